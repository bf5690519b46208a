"""A certificate that a platform team mounts: served, renewed without a dropped connection, or refused in words."""

from __future__ import annotations

import asyncio
import base64
import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from broker_house import CLAIMS, NAME, House
from claim_cluster import Cluster, Door, Lab
from cryptography.hazmat.primitives import serialization

from tapforge_operator import manager
from tapforge_operator.broker import tls
from tapforge_operator.broker.certificates import SERVER_DAYS, new_authority, new_server
from tapforge_operator.config import Settings
from tapforge_operator.kube.leaderelection import Timing
from tapforge_operator.manager import Leadership
from tapforge_operator.observability.metrics import Telemetry

NOW = datetime.now(UTC)
NAMES = (NAME, "localhost", "127.0.0.1")
CONFIG_MAP = f"/api/v1/namespaces/sys/configmaps/{tls.CONFIG_MAP}"
SECRET = f"/api/v1/namespaces/sys/secrets/{tls.SECRET}"


class Volume:
    """A Secret as the kubelet mounts it: all files change at once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._count = 0

    def hold(self, **files: bytes) -> None:
        self._count += 1
        data = self.folder / f"..{self._count}"
        data.mkdir()
        for name, content in files.items():
            (data / name.replace("_", ".")).write_bytes(content)
        link = self.folder / "..new"
        link.symlink_to(data.name)
        link.rename(self.folder / "..data")

    def issue(self, names=NAMES, now: datetime = NOW, **other: bytes) -> bytes:
        """A certificate of a new authority, whose certificate is returned."""
        ca, ca_key = new_authority(now)
        certificate, key = new_server(ca, ca_key, names, now)
        self.hold(**{"tls_crt": certificate, "tls_key": key, "ca_crt": ca, **other})
        return ca


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


async def _nobody() -> str:
    return ""


class Served:
    """A server whose certificate comes from the volume."""

    def __init__(self, volume: Volume, cluster: Cluster):
        self.volume = volume
        self.cluster = cluster
        self.telemetry = Telemetry()

    async def open(self) -> None:
        self.material = await tls.ensure(Door(self.cluster), "sys", NAMES, folder=self.volume.folder)
        context, self.trust = tls.context(self.material), ssl.create_default_context(cadata=self.material.ca.decode())
        self.mounted = tls.Mounted(self.volume.folder, NAMES, context, self.trust, self.material, self.telemetry)
        app = web.Application()
        app.router.add_get("/", _peer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=context).start()
        self.url = f"https://127.0.0.1:{self.runner.addresses[0][1]}/"

    def caller(self, ca: bytes) -> aiohttp.ClientSession:
        context = ssl.create_default_context(cadata=ca.decode())
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))


async def _peer(request: web.Request) -> web.Response:
    return web.Response(text=str(request.transport.get_extra_info("peername")))


@pytest.fixture
async def served(volume: Volume) -> AsyncIterator[Served]:
    volume.issue()
    served = Served(volume, Cluster())
    await served.open()
    yield served
    await served.runner.cleanup()


async def test_its_bundle_is_published_and_no_authority_is_made(volume: Volume) -> None:
    ca, cluster = volume.issue(), Cluster()
    first = await tls.ensure(Door(cluster), "sys", NAMES, folder=volume.folder)
    assert cluster.objects[CONFIG_MAP]["data"] == {"ca.crt": ca.decode()}
    assert set(cluster.objects[SECRET]["data"]) == {"hmac.key"}
    again = await tls.ensure(Door(cluster), "sys", NAMES, folder=volume.folder)
    assert first.keys == again.keys and len(first.key) == 32


async def test_the_key_for_claims_stays_when_a_broker_gets_a_mounted_certificate(volume: Volume) -> None:
    cluster = Cluster()
    own = await tls.ensure(Door(cluster), "sys", NAMES)
    volume.issue()
    assert (await tls.ensure(Door(cluster), "sys", NAMES, folder=volume.folder)).key == own.key


async def test_a_renewal_is_served_without_dropping_a_connection(served: Served) -> None:
    old = served.material.ca
    async with served.caller(old) as early:
        before = await (await early.get(served.url)).text()
        new = served.volume.issue()
        served.mounted.reload()
        assert await (await early.get(served.url)).text() == before  # the same connection
        async with served.caller(new) as late:
            assert (await late.get(served.url)).status == 200
    async with served.caller(old) as late:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await late.get(served.url)


async def test_a_new_authority_is_published_and_written_again_after_an_outage(served: Served) -> None:
    new, door = served.volume.issue(), Door(served.cluster)
    keep = asyncio.create_task(tls.keep(served.mounted, door, "sys", every=0.01))
    async with asyncio.timeout(60):
        while served.cluster.objects[CONFIG_MAP]["data"] != {"ca.crt": new.decode()}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    keep.cancel()
    await asyncio.gather(keep, return_exceptions=True)


def _encrypted(pem: bytes) -> bytes:
    key = serialization.load_pem_private_key(pem, None)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )


def _other_key() -> bytes:
    ca, ca_key = new_authority(NOW)
    return new_server(ca, ca_key, NAMES, NOW)[1]


WRONG = {
    "expired": ({"now": NOW - timedelta(days=SERVER_DAYS + 1)}, "certificate has expired"),
    "early": ({"now": NOW + timedelta(days=1)}, "not yet valid"),
    "another name": ({"names": ("localhost", "127.0.0.1")}, f"call {NAME}: Hostname mismatch"),
    "another key": ({"tls_key": _other_key()}, "KEY_VALUES_MISMATCH; the key has to be that of the first certificate"),
    "a passphrase": ({"tls_key": _encrypted(_other_key())}, "as PEM without a passphrase"),
    "no bundle": ({"ca_crt": b""}, "ca.crt is missing or empty.*put the certificate of the issuer there"),
    "no key": ({"tls_key": b""}, "tls.key is missing or empty: mount a Secret of type kubernetes.io/tls"),
    "the operator's own": ({"hmac_key": b"k" * 32}, "operator's own Secret tapforge-broker.*mount a Secret with a"),
    "junk": ({"tls_crt": b"junk"}, "tls.crt and .*tls.key can't be loaded"),
    "a junk bundle": ({"ca_crt": b"junk"}, "ca.crt can't be loaded.*certificates as PEM"),
    "another authority": ({"ca_crt": new_authority(NOW)[0]}, "unable to get local issuer certificate; issue it anew"),
}


@pytest.mark.parametrize(("given", "words"), WRONG.values(), ids=WRONG)
async def test_what_callers_would_refuse_is_not_served_and_the_reason_has_a_remedy(volume, given, words) -> None:
    volume.issue(**given)
    cluster = Cluster()
    with pytest.raises(tls.Unusable, match=words):
        await tls.ensure(Door(cluster), "sys", NAMES, folder=volume.folder)
    assert CONFIG_MAP not in cluster.objects


async def test_keys_that_are_lost_beside_a_mounted_certificate_are_written_back(served: Served) -> None:
    door, told = Door(served.cluster), []
    served.mounted._on_keys = told.append
    served.cluster.drop(SECRET)
    served.cluster.drop(CONFIG_MAP)
    await served.mounted.refresh(door, "sys", write=False)
    assert SECRET not in served.cluster.objects
    await served.mounted.refresh(door, "sys", write=True)
    assert base64.b64decode(served.cluster.objects[SECRET]["data"]["hmac.key"]) == served.material.key
    assert served.cluster.objects[CONFIG_MAP]["data"] == {"ca.crt": served.material.ca.decode()}
    new = base64.b64encode(b"n" * 32).decode()
    served.cluster.patch(SECRET, {"data": {"hmac.key": new}})
    await served.mounted.refresh(door, "sys", write=True)
    assert told == [(b"n" * 32, served.material.key)]


async def test_a_bad_renewal_leaves_the_earlier_certificate_served(served: Served) -> None:
    served.volume.issue(names=("localhost",))
    served.mounted.reload()
    assert "Hostname mismatch" in served.mounted.problem and served.mounted.usable
    async with served.caller(served.material.ca) as caller:
        assert (await caller.get(served.url)).status == 200
    served.volume.issue()
    served.mounted.reload()
    assert served.mounted.problem == ""


async def test_expiry_and_refusal_are_measured(served: Served) -> None:
    def measured(name: str) -> float:
        lines = served.telemetry.render().decode().splitlines()
        return float(dict(line.rsplit(" ", 1) for line in lines)[f"tapforge_broker_certificate_{name}"])

    first = measured("expiry_timestamp_seconds")
    assert first == pytest.approx((NOW + timedelta(days=SERVER_DAYS)).timestamp(), abs=2) and measured("refused") == 0
    served.volume.issue(names=("localhost",))
    served.mounted.reload()
    assert measured("expiry_timestamp_seconds") == first and measured("refused") == 1
    served.volume.issue(now=NOW - timedelta(days=1))
    served.mounted.reload()
    assert measured("expiry_timestamp_seconds") == first - 86400 and measured("refused") == 0


async def test_a_certificate_that_ended_while_it_was_served_is_a_fault(served: Served) -> None:
    ca = served.volume.issue(now=NOW - timedelta(days=SERVER_DAYS + 1))
    ended = tls.mounted(served.volume.folder)
    context, trust = tls.context(ended), ssl.create_default_context(cadata=ca.decode())
    mounted = tls.Mounted(served.volume.folder, NAMES, context, trust, ended, Telemetry())
    mounted.reload()
    assert "certificate has expired" in mounted.problem and not mounted.usable
    served.volume.issue()
    mounted.reload()
    assert mounted.problem == "" and mounted.usable


async def test_a_standby_trusts_the_leaders_renewed_certificate(volume: Volume) -> None:
    """Both replicas see the renewal, each at its own time: whichever has it first, callers are passed on."""
    volume.issue()
    material = await tls.ensure(Door(Cluster()), "sys", NAMES, folder=volume.folder)
    leader, standby = House(Lab(2)), House(Lab(0), leading=False)
    await leader.open(material)
    await standby.open(material, lambda: leader.address)
    standby.token = leader.token
    ends = [
        tls.Mounted(volume.folder, NAMES, house.context, house.trust, material, Telemetry())
        for house in (standby, leader)
    ]
    volume.issue()
    for k, end in enumerate(ends):
        end.reload()
        async with standby.caller() as session:
            status, *_ = await standby.post(CLAIMS, {"request": f"request-{k}"}, session=session)
        assert status == 200
    await standby.close()
    await leader.close()


async def test_the_operator_waits_for_a_certificate_that_can_be_served_and_says_what_is_wrong(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "_pauses", lambda: itertools.repeat(0.01))
    door: Any = Door(Cluster())
    election: Any = SimpleNamespace(leads=False, holder="other", leader="", term=0, timing=Timing())
    election.find_leader = _nobody
    settings = Settings(
        "me", host="127.0.0.1", broker_port=0, broker_url="https://broker.example:443", tls_dir=volume.folder
    )
    ours: Any = Leadership(settings, door, door, door, election, Telemetry())
    volume.issue(names=(NAME,))
    async with AsyncExitStack() as stack:
        listening = asyncio.create_task(ours._listen(stack))
        async with asyncio.timeout(60):
            while "call broker.example: Hostname mismatch" not in ours.unready():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        volume.issue(names=(NAME, "broker.example"))
        await asyncio.wait_for(listening, 60)
        assert ours.unready() == ""
        volume.issue(names=(NAME,))
        ours._served.reload()
        assert ours.unready() == "" and "not taken over: " in ours.role()
        ours._served.usable = False
        assert "Hostname mismatch" in ours.unready()
