"""The claims that are held, by what their ends depend on. Pure.

1. A claim that was not renewed for its `ttl` is silent. Silence ends nothing: it makes the shell look at the holder's
   Pod (`suspects`).
2. A claim that was not renewed for its `hold` is over (`due`), whatever is known of its holder.
3. Both are counted by a clock that runs only while the operator does, from the moment in which this ledger met the
   claim: the time in which no operator ran, and that in which none led, ages no claim.

Times are seconds and only go forward.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import TypeVar

from tapforge_operator.broker.types import Claim

K = TypeVar("K", bound=Hashable)

_MANY_TIMERS = 10_000


class Lives:
    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        #: (when, id): the earliest end of a claim; it may have been renewed since
        self._ends: list[tuple[float, str]] = []
        self._pods: defaultdict[str, dict[str, Claim]] = defaultdict(dict)
        self._sessions: defaultdict[tuple[str, str], dict[str, Claim]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(list(self._claims.values()))

    def get(self, claim_id: str) -> Claim | None:
        return self._claims.get(claim_id)

    def begin(self, claim: Claim, now: float) -> None:
        record, self._claims[claim.id] = claim.record, claim
        self.renew(claim, now)
        heapq.heappush(self._ends, (claim.ends, claim.id))
        if record.pod:
            self._pods[record.pod][claim.id] = claim
        if record.session:
            self._sessions[record.holder, record.session][claim.id] = claim

    def renew(self, claim: Claim, now: float) -> None:
        claim.renewed_at = now

    def end(self, claim: Claim) -> None:
        """Also of a claim that was never held."""
        if self._claims.pop(claim.id, None) is None:
            return
        session = claim.record.holder, claim.record.session
        _drop(self._pods, claim.record.pod, claim.id)
        _drop(self._sessions, session, claim.id)
        if len(self._ends) > 4 * len(self._claims) + _MANY_TIMERS:
            self._ends = [(when, name) for when, name in self._ends if name in self._claims]
            heapq.heapify(self._ends)

    def due(self, now: float) -> Iterator[Claim]:
        """Claims whose time is over; each has to be ended before the next one is asked for."""
        while self._ends and self._ends[0][0] <= now:
            _, name = heapq.heappop(self._ends)
            claim = self._claims.get(name)
            if claim is None:
                continue
            if claim.ends > now:
                heapq.heappush(self._ends, (claim.ends, name))
            else:
                yield claim

    def suspects(self, now: float, idle: Callable[[str], bool]) -> list[str]:
        """Pods of holders that are silent, or whose run wants no phones any more (`idle`, by the holder's name)."""
        return [pod for pod, claims in self._pods.items() if any(_suspect(c, now, idle) for c in claims.values())]

    def of_pod(self, pod: str, now: float, idle: Callable[[str], bool]) -> list[Claim]:
        """Its claims for which that was why it was looked at."""
        return [claim for claim in self._pods.get(pod, {}).values() if _suspect(claim, now, idle)]

    def unlisted(self, holder: str, session: str, settled: int, listed: Collection[str]) -> list[Claim]:
        """Claims of a session that its process doesn't know of, or knows to be over: it has an answer to the request
        that they were made for (`settled`), and doesn't name them."""
        known = self._sessions.get((holder, session), {})
        return [claim for claim in known.values() if claim.record.number <= settled and claim.id not in listed]


def _suspect(claim: Claim, now: float, idle: Callable[[str], bool]) -> bool:
    return claim.silent_from <= now or idle(claim.record.holder)


def _drop(index: dict[K, dict[str, Claim]], key: K, name: str) -> None:
    members = index.get(key)
    if members is not None:
        members.pop(name, None)
        if not members:
            del index[key]
