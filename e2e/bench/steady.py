"""A minute in the life of 5,000 ready slots to which nothing happens: what does the operator write?

Counted is every write of the operator's user; its leader Lease is counted apart. CPU is the operator's in that minute.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from . import pools
from .testbed import LEASE, USER, Run, Testbed


def run(options: Run) -> dict[str, Any]:
    slots, seconds, settle = (100, 10.0, 5.0) if options.quick else (5000, 60.0, 20.0)
    with Testbed(options, nodes=-(-slots // pools.PER_NODE), qps=1000) as bed:
        bed.start_operator()
        bed.make_fleet("phones", slots)
        time.sleep(settle)
        mark, cpu = bed.audit.mark(), bed.cpu_seconds()
        time.sleep(seconds)
        cpu = bed.cpu_seconds() - cpu
        mine = [write for write in bed.audit.since(mark) if write.user == USER]
    lease = sum(write.resource == "leases" and write.name == LEASE for write in mine)
    others = Counter(f"{w.verb} {w.resource}" for w in mine if not (w.resource == "leases" and w.name == LEASE))
    return {
        "steady_writes_per_minute": round(others.total() * 60 / seconds, 1),
        "steady_lease_writes_per_minute": round(lease * 60 / seconds, 1),
        "steady_writes": dict(others),
        "steady_cpu_share": round(cpu / seconds, 4),
        "steady_slots": slots,
    }
