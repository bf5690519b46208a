"""The next slot is on the fullest node, whatever happened before."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tapforge_operator.broker.scheduling import Packing

actions = st.lists(
    st.tuples(st.sampled_from(["offer", "withdraw", "claimed", "freed"]), st.integers(0, 11)), max_size=60
)


def place(slot: int) -> tuple[str, str, str]:
    """Twelve slots of two pools on three nodes."""
    return f"pool-{slot % 2}", f"node-{slot % 3}", f"slot-{slot}"


@given(actions)
def test_the_fullest_node_is_next(steps):
    packing, offered, fill = Packing(), set(), Counter()
    for what, slot in steps:
        pool, node, uid = place(slot)
        if what == "offer":
            packing.offer(pool, node, uid)
            offered.add(slot)
        elif what == "withdraw":
            packing.withdraw(pool, node, uid)
            offered.discard(slot)
        elif what == "claimed" or fill[node]:
            change = 1 if what == "claimed" else -1
            packing.claimed(node, change)
            fill[node] += change
        for each in ("pool-0", "pool-1"):
            mine = {place(s)[2]: place(s)[1] for s in offered if place(s)[0] == each}
            assert packing.free(each) == len(mine)
            chosen = packing.next(each)
            assert (chosen is None) == (not mine)
            if chosen is not None:
                assert fill[mine[chosen]] == max(fill[n] for n in mine.values())


def test_slots_take_turns():
    packing = Packing()
    for number in range(3):
        packing.offer("pool", "node", f"slot-{number}")
    order = []
    for _ in range(6):
        uid = packing.next("pool")
        order.append(uid)
        packing.withdraw("pool", "node", uid)
        packing.offer("pool", "node", uid)
    assert order == ["slot-0", "slot-1", "slot-2"] * 2
