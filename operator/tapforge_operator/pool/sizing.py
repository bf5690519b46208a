"""How many slots a pool should have.

* `replicas`: as many as it says.
* `scaling`: while anybody claims, waits or runs: what is claimed and asked for, and `warmSpares` beyond it; otherwise
  none; always within minReplicas..maxReplicas. It grows at once and shrinks to the largest size that was needed within
  the last `idleSeconds`.
* `external`: none; the devices exist already.

After a restart the size that was reported last counts as needed until then, so that a new operator throws nothing away.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapforge_api.pool import Scaling

from .history import History
from .records import Pool, Seen


@dataclass(frozen=True, slots=True)
class Size:
    desired: int
    #: history's needs from now on
    needs: tuple[tuple[float, int], ...] | None = None
    #: when the size shrinks if nothing happens
    shrinks_at: float | None = None
    #: slots that were asked for beyond maxReplicas
    beyond: int = 0


def size(pool: Pool, seen: Seen, claimed: int, present: int, history: History, now: float) -> Size:
    """`claimed`: slots that somebody holds; `present`: slots that are there."""
    if pool.spec.replicas is not None:
        return Size(pool.spec.replicas)
    if pool.spec.scaling is None:
        return Size(0)
    return _by_demand(pool.spec.scaling, seen, claimed, present, history, now)


def _by_demand(scaling: Scaling, seen: Seen, claimed: int, present: int, history: History, now: float) -> Size:
    demand = max(claimed + seen.waiting, seen.wanted)
    wish = demand + scaling.warm_spares if demand else 0
    need = min(max(wish, scaling.min_replicas), scaling.max_replicas)
    needs = history.needs
    if needs is None:
        reported = history.status.desired_replicas if history.status.observed_generation else present
        needs = ((now, reported),)
    # The newest need held until now; those of more than idleSeconds ago, and smaller ones, say nothing any more.
    held = (*needs[:-1], (now, needs[-1][1]))
    kept = tuple((t, n) for t, n in held if n > need and now - t < scaling.idle_seconds)
    desired = min(kept[0][1] if kept else need, scaling.max_replicas)
    shrinks_at = kept[0][0] + scaling.idle_seconds if kept and desired > need else None
    return Size(desired, (*kept, (now, need)), shrinks_at, max(0, wish - scaling.max_replicas))
