"""Orders: who is obeyed, how long a stop may take, and what a process that was stopped exits with."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tapforge_api.progress import EXIT_STOPPED
from tapforge_trainer.orders import EXIT_INTERRUPTED, Interrupted, Orders, Why, listening, under_orders, unless


@pytest.mark.parametrize(
    ("given", "why", "code", "abandoned"),
    [
        ([(Why.INTERRUPT, None)], Why.INTERRUPT, EXIT_INTERRUPTED, False),
        ([(Why.TERMINATE, 60)], Why.TERMINATE, EXIT_STOPPED, False),
        ([(Why.SUSPEND, 60), (Why.TERMINATE, 60)], Why.SUSPEND, EXIT_STOPPED, False),
        ([(Why.DEADLINE, 60)], Why.DEADLINE, EXIT_STOPPED, False),
        ([(Why.SUSPEND, 60), (Why.SUPERSEDED, None)], Why.SUPERSEDED, EXIT_STOPPED, True),
    ],
)
async def test_the_first_order_counts_unless_somebody_else_took_over(
    given: list[tuple[Why, float | None]], why: Why, code: int, abandoned: bool
) -> None:
    orders = Orders()
    assert not orders.stop.is_set()
    for order in given:
        orders.obey(*order)
    assert orders.stop.is_set()
    assert (orders.why, orders.code, orders.abandoned.is_set()) == (why, code, abandoned)


async def test_the_shortest_grace_counts() -> None:
    orders = Orders()
    orders.obey(Why.SUSPEND, 3600)
    orders.obey(Why.SUSPEND, 0.01)
    orders.obey(Why.SUSPEND, 3600)
    async with asyncio.timeout(120):
        await orders.abandoned.wait()


async def test_work_that_ends_in_time_ends_as_it_does() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    assert await under_orders(Orders(), work()) == 3


async def test_work_that_obeys_ends_with_the_orders_code() -> None:
    orders = Orders()

    async def work() -> int:
        await unless(orders.stop, asyncio.sleep(3600))
        return 0

    asyncio.get_running_loop().call_soon(orders.obey, Why.SUSPEND, 60.0)
    assert await under_orders(orders, work()) == EXIT_STOPPED


async def test_what_fails_is_raised_whatever_was_ordered() -> None:
    orders = Orders()
    orders.obey(Why.SUSPEND, 3600)

    async def work() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await under_orders(orders, work())


@pytest.mark.parametrize("cleaning", ["cleanly", "with an error", "not at all", "in time after all"])
async def test_work_that_takes_longer_than_the_grace_is_cut_off(cleaning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapforge_trainer.orders._CLEANUP", 0.05)
    orders, said, end = Orders(), [], asyncio.Event()

    async def work() -> int:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            said.append("cleaned up")
            if cleaning == "with an error":
                raise ZeroDivisionError from None
            if cleaning == "not at all":
                await end.wait()
            if cleaning == "in time after all":
                return 0
            raise
        return 1

    orders.obey(Why.DEADLINE, 0.01)
    code = await under_orders(orders, work(), lambda: said.append("abandoned"))
    assert code == (0 if cleaning == "in time after all" else EXIT_STOPPED)
    assert said == ["abandoned", "cleaned up"]
    end.set()


async def test_sigterm_has_a_grace_however_often_it_comes_and_ctrl_c_none(monkeypatch: pytest.MonkeyPatch) -> None:
    orders, heard = Orders(grace=3600), asyncio.Queue[Why]()
    obey = orders.obey
    monkeypatch.setattr(orders, "obey", lambda why, grace: (obey(why, grace), heard.put_nowait(why)))
    before = signal.getsignal(signal.SIGINT)
    with listening(orders):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await heard.get() is Why.TERMINATE
        assert (orders.why, orders.abandoned.is_set()) == (Why.TERMINATE, False)
    orders = Orders()
    with listening(orders):
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(60):
            await orders.stop.wait()
        assert orders.why is Why.INTERRUPT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


async def test_a_cancelled_caller_takes_the_work_with_it() -> None:
    ended = []

    async def work() -> int:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)
        return 0

    task = asyncio.create_task(under_orders(Orders(), work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_an_interruption_outside_of_orders_is_ctrl_c() -> None:
    async def work() -> int:
        raise Interrupted("stopped")

    assert await under_orders(Orders(), work()) == EXIT_INTERRUPTED
