"""Arithmetic of studies with paired seeds: means, intervals, differences, p values, and Holm's correction."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean, by Student's t."""
    if len(values) < 2:
        return None
    return round(_t975(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values)), 4)


def _t975(freedom: int) -> float:
    """Cornish-Fisher's expansion of Student's quantile; within 0.01 from 4 degrees of freedom on."""
    z = 1.959964
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def sign_flips(differences: Sequence[float], draws: int = 20_000) -> float:
    """Two-sided p of a mean of 0, where each difference might as well have the other sign."""
    values = np.array(differences)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (draws, len(values)))
    return float((1 + np.sum(np.abs(signs @ values) >= abs(values.sum()) - 1e-12)) / (1 + draws))


def holm(values: dict[str, float]) -> dict[str, float]:
    found, worst = {}, 0.0
    for place, name in enumerate(sorted(values, key=values.__getitem__)):
        worst = max(worst, min(1.0, values[name] * (len(values) - place)))
        found[name] = round(worst, 4)
    return found


def table(pairs: dict[str, dict[str, Any]], figure: str = "after", baseline: str = "grpo") -> dict[str, Any]:
    """Of the pairs that were run, arm -> seed -> result: mean and interval of a figure, and of its difference to the
    baseline's, paired by seed."""
    found: dict[str, Any] = {}
    versus = f"vs_{baseline}"
    for arm, seeds in pairs.items():
        after = [one[figure] for one in seeds.values()]
        rate = next(iter(seeds.values())).get("rate")
        found[arm] = {
            "seeds": len(after),
            "rate": rate,
            "mean": round(float(np.mean(after)), 4),
            "ci95": interval(after),
        }
        common = sorted(seeds.keys() & pairs.get(baseline, {}).keys()) if arm != baseline else []
        if len(common) >= 2:
            differences = [seeds[seed][figure] - pairs[baseline][seed][figure] for seed in common]
            found[arm][versus] = {
                "seeds": len(common),
                "mean": round(float(np.mean(differences)), 4),
                "ci95": interval(differences),
                "p": round(sign_flips(differences), 4),
            }
    for arm, value in holm({arm: one[versus]["p"] for arm, one in found.items() if versus in one}).items():
        found[arm][versus]["p_holm"] = value
    return found


def commit() -> str:
    return subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False
    ).stdout.strip()
