"""A made-up package flash-attn: the signature of its 2.8, with a kernel on CPUs and shapes everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tapforge_trainer.learner import attention


def _each(bounds: Tensor, key_bounds: Tensor) -> Iterator[tuple[slice, slice]]:
    spans = (pairwise(one.tolist()) for one in (bounds, key_bounds))
    return ((slice(*queries), slice(*keys)) for queries, keys in zip(*spans, strict=True))


def _unseen(queries: int, keys: int) -> Tensor:
    """What a causal mask hides, aligned at the bottom right as of 2.1 on."""
    return torch.ones(queries, keys).triu(keys - queries + 1).bool()


def _alone(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor, scale: float, causal: bool) -> Tensor:
    parts = []
    for queries, keys in _each(bounds, key_bounds):
        one = [part.transpose(0, 1)[None] for part in (q[queries], k[keys], v[keys])]
        seen = ~_unseen(one[0].shape[2], one[1].shape[2]) if causal else None
        out = F.scaled_dot_product_attention(*one, attn_mask=seen, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _taken(q: Tensor, k: Tensor, v: Tensor, *bounds: Tensor) -> None:
    """What the package refuses, by its interface of 2.8."""
    for one in bounds:
        assert one.dtype == torch.int32 and one.is_contiguous() and one.device == q.device
    assert q.shape[1] % k.shape[1] == 0 and k.shape == v.shape and q.shape[-1] <= 256
    for part in (q, k, v):
        assert part.dim() == 3 and part.stride(-1) == 1 and part.device == q.device
        assert part.dtype in (torch.bfloat16, torch.float16) or part.device.type == "cpu"


@torch.library.custom_op("tapforge_tests::varlen_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor, longest: int, scale: float, causal: bool
) -> Tensor:
    return _alone(q, k, v, bounds, key_bounds, scale, causal).contiguous()


@torch.library.custom_op("tapforge_tests::varlen_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    longest: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Within an op there is no autograd: the derivative of softmax attention, sequence by sequence."""
    share = q.shape[1] // k.shape[1]
    found: list[list[Tensor]] = [[], [], []]
    for queries, keys in _each(bounds, key_bounds):
        cut = (grad[queries], q[queries], k[keys], v[keys])
        g, query, key, value = (part.transpose(0, 1) for part in cut)
        key, value = key.repeat_interleave(share, 0), value.repeat_interleave(share, 0)
        scores = query @ key.transpose(1, 2) * scale
        if causal:
            scores = scores.masked_fill(_unseen(*scores.shape[1:]), -torch.inf)
        weights = scores.softmax(-1)
        passed = g @ value.transpose(1, 2)
        inner = weights * (passed - (passed * weights).sum(-1, keepdim=True)) * scale
        for parts, one in zip(
            found, (inner @ key, inner.transpose(1, 2) @ query, weights.transpose(1, 2) @ g), strict=True
        ):
            heads = one if parts is found[0] else one.unflatten(0, (-1, share)).sum(1)
            parts.append(heads.transpose(0, 1))
    dq, dk, dv = (torch.cat(parts).contiguous() for parts in found)
    return dq, dk, dv


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor, longest: int, scale: float, causal: bool
) -> Tensor:
    _taken(q, k, v, bounds, key_bounds)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    longest: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _taken(q, k, v, bounds, key_bounds)
    assert grad.shape == q.shape and grad.dtype == q.dtype and grad.device == q.device
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.numbers = inputs[5:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.numbers), *(None,) * 5)


_forward.register_autograd(_differentiate, setup_context=_keep)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert type(max_seqlen_q) is type(max_seqlen_k) is int
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    found: Tensor = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, scale, causal)
    return found


@contextmanager
def installed() -> Iterator[None]:
    """For who attends; transformers, which would look for more of it, doesn't see it."""
    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "import_module", {"flash_attn": module}.__getitem__)
        yield
