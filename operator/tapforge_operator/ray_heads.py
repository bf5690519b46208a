"""What is known of the Pods that Ray's heads are in, kept up by a list and then a watch per namespace.

A head that the cluster takes away (`disruption.py`) says so for as long as it exists, which can be a moment. So heads
are watched and not looked for, and of each run the newest one is remembered also after it is gone, until its run is.

Labels are anybody's to write: a Pod speaks for runs of its own namespace only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from . import names
from .kube.client import ApiError, Client, path
from .kube.store import version
from .run.records import RayHead, observe_ray_head

log = logging.getLogger(__name__)

_SELECTOR: Final = f"ray.io/node-type=head,{names.RUN_UID}"
#: between two watches, the first of which ended as it should
_AGAIN: Final = 0.1
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 15.0


class Heads:
    def __init__(self, changed: Callable[[str], None], exists: Callable[[str], bool]):
        """`changed` is told the UID of a run of whose head there is news, `exists` is asked whether there is a run."""
        self._changed = changed
        self._exists = exists
        self._heads: dict[tuple[str, str], RayHead] = {}

    def of(self, namespace: str, run_uid: str) -> RayHead | None:
        """The newest head of the run, which may be gone."""
        return self._heads.get((namespace, run_uid))

    def saw(self, pod: Mapping[str, Any], deleted: bool = False) -> None:
        head = observe_ray_head(pod)
        if head is None:
            return
        key = head.namespace, head.run_uid
        known = self._heads.get(key)
        if known is not None and _order(head) < _order(known):
            return
        if deleted and not self._exists(head.run_uid):
            self._heads.pop(key, None)
            return
        self._heads[key] = replace(head, gone=deleted)
        if known is None or _news(known) != _news(self._heads[key]):
            self._changed(head.run_uid)

    def replace(self, listed: set[str], as_of: str, namespace: str) -> None:
        """A list of a namespace ("": of all) has no other ones."""
        for key, head in self._heads.items():
            missing = head.uid not in listed and version(head.version) <= version(as_of)
            if missing and not head.gone and namespace in ("", head.namespace):
                self._heads[key] = replace(head, gone=True)
                self._changed(head.run_uid)

    def forget(self, run_uid: str) -> None:
        """The run is gone."""
        for key in [key for key in self._heads if key[1] == run_uid]:
            del self._heads[key]


def _order(head: RayHead) -> tuple[int, float, int]:
    return head.attempt, head.created, version(head.version)


def _news(head: RayHead) -> tuple[str, str, str, bool]:
    return head.uid, head.node, head.disruption, head.gone


class HeadWatch:
    def __init__(self, heads: Heads, client: Client, spaces: tuple[str, ...]):
        """`spaces`: namespaces, "" for all of them."""
        self._heads = heads
        self._client = client
        #: version up to which everything of a namespace was heard; "" before its list
        self._since = dict.fromkeys(spaces, "")

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
                await self._hear(space)
                pause, at_once = _FIRST_PAUSE, True
                await asyncio.sleep(_AGAIN)
            except ApiError as error:
                if error.status != 0:  # what was heard last may be no place to go on from
                    self._since[space] = ""
                if error.status == 410 and at_once:  # the server remembers some minutes only
                    at_once = False
                    continue
                log.warning("the Pods of Ray's heads can't be watched for now: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _hear(self, space: str) -> None:
        """One watch."""
        async for event in self._client.watch(path("pods", space), _SELECTOR, since=self._since[space]):
            self._since[space] = event["object"]["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                self._heads.saw(event["object"], event["type"] == "DELETED")

    async def _list(self, space: str) -> None:
        listed: set[str] = set()
        as_of = ""
        async for page, listed_as in self._client.pages(path("pods", space), _SELECTOR):
            as_of = listed_as
            for pod in page:
                listed.add(pod["metadata"]["uid"])
                self._heads.saw(pod)
        self._heads.replace(listed, as_of, space)
        self._since[space] = as_of
