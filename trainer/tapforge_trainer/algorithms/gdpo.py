"""GDPO (arXiv:2601.05242): each named reward is compared apart before they are added, so that none drowns another.

    Z = sum over streams of weight * (x - mean(x of the group)) / (std(x of the group) + epsilon);  A = Z, whitened

x is a stream's sum over a trajectory. A batch has the streams of `spec.rewards` with their weights: `outcome` and
`environment` (rewards of steps) where a file names none, and always `invalid_answer` (penalties, negative). A stream
without spread in a group adds 0.

Options:
- `weights`: `outcome=1, invalid_answer=0.5`; a stream that isn't named has 1, and 0 leaves one out. They multiply the
  weights of `spec.rewards`.
- `whiten`: `tokens` (the default, verl's: each trajectory counts as often as it has response tokens), `trajectories`
  (TRL's: (Z - mean) / (std + epsilon), each counts once; TRL has epsilon 1e-4 in both places) or `none`.

Conventions: a group of one has Z = 0 (verl: x). As published, whitening moves a group without spread off 0 with the
batch's mean. Where outcomes gate, a group that ended alike is in no statistic and has exactly 0: other streams refine
what outcomes tell. With `signal: reward` they teach on their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import numpy as np

from .choices import one_of
from .episodes import episodes_of
from .group_statistics import compare, mixed, over, unless_rounding
from .group_statistics import whiten as whitened
from .options import unknown
from .steps import Advantages, Steps, need

Whiten = Literal["tokens", "trajectories", "none"]


def gdpo(steps: Steps, *, weights: str = "", whiten: Whiten = "tokens", epsilon: float = 1e-6) -> Advantages:
    one_of("whiten", whiten, Whiten)
    streams = need(steps.streams, "gdpo", "streams", "give rewards by name, or use grpo")
    shares = steps.stream_weights or {}
    weight_of = {name: one * shares.get(name, 1.0) for name, one in weights_of(weights, streams).items()}
    episodes = episodes_of(steps)
    group, groups, success = episodes.group, episodes.groups, episodes.success
    total = np.zeros(len(episodes))
    for name, values in streams.items():
        own = compare(episodes.sums(values), group, groups, "mean_std", epsilon, 0.0, success)
        total += weight_of[name] * own
    compared = mixed(group, groups, success)[group]
    if whiten == "tokens":
        remedy = "give the response tokens of each step, or set its option whiten to trajectories"
        tokens = episodes.sums(need(steps.tokens, "gdpo", "tokens", remedy))
        total = np.where(compared, whitened(total, tokens * compared), 0.0)
    elif whiten == "trajectories" and compared.any():
        of = total[compared]
        spread = float(of.std(ddof=1)) if len(of) > 1 else 0.0
        varied = len(of) > 1 and bool((of != of[0]).any())
        mean = unless_rounding(float(of.mean()), of)
        total = np.where(compared & varied, over(total - mean, spread + epsilon), 0.0)
    return episodes.same_at_each_step(total)


def weights_of(text: str, streams: Collection[str]) -> dict[str, float]:
    """A weight for each stream. Raises ValueError for a name that none has, with the nearest, for one that comes twice,
    for no number, and for nothing but 0."""
    given: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in streams:
            raise ValueError(f"weights: {unknown('stream', name, streams)}")
        if name in given:
            raise ValueError(f"weights: {name} is named twice, at last by {part!r}; name it once")
        try:
            given[name] = float(number)
        except ValueError:
            given[name] = math.nan
        if not math.isfinite(given[name]):
            raise ValueError(f"weights: {part!r} should be NAME=NUMBER, as in outcome=1, environment=0.5")
    found = {name: given.get(name, 1.0) for name in streams}
    if streams and not any(found.values()):
        raise ValueError(f"weights: {text!r} leaves nothing to learn from; give one of {', '.join(found)} more than 0")
    return found
