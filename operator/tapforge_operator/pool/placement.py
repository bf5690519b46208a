"""Which slots go first when there are too many, and how new ones are called.

A name is made of the pool's UID, the ordinal and the UID of the Pod that had the ordinal before. As long as nothing new
was seen, the same create has the same name: the second one is a conflict, never a second Pod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

from ..names import slot_name
from ..slots import Slot
from .records import NewSlot, Pool


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


def keeper(slots: Sequence[Slot], protected: Collection[str]) -> Slot:
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
        # A name that an ending Pod still has would be a conflict for nothing. The newest Pod is nobody's predecessor
        # yet, so one is always free.
        name = slot_name(pool.name, pool.uid, ordinal, predecessor)
        if name not in names:
            return NewSlot(name, ordinal, predecessor)
    raise AssertionError(f"every name of slot {ordinal} is taken: a Pod precedes itself")
