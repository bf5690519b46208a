"""The keepers of all runs while this process leads, the watch that they need, and what drivers report to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from .kube.client import Client
from .kube.reflector import Reflector
from .ray_heads import head_reflector
from .ray_jobs import job_reflector
from .reports import Reports
from .run_writes import RunWrites
from .runs import RunKeeper
from .settings import Settings
from .telemetry import Telemetry
from .world import World
from .writes import Claims

log = logging.getLogger(__name__)

#: a keeper that broke (which is a bug) is started again after this many seconds
_MEND_SECONDS: Final = 10.0


class RunKeepers:
    def __init__(
        self,
        settings: Settings,
        world: World,
        client: Client,
        telemetry: Telemetry,
        leads: Callable[[], bool],
        claims: Callable[[], Claims | None] = lambda: None,
    ):
        """`claims` says whose the phones are; nobody's while there are none."""
        self._claims = claims
        self._settings = settings
        self._telemetry = telemetry.runs
        self._world = world
        self._client = client
        self._leads = leads
        self._keepers: dict[str, tuple[RunKeeper, asyncio.Task[None]]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._begun = False
        self.reports = Reports(self.wake)
        world.run_listeners.append(self.wake)

    async def begin(self) -> asyncio.Task[None]:
        """After the world was read. Returns the watch of RayJobs and heads, which ends only when it breaks."""
        jobs = job_reflector(self._world, self._client, self._settings.scope.each, self._wake_all)
        heads = head_reflector(self._world.heads, self._client, self._settings.scope.each)
        await jobs.sync()
        self._watch = asyncio.create_task(_both(jobs, heads), name="the watch of RayJobs")
        self._begun = True
        self._wake_all()
        return self._watch

    async def end(self) -> None:
        """Nothing is written any more afterwards."""
        self._begun = False
        tasks = [task for _, task in self._keepers.values()] + ([self._watch] if self._watch is not None else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.reports.clear()

    def wake(self, uid: str) -> None:
        """Something happened to the run."""
        if not self._begun:
            return
        if uid not in self._keepers and (run := self._world.runs.get(uid)) is not None:
            settings = self._settings
            writes = RunWrites(self._client, self._world, self._leads, settings.namespace, settings.broker)
            keeper = RunKeeper(
                run, self._world, self._client, self.reports, writes, self._telemetry, self._leads, self._claims
            )
            task = asyncio.create_task(keeper.run(), name=f"run {keeper.key}")
            task.add_done_callback(lambda task: self._ended(uid, task))
            self._keepers[uid] = keeper, task
        if uid in self._keepers:
            self._keepers[uid][0].wake()

    def _wake_all(self) -> None:
        for run in list(self._world.runs.all()):
            self.wake(run.uid)

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        keeper, _ = self._keepers.pop(uid)
        if task.cancelled() or task.exception() is None:
            return
        log.error("the keeper of run %s broke; it begins anew", keeper.key, exc_info=task.exception())
        asyncio.get_running_loop().call_later(_MEND_SECONDS, self.wake, uid)


async def _both(jobs: Reflector, heads: Reflector) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(jobs.run())
        group.create_task(heads.run())
