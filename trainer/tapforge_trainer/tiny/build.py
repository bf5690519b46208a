"""Builds the tiny base: random weights, then supervised grounding. From a seed; one process, no Ray.

The share of right answers on unseen screens sits at chance at first, then the look-up is found and finished within a
few hundred steps; the rest makes it sure. The result is stored in bfloat16, half the size, and loads in any precision.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

STEPS = 2500
BATCH = 64
LEARNING_RATE = 1e-3
#: steps of linear warm-up; share of the steps after which the rate decays; where it ends
_WARMUP, _DECAY_FROM, _FLOOR = 30, 0.6, 0.05


def build(
    folder: Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    report: Callable[[int, float, dict[int, float]], None] = lambda step, seconds, accuracy: None,
) -> dict[int, float]:
    """Writes the base to `folder`. Returns the mean probability of the right answer on fresh screens by their number of
    icons.

    `report(step, seconds, accuracy)` is called every 100 steps.
    """
    import torch

    from .folder import write_model
    from .grounding import ICONS, example
    from .scoring import Scorer

    torch.manual_seed(seed)
    write_model(folder, seed)
    scorer = Scorer.of_folder(folder)
    policy = scorer.policy
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    lessons, exams = Random(f"grounding:{seed}"), Random(f"grounding exam:{seed}")
    accuracy: dict[int, float] = {}
    begun = time.monotonic()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _rate(step, steps)
        loss = -scorer.logprobs([example(lessons) for _ in range(BATCH)])[0].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            accuracy = {n: round(scorer.accuracy([example(exams, n) for _ in range(128)]), 4) for n in ICONS}
            report(step, time.monotonic() - begun, accuracy)
    policy.model.to(torch.bfloat16).save_pretrained(folder)
    return accuracy


def _rate(step: int, steps: int) -> float:
    late = max(0.0, (step / steps - _DECAY_FROM) / (1 - _DECAY_FROM))
    return min(1.0, step / _WARMUP) * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * late)))
