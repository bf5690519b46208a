"""The policy loss on flat response tokens. The only file of this room that imports torch.

- Tokens of many sequences lie one after another; `sequence` says which one a token is of (0 .. count-1, local). A
  sequence (one response span) is never split over two calls.
- `policy_loss` divides by *global* counts, so losses and gradients of any split over micro-batches and ranks add up to
  those of the whole. Its `sums` add up the same way; of its `maxima` the largest counts.
- Gradients flow through `logp` alone. Everything is computed in fp32 at least.
- Log-ratios are held inside +-20 before they are exponentiated: far outside there is no gradient, never inf or nan.
- A token of weight 0 contributes exactly nothing, whatever its numbers are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import KL, Aggregation, Counts, Objective

#: exp(20) is 5e8
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class LossResult:
    #: this call's part of the global loss
    loss: Tensor
    #: parts of global means, detached
    sums: dict[str, Tensor]
    #: detached
    maxima: dict[str, Tensor]


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    sequence: Tensor,
    *,
    objective: Objective,
    counts: Counts,
    weight: Tensor | None = None,
    behavior_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
) -> LossResult:
    """All tensors are [tokens]. `behavior_logp` (the engine's) switches the importance weight on, if the objective has
    a cap; `ref_logp` is needed exactly when the objective's KL coefficient is not 0."""
    if objective.kl_coefficient > 0.0 and ref_logp is None:
        raise ValueError(f"kl_coefficient is {objective.kl_coefficient}, but there is no ref_logp; load a reference")
    weight = torch.ones_like(logp) if weight is None else weight
    counted = weight > 0
    # Tokens that do not count may hold anything (padding): replace, because 0 * inf is nan.
    logp = torch.where(counted, _wide(logp), 0.0)
    old = torch.where(counted, _wide(old_logp).detach(), 0.0)
    advantage = torch.where(counted, advantage.to(logp.dtype), 0.0)
    weight = weight.to(logp.dtype)
    share = token_shares(weight, sequence, objective.aggregation, counts)
    mean_share = weight / max(counts.tokens, 1e-12)

    log_ratio = logp - old
    if objective.ratio == "sequence":
        log_ratio = _sequence_log_ratio(logp, log_ratio, counted, sequence)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    token_loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    low = (advantage < 0) & (ratio < 1.0 - objective.clip_low)
    high = (advantage > 0) & (ratio > 1.0 + objective.clip_high)
    bounded = torch.zeros_like(low)
    if objective.dual_clip is not None:
        bound = -objective.dual_clip * advantage
        bounded = (advantage < 0) & (token_loss > bound)
        token_loss = torch.where(bounded, bound, token_loss)

    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    if behavior_logp is not None:
        gap = torch.where(counted, old - _wide(behavior_logp).detach(), 0.0)
        maxima["engine_gap_max"] = _largest(gap.abs(), counted)
        sums["engine_gap"] = (mean_share * gap.abs()).sum()
        if objective.importance_cap is not None:
            importance = importance_weight(gap, objective.importance_cap)
            token_loss = importance * token_loss
            sums["importance_mean"] = (mean_share * importance).sum()
            sums["importance_capped"] = (mean_share * (importance >= objective.importance_cap)).sum()

    loss = (share * token_loss).sum()
    sums["policy_loss"] = loss.detach()
    if objective.kl_coefficient > 0.0 and ref_logp is not None:
        reference = torch.where(counted, _wide(ref_logp).detach(), 0.0)
        cap = advantage.abs() / objective.kl_coefficient if objective.kl_advantage_cap else None
        divergence = kl(logp, reference, objective.kl, cap)
        kl_loss = (share * divergence).sum()
        loss = loss + objective.kl_coefficient * kl_loss
        sums["kl_loss"] = kl_loss.detach()
        sums["kl_reference"] = (mean_share * kl(logp, reference, "k3")).sum().detach()

    with torch.no_grad():
        sums["clip_fraction_low"] = (mean_share * low).sum()
        sums["clip_fraction_high"] = (mean_share * high).sum()
        sums["dual_clip_fraction"] = (mean_share * bounded).sum()
        sums["ratio_mean"] = (mean_share * ratio).sum()
        sums["approx_kl"] = (mean_share * kl(old, logp, "k3")).sum()
        maxima["ratio_max"] = _largest(ratio, counted)
    return LossResult(loss, {name: value.detach() for name, value in sums.items()}, maxima)


def kl(logp: Tensor, ref_logp: Tensor, kind: KL, gradient_cap: Tensor | None = None) -> Tensor:
    """Estimates of KL(policy || reference) per token, with d = logp - ref_logp: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) + d - 1. `gradient_cap` multiplies k2 by the constant min(1, cap / |d|), which bounds its gradient."""
    d = (_wide(logp) - _wide(ref_logp)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if kind == "k1":
        return d
    if kind == "k3":
        return torch.expm1(-d) + d
    squared = d.square() / 2
    if gradient_cap is None:
        return squared
    size = d.detach().abs()
    return squared * torch.where(size > gradient_cap, gradient_cap / size.clamp_min(1e-12), 1.0)


def importance_weight(old_minus_behavior: Tensor, cap: float) -> Tensor:
    """min(exp(old - behavior), cap), a constant: no gradient flows through it."""
    return old_minus_behavior.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp_max(cap)


def token_shares(weight: Tensor, sequence: Tensor, aggregation: Aggregation, counts: Counts) -> Tensor:
    """The factor of each token's loss in the global one."""
    if aggregation == "token_mean":
        return weight / max(counts.tokens, 1e-12)
    if aggregation == "seq_mean_token_sum":
        return weight / max(counts.sequences, 1e-12)
    length = _per_sequence((weight > 0).to(weight.dtype), sequence)
    return weight / length.clamp_min(1.0)[sequence] / max(counts.sequences, 1e-12)


def _sequence_log_ratio(logp: Tensor, log_ratio: Tensor, counted: Tensor, sequence: Tensor) -> Tensor:
    """Mean log-ratio of the token's sequence; its gradient goes through the token's own log-probability."""
    ones = counted.to(log_ratio.dtype)
    total = _per_sequence(log_ratio.detach() * ones, sequence)
    mean = total / _per_sequence(ones, sequence).clamp_min(1.0)
    return mean[sequence] + logp - logp.detach()


def _per_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    count = int(sequence.max()) + 1 if sequence.numel() else 0
    return values.new_zeros(count).index_add(0, sequence, values)


def _largest(values: Tensor, counted: Tensor) -> Tensor:
    return values[counted].max().detach() if bool(counted.any()) else values.new_zeros(())


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
