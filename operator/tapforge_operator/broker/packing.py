"""Which free slot is next: one on the fullest node, so that empty nodes can be drained.

A node is as full as it has slots of ours that are claimed, whatever their pool. Among equally full nodes the one that
became so first is taken, on a node the slot that has been free the longest. Every operation is O(pools on the node) or
O(different fills), never O(slots).
"""

from __future__ import annotations

from collections import Counter


class _PoolOffer:
    """Free slots of one pool, by node, and those nodes by fill."""

    __slots__ = ("by_fill", "count", "on_node")

    def __init__(self) -> None:
        self.on_node: dict[str, dict[str, None]] = {}
        self.by_fill: dict[int, dict[str, None]] = {}
        self.count = 0


class Packing:
    def __init__(self) -> None:
        self._fill: Counter[str] = Counter()
        self._pools: dict[str, _PoolOffer] = {}
        self._pools_on: dict[str, set[str]] = {}

    def free(self, pool: str) -> int:
        offer = self._pools.get(pool)
        return offer.count if offer else 0

    def fill(self, node: str) -> int:
        """Claimed slots on the node."""
        return self._fill[node]

    def next(self, pool: str) -> str | None:
        """UID of the free slot to grant next."""
        offer = self._pools.get(pool)
        if offer is None:
            return None
        node = next(iter(offer.by_fill[max(offer.by_fill)]))
        return next(iter(offer.on_node[node]))

    def offer(self, pool: str, node: str, uid: str) -> None:
        """The slot can be granted."""
        offer = self._pools.setdefault(pool, _PoolOffer())
        slots = offer.on_node.get(node)
        if slots is None:
            slots = offer.on_node[node] = {}
            offer.by_fill.setdefault(self._fill[node], {})[node] = None
            self._pools_on.setdefault(node, set()).add(pool)
        if uid not in slots:
            slots[uid] = None
            offer.count += 1

    def withdraw(self, pool: str, node: str, uid: str) -> None:
        """The slot can't be granted."""
        offer = self._pools.get(pool)
        slots = offer.on_node.get(node) if offer else None
        if offer is None or slots is None or uid not in slots:
            return
        del slots[uid]
        offer.count -= 1
        if not slots:
            del offer.on_node[node]
            self._leave(offer, node)
            self._pools_on[node].discard(pool)
            if not self._pools_on[node]:
                del self._pools_on[node]
        if not offer.count:
            del self._pools[pool]

    def claimed(self, node: str, change: int) -> None:
        """So many more (or less) slots on the node are claimed."""
        offers = [self._pools[pool] for pool in self._pools_on.get(node, ())]
        for offer in offers:
            self._leave(offer, node)
        self._fill[node] += change
        if not self._fill[node]:
            del self._fill[node]
        for offer in offers:
            offer.by_fill.setdefault(self._fill[node], {})[node] = None

    def _leave(self, offer: _PoolOffer, node: str) -> None:
        fill = self._fill[node]
        nodes = offer.by_fill[fill]
        del nodes[node]
        if not nodes:
            del offer.by_fill[fill]
