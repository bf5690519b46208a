"""The operator's peak memory with 5,000 and with 20,000 slots whose Pods have 5 KB each, or somewhat more.

Each size twice: in the process that made the slots, and in one that found them when it started. Pods are padded by an
annotation until a Ready one has at least 5 KB of JSON, as the API server sends it. The size is the largest resident
one (VmHWM).
"""

from __future__ import annotations

from typing import Any

from . import pools
from .testbed import Run, Testbed

BYTES = 5 * 1024
_TRIED = 1000


def run(options: Run) -> dict[str, Any]:
    sizes = (100, 200) if options.quick else (5000, 20_000)
    found: dict[str, Any] = {}
    for slots, name in zip(sizes, ("5000", "20000"), strict=True):
        making, finding, size = _peak(options, slots)
        found[f"peak_mib_{name}"] = round(max(making, finding), 1)
        found[f"peak_mib_{name}_making"] = round(making, 1)
        found[f"peak_mib_{name}_finding"] = round(finding, 1)
        found["bytes_per_pod"] = size
    return {**found, "sizes": list(sizes)}


def _peak(options: Run, slots: int) -> tuple[float, float, int]:
    with Testbed(options, nodes=-(-slots // pools.PER_NODE), qps=1000) as bed:
        bed.start_operator()
        padding = _padding(bed)
        bed.stop_operator()
        # A process of its own, so that nothing but this pool was ever in it.
        bed.start_operator()
        bed.make_fleet("phones", slots, padding)
        making, size = bed.peak_mib(), pools.size(bed.pods()[0])
        bed.stop_operator()
        bed.start_operator()
        bed.resize("phones", slots - 1)
        bed.wait_status("phones", 120, ready=slots - 1, pods=slots - 1)
        return making, bed.peak_mib(), size


def _padding(bed: Testbed) -> int:
    """Characters that make a Pod as large as it should be."""
    bed.make_fleet("probe", 1, _TRIED)
    tried = pools.size(bed.pods()[0])
    bed.resize("probe", 0)
    bed.wait_status("probe", 60, pods=0)
    return max(0, _TRIED + BYTES - tried)
