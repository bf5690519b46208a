"""What an engine and a learner with the same weights may differ by, as a decision on numbers alone.

Bytes and caches have detectors of their own (`received.py`, `Sampler.kept`); what is judged here is whether both sides
*compute* the same. Rules:

- A gap is the engine's log-probability of a token less the learner's, nats. A gap that is NaN is always a fault.
- In fp32 each token decides: two correct sides are within 1e-4, a thousand times their noise.
- In bf16 and fp16 single tokens may be far off (their noise has heavy tails: a maximum over tokens refuses correct
  syncs), so three figures over all tokens of an engine are bounded: the mean, the 90th percentile and k3. Each may be
  three times what it was in the run's first proof, at least what noise may be anyway (`_USUAL`), at most `_MOST`.
- The slope of the engine's change on the learner's, over tokens that both have scored in an earlier proof, says whether
  the engine has followed: about 1, or about 0 where it has not moved. It is judged where its standard error is below
  0.2 and the learner's change is five times the noise or more. What is noise in that change lowers the slope; there by
  less than a half, even where the noise has become three times what it was, and all of it is the learner's.
- Where adapters are merged into weights of 16 bits, engines hold less of the learner's change than the learner computes
  with (`exact` False): both figures grow and fall as the run goes on, in syncs that are as correct as they can be. The
  fixed bounds alone are judged then, and the slope is reported.
- `sync.tolerance` is a bound for every token in place of all that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: largest gap of any token in a correct sync
_TOKEN = {"float32": 1e-4}
#: how much larger than in the first proof a figure may be
_TIMES = 3.0
#: of each figure, what is accepted however small it was in the first proof. Between a trainer and vLLM in bf16 a root
#: mean square of 0.0227 was measured (Fast-LLM, issue 525): a mean of 0.01 to 0.02 and a k3 of 0.0003
_USUAL = {
    "bfloat16": {"gap_mean": 0.03, "gap_p90": 0.06, "gap_kl": 0.003},
    "float16": {"gap_mean": 0.006, "gap_p90": 0.012, "gap_kl": 0.0003},
}
#: and what is one however large it was
_MOST = {
    "bfloat16": {"gap_mean": 0.1, "gap_p90": 0.25, "gap_kl": 0.05},
    "float16": {"gap_mean": 0.02, "gap_p90": 0.05, "gap_kl": 0.004},
}
#: nats that a token's difference counts as in k3 at most, which grows like its exponential
_K3_RANGE = 20.0
#: a slope below which an engine has not followed; the standard error from which on it is not judged; the standard
#: errors that it has to be away from 1
_SLOPE, _ERROR, _ERRORS = 0.5, 0.2, 5.0
#: root mean square of the learner's change over that of the gaps, at least
_SIGNAL = 5.0
#: parts of the tokens, each of which is left out once for the standard error
_PARTS = 16


@dataclass(frozen=True, slots=True)
class Slope:
    """Of the engine's change on the learner's."""

    value: float
    #: standard error
    error: float
    #: root mean square of the learner's change over that of the gaps
    signal: float

    @property
    def counts(self) -> bool:
        return self.error < _ERROR and self.signal >= _SIGNAL


def figures(gaps: Sequence[np.ndarray]) -> dict[str, float]:
    """How far engine and learner are apart. `gaps`: of each answer [tokens]. `gap_mean`, `gap_p90` and `gap_max` are of
    their sizes, `gap_rms` is the root of their mean square; `gap_kl` is the mean of k3 = exp(-gap) - 1 + gap, an
    estimate of the divergence of the learner's policy from the engine's (Schulman, "Approximating KL Divergence")."""
    gap = np.concatenate(gaps).astype(np.float64)
    apart, bounded = np.abs(gap), np.clip(gap, -_K3_RANGE, _K3_RANGE)
    return {
        "gap_tokens": float(len(gap)),
        "gap_mean": float(apart.mean()),
        "gap_rms": float(np.sqrt((apart**2).mean())),
        "gap_p90": float(np.quantile(apart, 0.9)),
        "gap_max": float(apart.max()),
        "gap_kl": float((np.exp(-bounded) - 1 + bounded).mean()),
    }


def bounds(dtype: str, first: Mapping[str, float] | None, *, exact: bool = True) -> dict[str, float]:
    """Of `figures` in this number format, by name; empty where each token decides. `first`: the figures of the run's
    first proof; None: this is the first. `exact`: engines hold the weights that the learner computes with."""
    most = _MOST.get(dtype, {})
    if first is None or not exact:
        return dict(most)
    usual = _USUAL[dtype] if most else {}
    return {name: min(cap, max(usual[name], _TIMES * first.get(name, math.inf))) for name, cap in most.items()}


def disagreement(
    found: Mapping[str, float],
    dtype: str,
    *,
    tolerance: float | None = None,
    first: Mapping[str, float] | None = None,
    slope: Slope | None = None,
    exact: bool = True,
) -> str:
    """Why an engine whose `figures` are these can't compute with the learner's weights; "" where it can. `tolerance`:
    of any token, in place of everything else; for the others see `bounds` and `slope_of`."""
    token = _TOKEN.get(dtype) if tolerance is None else tolerance
    if not all(math.isfinite(value) for value in found.values()):
        return "not a number"
    if token is not None and found["gap_max"] > token:
        return f"tolerance {token:g}"
    if tolerance is not None:
        return ""
    for name, bound in bounds(dtype, first, exact=exact).items():
        if found[name] > bound:
            was = "" if first is None or name not in first else f" and was {first[name]:.3g} in the run's first proof"
            return f"{name} is {found[name]:.3g}, which may be {bound:.3g} in {dtype}{was}"
    if slope is not None and exact and slope.counts and slope.value < min(_SLOPE, 1 - _ERRORS * slope.error):
        return (
            f"of the learner's change since an earlier proof it has {slope.value:.2f}, with a standard error of "
            f"{slope.error:.2f}"
        )
    return ""


def slope_of(before: tuple[np.ndarray, np.ndarray], now: tuple[np.ndarray, np.ndarray]) -> Slope:
    """`before`, `now`: the engine's and the learner's log-probabilities of the same tokens, [tokens] each. The standard
    error is the jackknife's over parts of the tokens: it assumes nothing of how noise is spread."""
    y, x = (np.asarray(now[side], np.float64) - np.asarray(before[side], np.float64) for side in (0, 1))
    noise = [np.asarray(engine, np.float64) - np.asarray(learner, np.float64) for engine, learner in (before, now)]
    part = np.arange(len(x)) % _PARTS
    xy = np.bincount(part, x * y, _PARTS)
    xx = np.bincount(part, x * x, _PARTS)
    if not (np.all(np.isfinite(xy)) and xx.sum() > 0 and np.all(xx.sum() > xx)):
        return Slope(math.nan, math.inf, 0.0)
    without = (xy.sum() - xy) / (xx.sum() - xx)
    error = math.sqrt((_PARTS - 1) / _PARTS * float(((without - without.mean()) ** 2).sum()))
    # A fault now makes `now`'s gaps as large as the change: the proof that held has the noise.
    signal = math.sqrt(float(xx.sum()) / max(float((noise[0] ** 2).sum()), 1e-30))
    return Slope(float(xy.sum() / xx.sum()), error, signal)
