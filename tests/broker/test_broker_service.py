"""What callers of the broker see, against an API server in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from claim_cluster import NAMESPACE, POOL, TIMEOUTS, Broker, Door, Lab, pod_path, until

from tapforge_api.claims import Acquire
from tapforge_operator import labels
from tapforge_operator.broker.types import Holder, PoolNotFound
from tapforge_operator.kube.leaderelection import NotLeading

pytestmark = pytest.mark.usefixtures("own_time")


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Broker]]:
    brokers: list[Broker] = []

    def make(lab: Lab, term: int = 1, door: Door | None = None, **more: float) -> Broker:
        brokers.append(Broker(lab, term, door, **more))
        return brokers[-1]

    yield make
    for broker in brokers:
        await broker.end()


async def test_a_claim_is_on_its_slot_when_it_is_answered(start):
    lab = Lab(1)
    broker = start(lab)
    [claim] = await broker.acquire("train")
    pod = lab.pod("phone-0")["metadata"]
    assert pod["labels"][labels.CLAIMED] == "true"
    assert pod["labels"][labels.RUN] == "train"
    assert pod["annotations"][labels.SAFE_TO_EVICT] == "false"
    assert pod["annotations"][labels.DO_NOT_DISRUPT] == "true"
    assert int(pod["annotations"][labels.FENCE]) == claim.fence
    assert claim.url == "http://10.0.0.7:8000"
    assert claim.id == f"{pod['uid']}.{claim.fence}"
    assert lab.pool_uid in broker.requeued
    [held] = broker.claims.held(lab.pool_uid).values()
    assert (held.holder, held.expired, held.revoked) == ("run/lab/train/u", False, "")

    [said] = await broker.release(claim, episodes=3)
    assert said.state == "lost"
    pod = lab.pod("phone-0")["metadata"]
    assert labels.CLAIMED not in pod["labels"]
    assert labels.RUN not in pod["labels"]
    assert labels.CLAIM not in pod["annotations"]
    assert labels.DO_NOT_DISRUPT not in pod["annotations"]
    assert pod["annotations"][labels.SAFE_TO_EVICT] == "true"
    assert pod["annotations"][labels.EPISODES] == "3"
    [again] = await broker.acquire("eval")
    assert again.fence > claim.fence
    assert not await broker.acquire("late", wait_seconds=0)


async def test_several_slots_at_once_and_one_at_least(start):
    lab = Lab(3)
    broker = start(lab)
    claims = await broker.acquire(slots=8)
    assert len(claims) == len({c.id for c in claims}) == 3
    waiting = asyncio.create_task(broker.acquire("b", slots=2, wait_seconds=5))
    await until(lambda: broker.claims.waiting(lab.pool_uid) == 2)
    await broker.release(claims[0])
    assert len(await waiting) == 1


class SlowDoor(Door):
    """Writes end one after the other, `pause` seconds apart; of `stuck` those after the ninth never do."""

    def __init__(self, lab, pause, stuck=False):
        super().__init__(lab.cluster)
        self.pause, self.stuck = pause, stuck
        self.turn = asyncio.Lock()

    async def patch(self, path, body):
        async with self.turn:
            await asyncio.sleep(self.pause)
        if self.stuck and self.writes >= 9:
            await asyncio.Event().wait()
        return await super().patch(path, body)


async def test_a_call_is_answered_with_all_its_slots_as_long_as_their_writes_go_on(start):
    """Together they take longer than the slots wait for any one of them."""
    lab = Lab(10)
    pause = 0.9 * TIMEOUTS.siblings
    broker = start(lab, door=SlowDoor(lab, pause))
    assert 10 * pause < TIMEOUTS.settle
    assert len(await broker.acquire(slots=10)) == 10
    assert broker.door.writes == 10, "nothing was written in vain"


async def test_a_write_that_does_not_end_keeps_nobody_waiting_for_the_slots_that_are_there(start):
    lab = Lab(10)
    broker = start(lab, door=SlowDoor(lab, 0.0, stuck=True))
    assert len(await broker.acquire(slots=10)) == 9


async def test_slots_are_not_waited_for_without_end(start):
    lab = Lab(30)
    broker = start(lab, door=SlowDoor(lab, 0.9 * TIMEOUTS.siblings))
    assert 1 < len(await broker.acquire(slots=30)) < 30


async def test_who_waits_is_told_why_in_the_end(start):
    broker = start(Lab(1))
    await broker.acquire()
    ask = Acquire(request="in-vain-1", wait_seconds=0.05)
    answer = await broker.claims.acquire(NAMESPACE, POOL, Holder("user/u"), ask)
    assert not answer.claims
    assert "of 1 slots 1 are claimed" in answer.waiting


async def test_a_run_gets_no_more_than_its_spec_says_and_is_told_so(start):
    broker = start(Lab(4))
    run = Holder("run/lab/train/u", "train", slots=2, priority=1)

    async def ask(number: int, wait: float) -> Any:
        body = Acquire(request=f"limited-{number}", slots=4, wait_seconds=wait, priority=9)
        return await broker.claims.acquire(NAMESPACE, POOL, run, body)

    first = (await ask(1, 5)).claims
    assert len(first) == 2
    refused = await ask(2, 0.05)
    assert not refused.claims and "TrainingRun train holds 2 phones" in refused.waiting
    assert "`slots` of its spec.environment.source" in refused.waiting
    waiting = asyncio.create_task(ask(3, 5))
    await broker.release(first[0])
    assert len((await waiting).claims) == 1
    assert len(await broker.acquire("another", slots=2)) == 2


async def test_a_slot_that_becomes_ready_goes_to_who_waits(start):
    lab = Lab()
    broker = start(lab)
    waiting = asyncio.create_task(broker.acquire(wait_seconds=5))
    await until(lambda: broker.claims.waiting(lab.pool_uid))
    lab.add_slot(0, ready=False)
    await asyncio.sleep(0.02)
    assert not waiting.done()
    lab.set_ready("phone-0")
    assert len(await waiting) == 1


async def test_a_request_that_is_sent_again_gets_the_same_claims(start):
    lab = Lab(4)
    broker = start(lab)
    first = await broker.acquire(request="request-1", slots=2)
    again = await broker.acquire(request="request-1", slots=2)
    assert {c.id: c.secret for c in first} == {c.id: c.secret for c in again}
    # Another caller's request of the same name is another one; and so is it after a restart.
    other = await broker.acquire("b", request="request-1")
    await broker.die()
    broker = start(lab, term=2)
    assert {c.id for c in await broker.acquire(request="request-1", slots=2)} == {c.id for c in first}
    assert {c.id for c in await broker.acquire("b", request="request-1")} == {c.id for c in other}
    await broker.release(*first)
    assert await broker.acquire(request="request-1") == []
    assert len(await broker.acquire(request="request-2", slots=9)) == 3


async def test_two_calls_of_one_request_share_its_outcome(start):
    lab = Lab()
    broker = start(lab)
    calls = [asyncio.create_task(broker.acquire(request="request-1", wait_seconds=5)) for _ in range(2)]
    await until(lambda: broker.claims.waiting(lab.pool_uid))
    calls[0].cancel()
    await asyncio.sleep(0.02)
    lab.add_slot(0)
    assert len(await calls[1]) == 1
    assert len(broker.claims.held(lab.pool_uid)) == 1


async def test_a_caller_that_goes_away_leaves_nothing_claimed(start):
    lab = Lab()
    broker = start(lab)
    call = asyncio.create_task(broker.acquire(wait_seconds=5))
    await until(lambda: broker.claims.waiting(lab.pool_uid))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert broker.claims.waiting(lab.pool_uid) == 0
    lab.add_slot(0)
    # While the claim is being written:
    for steps in range(6):
        call = asyncio.create_task(broker.acquire(wait_seconds=5))
        for _ in range(steps):
            await asyncio.sleep(0)
        call.cancel()
        ended = await asyncio.gather(call, return_exceptions=True)
        if isinstance(ended[0], asyncio.CancelledError):
            await until(lambda: not broker.claims.held(lab.pool_uid))
            await until(lambda: labels.CLAIM not in str(lab.pod("phone-0")))
        else:
            await broker.release(*ended[0])
    assert len(await broker.acquire()) == 1


@pytest.mark.parametrize("verdict", ["dirty", "broken"])
async def test_a_dirty_slot_is_deleted_and_never_granted_again(start, verdict):
    lab = Lab(1)
    broker = start(lab)
    [claim] = await broker.acquire()
    await broker.release(claim, verdict=verdict)
    assert pod_path("phone-0") not in lab.cluster.objects
    assert await broker.acquire(wait_seconds=0.05) == []


async def test_a_claim_that_is_not_renewed_takes_its_pod_along(start):
    lab = Lab(2)
    broker = start(lab, speed=20.0)  # a claim of 5 s ends after 0.25 s
    (kept,) = await broker.acquire(hold_seconds=3600)
    (lost,) = await broker.acquire()
    await until(lambda: len(lab.cluster.objects) == 2)
    said = await broker.renew(kept, lost)
    assert [s.state for s in said] == ["held", "lost"]
    assert "not renewed" in said[1].reason


async def test_renewals_need_the_secret_and_no_api_server(start):
    lab = Lab(2)
    broker = start(lab)
    mine, other = await broker.acquire(slots=2)
    broker.door.dead = True
    forged = mine.model_copy(update={"secret": other.secret})
    said = await broker.renew(mine, forged, other.model_copy(update={"id": "nobody-knows.5"}), episodes=4)
    assert [s.state for s in said] == ["held", "lost", "lost"]
    assert "secret" in said[1].reason
    assert (await broker.release(forged))[0].reason == said[1].reason
    assert (await broker.renew(mine))[0].state == "held"
    assert broker.claims.held(lab.pool_uid)[mine.id.split(".")[0]].episodes == 4
    broker.door.dead = False


async def test_giving_back_twice_changes_nothing(start):
    lab = Lab(1)
    broker = start(lab)
    [claim] = await broker.acquire()
    await broker.release(claim)
    [new] = await broker.acquire("b")
    said = await broker.release(claim, verdict="broken")
    assert said[0].state == "lost"
    assert (await broker.renew(claim))[0].state == "lost"
    assert (await broker.renew(new))[0].state == "held"


async def test_a_dead_pod_ends_its_claim_and_is_left_to_its_pool(start):
    lab = Lab(2)
    broker = start(lab)
    claims = await broker.acquire(slots=2)
    lab.set_ready(claims[0].slot, ready=False, phase="Failed")
    lab.cluster.drop(pod_path(claims[1].slot))
    said = await broker.renew(*claims)
    assert [s.state for s in said] == ["lost", "lost"]
    assert "its Pod ended" in said[0].reason
    assert "gone" in said[1].reason
    assert broker.claims.held(lab.pool_uid) == {}
    assert broker.claims.drain(lab.pod(claims[0].slot)["metadata"]["uid"])


async def test_draining_slots_are_nobodys(start):
    lab = Lab(2)
    broker = start(lab)
    [claim] = await broker.acquire()
    uid = claim.id.split(".")[0]
    other = next(n for n in ("phone-0", "phone-1") if n != claim.slot)
    assert not broker.claims.drain(uid)
    assert broker.claims.drain(lab.pod(other)["metadata"]["uid"])
    assert await broker.acquire("b", wait_seconds=0.05) == []
    broker.claims.revoke(uid, "its node is drained")
    said = await broker.renew(claim)
    assert (said[0].state, said[0].reason) == ("recalled", "its node is drained")
    await broker.release(claim)
    assert await broker.acquire("b", wait_seconds=0.05) == []
    assert broker.claims.drain(uid)


async def test_a_worn_slot_is_not_granted_again(start):
    lab = Lab(1, recycle={"afterEpisodes": 3})
    broker = start(lab)
    for episodes in (2, 1):
        [claim] = await broker.acquire()
        await broker.release(claim, episodes=episodes)
    assert lab.pod("phone-0")["metadata"]["annotations"][labels.EPISODES] == "3"
    assert await broker.acquire(wait_seconds=0.05) == []


async def test_claims_come_from_the_fullest_node(start):
    lab = Lab(9, nodes=3)
    broker = start(lab)
    claims = [(await broker.acquire())[0] for _ in range(6)]
    nodes = [lab.pod(c.slot)["spec"]["nodeName"] for c in claims]
    assert nodes == sorted(nodes, key=nodes.index)
    assert len(set(nodes)) == 2


async def test_unknown_and_vanishing_pools(start):
    lab = Lab()
    broker = start(lab)
    ask = Acquire(request="request-1", wait_seconds=5)
    with pytest.raises(PoolNotFound, match="no EmulatorPool other in namespace lab"):
        await broker.claims.acquire(NAMESPACE, "other", Holder("user/u"), ask)
    call = asyncio.create_task(broker.acquire(wait_seconds=5))
    await until(lambda: broker.claims.waiting(lab.pool_uid))
    path = next(p for p in lab.cluster.objects if "emulatorpools" in p)
    lab.pool["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    lab.cluster.put(path, lab.pool)
    with pytest.raises(PoolNotFound, match="is being deleted"):
        await broker.acquire()
    lab.cluster.drop(path)
    with pytest.raises(PoolNotFound, match="was deleted"):
        await call


async def test_who_does_not_lead_answers_nothing(start):
    lab = Lab(1)
    broker = start(lab)
    [claim] = await broker.acquire()
    waiting = asyncio.create_task(broker.acquire(wait_seconds=5))
    await until(lambda: broker.claims.waiting(lab.pool_uid))
    broker.leading = False
    for call in (broker.acquire(), broker.renew(claim), broker.release(claim)):
        with pytest.raises(NotLeading):
            await call
    await broker.claims.end()
    with pytest.raises(NotLeading):
        await waiting
    assert not broker.claims.drain(claim.id.split(".")[0])
    assert labels.CLAIM in lab.pod("phone-0")["metadata"]["annotations"]


async def test_a_broker_that_breaks_leads_no_longer_and_keeps_nobody_waiting(start, caplog):
    lab = Lab(1)
    broker = start(lab)
    [claim] = await broker.acquire()
    waiting = asyncio.create_task(broker.acquire(wait_seconds=60))
    await until(lambda: broker.claims.waiting(lab.pool_uid))
    broker.claims._ledger._table = None  # a bug of its own
    with pytest.raises(NotLeading):
        await waiting
    assert not broker.claims.leading
    assert "stops leading" in caplog.text
    with pytest.raises(NotLeading):
        await broker.renew(claim)


async def test_forged_marks_and_labels_mean_nothing(start):
    lab = Lab(1)
    broker = start(lab)
    [claim] = await broker.acquire()
    real = lab.pod("phone-0")["metadata"]["annotations"][labels.CLAIM]
    await broker.release(claim)
    lab.cluster.touch(pod_path("phone-0"), **{labels.CLAIM: '{"v":1,"key":"x","fence":9,"signature":"00"}'})
    assert len(broker.claims.held(lab.pool_uid)) == 0
    lab.cluster.touch(pod_path("phone-0"), **{labels.CLAIM: real})  # a replay
    assert len(broker.claims.held(lab.pool_uid)) == 0
    lab.add_slot(1)
    lab.cluster.touch(pod_path("phone-1"), **{labels.CLAIM: real})  # copied to another slot
    assert len(broker.claims.held(lab.pool_uid)) == 0
    claims = await broker.acquire("b", slots=9)
    assert len(claims) == 2
    assert min(c.fence for c in claims) > claim.fence


async def test_a_mark_that_somebody_takes_off_ends_the_slot(start):
    lab = Lab(1)
    broker = start(lab)
    [claim] = await broker.acquire()
    lab.cluster.touch(pod_path("phone-0"), **{labels.CLAIM: ""})
    await until(lambda: pod_path("phone-0") not in lab.cluster.objects)
    said = await broker.renew(claim)
    assert said[0].state == "lost"
    assert "changed by another client" in said[0].reason


async def test_changes_by_others_between_look_and_claim_only_cost_a_retry(start):
    lab = Lab(1)
    broker = start(lab)
    broker.held_back = []
    for number in range(3):
        lab.cluster.touch(pod_path("phone-0"), note=str(number))
    assert len(await broker.acquire()) == 1
    broker.hear_all()
    assert len(broker.claims.held(lab.pool_uid)) == 1


async def test_a_pod_whose_status_changes_meanwhile_is_claimed_and_released_by_one_write_each(start):
    lab = Lab(1)
    broker = start(lab)
    broker.held_back = []
    lab.set_ready("phone-0")  # nobody told the broker yet
    [claim] = await broker.acquire()
    assert broker.door.writes == 1
    lab.cluster.touch(pod_path("phone-0"), **{"example.com/seen": "by somebody"})
    await broker.release(claim, episodes=2)
    assert broker.door.writes == 2
    assert lab.pod("phone-0")["metadata"]["annotations"][labels.EPISODES] == "2"


async def test_a_pod_that_ended_meanwhile_is_granted_to_nobody(start):
    lab = Lab(1)
    broker = start(lab)
    broker.held_back = []
    lab.set_ready("phone-0", ready=False, phase="Failed")
    assert await broker.acquire() == []


@pytest.mark.parametrize("kind", ["labels", "annotations"])
async def test_a_pod_without_what_the_operator_wrote_is_claimed_and_released_all_the_same(start, kind):
    lab = Lab(1)
    broker = start(lab)
    if kind == "annotations":
        del lab.pod("phone-0")["metadata"]["annotations"]
    [claim] = await broker.acquire()
    del lab.pod("phone-0")["metadata"]["labels"][labels.CLAIMED]
    lab.cluster.touch(pod_path("phone-0"), **{"example.com/seen": "by somebody"})
    await broker.release(claim)
    assert labels.CLAIM not in lab.pod("phone-0")["metadata"]["annotations"]
    assert len(await broker.acquire()) == 1


async def test_fair_share_is_revoked_at_the_end_of_an_episode(start):
    lab = Lab(4)
    broker = start(lab)
    mine = await broker.acquire("a", slots=4)
    others = asyncio.create_task(broker.acquire("b", slots=4, wait_seconds=5))

    back: list = []
    async with asyncio.timeout(60):
        while not back:
            await asyncio.sleep(0.01)
            said = await broker.renew(*mine)
            back = [claim for claim, word in zip(mine, said, strict=True) if word.state == "recalled"]
    assert len(back) == 2
    await broker.release(*back)
    got = await others
    if len(got) == 1:
        got += await broker.acquire("b", slots=3, wait_seconds=5)
    assert len(got) == 2
    mine = [c for c in mine if c not in back]
    asks = [asyncio.create_task(broker.acquire(h, slots=2, wait_seconds=0.3)) for h in ("a", "b")]
    await asyncio.sleep(0.2)
    assert {s.state for s in await broker.renew(*mine, *got)} == {"held"}
    assert await asyncio.gather(*asks) == [[], []]
