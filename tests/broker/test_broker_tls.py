"""The broker's certificate, its authority, and the key for claims."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from claim_cluster import Cluster, Door, until
from cryptography import x509

from tapforge_operator import manager
from tapforge_operator.broker import tls
from tapforge_operator.broker.certificates import CA_DAYS, SERVER_DAYS
from tapforge_operator.broker.material import fields
from tapforge_operator.config import Settings
from tapforge_operator.kube.client import ApiError
from tapforge_operator.kube.leaderelection import Timing
from tapforge_operator.manager import Leadership
from tapforge_operator.observability.metrics import Telemetry

pytestmark = pytest.mark.usefixtures("own_time")

NOW = datetime(2026, 11, 20, tzinfo=UTC)
NAMES = ["tapforge-broker.tapforge-system.svc", "localhost", "127.0.0.1", "::1"]
SECRET = f"/api/v1/namespaces/sys/secrets/{tls.SECRET}"
CONFIG_MAP = f"/api/v1/namespaces/sys/configmaps/{tls.CONFIG_MAP}"


async def ensure(api, now=NOW, names=NAMES) -> tls.Material:
    return await tls.ensure(api, "sys", names, lambda: now)


def published(cluster: Cluster) -> str:
    return cluster.objects[CONFIG_MAP]["data"]["ca.crt"]


def handshake(material: tls.Material, ca: str, name: str) -> None:
    """A TLS handshake in memory, by today's clock."""
    server, client = tls.context(material), ssl.create_default_context(cadata=ca)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(6):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not ends


async def test_it_is_made_once():
    cluster = Cluster()
    first = await ensure(Door(cluster))
    again = await ensure(door := Door(cluster))
    assert first == again
    assert door.writes == 0
    assert len(first.key) == 32
    assert published(cluster) == first.ca.decode()
    assert "ca.key" not in cluster.objects[CONFIG_MAP]["data"]


async def test_clients_that_trust_the_published_authority_reach_all_names():
    cluster = Cluster()
    material = await ensure(Door(cluster), datetime.now(UTC))
    for name in NAMES:
        handshake(material, published(cluster), name)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(material, published(cluster), "somebody-else")
    other = await ensure(Door(Cluster()), datetime.now(UTC))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(material, other.ca.decode(), NAMES[0])


async def test_operators_that_begin_together_end_with_the_same():
    cluster = Cluster()
    several = await asyncio.gather(*(ensure(Door(cluster)) for _ in range(4)))
    assert len({material.key for material in several}) == 1
    assert len({material.certificate for material in several}) == 1
    assert published(cluster) == several[0].ca.decode()


@pytest.mark.parametrize("fate", ["lost before", "lost after", 500, 409])
@pytest.mark.parametrize("number", [1, 2])
async def test_a_write_whose_answer_is_lost(fate, number):
    cluster = Cluster()
    door = Door(cluster, lambda n: fate if n == number else None)
    try:
        material = await ensure(door)
    except ApiError:
        material = await ensure(door)  # as the operator does when it begins anew
    assert material == await ensure(Door(cluster))
    assert published(cluster) == material.ca.decode()


async def test_the_certificate_is_renewed_in_time_and_the_rest_stays():
    cluster = Cluster()
    first = await ensure(Door(cluster))
    early = await ensure(Door(cluster), NOW + timedelta(days=SERVER_DAYS * 0.6))
    assert early == first
    late = await ensure(Door(cluster), NOW + timedelta(days=SERVER_DAYS * 0.7))
    assert late.certificate != first.certificate
    assert (late.ca, late.ca_keys, late.keys) == (first.ca, first.ca_keys, first.keys)


