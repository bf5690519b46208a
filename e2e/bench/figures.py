"""Numbers out of many measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values don't exceed."""
    if not values:
        raise ValueError("nothing was measured, so there is no percentile of it")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 2)


def spread(values: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Median, 99th percentile and maximum in milliseconds, under names that begin like that; of nothing, nothing."""
    if not values:
        return {}
    found = {"p50_ms": percentile(values, 50), "p99_ms": percentile(values, 99), "max_ms": max(values)}
    return {f"{prefix}{name}": milliseconds(value) for name, value in found.items()}


def ratios(ours: Sequence[float], raw: Sequence[float]) -> dict[str, float]:
    """How many times as long ours take at the median and at the 99th percentile; without the one or the other none."""
    if not (ours and raw):
        return {}
    return {f"p{n}_ratio": round(percentile(ours, n) / percentile(raw, n), 3) for n in (50, 99)}
