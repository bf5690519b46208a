"""Hidden states in, log-probability and entropy, or what else is asked for, of chosen tokens out: the head. Of a
teacher also what it finds likely, and of its student how far it is from that.

- Tokens that the policy may not say are masked out, logits are divided by the temperature, the rest is renormalised.
- Logits are fp32 whatever the number format of hidden states and weight: rounded to bf16, those of 16 to 32 move by up
  to 0.0625, which is most of the difference between a learner and an engine. The engine's head does the same
  (`engine/vllm.py`).
- Logits exist for a bounded number of positions at a time, in the backward pass too; the softmax is fp32.
- `install` makes it the forward pass of the head's own module, so that a wrapper that shards it gathers its weight
  once for all pieces.

torch's `linear_cross_entropy` would take a mask as a bias of -inf, but gives no entropy, and neither do liger's chunked
losses, which take no mask either.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tapforge_trainer.algorithms.losses import forward_kl

from .linear import linear

#: a token's second number beside its log-probability, over what may be said: the entropy, as a constant or with its
#: gradient; or the sum of squared probabilities, a constant
Beside = Literal["entropy", "entropy_with_gradient", "squared"]
#: logits (positions x vocabulary) that exist at one time; 64 Mi are 256 MiB in fp32
LOGITS_AT_ONCE = 64 * 1024 * 1024
#: numbers of the weight that are cast to fp32 at one time where no kernel has fp32 results of narrower factors
_CAST_AT_ONCE = 4 * 1024 * 1024


def install(head: nn.Module) -> None:
    """Calling `head` is calling `token_logprobs` from now on."""
    head.forward = MethodType(token_logprobs, head)


def token_logprobs(
    head: Any,
    hidden: Tensor,
    target: Tensor,
    allowed: Tensor,
    temperature: float,
    beside: Beside = "entropy",
    taught: tuple[Tensor, Tensor] | None = None,
    likely: int = 0,
) -> tuple[Tensor, ...]:
    """(log-probability, what `beside` says) [tokens] of `target` [tokens] by `hidden` [tokens, width].
    `allowed` [vocabulary] bool. With `taught`, a teacher's (ids, log-probabilities) [tokens, k], also the divergence
    from them [tokens]; with `likely`, k, also the own ones [tokens, k] of the k likeliest tokens."""
    weight = head.weight
    step = max(1, LOGITS_AT_ONCE // weight.shape[0])
    piece = partial(_piece, weight=weight, allowed=allowed, temperature=temperature, beside=beside, likely=likely)
    given = (hidden, target, *(taught or ()))
    if len(target) <= step:
        return piece(*given)
    parts = [
        checkpoint(piece, *(one[i : i + step] for one in given), use_reentrant=False)
        for i in range(0, len(target), step)
    ]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _piece(
    hidden: Tensor,
    target: Tensor,
    *taught: Tensor,
    weight: Tensor,
    allowed: Tensor,
    temperature: float,
    beside: Beside,
    likely: int,
) -> tuple[Tensor, ...]:
    logits = _logits(hidden, weight)
    if temperature != 1.0:
        logits = logits / temperature
    # `where` and not addition: a banned token gets no gradient, and never -inf * 0.
    logits = torch.where(allowed, logits, float("-inf"))
    everything = torch.log_softmax(logits, dim=-1)
    more: tuple[Tensor, ...] = ()
    if taught:
        # One look into all log-probabilities has one gradient of their size.
        ids, teacher = taught
        found = everything.gather(1, torch.cat([target.unsqueeze(1), ids], 1))
        logp, more = found[:, 0].clone(), (forward_kl(found[:, 1:], teacher),)
    else:
        logp = -F.nll_loss(everything, target, reduction="none")
    if likely:
        own = everything.topk(likely)
        more = (own.indices, own.values)
    with torch.set_grad_enabled(beside == "entropy_with_gradient" and torch.is_grad_enabled()):
        if beside == "squared":
            return logp, (2.0 * everything).exp().sum(-1), *more
        return logp, -(everything.exp() * torch.where(allowed, everything, 0.0)).sum(-1), *more


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T in fp32, [tokens, vocabulary]."""
    if hidden.dtype == torch.float32:
        return linear(hidden, weight)
    logits: Tensor = _FullLogits.apply(hidden, weight)
    return logits


class _FullLogits(torch.autograd.Function):
    """fp32 products of bf16 factors. `torch.mm(out_dtype=...)` accumulates into its fp32 result without casting the
    weight, has a kernel on GPUs alone and no derivative."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.device.type == "cuda":
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        whole = hidden.float()
        logits = whole.new_empty(len(hidden), len(weight))
        rows = max(1, _CAST_AT_ONCE // weight.shape[1])
        for i in range(0, len(weight), rows):
            logits[:, i : i + rows] = whole @ weight[i : i + rows].float().t()
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """In the factors' format, as `torch.nn.functional.linear` has it: gradients of logits are below 1, and sums
        over them are fp32 inside the product."""
        hidden, weight = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        for_hidden = grad @ weight if ctx.needs_input_grad[0] else None
        for_weight = grad.t() @ hidden if ctx.needs_input_grad[1] else None
        return for_hidden, for_weight
