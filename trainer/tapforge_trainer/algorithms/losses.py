"""The policy loss on flat response tokens. The only file of this room that imports torch.

- Tokens of many sequences lie one after another; `sequence` says which one a token is of (0 .. count-1, local). A
  sequence (one response span, a step's answer) is never split over two calls.
- A loss, found by name, says what a token costs (`loss_registry.py`); weights, averages, corrections, the KL term and
  figures are the same for all of them, and here.
- `policy_loss` divides by *global* counts, so losses and gradients of any split over micro-batches and ranks add up to
  those of the whole. Its `sums` add up the same way; of its `maxima` the largest counts.
- Gradients flow through `logp`, and through `entropy` where the objective has a bonus for it. Everything is computed in
  fp32 at least.
- Log-ratios are held inside +-20 before they are exponentiated: far outside there is no gradient, never inf or nan.
- A token of weight 0 contributes exactly nothing, whatever its numbers are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .corrections import WEIGHTS, Policies, correction
from .distillation import Distillation
from .loss_registry import loss as loss_by_name
from .objective import KL, Aggregation, Counts, Objective
from .tokens import LOG_RATIO_BOUND, TokenLoss, Tokens, exp, per_sequence
from .whole_step import StepTokens, WholeStep, checked


@dataclass(frozen=True, slots=True)
class LossResult:
    #: this call's part of the global loss
    loss: Tensor
    #: parts of global means, detached
    sums: dict[str, Tensor]
    #: detached
    maxima: dict[str, Tensor]
    #: of both, those that tell how far the policy is from the ratio's anchor
    of_ratio: frozenset[str]


def policy_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    sequence: Tensor,
    *,
    objective: Objective,
    counts: Counts,
    weight: Tensor | None = None,
    behavior_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    teacher_logp: Tensor | None = None,
    apart: Tensor | None = None,
    score: Tensor | None = None,
    entropy: Tensor | None = None,
    gathered: Mapping[str, Tensor] | None = None,
    sequences: int | None = None,
    seed: int = 0,
) -> LossResult:
    """All tensors are [tokens]. `old_logp` None: those of `logp` itself. `behavior_logp` (the engine's) switches the
    importance weight on, if the objective has a cap, and is needed by the anchor `behavior` and by corrections;
    `ref_logp` is needed exactly when the objective's KL coefficient is not 0, `teacher_logp` when it has a
    distillation, and `apart`, the divergence from the teacher with its gradient, when that is of the kind
    `forward_kl`; `score`, the returns of the tokens' episodes, by losses that read them; `entropy`, with its
    gradient, when the objective has a bonus for it. `gathered`: what parts of the objective decided over the whole
    optimizer step (`Objective.whole_step`); those that aren't in it decide over these tokens, and draw from `seed`.
    `sequences`: their number, where it is known without reading `sequence`, for which a GPU would be waited for."""
    if objective.kl_coefficient > 0.0 and ref_logp is None:
        raise ValueError(f"kl_coefficient is {objective.kl_coefficient}, but there is no ref_logp; load a reference")
    if objective.distillation is not None and teacher_logp is None:
        raise ValueError("the objective has a distillation, but there is no teacher_logp; load a teacher")
    if behavior_logp is None and (objective.anchor == "behavior" or objective.corrections):
        raise ValueError("the objective compares with the policy that sampled, but there is no behavior_logp")
    weight = torch.ones_like(logp) if weight is None else weight
    counted = weight > 0
    # Tokens that do not count may hold anything (padding): replace, because 0 * inf is nan.
    logp = torch.where(counted, _wide(logp), 0.0)

    def constant(values: Tensor) -> Tensor:
        return torch.where(counted, values.detach().to(logp.dtype), 0.0)

    old = logp.detach() if old_logp is None else constant(old_logp)
    behavior = None if behavior_logp is None else constant(behavior_logp)
    advantage, weight = constant(advantage), weight.to(logp.dtype)
    taught, teacher = objective.distillation, None if teacher_logp is None else constant(teacher_logp)
    if taught is not None:
        advantage = taught.advantage(advantage, logp.detach(), teacher)
    if sequences is None:
        sequences = int(sequence.max()) + 1 if sequence.numel() else 0
    anchor = old if objective.anchor == "old" or behavior is None else behavior
    whole = {name: constant(found) for name, found in (gathered or {}).items()}
    for name, part in objective.whole_step().items():
        if name not in whole:
            read = {"logp": logp, "entropy": entropy, "old": old, "behavior": behavior, "anchor": anchor}
            whole[name] = _gathered_here(part, name, counted, advantage, sequence, read, seed)
    score = None if score is None else constant(score)
    tokens = Tokens(logp, anchor, advantage, counted, sequence, sequences, score, whole.get("loss"))
    share = token_shares(weight, sequence, objective.aggregation, counts, objective.constant_length, sequences)
    mean_share = weight / max(counts.tokens, 1e-12)
    found = loss_by_name(objective.loss, objective.options)(tokens)
    _check(found, objective.loss, tokens)
    token_loss = torch.where(counted, found.loss, 0.0)

    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    if behavior is not None and objective.anchor == "old":
        gap = old - behavior
        maxima["engine_gap_max"] = _largest(gap.abs(), counted)
        sums["engine_gap"] = (mean_share * gap.abs()).sum()
        if objective.importance_cap is not None:
            importance = importance_weight(gap, objective.importance_cap)
            token_loss = importance * token_loss
            sums["importance_mean"] = (mean_share * importance).sum()
            sums["importance_capped"] = (mean_share * (importance >= objective.importance_cap)).sum()
    if behavior is not None and objective.corrections:
        factor, cut = corrected(Policies(tokens, old, behavior, whole), objective.corrections)
        token_loss = factor * token_loss
        sums |= {name: (mean_share * value).sum() for name, value in cut.items()}
    if objective.top_entropy is not None:
        token_loss = token_loss * whole["top_entropy"]
        sums["cut_top_entropy"] = (mean_share * (whole["top_entropy"] == 0)).sum()

    loss = (share * token_loss).sum()
    sums["policy_loss"] = loss.detach()
    if objective.entropy_bonus > 0.0:
        if entropy is None:
            raise ValueError(f"entropy_bonus is {objective.entropy_bonus}, but there are no entropies")
        loss = loss - objective.entropy_bonus * (share * torch.where(counted, entropy, 0.0)).sum()
    if objective.kl_coefficient > 0.0 and ref_logp is not None:
        reference = constant(ref_logp)
        cap = advantage.abs() / objective.kl_coefficient if objective.kl_advantage_cap else None
        divergence = kl(logp, reference, objective.kl, cap, exp(tokens.log_ratio))
        kl_loss = (share * divergence).sum()
        loss = loss + objective.kl_coefficient * kl_loss
        sums["kl_loss"] = kl_loss.detach()
        sums["kl_reference"] = (mean_share * kl(logp, reference, "k3")).sum().detach()
    if taught is not None and teacher is not None:
        if taught.kind != "k1":
            distance = _distance(taught, logp, teacher, apart, counted)
            loss = loss + taught.weight * (share * distance).sum()
        # k1: single tokens that the teacher finds far likelier would decide over a mean of k3.
        sums["distillation_kl"] = (mean_share * kl(logp, teacher, "k1")).sum().detach()

    with torch.no_grad():
        ratio = torch.where(counted, exp(tokens.log_ratio) if found.ratio is None else found.ratio, 0.0)
        shares = {name: (mean_share * changed).sum() for name, changed in found.shares.items()}
        # What the loss has decided over a whole step goes by more than the ratio; its share has the loss's name.
        decided = f"{objective.loss}_fraction" if "loss" in whole else ""
        of_ratio = {name: value for name, value in shares.items() if name != decided}
        of_ratio["ratio_mean"] = (mean_share * ratio).sum()
        of_ratio["approx_kl"] = (mean_share * kl(tokens.anchor, logp, "k3")).sum()
        maxima["ratio_max"] = _largest(ratio, counted)
    sums = {name: value.detach() for name, value in (sums | shares | of_ratio).items()}
    return LossResult(loss, sums, maxima, frozenset({*of_ratio, "ratio_max"}))


def _distance(taught: Distillation, logp: Tensor, teacher: Tensor, apart: Tensor | None, counted: Tensor) -> Tensor:
    """[tokens]: from the teacher, with gradient."""
    if taught.kind != "forward_kl":
        return kl(logp, teacher, "k2" if taught.kind == "k2" else "k3_held")
    if apart is None:
        raise ValueError("the distillation is of the kind forward_kl, but there is no divergence from the teacher")
    return torch.where(counted, _wide(apart), 0.0)


def forward_kl(logp: Tensor, teacher: Tensor) -> Tensor:
    """[tokens]: max(0, sum of t (log t - log p)) by log-probabilities [tokens, k] of the teacher's k likeliest tokens.
    Not renormalised: where they are all tokens, it is KL(teacher || policy); else a sum below 0, which a policy that
    finds them likelier than the teacher has, counts 0 and has no gradient. A token that may not be said (-inf by both)
    adds nothing."""
    said = torch.isfinite(teacher)
    each = torch.where(said, teacher, 0.0).exp() * (torch.where(said, teacher, 0.0) - torch.where(said, logp, 0.0))
    return torch.where(said, each, 0.0).sum(-1).clamp_min(0.0)


def _gathered_here(
    part: WholeStep,
    name: str,
    counted: Tensor,
    advantage: Tensor,
    sequence: Tensor,
    read: Mapping[str, Tensor | None],
    seed: int,
) -> Tensor:
    """[tokens]; 0 where a token doesn't count. As published code has it: over these tokens alone."""

    def shown(values: Tensor) -> Any:
        return values.detach()[counted].double().cpu().numpy()

    here = {key: shown(values) for key, values in read.items() if values is not None}
    place = torch.arange(len(advantage), device=advantage.device)
    step = StepTokens(shown(advantage), shown(sequence).astype(int), shown(place).astype(int), seed=seed, **here)
    found = checked(part.gather(step), name, step)
    whole = torch.zeros_like(advantage)
    whole[counted] = torch.as_tensor(found, dtype=advantage.dtype, device=advantage.device)
    return whole


def _check(found: TokenLoss, name: str, tokens: Tokens) -> None:
    """What a loss of another package answers with. Raises TypeError and ValueError."""
    if not isinstance(found, TokenLoss):
        raise TypeError(f"the loss {name} returned a {type(found).__name__}; a TokenLoss is due")
    of_each = {"": found.loss, **{f" as {share}": changed for share, changed in found.shares.items()}}
    if found.ratio is not None:
        of_each[" as ratio"] = found.ratio
    for what, values in of_each.items():
        shape = tuple(getattr(values, "shape", ()))
        if shape != tuple(tokens.logp.shape):
            raise ValueError(
                f"the loss {name} returned {shape} for {len(tokens.logp)} tokens{what}; one number per token is due"
            )
    if wrong := [share for share in found.shares if "fraction" not in share]:
        raise ValueError(
            f"the loss {name} tells of a share {wrong[0]!r}; names of shares contain 'fraction', so that they are no "
            "other figure's"
        )
    if tokens.logp.requires_grad and not found.loss.requires_grad:
        raise ValueError(f"the loss {name} has no gradient by tokens.logp; don't detach it, and don't use its .data")


def kl(
    logp: Tensor, ref_logp: Tensor, kind: KL, gradient_cap: Tensor | None = None, ratio: Tensor | None = None
) -> Tensor:
    """Estimates of KL(policy || reference) per token, with d = logp - ref_logp, held inside +-20:

        k1        d
        k2        d^2 / 2
        k3        exp(-d) + d - 1
        k3_held   k3, at most 10, without gradient beyond (verl's low_var_kl)
        k3+       k3, with the gradient of k2 (verl)
        k3_ratio  k3 times `ratio`, with the gradient of both: unbiased off policy (arXiv:2512.02556)
        abs       |d|

    `gradient_cap` multiplies k2 by the constant min(1, cap / |d|), which bounds its gradient."""
    raw = _wide(logp) - _wide(ref_logp)
    d = raw.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        squared = d.square() / 2
        if gradient_cap is None:
            return squared
        size = d.detach().abs()
        return squared * torch.where(size > gradient_cap, gradient_cap / size.clamp_min(1e-12), 1.0)
    k3 = torch.expm1(-d) + d
    if kind == "k3_held":
        return k3.clamp_max(10.0)
    if kind == "k3+":
        return k3.detach() + _gradient_alone(raw.square() / 2)
    if kind == "k3_ratio":
        if ratio is None:
            raise ValueError("k3_ratio needs the ratio")
        return ratio * k3
    return k3


def _gradient_alone(values: Tensor) -> Tensor:
    """0 with the gradient of `values`."""
    return values - values.detach()


def corrected(policies: Policies, corrections: Mapping[str, Mapping[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The product of all corrections' factors, and their figures: the mean weight, which tokens each has cut,
    and which have no factor left. All [tokens]."""
    factor = torch.ones_like(policies.old)
    weight = factor
    told: dict[str, Tensor] = {}
    for name, options in corrections.items():
        one, cut = correction(name, options)(policies)
        factor = factor * one
        weight = weight * one if name in WEIGHTS else weight
        told[f"cut_{name}"] = cut
    told["masked"] = factor == 0
    if not WEIGHTS.isdisjoint(corrections):
        told["importance_mean"] = weight
    return factor, told


def importance_weight(old_minus_behavior: Tensor, cap: float) -> Tensor:
    """min(exp(old - behavior), cap), a constant: no gradient flows through it."""
    return old_minus_behavior.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp_max(cap)


def token_shares(
    weight: Tensor,
    sequence: Tensor,
    aggregation: Aggregation,
    counts: Counts,
    constant_length: int = 1,
    sequences: int | None = None,
) -> Tensor:
    """The factor of each token's loss in the global one."""
    if aggregation == "token_mean":
        return weight / max(counts.tokens, 1e-12)
    if aggregation == "seq_mean_token_mean":
        if sequences is None:
            sequences = int(sequence.max()) + 1 if sequence.numel() else 0
        length = per_sequence((weight > 0).to(weight.dtype), sequence, sequences)
        return weight / length.clamp_min(1.0)[sequence] / max(counts.sequences, 1e-12)
    share = weight / max(counts.sequences, 1e-12)
    return share / constant_length if aggregation == "constant" else share


def _largest(values: Tensor, counted: Tensor) -> Tensor:
    """Of numbers that are 0 or more; 0 where none counts. Nothing is read from a device for it."""
    return torch.where(counted, values, 0.0).amax().detach() if values.numel() else values.new_zeros(())


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
