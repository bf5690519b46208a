"""Attention over sequences that lie end to end, by one call on every device: `torch.nn.attention.varlen`, or on GPUs
that of the package flash-attn (`learner.attention`), which has never run here.

- On GPUs it is torch's flash attention, or the newer one that `activate_flash_attention_impl` puts in its place. These
  kernels take 16-bit numbers only, so wider ones are narrowed to bfloat16 for the call.
- On CPUs torch has no kernel for this op; here it gets one, forward and backward, from torch's flash attention for
  padded batches: sequences of equal length that follow each other are one batch. Memory is linear in the length.
- Registered with transformers under a name that holds "flash": only then do its vision towers hand over where sequences
  begin, instead of cutting the tensors at numbers that they read from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import varlen

from ..placement.settings import AttentionKernel

NAME: Final = "flash_varlen"
_BY_PACKAGE: Final = "flash_attn_varlen"
#: (query, key, value, bounds, longest, scale, causal) -> out; [tokens, heads, head size] each
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, bool], Tensor]
#: devices whose kernel takes 16-bit numbers only
NARROW: Final = {"cuda"}

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def use(model: Any, kernel: AttentionKernel = "torch") -> None:
    """Lets every attention layer of a transformers model attend this way. Raises RuntimeError where flash-attn is not
    installed."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    name, call = (NAME, by_torch) if kernel == "torch" else (_BY_PACKAGE, by_package())
    AttentionInterface.register(name, partial(attention, kernel=call))
    AttentionMaskInterface.register(name, flash_attention_mask)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = name


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    *,
    kernel: Kernel | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: [1, heads, tokens, head size] in, [1, tokens, heads, head size] out. `cu_seq_lens_q`:
    where sequences begin and the last one ends; `max_length_q`: the longest one's tokens. `kernel`: None is torch's."""
    if query.shape[0] != 1 or cu_seq_lens_q is None or max_length_q is None or attention_mask is not None or dropout:
        raise ValueError("packed sequences lie in one row, say where they begin, and need neither mask nor dropout")
    causal = module.is_causal if is_causal is None else is_causal
    kind = query.dtype
    narrow = query.device.type in NARROW and kind not in (torch.bfloat16, torch.float16)
    q, k, v = (part.squeeze(0).transpose(0, 1).to(torch.bfloat16 if narrow else kind) for part in (query, key, value))
    out = (kernel or by_torch)(q, k, v, cu_seq_lens_q, max_length_q, scaling, causal)
    return out.to(kind).unsqueeze(0), None


def by_torch(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None, causal: bool
) -> Tensor:
    return varlen.varlen_attn(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def by_package() -> Kernel:
    """flash-attn's call, of 2.x. Fewer key heads than query heads need no word. Raises RuntimeError."""
    try:
        call = import_module("flash_attn").flash_attn_varlen_func
    except ImportError as error:
        raise RuntimeError(
            f"learner.attention: flash-attn can't be imported ({error}); install a wheel of it that is built for this "
            "torch (docs/gpus.md), or leave the field out"
        ) from error

    def attend(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None, causal: bool
    ) -> Tensor:
        out: Tensor = call(q, k, v, bounds, bounds, longest, longest, softmax_scale=scale, causal=causal)
        return out

    return attend


# --- the op on CPUs ---------------------------------------------------------------------------------------------------


def _batches(bounds: Tensor) -> Iterator[tuple[int, int, int]]:
    """(begin, sequences, tokens of each) of neighbours of equal length."""
    at = bounds.tolist()
    first = 0
    for k in range(1, len(at)):
        if k + 1 == len(at) or at[k + 1] - at[k] != at[k] - at[k - 1]:
            if at[k] > at[k - 1]:
                yield at[first], k - first, at[k] - at[k - 1]
            first = k


def _cut(tensor: Tensor, begin: int, count: int, length: int) -> Tensor:
    """[sequences, heads, tokens, head size], without a copy."""
    return tensor[begin : begin + count * length].unflatten(0, (count, length)).transpose(1, 2)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse(window_size, is_causal, seqused_k, block_table)
    out = torch.empty_like(query)
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float)
    share = query.shape[1] // key.shape[1]
    for span in _batches(cu_seq_q):
        q, k, v = (_cut(part, *span) for part in (query, key, value))
        k, v = (part.repeat_interleave(share, 1) if share > 1 else part for part in (k, v))
        o, norm = _flash(q, k, v, 0.0, is_causal, scale=scale)
        _cut(out, *span).copy_(o)
        begin, count, length = span
        lse[:, begin : begin + count * length] = norm.transpose(0, 1).flatten(1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(torch.empty_like(part) for part in (query, key, value))
    heads, share = key.shape[1], query.shape[1] // key.shape[1]
    for span in _batches(cu_seq_q):
        begin, count, length = span
        g, q, k, v, o = (_cut(part, *span) for part in (grad_out, query, key, value, out))
        k, v = (part.repeat_interleave(share, 1) if share > 1 else part for part in (k, v))
        norm = lse[:, begin : begin + count * length].unflatten(1, (count, length)).transpose(0, 1)
        found = _flash_backward(g, q, k, v, o, norm.contiguous(), 0.0, is_causal, scale=scale)
        for whole, part in zip(grads, found, strict=True):
            if share > 1 and whole is not grads[0]:
                part = part.unflatten(1, (heads, share)).sum(2)
            _cut(whole, *span).copy_(part)
    return grads


def _refuse(window: list[int] | None, causal: bool, *inference: Tensor | None) -> None:
    if (window or [-1, -1]) not in ([-1, -1], [-1, 0] if causal else [-1, -1]) or any(x is not None for x in inference):
        raise NotImplementedError("on CPUs varlen attention has neither sliding windows nor paged keys")


varlen._varlen_attn.register_kernel("cpu")(_forward)
varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
