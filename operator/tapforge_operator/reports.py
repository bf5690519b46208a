"""What drivers said last, and what they are to be told: kept in memory, by the run's UID.

Promises:
1. Of an attempt's reports the newest counts; one that comes late or twice changes nothing and is answered all the same.
2. A report of an earlier attempt is answered by `superseded`; one of an attempt that isn't known yet is put off.
3. Who reports a new checkpoint or its end is answered when that stands in the run's status, or put off.
4. Of a run that is being deleted or is gone nothing is written: its drivers are answered at once, and keep nobody
   waiting.

Losing them costs nothing: a driver reports every few seconds, and what lasts is in the status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tapforge_api.progress import Orders, Progress

#: how long an answer may wait for the status, seconds
_WRITTEN: Final = 20.0
#: so many runs that were deleted are remembered: for the minutes that their drivers need to end
_DISMISSED: Final = 1024


class NotNow(Exception):
    """Nobody here can take the report yet; it may be sent again."""


@dataclass(slots=True, eq=False)
class _Known:
    #: newest attempt of the run, and what its driver is to be told
    attempt: int
    orders: Orders
    #: update of the checkpoint in the status, -1 for none
    checkpoint: int
    report: Progress | None = None
    #: when it came, seconds since the epoch
    at: float = 0.0
    #: sequence that stands in the status
    written: int = -1
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Reports:
    def __init__(self, woken: Callable[[str], None]):
        """`woken` is called with the UID of a run whose driver said something."""
        self._woken = woken
        self._runs: dict[str, _Known] = {}
        #: in the order of their end
        self._dismissed: dict[str, None] = {}

    # --- for the run's keeper -----------------------------------------------------------------------------------------

    def newest(self, uid: str) -> tuple[Progress | None, float]:
        """The newest report, and when it came."""
        known = self._runs.get(uid)
        return (known.report, known.at) if known is not None else (None, 0.0)

    def settle(self, uid: str, attempt: int, orders: Orders, checkpoint: int, written: Progress | None) -> None:
        """What the next callers are told, and the report that stands in the status by now."""
        known = self._runs.get(uid)
        if known is None or known.attempt != attempt:
            if known is not None:
                known.news.set()
            known = self._runs[uid] = _Known(attempt, orders, checkpoint)
        known.orders, known.checkpoint = orders, checkpoint
        self._dismissed.pop(uid, None)
        if written is not None and written.attempt == attempt and written.sequence > known.written:
            known.written = written.sequence
            _tell(known)

    def dismiss(self, uid: str) -> None:
        """The run is being deleted, or is gone."""
        self._dismissed.pop(uid, None)
        self._dismissed[uid] = None
        if len(self._dismissed) > _DISMISSED:
            del self._dismissed[next(iter(self._dismissed))]
        if (known := self._runs.get(uid)) is not None:
            _tell(known)

    def forget(self, uid: str) -> None:
        known = self._runs.pop(uid, None)
        if known is not None:
            known.news.set()

    def clear(self) -> None:
        self._dismissed.clear()
        for uid in list(self._runs):
            self.forget(uid)

    # --- for the driver -----------------------------------------------------------------------------------------------

    async def take(self, uid: str, report: Progress) -> Orders:
        """Raises NotNow."""
        known = self._runs.get(uid)
        if known is None and uid in self._dismissed:
            return Orders()
        if known is None or report.attempt > known.attempt:
            raise NotNow("the run's attempt is not known here yet")
        if report.attempt < known.attempt:
            return Orders(stop="superseded")
        if known.report is None or report.sequence > known.report.sequence:
            known.report, known.at = report, time.time()
            self._woken(uid)
        new = report.checkpoint is not None and report.checkpoint.update != known.checkpoint
        if report.final or new:
            await self._written(uid, known, report.sequence)
        return known.orders

    async def _written(self, uid: str, known: _Known, sequence: int) -> None:
        try:
            async with asyncio.timeout(_WRITTEN):
                while known.written < sequence and uid not in self._dismissed:
                    if self._runs.get(uid) is not known:
                        raise NotNow("the run is looked after elsewhere by now")
                    await known.news.wait()
        except TimeoutError as error:
            raise NotNow(f"the run's status could not be written within {_WRITTEN:g} s") from error


def _tell(known: _Known) -> None:
    known.news.set()
    known.news = asyncio.Event()
