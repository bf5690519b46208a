"""Which slots a new template, their age or a cordoned node makes outdated, and how many may go at once.

`maxSurge` rounds up, `maxUnavailable` rounds down, as in a Deployment; when both come to 0, one slot may be missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tapforge_api.pool import UpdateStrategy
from tapforge_operator.emulatorpool.state import Limits, Pool, Reason
from tapforge_operator.kube.types import Slot


def limits(strategy: UpdateStrategy, desired: int) -> Limits:
    surge = _slots(strategy.max_surge, desired, math.ceil)
    unavailable = _slots(strategy.max_unavailable, desired, math.floor)
    return Limits(surge, unavailable if surge or unavailable else 1)


def _slots(value: int | str, desired: int, rounded: Callable[[float], int]) -> int:
    return value if isinstance(value, int) else rounded(desired * int(value[:-1]) / 100)


def outdated(slot: Slot, pool: Pool, played: int, cordoned: bool, age: float) -> Reason | None:
    """Why a slot is to be exchanged. `played`: episodes under the claim that it has now. `age` counts from the start of
    the container, and only for a slot that was ready once: a boot that takes longer would never end otherwise."""
    if cordoned:
        return Reason.CORDONED
    if slot.template != pool.template:
        return Reason.OLD_TEMPLATE
    recycle = pool.spec.recycle
    if recycle.after_episodes is not None and slot.episodes + played >= recycle.after_episodes:
        return Reason.EPISODES
    if recycle.after_seconds is not None and slot.ever_ready and slot.started is not None:
        return Reason.AGE if age >= recycle.after_seconds else None
    return None
