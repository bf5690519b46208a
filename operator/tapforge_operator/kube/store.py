"""What the watches and lists said last, kept small.

Promises:
1. An object never goes back in time: what carries an older resourceVersion than is known is passed over, also when it
   comes late out of a list or out of the answer to one of our own writes.
2. What was deleted stays deleted, whatever comes late out of a list or an answer. What merely went out of sight (it
   lost the label that is selected by, which a watch calls deleted too) is known again when it is seen at a later
   version: of an object that was deleted there is none.
3. A whole list (`replace`) also removes what is not in it any more: a watch that was cut doesn't tell of what vanished
   meanwhile. What was written after the list was read is kept.

Not thread-safe; everything happens in one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar


class Kept(Protocol):
    """What a store can keep: a record of an object."""

    @property
    def uid(self) -> str: ...
    @property
    def resource_version(self) -> str: ...


K = TypeVar("K", bound=Kept)
#: UIDs of deleted objects that are remembered: more than can be under way in any list or answer
_GRAVES = 20_000


def version(text: str) -> int:
    """A resourceVersion as the number that it is, on every API server that stores in etcd."""
    return int(text) if text.isdigit() else 0


class Store(Generic[K]):
    """Objects of a kind by UID, and by `group` (the pool's UID for slots)."""

    def __init__(self, group: Callable[[K], str], changed: Callable[[str, K | None, K | None], None] | None = None):
        self._group = group
        #: called with (group, before, after) for every change
        self._changed = changed
        self._objects: dict[str, K] = {}
        self._groups: dict[str, dict[str, K]] = {}
        #: the version at which each went; -1: for ever
        self._graves: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, uid: str) -> K | None:
        return self._objects.get(uid)

    def all(self) -> Iterable[K]:
        return self._objects.values()

    def of(self, group: str) -> Mapping[str, K]:
        """The objects of a group by UID: a view, not a copy."""
        return MappingProxyType(self._groups.get(group, {}))

    def newer(self, uid: str, resource_version: str) -> K | None:
        """What is known of an object, where that is not older than this version of it; None for no version."""
        known, then = self._objects.get(uid), version(resource_version)
        return known if known is not None and 0 < then <= version(known.resource_version) else None

    def put(self, thing: K) -> bool:
        """True when it was news."""
        went = self._graves.get(thing.uid)
        if went is not None and not 0 <= went < version(thing.resource_version):
            return False
        self._graves.pop(thing.uid, None)
        before = self._objects.get(thing.uid)
        if before is not None and version(before.resource_version) >= version(thing.resource_version):
            return False
        group = self._group(thing)
        if before is not None and (old := self._group(before)) != group:
            self._leave(old, thing.uid)
        self._objects[thing.uid] = thing
        self._groups.setdefault(group, {})[thing.uid] = thing
        self._tell(group, before, thing)
        return True

    def drop(self, uid: str, at: str = "") -> K | None:
        """It was deleted, or went out of sight at the version `at`. Returns what was known of it."""
        before = self._graves.get(uid, 0)
        self._graves[uid] = -1 if before < 0 or not at else max(before, version(at))
        while len(self._graves) > _GRAVES:
            self._graves.popitem(last=False)
        thing = self._objects.pop(uid, None)
        if thing is not None:
            group = self._group(thing)
            self._leave(group, uid)
            self._tell(group, thing, None)
        return thing

    def replace(self, listed: set[str], resource_version: str, among: Callable[[K], bool] | None = None) -> list[str]:
        """Drops what a list of that version doesn't have any more: UIDs that are not `listed`, of objects that the list
        speaks of (`among`; all without it), unless they were written later. Returns them."""
        as_of = version(resource_version)
        gone = [
            uid
            for uid, thing in self._objects.items()
            if uid not in listed and version(thing.resource_version) <= as_of and (among is None or among(thing))
        ]
        for uid in gone:
            self.drop(uid, resource_version)
        return gone

    def _leave(self, group: str, uid: str) -> None:
        members = self._groups[group]
        del members[uid]
        if not members:
            del self._groups[group]

    def _tell(self, group: str, before: K | None, after: K | None) -> None:
        if self._changed is not None:
            self._changed(group, before, after)
