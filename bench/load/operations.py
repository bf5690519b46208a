"""Floating-point operations that torch computes, counted as it computes them: by torch's own counter, which gets the
formulas of a CPU's ops. Causal attention counts half of its square, and twice of that in the backward pass, as the
model needs it (`learner/flops.py`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import varlen
from torch.utils.flop_counter import FlopCounterMode


def counter() -> FlopCounterMode:
    aten, varying = torch.ops.aten, torch.ops.torch_attn
    known: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _flash,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
        varying._varlen_attn: _varlen,
        varying._varlen_attn_backward: _varlen_backward,
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        known[torch.ops.mkldnn._linear_pointwise] = _linear
    for count in known.values():
        count._get_raw = True  # type: ignore[attr-defined]
    return FlopCounterMode(display=False, custom_mapping=known)


assert varlen  # its ops are registered


def _linear(x: Any, weight: Any, *others: Any, out_val: Any, **named: Any) -> int:
    return int(2 * x.numel() * weight.shape[0])


def _attention(query: Any, key: Any, causal: bool) -> int:
    """[batch, heads, tokens, size] each."""
    batch, heads, tokens, size = query.shape
    return int(4 * batch * heads * tokens * key.shape[2] * size) // (2 if causal else 1)


def _flash(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *, out_val: Any, **named: Any) -> int:
    return _attention(q, k, causal)


def _flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dropout: float, causal: bool, *, out_val: Any, **named: Any
) -> int:
    return 2 * _attention(q, k, causal)


def _spans(query: Any, bounds: Any, key_bounds: Any, causal: bool) -> int:
    """[tokens, heads, size]; bounds: where sequences begin and the last one ends."""
    queries, keys = ([end - begin for begin, end in pairwise(one.tolist())] for one in (bounds, key_bounds))
    squares = sum(q * (2 * k - q if causal else k) for q, k in zip(queries, keys, strict=True))
    return int(4 * query.shape[1] * query.shape[2] * squares) // (2 if causal else 1)


def _varlen(
    q: Any, k: Any, v: Any, bounds: Any, *others: Any, out_val: Any, is_causal: bool = False, **named: Any
) -> int:
    return _spans(q, bounds, others[0], bool(others[3]) if len(others) > 3 else is_causal)


def _varlen_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bounds: Any, *others: Any, out_val: Any, **named: Any
) -> int:
    causal = bool(others[3]) if len(others) > 3 else bool(named.get("is_causal"))
    return 2 * _spans(q, bounds, others[0], causal)
