"""The operator dies after every single write that it makes, and before every single one: whatever it was doing, the
next one finds it on the cluster and goes on. Slots and claims go through everything that can happen to them meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import kopf
import pytest
from e2e.cluster import PATIENCE, Cluster, fake
from live_pool import Object, name, note_of, phone, ready, uid, uids
from mortal_operator import House, When

from tapforge_api.base import API_VERSION
from tapforge_api.claims import Claim
from tapforge_operator import labels
from tapforge_operator.kube.client import ApiError, Client, path

#: runs under way at once
_AT_ONCE = 8
SIZE = 2
T = TypeVar("T")


async def eventually(what: str, probe: Callable[[], Awaitable[T]]) -> T:
    """What `probe` answers as soon as that is true."""
    end = time.monotonic() + PATIENCE
    while not (found := await probe()):
        assert time.monotonic() < end, f"{what}: not there after {PATIENCE:g} s"
        await asyncio.sleep(0.1)
    return found


async def surely(write: Callable[[], Awaitable[object]]) -> None:
    """Again where nobody knows whether it was carried out (504, from an API server that stalls): twice is as good as
    once."""
    repeated = False

    async def carried_out() -> bool:
        nonlocal repeated
        try:
            await write()
        except ApiError as error:
            if not error.unclear and not (repeated and error.status == 409):
                raise
            repeated = True
            return not error.unclear
        return True

    await eventually("the API server's word on a write", carried_out)


@dataclass
class Watched:
    """A pool in a namespace of its own, and what must never be seen there."""

    api: Client
    namespace: str
    most: int = SIZE
    holders: dict[str, Claim] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    thrown_away: set[str] = field(default_factory=set)

    async def create(self, **spec: object) -> None:
        body = {"apiVersion": API_VERSION, "kind": "EmulatorPool", "metadata": {"name": "phones"}, "spec": spec}
        await surely(lambda: self.api.create(path("emulatorpools", self.namespace, group=API_VERSION), body))

    async def edit(self, **spec: object) -> None:
        where = path("emulatorpools", self.namespace, "phones", group=API_VERSION)
        await surely(lambda: self.api.patch(where, {"spec": spec}))

    async def status(self) -> Object:
        found = await self.api.get(path("emulatorpools", self.namespace, "phones", group=API_VERSION))
        return found.get("status") or {}

    async def until_seen(self) -> None:
        """The status speaks of the spec as it is."""

        async def seen() -> bool:
            found = await self.api.get(path("emulatorpools", self.namespace, "phones", group=API_VERSION))
            return (found.get("status") or {}).get("observedGeneration") == found["metadata"]["generation"]

        await eventually("a status of the spec as it is", seen)

    async def pods(self, aside: bool = False) -> list[Object]:
        """The slots; `aside`: those that are kept for a look at their log."""
        found: list[Object] = []
        async for page, _ in self.api.pages(path("pods", self.namespace), labels.POOL_UID):
            found += [pod for pod in page if "deletionTimestamp" not in pod["metadata"]]
        slots = [pod for pod in found if (note_of(pod, labels.RETAINED) is not None) is aside]
        if not aside:
            assert len(slots) <= self.most, [name(pod) for pod in slots]
        return slots

    async def until(self, what: str, probe: Callable[[list[Object]], bool]) -> list[Object]:
        async def found() -> list[Object]:
            pods[:] = await self.pods()
            return [*pods] if probe(pods) else []

        pods: list[Object] = []
        try:
            return await eventually(what, found)
        except AssertionError as error:
            raise AssertionError(f"{error}; {[(name(p), p['status'].get('phase')) for p in pods]}") from error

    async def until_ready(self, slots: int = SIZE, without: str = "") -> list[Object]:
        return await self.until(
            f"{slots} ready slots",
            lambda pods: len(pods) == slots and all(map(ready, pods)) and without not in uids(pods),
        )

    async def describe(self) -> str:
        pods = [
            f"{name(pod)} {pod['status'].get('phase')}{' ready' if ready(pod) else ''} {pod['metadata']['annotations']}"
            for pod in await self.pods()
        ]
        return "\n".join([str(await self.status()), *pods])

    def granted(self, claim: Claim) -> Claim:
        slot = claim.id.rpartition(".")[0]
        assert slot not in self.holders, f"{slot} has a holder: {self.holders[slot]}"
        assert slot not in self.thrown_away
        assert claim.fence > self.fences.get(slot, -1)
        self.holders[slot], self.fences[slot] = claim, claim.fence
        return claim

    def over(self, claim: Claim, *, bad: bool = False) -> str:
        slot = claim.id.rpartition(".")[0]
        del self.holders[slot]
        if bad:
            self.thrown_away.add(slot)
        return slot


async def everything(house: House, pool: Watched) -> None:
    """A day in a pool's life."""
    await pool.create(replicas=SIZE, template=phone(terminationGracePeriodSeconds=0))
    await pool.until_ready()

    # claimed, given back, claimed again with a larger fence
    requests = itertools.count()

    async def claim(**ask: object) -> Claim:
        request = f"request-{next(requests)}"
        for _ in range(40):
            if got := await house.acquire("phones", request, **ask):
                # One that ends soon may be over by now.
                if "ttl_seconds" not in ask:
                    assert await house.acquire("phones", request) == got, "the same question, the same claim"
                return pool.granted(got[0])
            if "ttl_seconds" in ask:  # it was over before its answer was there, and so is the request
                request = f"request-{next(requests)}"
        raise AssertionError("no slot came free")

    first = await claim()
    assert await house.renew(first) == "held"
    second = await claim()
    pool.over(first)
    await house.release(first)
    third = await claim()
    assert third.slot == first.slot, "the other one is held"

    # given back dirty; never renewed
    gone = pool.over(third, bad=True)
    await house.release(third, "dirty")
    await pool.until_ready(without=gone)
    expires = await claim(ttl_seconds=0.7, hold_seconds=0.7)
    gone = pool.over(expires, bad=True)
    assert await house.renew(second) == "held"
    await pool.until_ready(without=gone)

    # another template: the free one is exchanged, the claimed one when it comes back
    await pool.edit(template=phone("phone:2", terminationGracePeriodSeconds=0))
    held = second.id.rpartition(".")[0]
    await pool.until("the free one to be new", lambda pods: images(pods).count("phone:2") == 1 and held in uids(pods))

    async def recalled() -> bool:
        return await house.renew(second) == "recalled"

    await eventually("the claimed one to be asked back", recalled)
    pool.over(second)
    await house.release(second)
    await pool.until("all to be new", lambda pods: images(pods) == ["phone:2"] * SIZE and all(map(ready, pods)))

    # a crash, kept for a look at its log; then smaller
    await pool.edit(recycle={"retainFailed": 1})
    await pool.until_seen()
    victim = (await pool.pods())[0]
    crash = {"metadata": {"annotations": {fake.EXIT: "0"}}}
    await surely(lambda: pool.api.patch(path("pods", pool.namespace, name(victim)), crash))
    await pool.until_ready(without=uid(victim))
    assert uids(await pool.pods(aside=True)) == [uid(victim)]
    await pool.edit(replicas=1)
    await pool.until_ready(1)

    # nothing is lost: what is there can be claimed, and nothing else is written on it
    last = await claim()
    pool.over(last)
    await house.release(last)
    (slot,) = await pool.until("it to be free", lambda pods: [note_of(pod, labels.CLAIM) for pod in pods] == [None])
    assert ready(slot) and labels.CLAIMED not in slot["metadata"]["labels"]
    assert note_of(slot, labels.SAFE_TO_EVICT) == "true"

    async def told() -> bool:
        status = await pool.status()
        return (status.get("ready"), status.get("claimed"), status.get("pods")) == (1, 0, 1)

    await eventually("a status that says so", told)


