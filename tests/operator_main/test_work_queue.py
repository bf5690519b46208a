"""Passes of objects: never two at once, again after a failure; and calls that outlive the pass that began them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tapforge_operator import controller
from tapforge_operator.controller import InFlight, Requeue, WorkQueue
from tapforge_operator.kube.client import ApiError
from tapforge_operator.kube.leaderelection import NotLeading

Pass = Callable[[], Awaitable[Requeue | None]]


class Scripted:
    """The controller of one object, whose passes are written down one by one; the last one is repeated."""

    namespace, name = "lab", "phones"

    def __init__(self, *passes: Pass):
        self._passes = list(passes)
        self.begun = 0
        self.running = 0
        self.closed = False

    async def reconcile(self) -> Requeue | None:
        assert not self.running and not self.closed
        self.running += 1
        self.begun += 1
        try:
            return await self._passes[min(self.begun, len(self._passes)) - 1]()
        finally:
            self.running -= 1

    async def close(self) -> None:
        self.closed = True


async def quiet() -> Requeue | None:
    return Requeue(after=60.0, pause=0.0)


async def gone() -> Requeue | None:
    return None


async def fails() -> Requeue | None:
    raise ApiError("PATCH it", 503, "Busy", "later")


async def breaks() -> Requeue | None:
    raise KeyError("a bug")


async def led_no_more() -> Requeue | None:
    raise NotLeading


@asynccontextmanager
async def queue_of(*controllers: Scripted, leads: Callable[[], bool] = lambda: True) -> AsyncIterator[WorkQueue]:
    """`controllers`: those of the object "one", one after the other."""
    left = list(controllers)
    queue = WorkQueue("EmulatorPool", lambda uid: left.pop(0) if left and uid == "one" else None, leads)
    queue.start()
    try:
        yield queue
    finally:
        await queue.stop()
    assert all(one.closed for one in controllers if one.begun)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_news_during_a_pass_cause_one_more_pass_and_no_second_one_at_once():
    inside, end = asyncio.Event(), asyncio.Event()

    async def long() -> Requeue | None:
        inside.set()
        await end.wait()
        return Requeue(after=60.0, pause=0.0)

    one = Scripted(long, quiet)
    async with queue_of(one) as queue:
        queue.wake("one")
        await inside.wait()
        for _ in range(5):
            queue.wake("one")
        end.set()
        await until(lambda: one.begun == 2)
        await asyncio.sleep(0.05)
        assert one.begun == 2


async def test_what_a_pass_asked_for_comes_without_news():
    async def soon() -> Requeue | None:
        return Requeue(after=0.02)

    one = Scripted(soon, soon, quiet)
    async with queue_of(one) as queue:
        queue.wake("one")
        await until(lambda: one.begun == 3)


async def test_a_pass_that_fails_is_repeated_with_growing_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(controller, "_FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(controller, "_LONGEST_BACKOFF", 0.02)
    waits: list[float] = []
    wait = controller._Loop._wait
    monkeypatch.setattr(
        controller._Loop, "_wait", lambda self, again: (waits.append(again.after), wait(self, again))[1]
    )
    told: list[str | None] = []
    one = Scripted(fails, fails, fails, quiet)
    queue = WorkQueue("EmulatorPool", lambda _: one, lambda: True, lambda _, __, error: told.append(error))
    queue.start()
    queue.wake("one")
    await until(lambda: one.begun == 4)
    await queue.stop()
    assert waits[:3] == [0.01, 0.02, 0.02] and told[:3] == ["Busy"] * 3


async def test_a_controller_that_breaks_is_replaced_by_another_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(controller, "_RESTART_SECONDS", 0.05)
    first, second = Scripted(breaks), Scripted(quiet)
    async with queue_of(first, second) as queue:
        queue.wake("one")
        await until(lambda: second.begun == 1)
        assert first.begun == 1 and first.closed


async def test_an_object_whose_controllers_break_rests_longer_each_time_whatever_news_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    rests: list[float] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def call_later(delay: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        if getattr(callback, "__self__", None) is not queue:
            return later(delay, callback, *args)
        rests.append(delay)
        ends.append(lambda: callback(*args))
        return later(3600.0, lambda: None)

    ends: list[Callable[[], object]] = []
    monkeypatch.setattr(loop, "call_later", call_later)
    begun: list[Scripted] = []
    passes: list[Pass] = [breaks] * 8

    def begin(uid: str) -> Scripted:
        begun.append(Scripted(*([quiet, breaks] if len(begun) == len(passes) else passes)))
        return begun[-1]

    queue = WorkQueue("EmulatorPool", begin, lambda: True)
    queue.start()
    queue.wake("one")
    for number in range(1, len(passes) + 1):
        await until(lambda number=number: len(rests) == number)
        for _ in range(100):  # as from a thousand Pods that change
            queue.wake("one")
            await asyncio.sleep(0)
        assert len(begun) == number
        ends[-1]()
    assert rests == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    # A pass that ends well starts the pauses anew.
    await until(lambda: begun[-1].begun == 1)
    queue.wake("one")
    await until(lambda: len(rests) == len(passes) + 1)
    assert rests[-1] == 10.0
    told = [record for record in caplog.records if record.exc_info]
    assert len(told) == len(rests), "one traceback for each"
    await queue.stop()


async def test_an_object_that_goes_while_it_rests_is_forgotten_with_its_crash(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(controller, "_RESTART_SECONDS", 0.05)
    told: list[str | None] = []
    left = [Scripted(breaks)]
    queue = WorkQueue(
        "EmulatorPool",
        lambda _: left.pop() if left else None,
        lambda: True,
        lambda _, __, error: told.append(error),
        told.append,
    )
    queue.start()
    queue.wake("one")
    await until(lambda: len(told) == 2)
    assert told == ["Crash", "lab/phones"]
    queue.wake("one")
    assert len(told) == 2, "once"
    await queue.stop()


async def test_a_rest_ends_with_the_leadership_and_nothing_begins_after_it():
    first, second = Scripted(breaks), Scripted(quiet)
    async with queue_of(first, second) as queue:
        queue.wake("one")
        await until(lambda: first.closed)
        await asyncio.sleep(0)
        await queue.stop()
        assert not second.begun
        queue.start()
        queue.wake("one")
        await until(lambda: second.begun == 1)


async def test_an_object_that_is_back_during_the_last_pass_over_it_gets_a_controller():
    back = asyncio.Event()

    async def last() -> Requeue | None:
        await back.wait()
        return None

    first, second = Scripted(last), Scripted(quiet)
    async with queue_of(first, second) as queue:
        queue.wake("one")
        await until(lambda: first.begun == 1)
        queue.wake("one")
        back.set()
        await until(lambda: second.begun == 1)


@pytest.mark.parametrize("end", [gone, led_no_more])
async def test_what_is_gone_or_led_by_another_one_is_not_reconciled_again(end: Pass):
    one = Scripted(end)
    async with queue_of(one) as queue:
        queue.wake("one")
        await until(lambda: one.closed)
        await asyncio.sleep(0.05)
        assert one.begun == 1


async def test_nothing_runs_before_the_start_after_the_stop_or_without_leading():
    leads = False
    first, second = Scripted(quiet), Scripted(quiet)
    async with queue_of(first, second, leads=lambda: leads) as queue:
        queue.wake("one")
        await asyncio.sleep(0.02)
        assert not first.begun
        leads = True
        queue.wake("one")
        await until(lambda: first.begun == 1)
        await queue.stop()
        assert first.closed
        queue.wake("one")
        await asyncio.sleep(0.02)
        assert not second.begun
        queue.start()
        queue.wake("one")
        await until(lambda: second.begun == 1)


async def test_a_pass_ends_when_few_enough_of_its_calls_are_in_flight():
    told: list[None] = []
    calls: InFlight[int] = InFlight(lambda: told.append(None))
    ends = [asyncio.Event() for _ in range(4)]
    for number, end in enumerate(ends):
        calls.begin(number, end.wait())
    ends[0].set()
    settled = asyncio.create_task(calls.end_pass(pending=2))
    await asyncio.sleep(0.05)
    assert not settled.done()  # three are in flight
    ends[1].set()
    await settled
    assert sorted(calls) == [2, 3] and calls.turn == 1 and not told
    # What goes on is known to the next pass, which does not wait for it.
    ends[2].set()
    await asyncio.sleep(0.05)
    await calls.end_pass()
    assert sorted(calls) == [3] and len(told) == 1
    await calls.end()


async def test_no_pass_waits_for_a_call_in_the_background_whose_end_is_no_news(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(controller, "_STANDSTILL_SECONDS", 600.0)
    told: list[None] = []
    calls: InFlight[int] = InFlight(lambda: told.append(None))
    gate = asyncio.Event()

    async def late() -> None:
        await gate.wait()
        raise ValueError("no room")

    calls.begin(1, late(), background=True)
    async with asyncio.timeout(60):
        await calls.end_pass()
    assert list(calls) == [1], "nobody begins it a second time"
    gate.set()
    await asyncio.wait([task for number in calls if (task := calls.get(number))])
    assert not told
    with pytest.raises(ValueError, match="no room"):
        await calls.end_pass()


async def test_what_a_call_raised_after_its_pass_comes_out_of_the_next_one():
    calls: InFlight[int] = InFlight(lambda: None)
    gate = asyncio.Event()

    async def late() -> None:
        await gate.wait()
        raise ValueError("no room")

    calls.begin(1, late())
    await calls.end_pass(pending=1)
    gate.set()
    await asyncio.sleep(0.05)
    with pytest.raises(ValueError, match="no room"):
        await calls.end_pass()
    await calls.end_pass()


async def raised(*errors: Exception) -> BaseException:
    calls: InFlight[int] = InFlight(lambda: None)

    async def fail(error: Exception) -> None:
        raise error

    for number, error in enumerate(errors):
        calls.begin(number, fail(error))
    with pytest.raises((Exception, BaseExceptionGroup)) as found:
        await calls.end_pass()
    await calls.end_pass()
    return found.value


async def test_a_bug_is_not_lost_behind_what_is_tried_again():
    busy, bug, over = ApiError("POST it", 503, "Busy", "later"), KeyError("a bug"), NotLeading()
    assert await raised(busy) is busy and await raised(bug) is bug
    group = await raised(busy, bug, over)
    assert isinstance(group, ExceptionGroup) and set(group.exceptions) == {busy, bug, over}
    assert await raised(busy, ApiError("POST", 500, "No", "no")) is busy
    assert await raised(busy, over) is over, "nobody who leads no more tries again"
