"""The broker's certificate, its authority, and the key for claims."""

from __future__ import annotations

import asyncio
import base64
import ssl
from datetime import UTC, datetime, timedelta

import pytest
from claim_cluster import Cluster, Door
from cryptography import x509

from tapforge_operator.broker import tls
from tapforge_operator.broker.certificates import CA_DAYS, SERVER_DAYS
from tapforge_operator.kube.client import ApiError

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
    assert (late.ca, late.ca_key, late.key) == (first.ca, first.ca_key, first.key)


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
    keeper = asyncio.create_task(tls.keep(Door(cluster), "sys", NAMES, context, old, every=0.01))
    before = cluster.objects[SECRET]["metadata"]["resourceVersion"]
    async with asyncio.timeout(60):
        while cluster.objects[SECRET]["metadata"]["resourceVersion"] == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    keeper.cancel()
    assert (await ensure(Door(cluster), now)).certificate != old.certificate