async def on_devices(house: House, pool: Watched) -> None:
    """The same of devices, which have Leases instead of Pods."""
    await pool.create(external={"urls": ["http://10.1.0.1:8000", "http://10.1.0.2:8000"]})
    requests = itertools.count()

    async def claim() -> Claim:
        request = f"request-{next(requests)}"

        async def got() -> list[Claim]:
            try:
                return await house.acquire("phones", request)
            except Exception as error:  # noqa: BLE001 the pool may not be known yet
                assert "there is no EmulatorPool" in str(error)
                return []

        return pool.granted((await eventually("a device", got))[0])

    first, second = await claim(), await claim()
    pool.over(first)
    await house.release(first)
    third = await claim()
    assert third.url == first.url and await house.renew(second) == "held"
    for one in (second, third):
        pool.over(one)
        await house.release(one)

    async def free() -> bool:
        leases = [item async for page, _ in pool.api.pages(where, labels.POOL_UID) for item in page]
        assert len(leases) == 2
        return all(note_of(lease, labels.CLAIM) is None and "holderIdentity" not in lease["spec"] for lease in leases)

    where = path("leases", pool.namespace, group="coordination.k8s.io/v1")
    await eventually("all to be free", free)


def images(pods: list[Object]) -> list[str]:
    return [pod["spec"]["containers"][0]["image"] for pod in pods]


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def info(cluster: Cluster) -> kopf.ConnectionInfo:
    certificate, key = cluster.admin
    return kopf.ConnectionInfo(
        server=cluster.server, ca_path=str(cluster.ca), certificate_path=str(certificate), private_key_path=str(key)
    )


