"""Micro-batches of samples that share prompts: samples with one prompt are a unit, which is planned as a sample is
(`batches.py:plan_micro_batches`). Pure numpy.

- A unit has its prompt once. One that exceeds the budget is cut, and each part has the prompt.
- Samples that share a prompt attend to it each by itself, with keys and values of their own. Those of a micro-batch are
  at most `ATTENDED` times its budget of tokens, which the plan of memory counts on.
- Several ranks wait for each other. Where few units are hard to deal out, all are cut into 2, 4, … parts, if by the
  count of operations the slowest rank has less to do then, the prompts that are computed once more included.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

import numpy as np

from .batches import MicroBatchPlan, TokenBatch, plan_micro_batches

#: tokens that are attended to, in units of those that are computed
ATTENDED: Final = 2


def plan_samples(
    data: TokenBatch,
    chosen: np.ndarray,
    ranks: int,
    token_budget: int,
    work: tuple[np.ndarray, np.ndarray] | None = None,
) -> list[list[MicroBatchPlan]]:
    """Micro-batches per rank of the chosen samples. `work`: of all samples, and of their prompts alone; None: their
    tokens."""
    whole, prompts = (data.lengths, data.prompts.tokens) if work is None else work
    groups = _sharing(data, chosen)
    best: list[list[MicroBatchPlan]] | None = None
    least, parts, most = np.inf, 1, max(map(len, groups), default=1)
    while best is None or (ranks > 1 and parts < 2 * most):
        units = [unit for group in groups for unit in _cut(data, group, token_budget, parts)]
        sizes = [_size(data, unit) for unit in units]
        costs = np.asarray([_once(whole, prompts, unit) for unit in units], np.float64)
        plans = plan_micro_batches(sizes, ranks, token_budget, costs)
        waited = _waited(plans, costs)
        if best is None or waited < least:
            best, least = [[_of_samples(plan, units) for plan in rank] for rank in plans], waited
        parts *= 2
    return best


def answers_at_once(length: int, prompt: int, token_budget: int) -> int:
    """Samples of this length with one prompt that a micro-batch has, at most; the others have the prompt anew."""
    if length > token_budget:
        return 1
    return min(ATTENDED * token_budget // length, 1 + (token_budget - length) // (length - prompt))


def computed_tokens(data: TokenBatch, plan: MicroBatchPlan) -> int:
    """In the row of a micro-batch: prompts that its samples share once."""
    samples = np.asarray(plan.samples, np.int64)
    again = data.prompts.leads(samples) != np.arange(len(samples))
    return int(data.lengths[samples].sum() - data.prompts.tokens[samples[again]].sum())


def padding_share(data: TokenBatch, plans: Sequence[MicroBatchPlan]) -> float:
    """Share of computed tokens that belong to micro-batches which only keep their rank in step."""
    tokens = [(computed_tokens(data, plan), plan.padding) for plan in plans]
    computed = sum(count for count, _ in tokens)
    return sum(count for count, padding in tokens if padding) / computed if computed else 0.0


def _sharing(data: TokenBatch, chosen: np.ndarray) -> list[list[int]]:
    """The chosen samples, those of one prompt together."""
    found: dict[int, list[int]] = {}
    for k, number in zip(chosen.tolist(), data.prompts.number[chosen].tolist(), strict=True):
        found.setdefault(number, []).append(k)
    return list(found.values())


def _cut(data: TokenBatch, group: Sequence[int], token_budget: int, parts: int) -> list[list[int]]:
    """As few as the budget allows, and no larger than one of so many equal parts."""
    most = -(-len(group) // parts)
    units: list[list[int]] = []
    computed = attended = 0
    for k in group:
        length, prompt = int(data.lengths[k]), int(data.prompts.tokens[k])
        room = ATTENDED * token_budget - attended >= length and token_budget - computed >= length - prompt
        if units and len(units[-1]) < most and room:
            units[-1].append(k)
            computed, attended = computed + length - prompt, attended + length
        else:
            units.append([k])
            computed = attended = length
    return units


def _size(data: TokenBatch, unit: Sequence[int]) -> int:
    """Of a micro-batch's budget."""
    attended = int(data.lengths[list(unit)].sum())
    shares = len(unit) > 1
    return max(int(_once(data.lengths, data.prompts.tokens, unit)), -(-attended // ATTENDED) if shares else attended)


def _once(whole: np.ndarray, prompts: np.ndarray, unit: Sequence[int]) -> float:
    return float(whole[list(unit)].sum() - (len(unit) - 1) * prompts[unit[0]])


def _waited(plans: Sequence[Sequence[MicroBatchPlan]], costs: np.ndarray) -> float:
    """What ranks do that wait for each other after every micro-batch."""
    each = zip_longest(*([float(costs[list(p.samples)].sum()) for p in rank] for rank in plans), fillvalue=0.0)
    return sum(map(max, each))


def _of_samples(plan: MicroBatchPlan, units: Sequence[Sequence[int]]) -> MicroBatchPlan:
    chosen = [units[unit] for unit in plan.samples]
    # what keeps a rank in step is as little as there is
    return MicroBatchPlan(tuple(k for unit in chosen for k in (unit[:1] if plan.padding else unit)), plan.padding)
