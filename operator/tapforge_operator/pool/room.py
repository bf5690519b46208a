"""Which removals of a plan make room for which of its creates, so that there is never a slot more than may be.

A removal may fail to be carried out: the slot was claimed since it was planned. A create waits for the removals of its
own ordinal, and for one slot that goes; no two creates wait for the same one. What takes long holds up nobody else.

A pool that has too many slots is different: the first removals make room for nothing. There each create waits for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from .records import Plan


def room_makers(planned: Plan) -> Mapping[str, frozenset[str]]:
    """UIDs of the slots that have to go before each create, by the new slot's name."""
    wanted = {new.ordinal for new in planned.creates}
    of_ordinal: defaultdict[int, set[str]] = defaultdict(set)
    #: ordinals whose slot stands until it is removed here, and slots that go without a successor
    standing: set[int] = set()
    others: list[str] = []
    every: set[str] = set()
    for removal in (*planned.retain, *planned.deletes):
        slot = removal.slot
        stands = not (slot.deleting or slot.retained)  # the others hold no place any more
        if slot.ordinal in wanted:
            of_ordinal[slot.ordinal].add(slot.uid)
            standing |= {slot.ordinal} if stands else set()
        elif stands:
            others.append(slot.uid)
        every |= {slot.uid} if stands else set()
    found: dict[str, frozenset[str]] = {}
    for new in planned.creates:
        makers = set(of_ordinal.get(new.ordinal, ()))
        if planned.too_many:
            makers |= every
        elif new.ordinal not in standing and others:
            makers.add(others.pop())
        found[new.name] = frozenset(makers)
    return found
