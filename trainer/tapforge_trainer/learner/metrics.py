"""What the ranks saw in an update, and the metrics made of it. No torch: the driver reads this.

`tokens_age_N` and `kl_age_N` are the update's tokens by age (`age.py`).

Throughput is over the whole update as the driver waits for it: `tokens_per_second` of the samples' own tokens, those
that several of them share once, `positions_per_second` of all that were computed, padding included. `mfu` is `flops`
(`flops.py`) over what all ranks' GPUs could do meanwhile, by their makers' dense bfloat16 figures; absent where that is
not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .age import of_ages
from .token_readings import TokenReadings


@dataclass(slots=True)
class UpdateMetrics:
    """What a rank saw. `sums` add up over ranks, of `maxima` the largest counts. `tokens`: None: they aren't kept."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    tokens: TokenReadings | None = None

    def add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def top(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, value), value)

    def keep(self, chosen: np.ndarray, found: np.ndarray) -> None:
        if self.tokens is not None:
            self.tokens.keep(chosen, found)


def summary(ranks: Sequence[UpdateMetrics], seconds: float, padding: float) -> dict[str, float]:
    """Metrics of an update from what its ranks saw."""
    sums: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for rank in ranks:
        for name, value in rank.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in rank.maxima.items():
            metrics[name] = max(metrics.get(name, -math.inf), value)
    weight = max(sums.pop("weight", 0.0), 1e-12)
    metrics |= of_ages(sums)
    metrics["entropy"] = sums.pop("entropy", 0.0) / weight
    computing = sums.pop("seconds", 0.0)
    positions, peak = sums.get("positions", 0.0), metrics.pop("peak_flops", None)
    metrics |= sums
    if "policy_loss" in metrics:
        metrics["loss"] = metrics["policy_loss"]
    metrics["padding_share"] = padding
    metrics["seconds"] = seconds
    metrics["seconds_computing"] = computing
    metrics["tokens_per_second"] = metrics.get("tokens", 0.0) / max(seconds, 1e-9)
    metrics["positions_per_second"] = positions / max(seconds, 1e-9)
    if peak:
        metrics["mfu"] = metrics.get("flops", 0.0) / (max(seconds, 1e-9) * peak * len(ranks))
    return metrics
