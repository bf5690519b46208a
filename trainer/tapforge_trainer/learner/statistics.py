"""What is decided over a whole optimizer step, on all ranks alike, before its gradients (`algorithms/whole_step.py`).

A rank reads the tokens of its own micro-batches in a forward pass without gradients; the ranks put them together, and
each decides over all of them by itself: the same numbers in the same order. Numbers travel once, some bytes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tapforge_trainer.algorithms.objective import Objective
from tapforge_trainer.algorithms.whole_step import StepTokens, checked, passes

from .batches import MicroBatchPlan, TokenBatch

#: [2 or more, response tokens]: log-probabilities, entropies, and what else is read; those of other ranks are nan
Read = Callable[[], np.ndarray]


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What a rank knows before one of an update's optimizer steps."""

    data: TokenBatch
    #: this rank's
    plans: Sequence[MicroBatchPlan]
    #: old log-probabilities, with nan for other ranks' tokens; None: they are those of the policy as it is
    old: np.ndarray | None
    #: of the update and the step
    seed: int


def gathered(objective: Objective, step: OptimizerStep, read: Read, ranks: int) -> dict[str, np.ndarray]:
    """By part of the objective: a number for each response token of the batch, 0 for those that don't count in this
    step. Collective where anything is read."""
    whole = {name: part for name, part in objective.whole_step().items() if part.over == "step"}
    if not whole:
        return {}
    data = step.data
    behavior = data.behavior.astype(np.float64)
    mine = np.isin(data.sample, [k for plan in step.plans if not plan.padding for k in plan.samples])
    columns: dict[str, np.ndarray] = {"counted": mine & (data.weight > 0)}
    if passes(whole, known=step.old is not None):
        columns["logp"], columns["entropy"] = read()[:2]
    if step.old is not None:
        columns["old"] = step.old
    shared = _of_all({name: np.where(mine, values, 0.0) for name, values in columns.items()}, ranks)
    chosen = np.flatnonzero(shared.pop("counted") > 0)
    found = {name: values[chosen] for name, values in shared.items()}
    if step.old is None and "logp" in found:
        found["old"] = found["logp"]
    found["behavior"] = behavior[chosen]
    anchor = found.get("old") if objective.anchor == "old" else found["behavior"]
    _, sequence = np.unique(data.span[chosen], return_inverse=True)
    advantage = data.advantage[chosen].astype(np.float64)
    tokens = StepTokens(advantage, sequence, chosen, anchor=anchor, seed=step.seed, **found)
    return {
        name: _placed(checked(part.gather(tokens), name, tokens), chosen, len(data.index))
        for name, part in whole.items()
    }


def _of_all(mine: Mapping[str, np.ndarray], ranks: int) -> dict[str, np.ndarray]:
    """Each token is one rank's, and 0 on all others: their sum is exact."""
    if ranks == 1:
        return {name: values.astype(np.float64) for name, values in mine.items()}
    import torch
    import torch.distributed as dist

    joined = torch.from_numpy(np.stack([values.astype(np.float64) for values in mine.values()]))
    dist.all_reduce(joined)
    return dict(zip(mine, joined.numpy(), strict=True))


def _placed(values: np.ndarray, chosen: np.ndarray, size: int) -> np.ndarray:
    whole = np.zeros(size, np.float32)
    whole[chosen] = values
    return whole
