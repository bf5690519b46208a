"""A device that several pools name has one holder at a time all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from claim_cluster import POOL, Broker, Door, Lab, until

from tapforge_api.claims import Acquire, Claim
from tapforge_operator import labels
from tapforge_operator.broker.devices import DeviceRules, device_of, told
from tapforge_operator.broker.types import Holder
from tapforge_operator.config import device_rules
from tapforge_operator.kube.leaderelection import NotLeading

pytestmark = pytest.mark.usefixtures("own_time")

URL = "http://10.1.0.1:7555/a"


def add_pool(lab: Lab, namespace: str, name: str, *urls: str, **spec: Any) -> str:
    """Returns where it is."""
    body = {"kind": "EmulatorPool", "metadata": {"name": name, "namespace": namespace}}
    path = f"/apis/tapforge.dev/v1alpha1/namespaces/{namespace}/emulatorpools/{name}"
    lab.cluster.put(path, {**body, "spec": {"external": {"urls": list(urls)}, **spec}})
    return path


async def acquire(broker: Broker, namespace: str, name: str, request: str, **ask: Any) -> list[Claim]:
    question = Acquire(**{"request": request, "wait_seconds": 0.05, "ttl_seconds": 5.0, "hold_seconds": 5.0} | ask)
    return list((await broker.claims.acquire(namespace, name, Holder("user/ann"), question)).claims)


@pytest.mark.parametrize("namespace", ["lab", "elsewhere"])
async def test_a_device_is_handed_out_through_one_pool_at_a_time(namespace: str) -> None:
    lab = Lab(urls=(URL,))
    path = add_pool(lab, namespace, "other", URL.replace("10.1.0.1:7555/a", "10.1.0.1:7555/a/"))
    other = lab.cluster.objects[path]["metadata"]["uid"]
    broker = Broker(lab)
    [claim] = await broker.acquire()
    assert await acquire(broker, namespace, "other", "request-1") == []
    [device] = broker.claims.devices(other)
    assert (device.state, device.claimed) == ("quarantined", False)
    assert "another pool" in device.reason
    assert other in broker.requeued
    await broker.release(claim)
    assert [d.state for d in broker.claims.devices(other)] == ["ready"]
    [claim] = await acquire(broker, namespace, "other", "request-2")
    assert await broker.acquire(wait_seconds=0.05) == []
    assert claim.fence > 0
    await broker.end()


async def test_who_waits_in_the_other_pool_gets_it_when_it_comes_back() -> None:
    lab = Lab(urls=(URL,))
    add_pool(lab, "lab", "other", URL)
    broker = Broker(lab)
    [claim] = await broker.acquire()
    await broker.release(claim, verdict="broken")
    assert await acquire(broker, "lab", "other", "request-1", wait_seconds=0) == [], "it rests for all"
    [again] = await acquire(broker, "lab", "other", "request-2", wait_seconds=5)
    assert again.fence > claim.fence
    await broker.end()


async def test_the_next_operator_knows_it_too() -> None:
    lab = Lab(urls=(URL,))
    add_pool(lab, "elsewhere", "other", URL)
    first = Broker(lab, 1)
    [claim] = await first.acquire()
    await first.die()
    second = Broker(lab, 2)
    assert await acquire(second, "elsewhere", "other", "request-1") == []
    assert (await second.renew(claim))[0].state == "held"
    await second.release(claim)
    assert len(await acquire(second, "elsewhere", "other", "request-2")) == 1
    await second.end()


async def test_the_next_operator_knows_who_has_a_device_that_left_their_pool_meanwhile() -> None:
    lab = Lab(urls=(URL,))
    path = next(iter(lab.cluster.objects))
    add_pool(lab, "lab", "other", URL)
    first = Broker(lab, 1)
    [claim] = await first.acquire()
    pool = lab.cluster.get(path)
    pool["spec"]["external"]["urls"] = ["http://10.1.0.9:1"]
    lab.cluster.put(path, pool)
    await first.die()
    second = Broker(lab, 2)
    assert await acquire(second, "lab", "other", "request-1") == []
    [told] = await second.renew(claim)
    assert (told.state, told.reason) == ("recalled", "its URL is no longer in the pool")
    await second.release(claim)
    assert [d.url for d in second.claims.devices(lab.pool_uid)] == ["http://10.1.0.9:1"]
    assert len(await acquire(second, "lab", "other", "request-2")) == 1
    await second.end()


async def test_a_claim_that_an_earlier_leader_wrote_with_its_last_breath_and_never_told() -> None:
    lab = Lab(urls=(URL,))
    add_pool(lab, "elsewhere", "other", URL)
    first = Broker(lab, 1, door=Door(lab.cluster, lambda number: "late"))
    call = asyncio.create_task(first.acquire(request="request-1"))
    await until(lambda: first.door.writes)
    late = first.door
    await first.die()
    with pytest.raises(NotLeading):
        await call
    second = Broker(lab, 2)
    [claim] = await acquire(second, "elsewhere", "other", "request-2")
    late.release_late()
    await until(lambda: [labels.CLAIM in lease["metadata"]["annotations"] for lease in lab.leases()].count(True) == 1)
    assert (await second.renew(claim))[0].state == "held"
    assert await second.acquire(request="request-1", wait_seconds=0) == []
    await second.release(claim)
    assert len(await second.acquire(request="request-3")) == 1
    await second.end()


async def test_of_two_claims_that_are_written_the_later_one_counts() -> None:
    """As an operator left them that didn't know that they were of one device."""
    lab = Lab(urls=(URL,))
    first = Broker(lab)
    [early] = await first.acquire()
    await first.die()
    path = add_pool(lab, "elsewhere", "other", URL)
    other, lone = lab.cluster.objects[path], Lab()
    lone.cluster.objects = {path: other}
    apart = Broker(lone, 2)
    [late] = await acquire(apart, "elsewhere", "other", "request-2")
    await apart.die()
    lab.cluster.objects |= lone.cluster.objects
    second = Broker(lab, 3)
    assert [s.state for s in await second.renew(early, late)] == ["lost", "held"]
    await second.end()


