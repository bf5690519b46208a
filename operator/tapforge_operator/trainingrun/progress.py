"""Drivers' newest reports and the answers to them: kept in memory, by the run's UID; and the broker's path
on which they report (`add_progress`), under the rules of the claims beside it: only a Pod of the run itself may.

Promises:
1. Of an attempt's reports the newest counts; one that comes late or twice changes nothing and is answered all the same.
2. A report of an earlier attempt is answered by `superseded`; one of an attempt that isn't known yet is put off.
3. A driver that reports a new checkpoint or its end is answered when that is in the run's status, or put off.
4. Of a run that is being deleted or is gone nothing is written: its drivers are answered at once, and delay no other
   caller.

Losing them costs nothing: a driver reports every few seconds, and what lasts is in the status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from tapforge_api.progress import REPORT, Orders, Progress
from tapforge_operator.broker.auth import Auth, Denied
from tapforge_operator.broker.http import answer, parse, read_body, token, turn

#: how long an answer may wait for the status, seconds
_WRITTEN: Final = 20.0
#: so many runs that were deleted are remembered: for the minutes that their drivers need to end
_DISMISSED: Final = 1024


class TryLater(Exception):
    """This process can't take the report yet; it may be sent again."""


@dataclass(slots=True, eq=False)
class _Known:
    #: newest attempt of the run, and what its driver is answered
    attempt: int
    orders: Orders
    #: update of the checkpoint in the status, -1 for none
    checkpoint: int
    report: Progress | None = None
    #: when it came, seconds since the epoch
    at: float = 0.0
    #: sequence that is in the status
    written: int = -1
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Reports:
    def __init__(self, wake: Callable[[str], None]):
        """`wake` is called with the UID of a run whose driver reported something."""
        self._wake = wake
        self._runs: dict[str, _Known] = {}
        #: in the order of their end
        self._dismissed: dict[str, None] = {}

    # --- for the run's controller -------------------------------------------------------------------------------------

    def knows(self, uid: str) -> bool:
        return uid in self._runs

    def newest(self, uid: str) -> tuple[Progress | None, float]:
        """The newest report, and when it came."""
        known = self._runs.get(uid)
        return (known.report, known.at) if known is not None else (None, 0.0)

    def settle(self, uid: str, attempt: int, orders: Orders, checkpoint: int, written: Progress | None) -> None:
        """What the next callers are answered, and the report that is in the status by now."""
        known = self._runs.get(uid)
        if known is None or known.attempt != attempt:
            if known is not None:
                known.news.set()
            known = self._runs[uid] = _Known(attempt, orders, checkpoint)
        known.orders, known.checkpoint = orders, checkpoint
        self._dismissed.pop(uid, None)
        if written is not None and written.attempt == attempt and written.sequence > known.written:
            known.written = written.sequence
            _notify(known)

    def dismiss(self, uid: str) -> None:
        """The run is being deleted, or is gone."""
        self._dismissed.pop(uid, None)
        self._dismissed[uid] = None
        if len(self._dismissed) > _DISMISSED:
            del self._dismissed[next(iter(self._dismissed))]
        if (known := self._runs.get(uid)) is not None:
            _notify(known)

    def end(self, uid: str) -> None:
        """The run is gone. Of a run that is there all stays, also while its controller begins anew after a fault."""
        self.dismiss(uid)
        self._forget(uid)

    def clear(self) -> None:
        """This process leads no more."""
        self._dismissed.clear()
        for uid in list(self._runs):
            self._forget(uid)

    def _forget(self, uid: str) -> None:
        known = self._runs.pop(uid, None)
        if known is not None:
            known.news.set()

    # --- for the driver -----------------------------------------------------------------------------------------------

    async def take(self, uid: str, report: Progress) -> Orders:
        """Raises TryLater."""
        known = self._runs.get(uid)
        if known is None and uid in self._dismissed:
            return Orders()
        if known is None or report.attempt > known.attempt:
            raise TryLater("the run's attempt is not known here yet")
        if report.attempt < known.attempt:
            return Orders(stop="superseded")
        if known.report is None or report.sequence > known.report.sequence:
            known.report, known.at = report, time.time()
            self._wake(uid)
        new = report.checkpoint is not None and report.checkpoint.update != known.checkpoint
        if report.final or new:
            await self._written(uid, known, report.sequence)
        return known.orders

    async def _written(self, uid: str, known: _Known, sequence: int) -> None:
        try:
            async with asyncio.timeout(_WRITTEN):
                while known.written < sequence and uid not in self._dismissed:
                    if self._runs.get(uid) is not known:
                        raise TryLater("the run is controlled by another process by now")
                    await known.news.wait()
        except TimeoutError as error:
            raise TryLater(f"the run's status could not be written within {_WRITTEN:g} s") from error


def _notify(known: _Known) -> None:
    known.news.set()
    known.news = asyncio.Event()


def add_progress(app: web.Application, reports: Reports, auth: Auth) -> None:
    async def report(request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["run"]
        shown = token(request)
        async with turn(request, proved=auth.knows(shown)):
            run = (await auth.caller(shown)).run
            sent = parse(await read_body(request), Progress)
        if run is None or (run.namespace, run.name) != (namespace, name):
            who = f"a Pod of TrainingRun {run.namespace}/{run.name}" if run is not None else "no Pod of a TrainingRun"
            text = f"only a Pod of TrainingRun {name} in namespace {namespace} may report for it; this is {who}"
            raise Denied(403, "Forbidden", text)
        try:
            return answer(await reports.take(run.uid, sent))
        except TryLater as error:
            raise Denied(503, "TryLater", str(error)) from error

    app.router.add_post(REPORT, report)
