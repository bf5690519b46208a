"""Acquires by the name that their caller gave them: one that is sent again gets the claims of the first, not more.

A request is known while somebody waits on it, while one of its claims lives, and a while longer. It is found again
after a restart, because each claim's mark carries it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .records import Claim, Waiter

Key = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class Request:
    waiter: Waiter | None = None
    #: claims that live
    claims: dict[str, Claim] = field(default_factory=dict)


class Requests:
    def __init__(self, remember: float):
        self._remember = remember
        self._known: dict[Key, Request] = {}
        #: requests whose last claim ended, and until when they are known, the earliest first
        self._over: dict[Key, float] = {}

    def __len__(self) -> int:
        return len(self._known) + len(self._over)

    def find(self, key: Key) -> Request | None:
        return self._known.get(key) or (Request() if key in self._over else None)

    def begin(self, key: Key, waiter: Waiter) -> None:
        self._known[key] = Request(waiter)

    def drop(self, key: Key, waiter: Waiter) -> None:
        """It ended without anybody having heard of a claim: sent again, it begins anew."""
        known = self._known.get(key)
        if known is not None and known.waiter is waiter:
            del self._known[key]

    def claimed(self, key: Key, claim: Claim) -> None:
        self._known.setdefault(key, Request()).claims[claim.id] = claim

    def ended(self, key: Key, claim: Claim, now: float) -> None:
        known = self._known.get(key)
        if known is None or claim.id not in known.claims:
            return
        del known.claims[claim.id]
        if not known.claims and not (known.waiter and known.waiter.open):
            del self._known[key]
            self._over.pop(key, None)
            self._over[key] = now + self._remember

    def purge(self, now: float) -> None:
        while self._over and (first := next(iter(self._over))) and self._over[first] <= now:
            del self._over[first]