async def test_a_new_authority_does_not_end_trust_in_the_old_one():
    cluster = Cluster()
    first = await ensure(Door(cluster))
    then = NOW + timedelta(days=CA_DAYS * 0.6)
    before = await ensure(Door(cluster), then)
    assert before.ca == first.ca
    later = NOW + timedelta(days=CA_DAYS * 0.7)
    second = await ensure(Door(cluster), later)
    assert second.ca.endswith(first.ca)
    assert len(x509.load_pem_x509_certificates(second.ca)) == 2
    assert published(cluster) == second.ca.decode()
    assert second.key == first.key
    # Callers that have only the old bundle are served by the old authority for a while.
    issuers = x509.load_pem_x509_certificates(second.ca)
    x509.load_pem_x509_certificate(second.certificate).verify_directly_issued_by(issuers[1])
    third = await ensure(Door(cluster), later + timedelta(days=SERVER_DAYS * 0.7))
    assert third.ca == second.ca
    x509.load_pem_x509_certificate(third.certificate).verify_directly_issued_by(issuers[0])
    after = await ensure(Door(cluster), NOW + timedelta(days=CA_DAYS * 1.01))
    assert len(x509.load_pem_x509_certificates(after.ca)) == 1


async def test_other_names_mean_another_certificate():
    cluster = Cluster()
    first = await ensure(Door(cluster))
    fewer = await ensure(Door(cluster), names=NAMES[:1])
    assert fewer == first
    more = await ensure(Door(cluster), names=[*NAMES, "10.0.0.9"])
    assert more.certificate != first.certificate
    assert more.ca == first.ca
    with pytest.raises(ValueError, match="at least one name"):
        await ensure(Door(cluster), names=[])


@pytest.mark.parametrize(
    ("field", "value"),
    [("ca.crt", b"junk"), ("ca.key", b"junk"), ("tls.crt", b""), ("tls.key", b"junk"), ("hmac.key", b"short")],
)
async def test_what_somebody_broke_is_mended(field, value):
    cluster = Cluster()
    now = datetime.now(UTC)
    first = await ensure(Door(cluster), now)
    secret = cluster.get(SECRET)
    secret["data"][field] = base64.b64encode(value).decode()
    cluster.put(SECRET, secret)
    mended = await ensure(Door(cluster), now)
    assert (mended.key == first.key) == (field != "hmac.key")
    handshake(mended, published(cluster), NAMES[0])
    assert mended == await ensure(Door(cluster), now)


async def test_a_secret_that_is_no_base64_is_made_anew():
    cluster = Cluster()
    first = await ensure(Door(cluster))
    secret = cluster.get(SECRET)
    secret["data"]["hmac.key"] = "%%%"
    cluster.put(SECRET, secret)
    assert (await ensure(Door(cluster))).key != first.key


async def test_a_running_server_gets_the_new_certificate():
    cluster = Cluster()
    now = datetime.now(UTC)
    old = await ensure(Door(cluster), now - timedelta(days=SERVER_DAYS * 0.9))
    context = tls.context(old)
    served = tls.Own(NAMES, context, ssl.create_default_context(cadata=old.ca.decode()), old, Telemetry())
    keeper = asyncio.create_task(tls.keep(served, Door(cluster), "sys", every=0.01))
    before = cluster.objects[SECRET]["metadata"]["resourceVersion"]
    async with asyncio.timeout(60):
        while cluster.objects[SECRET]["metadata"]["resourceVersion"] == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    keeper.cancel()
    assert (await ensure(Door(cluster), now)).certificate != old.certificate


# --- what a running operator has is written back ----------------------------------------------------------------------


class Replica:
    """An operator's process that has begun: what it serves, and its looks at the Secret."""

    def __init__(self, cluster: Cluster, material: tls.Material):
        self.door = Door(cluster)
        self.context = tls.context(material)
        self.trust = ssl.create_default_context(cadata=material.ca.decode())
        self.keys: list[tuple[bytes, ...]] = []
        self.served = tls.Own(NAMES, self.context, self.trust, material, Telemetry(), self.keys.append)

    async def look(self, leads: bool = True) -> None:
        await self.served.refresh(self.door, "sys", write=leads)


async def begun() -> tuple[Cluster, tls.Material]:
    cluster = Cluster()
    return cluster, await ensure(Door(cluster), datetime.now(UTC))


