"""The audit log: the holder of each claim, its slot, from when until when, and why it ended. One line when a claim is
granted, one when it ends, on a logger of its own.

1. The line of a grant is written after the claim's record is on the slot and before its caller is answered.
2. A leader that adopts claims writes no line for them: the leader that granted them did. Their ends are lines like all
   others, of which `granted` is empty.
3. A claim that ended while no operator led has no line of its end.

`SCHEMA` grows when a field changes its meaning or goes; fields that are new don't change it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from tapforge_operator.broker.types import ClaimEvent
from tapforge_operator.observability.logging import AUDIT, rfc3339

SCHEMA: Final = 1

log = logging.getLogger(AUDIT)


class Audit:
    """Of one term."""

    def __init__(self, term: int, pools: Callable[[str], str], clock: Callable[[], float] = time.time):
        """`pools`: namespace/name of a pool by its UID, "" of one that is gone. `clock`: seconds since 1970."""
        self._term = term
        self._pools = pools
        self._clock = clock
        #: when the claims of this term were granted, and the names of their pools
        self._granted: dict[str, tuple[float, str]] = {}

    def write(self, events: Iterable[ClaimEvent]) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        for event in events:
            now, pool = self._clock(), self._pools(event.view.pool)
            if event.why:
                granted, pool = self._granted.pop(event.claim.id, (None, pool))
                _write(_ended(event, self._term, pool.rpartition("/")[2], granted))
            else:
                self._granted[event.claim.id] = now, pool
                _write(_granted(event, self._term, pool.rpartition("/")[2], now))


def _write(fields: dict[str, Any]) -> None:
    # Without a search for the line of code that said it, which no line shows: hundreds of claims come in a second.
    log.handle(log.makeRecord(log.name, logging.INFO, "", 0, fields, (), None))


def _granted(event: ClaimEvent, term: int, pool: str, now: float) -> dict[str, Any]:
    record = event.claim.record
    return {
        "schema": SCHEMA,
        "event": "granted",
        **_common(event, term, pool),
        "ttlSeconds": record.ttl,
        "holdSeconds": record.hold,
        "until": rfc3339(now + max(record.ttl, record.hold)),
    }


def _ended(event: ClaimEvent, term: int, pool: str, granted: float | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "event": "ended",
        **_common(event, term, pool),
        "granted": "" if granted is None else rfc3339(granted),
        "why": event.why,
        "episodes": event.claim.episodes,
        "proved": event.claim.proved,
    }


def _common(event: ClaimEvent, term: int, pool: str) -> dict[str, Any]:
    record, view = event.claim.record, event.view
    return {
        "holder": record.holder,
        "pod": record.pod,
        "request": record.request,
        "priority": record.priority,
        "namespace": view.namespace,
        "pool": pool,
        "poolUid": view.pool,
        "slot": view.name,
        "slotUid": view.uid,
        "node": view.node,
        "address": view.address,
        "fence": record.fence,
        "term": term,
    }
