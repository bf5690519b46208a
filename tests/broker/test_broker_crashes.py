"""The broker dies after any of its writes, loses answers, is refused, or is followed by another leader while its own
writes are still under way. Judged from outside, by what holders were told: never two on a slot, nothing lost for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import pytest
from claim_cluster import NAMESPACE, Broker, Door, Lab, until

from tapforge_operator import labels
from tapforge_operator.broker import writer
from tapforge_operator.broker.renewals import Behind
from tapforge_operator.kube.leaderelection import NotLeading

pytestmark = pytest.mark.usefixtures("own_time")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_PAUSE", "_LONGEST_PAUSE", "_REFUSED_PAUSE"):
        monkeypatch.setattr(writer, name, 0.01)


class Judge:
    """What holders believe."""

    def __init__(self, lab: Lab):
        self._lab = lab
        self._holders: dict[str, tuple[str, int]] = {}
        self._fences: dict[str, int] = {}
        self.told = 0

    def told_of(self, who: str, claims: list) -> None:
        alive = {body["metadata"]["uid"] for path, body in self._lab.cluster.objects.items() if "/pods/" in path}
        for claim in claims:
            uid = claim.id.rpartition(".")[0]
            before = self._holders.get(uid)
            if before == (who, claim.fence):
                continue  # told again
            assert before is None or uid not in alive, f"{who} and {before} hold {claim.slot}"
            assert claim.fence > self._fences.get(uid, -1)
            self._holders[uid] = (who, claim.fence)
            self._fences[uid] = claim.fence
            self.told += 1

    def stops(self, claim) -> None:
        uid = claim.id.rpartition(".")[0]
        if self._holders.get(uid, ("", 0))[1] == claim.fence:
            del self._holders[uid]


class Front:
    """Where callers find a broker; they ask again with the same words until one answers."""

    def __init__(self, lab: Lab, door: Door | None = None):
        self.lab = lab
        self.term = 1
        self.broker = Broker(lab, 1, door)
        self.judge = Judge(lab)
        self.spoiled = 0

    async def replace(self, *, kill: bool, door: Door | None = None) -> None:
        old, self.term = self.broker, self.term + 1
        old.leading = False
        if kill:
            await old.die()
        self.broker = Broker(self.lab, self.term, door)
        if not kill:
            await old.end()

    async def ask(self, call: Callable):
        async with asyncio.timeout(20):
            while True:
                try:
                    async with asyncio.timeout(2.0 if not self.broker.door.dead else 0.01):
                        return await call(self.broker)
                except (TimeoutError, NotLeading, Behind):
                    await asyncio.sleep(0.005)

    async def acquire(self, who: str, request: str, slots: int = 1) -> list:
        claims = await self.ask(lambda b: b.acquire(who, request, slots=slots, wait_seconds=0.2))
        self.judge.told_of(who, claims)
        return claims

    async def renew(self, claims: list) -> list:
        said = await self.ask(lambda b: b.renew(*claims))
        for claim, word in zip(claims, said, strict=True):
            if word.state == "lost":
                self.judge.stops(claim)
        return [claim for claim, word in zip(claims, said, strict=True) if word.state != "lost"]

    async def release(self, claims: list, verdict: str = "clean") -> None:
        for claim in claims:
            self.judge.stops(claim)
        self.spoiled += len(claims) if verdict != "clean" else 0
        await self.ask(lambda b: b.release(*claims, verdict=verdict))


async def day(front: Front, tag: str = "") -> None:
    """Two runs share three phones."""

    async def train() -> None:
        held = await front.acquire(f"train{tag}", "train-request-1", slots=2)
        held = await front.renew(held) if held else []
        if held:
            await front.release(held[:1])
        more = await front.acquire(f"train{tag}", "train-request-2")
        if more:
            await front.release(more, "dirty")
        if held[1:] and (kept := await front.renew(held[1:])):
            await front.release(kept)

    async def check() -> None:
        for number in range(3):
            held = await front.acquire(f"eval{tag}", f"eval-request-{number}")
            if held:
                await asyncio.sleep(0)
                await front.release(await front.renew(held) or held)

    async with asyncio.TaskGroup() as group:
        group.create_task(train())
        group.create_task(check())


async def evening(front: Front) -> None:
    """Everybody went home. Whatever nobody renews ends, and every phone that is left can be had again."""
    await front.replace(kill=True)
    await front.broker.end()
    last = Broker(front.lab, front.term + 1, speed=200.0)
    lab = front.lab
    await until(lambda: not any(labels.CLAIM in str(body) for body in lab.cluster.objects.values()))
    left = [path for path in lab.cluster.objects if "/pods/" in path]
    claims = await last.acquire("last", slots=9, ttl_seconds=3600) if left else []
    front.judge._holders.clear()
    front.judge.told_of("last", claims)
    assert len(claims) == len(left)
    await last.end()


async def test_a_crash_after_every_single_write():
    for number in range(1, 100):
        lab = Lab(3)
        front = Front(lab, Door(lab.cluster, lambda n, last=number: "die" if n == last else None))
        work = asyncio.create_task(day(front))
        while not work.done() and not front.broker.door.dead:
            await asyncio.wait([work], timeout=0.002)
        died = front.broker.door.dead
        if died:
            await front.replace(kill=True)
        await work
        assert front.judge.told
        await evening(front)
        if not died:
            break
    assert 6 < number < 40  # the loop saw the end of the day


async def test_after_a_crash_at_any_write_each_record_is_held_or_released_at_its_holders_next_renewal():
    """The holder gives up what nobody answered, and lists what it has."""
    long = {"hold_seconds": 3600.0, "ttl_seconds": 3600.0, "session": "s"}
    for number in range(1, 10):
        lab = Lab(4)
        first = Broker(lab, 1, Door(lab.cluster, lambda n, last=number: "die" if n == last else None))
        known: list = []
        for request in (1, 2, 3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    known += await first.acquire("train", f"request-{request}-of-s", number=request, **long)
        died = first.door.dead
        await first.die()
        second = Broker(lab, 2)
        known += await second.acquire("train", "request-4-of-s", number=4, **long)
        said = await second.renew(*known, session="s", settled=4)
        assert {word.state for word in said} == {"held"}
        mine = {claim.id for claim in known}
        await until(lambda mine=mine, lab=lab: claimed(lab) == mine)
        await second.end()
        if not died:
            break
    assert number == 4, "the loop saw the end"


def claimed(lab: Lab) -> set[str]:
    """Ids of the claims whose records are on slots."""
    pods = [body["metadata"] for path, body in lab.cluster.objects.items() if "/pods/" in path]
    return {f"{m['uid']}.{m['annotations'][labels.FENCE]}" for m in pods if labels.CLAIM in m.get("annotations", {})}


FATES = [409, 429, 500, 503, 403, "lost before", "lost after", "late"]


@pytest.mark.parametrize("fate", FATES)
async def test_every_single_write_goes_wrong(fate):
    for number in range(1, 9):
        lab = Lab(3)
        front = Front(lab, Door(lab.cluster, lambda n, last=number: fate if n == last else None))
        work = asyncio.create_task(day(front))
        while not work.done():
            await asyncio.wait([work], timeout=0.03)
            front.broker.door.release_late()
        await work
        await evening(front)
        # No operator died: no phone was thrown away but those that were spoiled.
        assert sum("/pods/" in path for path in lab.cluster.objects) == 3 - front.spoiled


async def test_an_api_server_that_answers_nothing_for_a_while():
    lab = Lab(3)
    mute = [True]
    front = Front(lab, Door(lab.cluster, lambda n: "lost after" if mute[0] else None))
    work = asyncio.create_task(day(front))
    await asyncio.sleep(0.3)
    mute[0] = False
    await work
    await evening(front)


@pytest.mark.parametrize("seed", range(16))
async def test_leaders_change_while_writes_are_under_way(seed):
    """Some die, some are cut off and their writes arrive when their successor is at work."""
    chance = random.Random(seed)
    lab = Lab(3, nodes=2)
    doors: list[Door] = []

    def door() -> Door:
        fates = ["late", "lost after", "lost before", 500, 409, None, None, None, None, None]
        doors.append(Door(lab.cluster, lambda n: chance.choice(fates)))
        return doors[-1]

    front = Front(lab, door())
    days = asyncio.gather(*(day(front, tag) for tag in "xy"))

    async def trouble() -> None:
        for _ in range(8):
            await asyncio.sleep(chance.uniform(0.0, 0.03))
            match chance.randrange(4):
                case 0:
                    await front.replace(kill=True, door=door())
                case 1:
                    await front.replace(kill=False, door=door())
                case 2:
                    front.broker.held_back = front.broker.held_back or []  # the watch is late
                case 3:
                    front.broker.hear_all()
            chance.choice(doors).release_late()
        front.broker.hear_all()
        front.broker.door.script = lambda n: None

    await asyncio.gather(days, trouble())
    for late in doors:
        late.release_late()
    await evening(front)


async def test_two_that_both_believe_to_lead_never_grant_a_slot_twice():
    lab = Lab(20, nodes=4)
    old, new = Broker(lab, 1), Broker(lab, 2)
    old.held_back = []
    asks = [broker.acquire(f"run-{k}") for k in range(10) for broker in (old, new)]
    answers = await asyncio.gather(*asks)
    slots = [claim.slot for claims in answers for claim in claims]
    assert len(slots) == len(set(slots))
    assert len(slots) >= 10
    # What one of them granted the other one honours, news or no news.
    claims = [claim for claims in answers for claim in claims]
    assert {said.state for said in await new.renew(*claims)} == {"held"}
    old.hear_all()
    assert {said.state for said in await old.renew(*claims)} == {"held"}
    for broker in (old, new):
        await broker.end()


async def test_a_late_delete_hits_no_claim_of_the_next_leader():
    lab = Lab(1)
    old = Broker(lab, 1, Door(lab.cluster, lambda number: "late" if number == 2 else None))
    [claim] = await old.acquire()
    release = asyncio.create_task(old.release(claim, verdict="dirty"))
    await until(lambda: old.door.writes == 2)
    old.leading = False
    new = Broker(lab, 2)
    await new.release(claim)  # its holder asks again, and says otherwise
    [after] = await new.acquire("b")
    old.door.release_late()
    assert (await new.renew(after))[0].state == "held"
    release.cancel()
    for broker in (old, new):
        await broker.end()


async def test_time_without_an_operator_ages_no_claim():
    lab = Lab(2)
    first = Broker(lab, 1)
    claims = await first.acquire(slots=2)
    await first.die()
    second = Broker(lab, 2, speed=100.0)  # five seconds last 50 ms
    assert {said.state for said in await second.renew(*claims)} == {"held"}
    await until(lambda: not lab.cluster.objects.keys() & {f"/api/v1/namespaces/{NAMESPACE}/pods/phone-0"})
    assert {said.state for said in await second.renew(*claims)} == {"lost"}
    await second.end()


async def test_the_renewal_that_comes_before_the_news_is_not_lost():
    """A claim of the last leader that the new one's watch has not shown yet."""
    lab = Lab(1)
    first = Broker(lab, 1)
    stale = lab.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods/phone-0")
    claims = await first.acquire()
    fresh = lab.cluster.objects[f"/api/v1/namespaces/{NAMESPACE}/pods/phone-0"]
    lab.cluster.objects[f"/api/v1/namespaces/{NAMESPACE}/pods/phone-0"] = stale
    second = Broker(lab, 2)
    lab.cluster.objects[f"/api/v1/namespaces/{NAMESPACE}/pods/phone-0"] = fresh
    assert second.claims.held(lab.pool_uid) == {}
    # Without the claim's secret nobody makes the broker look.
    forged = claims[0].model_copy(update={"secret": "x" * 43})
    assert (await second.renew(forged))[0].state == "lost"
    assert second.claims.held(lab.pool_uid) == {}
    assert (await second.renew(*claims))[0].state == "held"
    for broker in (first, second):
        await broker.end()