def stored(cluster: Cluster) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in cluster.objects[SECRET]["data"].items()}


def write(cluster: Cluster, **data: bytes | None) -> None:
    encoded = {k.replace("__", "."): v and base64.b64encode(v).decode() for k, v in data.items()}
    cluster.patch(SECRET, {"data": encoded})


async def test_a_secret_that_is_deleted_is_written_back_by_the_leader_alone() -> None:
    cluster, material = await begun()
    leader, standby = Replica(cluster, material), Replica(cluster, material)
    cluster.drop(SECRET)
    cluster.drop(CONFIG_MAP)
    await standby.look(leads=False)
    assert standby.door.writes == 0 and standby.served.material == material
    await leader.look()
    assert await ensure(Door(cluster), datetime.now(UTC)) == material
    assert published(cluster) == material.ca.decode()
    writes = leader.door.writes
    await leader.look()
    assert leader.door.writes == writes


@pytest.mark.parametrize("field", ["ca.crt", "ca.key", "tls.crt", "tls.key", "hmac.key"])
@pytest.mark.parametrize("value", [None, b"junk"])
async def test_a_field_that_somebody_broke_is_written_back(field: str, value: bytes | None) -> None:
    cluster, material = await begun()
    leader = Replica(cluster, material)
    write(cluster, **{field.replace(".", "__"): value})
    await leader.look()
    assert leader.served.material == material == await ensure(Door(cluster), datetime.now(UTC))


async def test_what_another_operator_wrote_over_it_loses_no_claim_and_no_caller() -> None:
    """As one does that starts while the Secret is away, or a backup of another day."""
    cluster, material = await begun()
    leader = Replica(cluster, material)
    for path in (SECRET, CONFIG_MAP):
        cluster.drop(path)
    other = await ensure(Door(cluster), datetime.now(UTC))
    await leader.look()
    both = await ensure(Door(cluster), datetime.now(UTC))
    assert set(both.keys) == {material.key, other.key} and leader.keys == [both.keys]
    assert (both.certificate, both.private_key) == (material.certificate, material.private_key)
    for ca in (material.ca.decode(), published(cluster)):
        handshake(both, ca, NAMES[0])
    assert set(published(cluster).split("-----BEGIN")) == {
        *material.ca.decode().split("-----BEGIN"),
        *other.ca.decode().split("-----BEGIN"),
    }
    handshake(other, published(cluster), NAMES[0])  # a replica that began with it is trusted too


async def test_a_new_key_signs_as_soon_as_it_is_written_and_the_one_before_stays() -> None:
    cluster, material = await begun()
    leader, standby, new = Replica(cluster, material), Replica(cluster, material), b"n" * 32
    write(cluster, hmac__key=new)
    await leader.look()
    assert leader.keys == [(new, material.key)]
    await standby.look(leads=False)
    assert standby.keys == [(new, material.key)]
    assert (await ensure(Door(cluster), datetime.now(UTC))).keys == (new, material.key)
    assert stored(cluster)["hmac.key"] == new, "which is what the release before reads"
    write(cluster, **{"hmac__key.2026": b"short"})
    await leader.look()
    assert leader.served.material.keys == (new, material.key)


async def test_a_key_that_is_taken_out_while_no_operator_runs_is_out() -> None:
    cluster, material = await begun()
    write(cluster, **{"hmac__key": b"n" * 32, "hmac__key.before": material.key})
    assert (await ensure(Door(cluster))).keys == (b"n" * 32, material.key)
    write(cluster, **{"hmac__key.before": None})
    assert (await ensure(Door(cluster))).keys == (b"n" * 32,)


