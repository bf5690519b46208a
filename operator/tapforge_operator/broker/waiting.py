"""Places for acquires that wait for slots, shared fairly among namespaces.

1. How many acquires may wait at once is limited for one holder, for the holders of a namespace together, and for all
   (`Limits`). A person, being of no namespace, counts as one. The connection of one that waits is not given up, so all
   together have three eighths of the port's: the others are left to renewals and to new callers, also where all come
   from one address, that of another replica, which has half of the port's at most.
2. Where all places are taken, a newcomer gets that of the namespace that has the most of them, if this is more than
   its own has with the newcomer: within it the holder that has the most, and of its acquires the youngest. So no number
   of namespaces keeps another one from waiting.
3. An acquire that has no place, or loses it, is refused for now (429), and nothing stays claimed for it.

One event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from tapforge_operator.broker.auth import Denied
from tapforge_operator.broker.types import account_of

#: more than wait when the API server stands still for a second: a refused caller waits longer than one that queues
WAITERS: Final = 256
NAMESPACE_WAITERS: Final = 1024
_ADVICE: Final = "ask for several slots at once, or ask again later"


class Limits(NamedTuple):
    holder: int
    namespace: int
    all: int


def limits_of(connections: int) -> Limits:
    """Of a port with so many connections. Pure."""
    most = max(1, connections * 3 // 8)
    return Limits(min(WAITERS, max(1, most // 6)), min(NAMESPACE_WAITERS, max(1, most * 2 // 3)), most)


class WaitingRoom:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: by namespace and holder, the oldest first
        self._places: dict[str, dict[str, dict[asyncio.Timeout, None]]] = {}
        #: of each namespace
        self._counts: Counter[str] = Counter()
        self._count = 0

    @asynccontextmanager
    async def place(self, holder: str) -> AsyncIterator[None]:
        """Raises Denied, also in the middle of the block, which is cancelled then."""
        namespace = account_of(holder)
        self._make_room(namespace, holder)
        try:
            async with asyncio.timeout(None) as place:
                mine = self._places.setdefault(namespace, {}).setdefault(holder, {})
                mine[place] = None
                self._counts[namespace] += 1
                self._count += 1
                try:
                    yield
                finally:
                    self._leave(namespace, holder, place)
        except TimeoutError as error:
            if not place.expired():
                raise
            raise _full(f"all {self.limits.all} places are taken, and {holder} gave up one of its own") from error

    def _make_room(self, namespace: str, holder: str) -> None:
        most = self.limits
        own = self._places.get(namespace, {})
        if len(own.get(holder, ())) >= most.holder:
            raise _full(f"{holder} waits in {most.holder} acquires, of at most {most.holder}")
        if self._counts[namespace] >= most.namespace:
            name = f"the holders of namespace {namespace} wait" if namespace != holder else f"{holder} waits"
            raise _full(f"{name} in {most.namespace} acquires, of at most {most.namespace}")
        if self._count < most.all:
            return
        largest = max(self._places, key=lambda one: self._counts[one])
        if self._counts[largest] <= self._counts[namespace] + 1:
            raise _full(f"all callers wait in {most.all} acquires, of at most {most.all}")
        loser = max(self._places[largest], key=lambda one: len(self._places[largest][one]))
        place = next(reversed(self._places[largest][loser]))
        place.reschedule(asyncio.get_running_loop().time())
        self._leave(largest, loser, place)

    def _leave(self, namespace: str, holder: str, place: asyncio.Timeout) -> None:
        """May be called again."""
        holders = self._places.get(namespace, {})
        places = holders.get(holder, {})
        if place not in places:
            return
        del places[place]
        self._counts[namespace] -= 1
        self._count -= 1
        if not places:
            del holders[holder]
        if not holders:
            del self._places[namespace], self._counts[namespace]


def _full(why: str) -> Denied:
    return Denied(429, "TooManyWaiters", f"{why}; {_ADVICE}")
