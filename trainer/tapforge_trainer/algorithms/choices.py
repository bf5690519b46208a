"""Checks of options that estimators share: each error names the option, the value and what would do."""

from __future__ import annotations

import math
from typing import Any, get_args


def one_of(option: str, value: object, literal: Any) -> None:
    """`literal` is a `Literal[...]` of texts. Raises ValueError for what isn't among them."""
    if value not in get_args(literal):
        raise ValueError(f"unknown {option} {value!r}; known are {', '.join(get_args(literal))}")


def within(option: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raises ValueError for a number outside [low, high], for an infinite one, and for one that is none."""
    if not (low <= value <= high and math.isfinite(value)):
        end = f"{high:g}]" if math.isfinite(high) else "inf)"
        raise ValueError(f"{option} is {value:g}; it lies in [{low:g}, {end}")