async def test_the_end_of_a_pool_gives_a_device_to_nobody_before_its_holder_can_know() -> None:
    lab = Lab(urls=(URL,))
    other = add_pool(lab, "lab", "other", URL)
    broker = Broker(lab)
    await acquire(broker, "lab", "other", "request-1", ttl_seconds=5.0)
    lab.cluster.drop(other)
    assert await broker.acquire(wait_seconds=0.05) == []
    await broker.end()

    broker = Broker(lab := Lab(urls=(URL,)), speed=20.0)  # a claim of 5 s ends after 0.25 s
    other = add_pool(lab, "lab", "other", URL)
    await acquire(broker, "lab", "other", "request-1", ttl_seconds=5.0)
    lab.cluster.drop(other)
    assert len(await broker.acquire(wait_seconds=5)) == 1
    await broker.end()


async def test_a_device_that_leaves_a_pool_while_it_rests_rests_for_the_others_too() -> None:
    lab = Lab(urls=(URL, "http://10.1.0.9:1"))
    add_pool(lab, "lab", "other", URL)
    broker = Broker(lab)
    claims = await broker.acquire(slots=2)
    claim = next(c for c in claims if c.url == URL)
    await broker.release(claim, verdict="broken")
    path = next(p for p in lab.cluster.objects if p.endswith(f"/emulatorpools/{POOL}"))
    pool = lab.cluster.get(path)
    pool["spec"]["external"]["urls"] = ["http://10.1.0.9:1"]
    lab.cluster.put(path, pool)
    assert [d.url for d in broker.claims.devices(lab.pool_uid)] == ["http://10.1.0.9:1"]
    assert await acquire(broker, "lab", "other", "request-1", wait_seconds=0) == []
    await until(lambda: broker.claims.counts(lab.pool_uid).slots == 1)
    assert len(await acquire(broker, "lab", "other", "request-2", wait_seconds=5)) == 1
    await broker.end()


def test_what_is_one_device() -> None:
    same = ["http://Phone.example", "http://phone.example:80/", "http://phone.example/"]
    assert len(set(map(device_of, same))) == 1
    same += [
        "http://phone.example//",
        "http://phone.example/.",
        "http://phone.example/a/..",
        "http://phone.example?a=1#b",
    ]
    assert len(set(map(device_of, same))) == 1
    others = ["https://phone.example", "http://phone.example/a", "http://phone.example:81", "http://dead.beef"]
    assert len(set(map(device_of, [*same, *others]))) == 1 + len(others)
    assert device_of("http://[::1") == "http://[::1"
    assert device_of("http://a:99999") == "http://a:99999"


@pytest.mark.parametrize("host", ["10.0.5", "167772165", "0xA000005", "012.0.0.5", "10.0.0x0.5", "[::ffff:10.0.0.5]"])
def test_an_address_is_known_in_each_form_that_a_resolver_takes(host: str) -> None:
    assert device_of(f"http://{host}:8000") == device_of("http://10.0.0.5:8000")
    assert device_of(f"{host}:5555", "adb") == device_of("10.0.0.5", "adb")
    assert not device_rules(["a=10.0.0.5/32"]).allow("b", f"http://{host}:8000", "http")
    assert device_rules(["a=10.0.0.5/32"]).allow("a", f"http://{host}:8000", "http")


def test_phones_behind_one_mobileworld_server_are_told_apart_by_device_alone() -> None:
    server = "http://10.0.0.5:6800"
    spelt = [f"{server}?device=A", f"{server}/?device=%41", f"{server}?x=1&device=A", f"{server}?device=A&device=B"]
    assert len({device_of(url, "mobileworld") for url in spelt}) == 1
    phones = [*spelt[:1], f"{server}?device=B", f"{server}?device=&device=A"]
    assert device_of(phones[-1], "mobileworld") == device_of(server, "mobileworld")
    assert len({device_of(url, "mobileworld") for url in phones}) == 3
    assert len({device_of(url, "tapforge") for url in phones}) == 1


