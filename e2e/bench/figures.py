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
