"""The addresses of a real node: a block that this machine has no other way to, so that clusters don't meet.

The first half of the block is for pods; its last four addresses are the cable between this machine and the node, which
has a network of its own. Pure, but for `routes`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

#: blocks that are tried. Those of services and of fake pods (components.py) are not among them
_CANDIDATES = (
    *list(IPv4Network("10.128.0.0/9").subnets(new_prefix=16)),
    *list(IPv4Network("172.16.0.0/12").subnets(new_prefix=16)),
)
_ROUTES = Path("/proc/net/route")


@dataclass(frozen=True, slots=True)
class Addresses:
    block: IPv4Network

    @property
    def pods(self) -> IPv4Network:
        return next(self.block.subnets(prefixlen_diff=1))

    @property
    def cable(self) -> IPv4Network:
        return IPv4Network((self.block[-4], 30))

    @property
    def host(self) -> IPv4Address:
        """This machine's end: where pods find the API server."""
        return self.cable[1]

    @property
    def node(self) -> IPv4Address:
        """The node's end: its kubelet and the cluster's names (DNS) answer here."""
        return self.cable[2]

    def interface(self) -> str:
        """Name of this machine's end; of at most 15 characters."""
        return f"tapforge{int(self.block.network_address) >> 16 & 0xFFFF:x}"


def choose(taken: Iterable[IPv4Network], candidates: Sequence[IPv4Network] = _CANDIDATES) -> Addresses:
    """At random, so that clusters that start together seldom want the same."""
    ways = [way for way in taken if way.prefixlen]
    free = [block for block in candidates if not any(block.overlaps(way) for way in ways)]
    if not free:
        raise RuntimeError(
            f"a real node needs a /16 of private addresses, and this machine's routes cover all {len(candidates)} "
            f"candidates: {', '.join(map(str, ways))}"
        )
    return Addresses(random.choice(free))


def routes(table: str | None = None) -> list[IPv4Network]:
    """Where this machine's routes lead; `table` is text as of /proc/net/route."""
    lines = (_ROUTES.read_text() if table is None else table).splitlines()[1:]
    fields = [line.split() for line in lines if line.strip()]
    return [IPv4Network((_address(field[1]), str(_address(field[7])))) for field in fields]


def _address(digits: str) -> IPv4Address:
    return IPv4Address(int.from_bytes(bytes.fromhex(digits), "little"))