ADB = ["10.0.0.5:5555", "http://10.0.0.5:5555", "http://10.0.0.5", "https://10.0.0.5/x?y", "10.0.0.5"]


@pytest.mark.parametrize(
    "same",
    [
        [*ADB, "[::ffff:10.0.0.5]", "http://me@10.0.0.5:05555"],
        ["Phone.example:5555", "phone.example.", "http://PHONE.example:5555/"],
        ["[fd00::5]:5555", "[fd00:0:0:0:0:0:0:5]", "http://[FD00::5]"],
    ],
)
def test_a_device_of_adb_is_known_by_what_callers_are_told(same: list[str]) -> None:
    assert len({device_of(url, "adb") for url in same}) == 1, [device_of(url, "adb") for url in same]
    assert device_of(same[0].replace("5555", "5556"), "adb") != device_of(same[1], "adb")
    for url in same:  # what is told of one names the same device, whichever pool lists it
        assert device_of(told(url, "adb"), "adb") == device_of(url, "adb")


async def test_an_adb_device_under_several_spellings_has_one_holder() -> None:
    lab = Lab(urls=tuple(ADB[:3]), protocol="adb")
    add_pool(lab, "elsewhere", "other", "10.0.0.5", protocol="adb")
    broker = Broker(lab)
    [claim] = await broker.acquire("a", slots=3)
    assert claim.url == "10.0.0.5:5555"
    assert await broker.acquire("b", wait_seconds=0.05) == []
    assert await acquire(broker, "elsewhere", "other", "request-1") == []
    await broker.release(claim)
    assert len(await acquire(broker, "elsewhere", "other", "request-2")) == 1
    await broker.end()


async def test_leases_of_a_release_that_told_spellings_apart_give_a_device_no_second_holder() -> None:
    """Each spelling had a Lease and a holder: the latest stays, the others hear that it is lost."""
    leases, claims = [], []
    for term, url in enumerate(ADB[:3], 1):
        lab = Lab(urls=(url,), protocol="adb")
        alone = Broker(lab, term)
        claims += await alone.acquire(f"run-{term}")
        leases += [(path, body) for path, body in lab.cluster.objects.items() if "/leases/" in path]
        await alone.end()
    lab = Lab(urls=tuple(ADB[:3]), protocol="adb")
    lab.cluster.objects |= dict(leases)
    broker = Broker(lab, 9)
    assert [said.state for said in await broker.renew(*claims)] == ["lost", "lost", "held"]
    await broker.end()


RULES = device_rules(["lab=10.0.0.0/8", "lab=*.lab.example", "*=192.168.1.7", "other=fd00::/64"])


@pytest.mark.parametrize(
    ("namespace", "url", "fine"),
    [
        ("lab", "http://10.1.0.1:7555/a", True),
        ("lab", "[::ffff:10.1.0.1]:5555", True),
        ("lab", "Phone.LAB.example:5555", True),
        ("lab", "http://lab.example", False),
        ("lab", "http://evil-lab.example", False),
        ("lab", "http://11.1.0.1", False),
        ("other", "http://10.1.0.1", False),
        ("other", "http://[fd00::9]:80", True),
        ("nobody", "192.168.1.7", True),
        ("nobody", "http://10.1.0.1@192.168.1.8", False),
        ("lab", "http://[::1", False),
    ],
)
def test_which_namespace_may_name_a_device(namespace: str, url: str, fine: bool) -> None:
    for protocol in ("adb", "tapforge"):
        assert RULES.allow(namespace, url, protocol) is fine
    assert DeviceRules().allow(namespace, url, "adb")


@pytest.mark.parametrize("text", ["lab", "lab=", "Lab=10.0.0.0/8", "lab=10.0.0.1/8", "lab=10.0.0.5:5555", "=10.0.0.5"])
def test_a_rule_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="NAMESPACE=|names neither a network"):
        device_rules([text])


async def test_a_device_that_a_namespace_may_not_name_goes_to_nobody_and_its_claim_is_asked_back() -> None:
    lab = Lab(urls=(URL, "http://10.9.0.1:1"))
    first = Broker(lab, 1)
    claims = await first.acquire(slots=2)
    await first.die()
    second = Broker(lab, 2, devices=device_rules(["lab=10.1.0.0/16"]))
    states = {said.id: said.state for said in await second.renew(*claims)}
    assert [states[claim.id] for claim in sorted(claims, key=lambda c: c.url)] == ["held", "recalled"]
    known = {device.url: (device.state, device.claimed) for device in second.claims.devices(lab.pool_uid)}
    assert known == {URL: ("ready", True), "http://10.9.0.1:1": ("refused", True)}
    await second.release(*claims)
    [claim] = await second.acquire(slots=2)
    assert claim.url == URL
    known = {device.url: (device.state, device.claimed) for device in second.claims.devices(lab.pool_uid)}
    assert known["http://10.9.0.1:1"] == ("refused", False)
    await second.end()
