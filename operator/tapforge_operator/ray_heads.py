"""What is known of the Pods that Ray's heads are in, kept up by a reflector.

A head that the cluster takes away (`disruption.py`) says so for as long as it exists, which can be a moment. So heads
are watched and not looked for, and of each run the newest one is remembered also after it is gone, until its run is.

Labels are anybody's to write: a Pod speaks for runs of its own namespace only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from . import names
from .kube.client import Client
from .kube.reflector import Kind, Reflector
from .kube.store import version
from .run.records import RayHead, observe_ray_head

_HEADS: Final = Kind("the Pods of Ray's heads", "pods", f"ray.io/node-type=head,{names.RUN_UID}")


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


def head_reflector(heads: Heads, client: Client, spaces: tuple[str, ...]) -> Reflector:
    """`spaces`: namespaces, "" for all of them."""
    return Reflector(
        client,
        _HEADS,
        spaces,
        heads.saw,
        lambda space, listed, as_of: heads.replace(listed, as_of, space),
    )
