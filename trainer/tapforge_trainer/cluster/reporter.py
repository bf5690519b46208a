"""Reports the run's status to the operator every few seconds, and applies what is answered: a request to stop, edited
limits (`tapforge_api.progress`).

Promises:
1. It never blocks the training. A failure is logged once when it begins and once when it has ended. A report without
   an answer times out after `Timing.answer`.
2. While the operator is unreachable, reports continue with growing pauses; each is complete, so none is sent later.
3. The last report is sent until it is answered, or `Timing.final` is over, or it was refused `Timing.refusals` times.
4. Reports of an attempt are numbered in the order of their time, also over restarts of its driver.

Times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Self

from tapforge_api.progress import FINAL_SECONDS, Progress
from tapforge_api.progress import Orders as Answer
from tapforge_envs.slots.broker_calls import Access, BrokerAway, BrokerCalls
from tapforge_envs.slots.source import SlotError

from ..run.shutdown import StopReason, StopSignal
from ..telemetry.telemetry import ProgressView
from .attempt import RunAttempt
from .status_report import Final, report_of

log = logging.getLogger(__name__)

#: at most so much of a stop's grace is kept for the last report
_LAST_REPORT = 5.0


@dataclass(frozen=True, slots=True)
class Timing:
    #: between two reports, until the operator answers with another interval
    interval: float = 5.0
    #: for an answer: one about a checkpoint waits until it is in the run's status
    answer: float = 25.0
    #: longest backoff while the operator is unreachable
    backoff_cap: float = 60.0
    #: for the last report, with all its repetitions
    final: float = FINAL_SECONDS
    #: between those, growing
    retry: float = 0.5
    #: how often the last report is refused before it is given up
    refusals: int = 3


class Reporter:
    """`view` is what is reported; its owner keeps changing it."""

    def __init__(
        self, access: Access, attempt: RunAttempt, view: ProgressView, stop: StopSignal, times: Timing | None = None
    ):
        self._calls = BrokerCalls(access)
        self._attempt = attempt
        self._view = view
        self._stop = stop
        self._times = times or Timing()
        self._between = self._times.interval
        self._failures = 0
        self._answered = asyncio.Event()
        # Grows more slowly than the clock: a later driver of the attempt starts with a larger one.
        self._sequence = int(time.time() * 1000)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep_reporting(), name="reports to the operator")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cancel()
        await self._calls.close()

    async def answered(self, seconds: float) -> bool:
        """Whether the operator has answered, now or within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._answered.wait()
        except TimeoutError:
            return False
        return True

    async def finish(self, final: Final, message: str, seconds: float | None = None) -> bool:
        """The last report. Returns whether the operator has it."""
        await self._cancel()
        end = time.monotonic() + (self._times.final if seconds is None else seconds)
        pause, refused, trouble = self._times.retry, 0, "there was no time"
        while (left := end - time.monotonic()) > 0:
            try:
                await self._calls.report(self._attempt.run, self._next(final, message), min(self._times.answer, left))
                return True
            except BrokerAway as away:
                trouble, asked = str(away), away.pause
            except SlotError as refusal:
                trouble, asked, refused = str(refusal), 0.0, refused + 1
                if refused >= self._times.refusals:
                    break
            await asyncio.sleep(min(max(pause, asked), max(0.0, end - time.monotonic())))
            pause = min(2 * pause, self._times.interval)
        log.warning("the last report did not reach the operator: %s", trouble)
        return False

    async def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _next(self, final: Final = "", message: str = "") -> Progress:
        self._sequence += 1
        return report_of(self._attempt, self._sequence, self._view, final, message, self._stop.reason)

    async def _keep_reporting(self) -> None:
        while True:
            pause = await self._report()
            await asyncio.sleep(pause)

    async def _report(self) -> float:
        """Returns how long to wait with the next one."""
        try:
            answer = await self._calls.report(self._attempt.run, self._next(), self._times.answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training continues
            self._failures += 1
            if self._failures == 1:
                log.warning("status reports don't reach the operator: %s", error)
            asked = error.pause if isinstance(error, BrokerAway) else 0.0
            grown = self._between * 2 ** min(self._failures - 1, 16)
            return max(self._between, asked, min(self._times.backoff_cap, grown))
        if self._failures:
            log.warning("status reports reach the operator again, after %d failures", self._failures)
            self._failures = 0
        self._apply(answer)
        return self._between

    def _apply(self, answer: Answer) -> None:
        self._between = answer.report_seconds
        self._stop.limits = answer.limits or self._stop.limits
        self._answered.set()
        if not answer.stop:
            return
        reason = StopReason(answer.stop)
        if self._stop.reason is not reason:
            log.warning("the operator requests a stop: %s", reason)
        # The last part of the grace is for saying how it ended.
        self._stop.request(reason, answer.grace_seconds - min(_LAST_REPORT, answer.grace_seconds / 10))