@pytest.fixture
def spaces(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Names of namespaces."""
    test = request.node.name.translate(str.maketrans("_[]", "---")).removeprefix("test-").strip("-")[:40]
    numbers = itertools.count()
    return lambda: f"{test.lower()}-{next(numbers)}"


@asynccontextmanager
async def ground(info: kopf.ConnectionInfo, namespace: str) -> AsyncIterator[Watched]:
    async with Client(info, deadline=PATIENCE) as api:
        await surely(lambda: api.create(path("namespaces"), {"metadata": {"name": namespace}}))

        async def account() -> bool:
            try:
                return bool(await api.get(path("serviceaccounts", namespace, "default")))
            except ApiError as error:
                assert error.status == 404
                return False

        await eventually("the namespace's service account", account)
        try:
            yield Watched(api, namespace)
        finally:
            await api.delete(path("namespaces", name=namespace))


@pytest.mark.long
@pytest.mark.parametrize("day", [everything, on_devices])
@pytest.mark.parametrize("when", ["after", "before"])
async def test_a_death_at_every_single_write(
    info: kopf.ConnectionInfo,
    spaces: Callable[[], str],
    when: When,
    day: Callable[[House, Watched], object],
) -> None:
    """Each run dies at another write, until one is so far that there are no more."""

    async def run(at: int) -> House:
        async with gate:
            deaths = lambda life: at if life == 1 else 0  # noqa: E731
            async with ground(info, spaces()) as pool, House(info, pool.namespace, deaths, when) as house:
                try:
                    await day(house, pool)  # type: ignore[misc]
                except (AssertionError, TimeoutError) as error:
                    raise AssertionError(f"after a death at write {at}: {error}\n{await pool.describe()}") from error
            return house

    gate = asyncio.Semaphore(_AT_ONCE)
    whole, *lives = await asyncio.gather(*map(run, range(_AT_ONCE)))
    assert not whole.deaths
    # How often the status is written is a matter of time: the end is near a whole life's last write, not just there.
    most = whole.writes
    while all(house.deaths for house in lives):
        assert len(lives) < 60, "a life of 60 writes would have seen the end of the day"
        lives += await asyncio.gather(*map(run, range(len(lives) + 1, max(most, len(lives) + 2) + 1)))
    assert sum(house.deaths for house in lives) >= (15 if day is everything else 6)


async def test_an_operator_that_dies_after_each_write_gets_there_all_the_same(
    info: kopf.ConnectionInfo, spaces: Callable[[], str]
) -> None:
    async with ground(info, spaces()) as pool, House(info, pool.namespace, lambda _: 1, "after") as house:
        await everything(house, pool)
        assert house.deaths > 15
