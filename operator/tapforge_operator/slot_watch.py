"""Keeps the world's slots right: a list and then one watch per namespace, which begins again where it was cut.

Slots are by far the most numerous objects and change the most often, so they don't take kopf's way, on which an event
costs five times as much and every object keeps a task: a thousand Pods that change at once are digested in a tenth of a
second, and claims are answered in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from .kube.client import ApiError, Client, path
from .world import MEMBERS, World

log = logging.getLogger(__name__)

#: between two watches, the first of which ended as it should: nothing is missed meanwhile
_AGAIN: Final = 0.1
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 15.0
#: events after which others get a turn, when the next ones are there already
_TURN: Final = 20


class SlotWatch:
    def __init__(self, world: World, client: Client, spaces: tuple[str, ...], heard: Callable[[], None]):
        """`spaces`: namespaces, "" for all of them. `heard` is called whenever a watch said anything."""
        self._world = world
        self._client = client
        self._heard = heard
        #: version up to which everything of a namespace was heard; "" before its list
        self._since = dict.fromkeys(spaces, "")

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for space in self._since:
                group.create_task(self._follow(space), name=f"slots of {space or 'all namespaces'}")

    async def _follow(self, space: str) -> None:
        pause, at_once = _FIRST_PAUSE, True
        while True:
            try:
                if not self._since[space]:
                    await self._list(space)
                await self._hear(space)
                pause, at_once = _FIRST_PAUSE, True
                await asyncio.sleep(_AGAIN)
            except ApiError as error:
                if error.status != 0:  # what was heard last may be no place to go on from
                    self._since[space] = ""
                if error.status == 410 and at_once:  # the server remembers some minutes only
                    at_once = False
                    continue
                log.warning("slots can't be watched for now: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _hear(self, space: str) -> None:
        """One watch."""
        heard = 0
        async for event in self._client.watch(path("pods", space), MEMBERS, since=self._since[space]):
            thing = event["object"]
            if event["type"] != "BOOKMARK":
                self._world.saw_pod(thing, event["type"] == "DELETED")
            self._since[space] = thing["metadata"]["resourceVersion"]
            self._heard()
            heard += 1
            if heard % _TURN == 0:
                await asyncio.sleep(0)

    async def _list(self, space: str) -> None:
        listed: set[str] = set()
        as_of = ""
        async for page, version in self._client.pages(path("pods", space), MEMBERS):
            as_of = version
            for pod in page:
                listed.add(pod["metadata"]["uid"])
                self._world.saw_pod(pod)
            self._heard()
            await asyncio.sleep(0)
        among = (lambda slot: slot.namespace == space) if space else None
        self._world.slots.replace(listed, as_of, among)
        self._since[space] = as_of