async def test_the_steps_of_the_page_after_a_theft_leave_nothing_that_was_stolen() -> None:
    """Each command of docs/security.md, under operators that look at the Secret whenever they run."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    [steps] = re.findall(r"After a theft.*?```sh\n(.*?)```", page, re.DOTALL)
    cluster, stolen = await begun()
    running = [Replica(cluster, stolen)]
    for step in steps.splitlines():
        match step.removeprefix("kubectl -n tapforge-system ").split():
            case ["scale", "deployment", "tapforge-operator", "--replicas=0"]:
                running.clear()
            case ["wait", "--for=delete", "pod", *_]:
                assert not running
            case ["delete", "secret", tls.SECRET]:
                cluster.drop(SECRET)
            case ["scale", "deployment", "tapforge-operator", "--replicas=2"]:
                running += [Replica(cluster, await ensure(Door(cluster), datetime.now(UTC))) for _ in range(2)]
            case other:
                pytest.fail(f"the test knows nothing of {other}")
        for one in running:
            await one.look()
    assert running
    for data in (stored(cluster), fields(running[0].served.material, {})):
        assert not set(data.values()) & set(fields(stolen, {}).values())
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(stolen, published(cluster), NAMES[0])


async def test_an_operator_that_starts_makes_no_keys_while_another_may_have_them() -> None:
    cluster = Cluster()
    with pytest.raises(tls.KeysMissing):
        await tls.ensure(Door(cluster), "sys", NAMES, create=False)
    assert not cluster.objects
    _, material = await begun()
    assert (await tls.ensure(Door(cluster), "sys", NAMES, held=material, create=False)) == material


async def test_the_certificate_of_other_names_is_of_an_authority_that_callers_know() -> None:
    cluster = Cluster()
    first = await ensure(Door(cluster))
    later = NOW + timedelta(days=CA_DAYS * 0.7)
    second = await ensure(Door(cluster), later)
    assert second.ca != first.ca
    soon = await ensure(Door(cluster), later + timedelta(hours=1), [*NAMES, "10.0.0.9"])
    old, new = (x509.load_pem_x509_certificates(second.ca)[k] for k in (1, 0))
    x509.load_pem_x509_certificate(soon.certificate).verify_directly_issued_by(old)
    late = await ensure(Door(cluster), later + timedelta(days=2), [*NAMES, "10.0.0.9", "10.0.0.8"])
    x509.load_pem_x509_certificate(late.certificate).verify_directly_issued_by(new)


async def starting(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, leader: str) -> Any:
    """An operator's process that begins, beside one that the leader Lease names."""
    monkeypatch.setattr(manager, "_pauses", lambda: itertools.repeat(0.01))

    async def find_leader() -> str:
        return leader

    election: Any = SimpleNamespace(timing=Timing(), find_leader=find_leader, led_before=False)
    door: Any = Door(cluster)
    return Leadership(Settings("me", namespace="sys"), door, door, door, election, Telemetry())


async def test_an_operator_that_starts_while_the_secret_is_away_takes_what_the_leader_writes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, material = await begun()
    cluster.drop(SECRET)
    ours = await starting(monkeypatch, cluster, "another")
    waiting = asyncio.create_task(ours._material(NAMES))
    await until(lambda: "another" in ours.unready())
    assert SECRET not in cluster.objects
    await Replica(cluster, material).look()
    assert await waiting == material
    assert ours._election.led_before, "a Lease that is not there may be one that was deleted"


@pytest.mark.parametrize(("leader", "patience"), [("", 1e9), ("one that died", -1e9)])
async def test_it_makes_keys_where_nobody_can_have_them(monkeypatch, leader: str, patience: float) -> None:
    monkeypatch.setattr(manager, "_WRITTEN_BACK_SECONDS", patience)
    cluster = Cluster()
    ours = await starting(monkeypatch, cluster, leader)
    assert (await ours._material(NAMES)).key == stored(cluster)["hmac.key"]
    assert not ours._election.led_before, "the first start waits for nobody"


async def test_a_term_begins_with_the_keys_that_the_leader_before_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, material = await begun()
    ours = await starting(monkeypatch, cluster, "")
    standby = Replica(cluster, material)
    ours._served = standby.served
    write(cluster, hmac__key=b"n" * 32)
    await ours._refresh_keys()
    assert standby.keys == [(b"n" * 32, material.key)]
    assert (await ensure(Door(cluster), datetime.now(UTC))).keys == standby.keys[0]
