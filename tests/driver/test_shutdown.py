"""The stop signal: which request counts, how long a stop may take, and what a stopped process exits with."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tapforge_api.progress import EXIT_STOPPED
from tapforge_trainer.run.shutdown import (
    EXIT_INTERRUPTED,
    Interrupted,
    StopReason,
    StopSignal,
    handling_signals,
    run_until_aborted,
    unless_stopped,
)


@pytest.mark.parametrize(
    ("given", "reason", "code", "aborted"),
    [
        ([(StopReason.INTERRUPT, None)], StopReason.INTERRUPT, EXIT_INTERRUPTED, False),
        ([(StopReason.TERMINATE, 60)], StopReason.TERMINATE, EXIT_STOPPED, False),
        ([(StopReason.SUSPEND, 60), (StopReason.TERMINATE, 60)], StopReason.SUSPEND, EXIT_STOPPED, False),
        ([(StopReason.DEADLINE, 60)], StopReason.DEADLINE, EXIT_STOPPED, False),
        ([(StopReason.SUSPEND, 60), (StopReason.SUPERSEDED, None)], StopReason.SUPERSEDED, EXIT_STOPPED, True),
    ],
)
async def test_the_first_request_counts_unless_a_successor_took_over(
    given: list[tuple[StopReason, float | None]], reason: StopReason, code: int, aborted: bool
) -> None:
    stop = StopSignal()
    assert not stop.requested.is_set()
    for request in given:
        stop.request(*request)
    assert stop.requested.is_set()
    assert (stop.reason, stop.exit_code, stop.aborted.is_set()) == (reason, code, aborted)


async def test_the_shortest_grace_counts() -> None:
    stop = StopSignal()
    stop.request(StopReason.SUSPEND, 3600)
    stop.request(StopReason.SUSPEND, 0.01)
    stop.request(StopReason.SUSPEND, 3600)
    async with asyncio.timeout(120):
        await stop.aborted.wait()


async def test_work_that_ends_in_time_ends_as_it_does() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    assert await run_until_aborted(StopSignal(), work()) == 3


async def test_work_that_stops_ends_with_the_signals_code() -> None:
    stop = StopSignal()

    async def work() -> int:
        await unless_stopped(stop, asyncio.sleep(3600))
        return 0

    asyncio.get_running_loop().call_soon(stop.request, StopReason.SUSPEND, 60.0)
    assert await run_until_aborted(stop, work()) == EXIT_STOPPED


async def test_what_fails_is_raised_whatever_was_requested() -> None:
    stop = StopSignal()
    stop.request(StopReason.SUSPEND, 3600)

    async def work() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_until_aborted(stop, work())


@pytest.mark.parametrize("cleaning", ["cleanly", "with an error", "not at all", "in time after all"])
async def test_work_that_takes_longer_than_the_grace_is_cut_off(cleaning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapforge_trainer.run.shutdown._CLEANUP", 0.05)
    stop, said, end = StopSignal(), [], asyncio.Event()

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

    stop.request(StopReason.DEADLINE, 0.01)
    code = await run_until_aborted(stop, work(), lambda: said.append("aborted"))
    assert code == (0 if cleaning == "in time after all" else EXIT_STOPPED)
    assert said == ["aborted", "cleaned up"]
    end.set()


async def test_sigterm_has_a_grace_however_often_it_comes_and_ctrl_c_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, heard = StopSignal(grace=3600), asyncio.Queue[StopReason]()
    request = stop.request
    monkeypatch.setattr(stop, "request", lambda why, grace: (request(why, grace), heard.put_nowait(why)))
    before = signal.getsignal(signal.SIGINT)
    with handling_signals(stop):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await heard.get() is StopReason.TERMINATE
        assert (stop.reason, stop.aborted.is_set()) == (StopReason.TERMINATE, False)
    stop = StopSignal()
    with handling_signals(stop):
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(60):
            await stop.requested.wait()
        assert stop.reason is StopReason.INTERRUPT
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

    task = asyncio.create_task(run_until_aborted(StopSignal(), work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_an_interruption_without_a_request_is_ctrl_c() -> None:
    async def work() -> int:
        raise Interrupted("stopped")

    assert await run_until_aborted(StopSignal(), work()) == EXIT_INTERRUPTED
