"""How many slots a pool should have, which of them go first when there are too many, and how new ones are called.

* `replicas`: as many as it says.
* `scaling`: while there is a claim, a waiting claimant or an active run: what is claimed and asked for, and
  `warmSpares` beyond it; otherwise none; always within minReplicas..maxReplicas. It grows at once and shrinks to the
  largest size that was needed within the last `idleSeconds`.
* `external`: none; the devices exist already.

After a restart the size that was reported last counts as needed until then, so that a new operator throws nothing away.

A name is made of the pool's UID, the ordinal and the UID of the Pod that had the ordinal before. As long as nothing new
was seen, the same create has the same name: the second one is a conflict, never a second Pod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

from tapforge_api.pool import Scaling
from tapforge_operator.emulatorpool.state import History, NewSlot, Observed, Pool, Size
from tapforge_operator.kube.types import Slot
from tapforge_operator.labels import slot_name


def size(pool: Pool, observed: Observed, claimed: int, present: int, history: History, now: float) -> Size:
    """`claimed`: slots that have a holder; `present`: slots that are there."""
    if pool.spec.replicas is not None:
        return Size(pool.spec.replicas)
    if pool.spec.scaling is None:
        return Size(0)
    return _by_demand(pool.spec.scaling, observed, claimed, present, history, now)


def _by_demand(scaling: Scaling, observed: Observed, claimed: int, present: int, history: History, now: float) -> Size:
    demand = max(claimed + observed.waiting, observed.wanted)
    target = demand + scaling.warm_spares if demand else 0
    need = min(max(target, scaling.min_replicas), scaling.max_replicas)
    needs = history.needs
    if needs is None:
        reported = history.status.desired_replicas if history.status.observed_generation else present
        needs = ((now, reported),)
    # The newest need held until now; those of more than idleSeconds ago, and smaller ones, say nothing any more.
    held = (*needs[:-1], (now, needs[-1][1]))
    kept = tuple((t, n) for t, n in held if n > need and now - t < scaling.idle_seconds)
    desired = min(kept[0][1] if kept else need, scaling.max_replicas)
    shrinks_at = kept[0][0] + scaling.idle_seconds if kept and desired > need else None
    return Size(desired, (*kept, (now, need)), shrinks_at, max(0, target - scaling.max_replicas))


def scale_in_order(slots: Iterable[Slot], standing: Iterable[Slot]) -> list[Slot]:
    """Those without a node first, then booting, then unready, then ready; among equals the newest on the node
    with the fewest of the pool's slots, so that nodes become empty."""
    crowd = Counter(slot.node for slot in standing)

    def key(slot: Slot) -> tuple[int, int, str, float, str]:
        if not slot.node:
            rank = 0
        elif not slot.ever_ready:
            rank = 1
        elif not slot.ready:
            rank = 2
        else:
            rank = 3
        return rank, crowd[slot.node], slot.node, -slot.created, slot.uid

    return sorted(slots, key=key)


def survivor(slots: Sequence[Slot], protected: Collection[str]) -> Slot:
    """The one of several slots with the same ordinal that stays: a claimed one, else the oldest."""
    return min(slots, key=lambda slot: (slot.uid not in protected, slot.created, slot.uid))


def name_new(
    pool: Pool, wanted: int, taken: Collection[int], others: Mapping[int, Sequence[Slot]], last: Mapping[int, str]
) -> tuple[NewSlot, ...]:
    """`wanted` new slots on the lowest ordinals that are not taken. `others`: Pods that have an ordinal and do not hold
    it any more, by ordinal; `last`: uid of the last one known."""
    return tuple(_new(pool, ordinal, others.get(ordinal, ()), last) for ordinal in _free(taken, wanted))


def _free(taken: Collection[int], wanted: int) -> Iterator[int]:
    for ordinal in count():
        if wanted <= 0:
            return
        if ordinal not in taken:
            wanted -= 1
            yield ordinal


def _new(pool: Pool, ordinal: int, others: Sequence[Slot], last: Mapping[int, str]) -> NewSlot:
    if not others and ordinal not in last:
        return NewSlot(slot_name(pool.name, pool.uid, ordinal, ""), ordinal, "")
    names = {slot.name for slot in others}
    visible = [slot.uid for slot in sorted(others, key=lambda slot: (-slot.created, slot.uid))]
    known = [last[ordinal]] if ordinal in last else []
    for predecessor in [*known, *visible, ""]:
        # A name that an ending Pod still has would be a conflict for nothing. The newest Pod is not a predecessor yet,
        # so one is always free.
        name = slot_name(pool.name, pool.uid, ordinal, predecessor)
        if name not in names:
            return NewSlot(name, ordinal, predecessor)
    raise AssertionError(f"every name of slot {ordinal} is taken: a Pod precedes itself")
