"""ZeroGUI's manager (`env_api_manager.py`): it makes and ends workers, each of which is a process with one machine.

It keeps its books in memory, by names that are its clock's second (`20250601120000`), and never says which it has. So:

1. Workers are made one after another and more than a second apart: two of one name would be one, and the other would
   be left running.
2. A create whose answer was lost is not repeated. What became of it is found out: by the number of processes, and by
   ending every name that the manager can have given in those seconds. What stays unknown is named in a warning.
3. A worker that can't be ended is named in a warning.

A manager belongs to one run: it can't tell whose worker is whose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import aiohttp
from yarl import URL

from ..protocol import EnvironmentFault
from .http import HttpServer

log = logging.getLogger(__name__)

#: how the manager writes its clock
_NAME: Final = "%Y%m%d%H%M%S"
#: bytes of an answer
_LIMIT: Final = 1024 * 1024


class _Refused(EnvironmentFault):
    """The manager says that it did not do it."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. The manager sleeps for 3 s in a create, and tries for up to 30 minutes to close a machine."""

    create: float = 60.0
    #: until a new worker answers
    ready: float = 60.0
    #: until its machine runs
    start: float = 600.0
    terminate: float = 180.0
    #: from one create to the next
    apart: float = 1.1
    #: from one look at a new worker to the next
    poll: float = 0.5


@dataclass(slots=True)
class Worker:
    env_id: str
    url: str
    #: it is to be replaced: an episode on it broke, or its machine didn't start
    dirty: bool = False


class Manager:
    """One manager process. Belongs to one event loop; the session belongs to the caller."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        patience: Patience,
        now: Callable[[], datetime] = datetime.now,
    ):
        self._server = HttpServer(url, session, url, _LIMIT)
        self._url = URL(url)
        self._patience = patience
        self._now = now
        self._one = asyncio.Lock()
        self._alive: set[str] = set()
        #: how far its clock is before ours; known after the first create
        self._ahead: timedelta | None = None
        self._closed = False
        #: workers that were ended since the start, also while another one is being made
        self._ended = 0

    def close(self) -> None:
        """No worker is made from now on, not even for a caller that waits already."""
        self._closed = True

    async def create(self) -> Worker:
        """Raises EnvironmentFault; then there is no new worker, or it was named."""
        async with self._one:
            if self._closed:
                raise self._server.fault("create", "no worker is made any more: the run ends")
            before, ended = await self._processes(), self._ended
            sent = self._now()
            try:
                answer = await self._ask("create", "/create_env_api", self._patience.create)
            except _Refused:
                raise
            except EnvironmentFault as fault:
                await self._find_lost(lambda: before - (self._ended - ended), sent, fault)
                raise
            worker = self._worker(answer, sent)
            await asyncio.sleep(self._patience.apart)
            return worker

    async def terminate(self, worker: Worker) -> None:
        """What still runs afterwards is named in a warning."""
        why = "the wait for its answer was cut off"
        try:
            why = await self._end(worker.env_id)
            self._ended += not why
        finally:
            self._alive.discard(worker.env_id)
            if why:
                log.warning("worker %s of %s may still run: %s; end it on that host", worker.env_id, self._url, why)

    def _worker(self, answer: dict[str, Any], sent: datetime) -> Worker:
        env_id, port = answer.get("env_id"), answer.get("port")
        if not isinstance(env_id, str) or not 0 < len(env_id) < 100:
            raise self._server.fault(
                "create", f"answered {answer!r:.300}: a worker without a name; end it on that host"
            )
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            raise self._server.fault("create", f"worker {env_id} is at {port!r:.40}, no port; end it on that host")
        if env_id in self._alive:
            raise self._server.fault(
                "create", f"two workers are called {env_id}: one of them can't be ended any more; end it on that host"
            )
        log.info("worker %s of %s was made, at port %d", env_id, self._url, port)
        self._alive.add(env_id)
        try:
            self._ahead = datetime.strptime(env_id, _NAME) - sent  # noqa: DTZ007  (the manager's local time)
        except ValueError:
            self._ahead = None
        return Worker(env_id, str(self._url.with_port(port)).rstrip("/"))

    async def _find_lost(self, others: Callable[[], int], sent: datetime, fault: EnvironmentFault) -> None:
        """`others`: processes that there are without the new one."""
        try:
            if await self._processes() <= others():
                return
            ended = await self._end_names(sent, self._ahead) if self._ahead is not None else ""
        except EnvironmentFault as also:
            log.warning("%s may have made a worker (%s), and can't be asked: %s", self._url, fault, also)
            return
        if ended:
            log.info("worker %s of %s, made without an answer, was ended", ended, self._url)
        else:
            log.warning("%s made a worker and did not say which (%s): end it on that host", self._url, fault)

    async def _end_names(self, sent: datetime, ahead: timedelta) -> str:
        """The name of the worker that was ended, of those that can have been made since then; "" when none was."""
        first = sent + ahead - timedelta(seconds=1)
        seconds = int((self._now() - sent).total_seconds()) + 3
        for name in ((first + timedelta(seconds=n)).strftime(_NAME) for n in range(seconds)):
            if name in self._alive:
                continue
            try:
                await self._ask("terminate", "/terminate_env_api", self._patience.terminate, {"env_id": name})
            except _Refused as refused:
                if _is_unknown(name, refused):
                    continue
                raise  # it is this one, and can't be ended
            return name
        return ""

    async def _end(self, env_id: str) -> str:
        """Why it can't be ended; nothing when it is gone."""
        try:
            await self._ask("terminate", "/terminate_env_api", self._patience.terminate, {"env_id": env_id})
        except EnvironmentFault as fault:
            return "" if isinstance(fault, _Refused) and _is_unknown(env_id, fault) else str(fault)
        return ""

    async def _processes(self) -> int:
        answer = await self._server.json("list", "GET", "/get_pid", seconds=self._patience.ready)
        pids = answer.get("pid") if isinstance(answer, dict) else None
        if not isinstance(pids, list):
            raise self._server.fault("list", f"answered {answer!r:.200}: 'pid' must be a list; is it a manager?")
        return len(pids)

    async def _ask(self, call: str, path: str, seconds: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = await self._server.json(call, "POST", path, body=body, seconds=seconds)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise _Refused(f"{self._server.slot}: {call}: the manager refused: {str(answer.get('message'))[:300]}")
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise self._server.fault(call, f"answered {answer!r:.300}, expected 'success'")
        return answer


def _is_unknown(env_id: str, refused: _Refused) -> bool:
    return f"{env_id} not found" in str(refused)
