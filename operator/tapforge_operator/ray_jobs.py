"""Keeps the world's RayJobs right: a list and then a watch per namespace, with labels of ours only.

KubeRay may not be installed, or be installed later: then the API server knows no RayJobs, the world says so, and it is
asked again every few seconds. (kopf would never look again.) The same where the operator may not look at them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from . import names
from .kube.client import ApiError, Client, path
from .world import World

log = logging.getLogger(__name__)

GROUP: Final = "ray.io/v1"
_MISSING: Final = "the cluster knows no RayJobs (rayjobs.ray.io): install KubeRay 1.4 or newer"
_SELECTOR: Final = f"{names.MANAGED_BY}={names.OPERATOR}"
_ABSENT_SECONDS: Final = 15.0
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class RayJobWatch:
    def __init__(self, world: World, client: Client, spaces: tuple[str, ...], changed: Callable[[], None]):
        """`spaces`: namespaces, "" for all of them. `changed` is told when the cluster learns of RayJobs or forgets."""
        self._world = world
        self._client = client
        self._changed = changed
        #: version that each namespace was listed at; "" while the cluster knows no RayJobs
        self._since = dict.fromkeys(spaces, "")

    async def sync(self) -> None:
        """Lists everything once. Raises ApiError."""
        for space in self._since:
            await self._list(space)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for space in self._since:
                group.create_task(self._follow(space))

    async def _follow(self, space: str) -> None:
        pause, at_once = _FIRST_PAUSE, True
        while True:
            try:
                if not self._since[space]:
                    await self._list(space)
                if not self._since[space]:
                    await asyncio.sleep(_ABSENT_SECONDS)
                    continue
                await self._hear(space)
                pause, at_once = _FIRST_PAUSE, True
            except ApiError as error:
                if error.status == 410 and at_once:  # the server remembers some minutes only
                    at_once = False
                else:
                    log.warning("RayJobs can't be watched for now: %s", error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                self._since[space] = ""

    async def _hear(self, space: str) -> None:
        """One watch."""
        where = path("rayjobs", space, group=GROUP)
        async for event in self._client.watch(where, _SELECTOR, since=self._since[space]):
            self._since[space] = event["object"]["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                self._world.saw_ray_job(event["object"], event["type"] == "DELETED")

    async def _list(self, space: str) -> None:
        listed: set[str] = set()
        as_of, trouble = "", ""
        try:
            async for page, version in self._client.pages(path("rayjobs", space, group=GROUP), _SELECTOR):
                as_of = version
                for job in page:
                    listed.add(job["metadata"]["uid"])
                    self._world.saw_ray_job(job)
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            trouble = _MISSING if error.status == 404 else f"the operator may not look at RayJobs: {error.message}"
        if as_of:
            among = (lambda job: job.namespace == space) if space else None
            self._world.ray_jobs.replace(listed, as_of, among)
        self._since[space] = as_of
        if trouble != self._world.no_ray_jobs.get(space, ""):
            self._world.no_ray_jobs[space] = trouble
            log.info("runs: %s%s", trouble or "RayJobs can be made", f" (in namespace {space})" if space else "")
            self._changed()
