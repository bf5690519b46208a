"""Attention over sequences that lie end to end, by one call on every device: `torch.nn.attention.varlen`, or on GPUs
that of the package flash-attn (`learner.attention`), which has never run here.

- On GPUs it is torch's flash attention, or the newer one that `activate_flash_attention_impl` puts in its place. These
  kernels take 16-bit numbers only, so wider ones are narrowed to bfloat16 for the call.
- A sequence may have more keys than queries: what lies before them was computed for another sequence too
  (`batches.py:micro_batch`). Its queries are the last of its tokens, so a causal mask is aligned at the bottom right:
  query i of q sees keys up to i + k - q. So do flash-attn from 2.1 on (its mask.h) and torch's varlen attention, whose
  kernels are flash-attn's 2 and 3. Keys and values of tokens that several sequences have are gathered for each.
- On CPUs torch has no kernel for this op; here it gets one, forward and backward, from torch's flash attention for
  padded batches: sequences of equal length that follow each other are one batch. Memory is linear in the length.
  Its causal mask is aligned at the top left; keys before the first query are a call of their own, and the two are put
  together by their normalisers (FlashAttention-2, arXiv 2307.08691, section 3.1).
- Registered with transformers under a name that holds "flash": only then do its vision towers hand over where sequences
  begin, instead of cutting the tensors at numbers that they read from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import sub
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import varlen

from ..placement.settings import AttentionKernel

NAME: Final = "flash_varlen"
_BY_PACKAGE: Final = "flash_attn_varlen"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where sequences begin and the last one ends [sequences + 1] int32, and the longest one's tokens."""

    at: Tensor
    longest: int


#: (query, key, value, queries' bounds, keys' bounds, scale, causal) -> out; [tokens, heads, head size] each
Kernel = Callable[[Tensor, Tensor, Tensor, Bounds, Bounds, float | None, bool], Tensor]
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
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    *,
    keys: Tensor | None = None,
    kernel: Kernel | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: [1, heads, tokens, head size] in, [1, tokens, heads, head size] out. `cu_seq_lens_q`:
    where sequences begin and the last one ends; `max_length_q`: the longest one's tokens. `keys`: the tokens whose keys
    and values each sequence attends to, one sequence after another, with bounds of their own (`cu_seq_lens_k`,
    `max_length_k`); None: its own. `kernel`: None is torch's."""
    if query.shape[0] != 1 or cu_seq_lens_q is None or max_length_q is None or attention_mask is not None or dropout:
        raise ValueError("packed sequences lie in one row, say where they begin, and need neither mask nor dropout")
    causal = module.is_causal if is_causal is None else is_causal
    kind = query.dtype
    narrow = query.device.type in NARROW and kind not in (torch.bfloat16, torch.float16)
    q, k, v = (part.squeeze(0).transpose(0, 1).to(torch.bfloat16 if narrow else kind) for part in (query, key, value))
    of_queries = of_keys = Bounds(cu_seq_lens_q, max_length_q)
    if keys is not None and cu_seq_lens_k is not None and max_length_k is not None:
        of_keys = Bounds(cu_seq_lens_k, max_length_k)
        k, v = k.index_select(0, keys), v.index_select(0, keys)
    out = (kernel or by_torch)(q, k, v, of_queries, of_keys, scaling, causal)
    return out.to(kind).unsqueeze(0), None


def by_torch(
    q: Tensor, k: Tensor, v: Tensor, of_queries: Bounds, of_keys: Bounds, scale: float | None, causal: bool
) -> Tensor:
    return varlen.varlen_attn(
        q,
        k,
        v,
        of_queries.at,
        of_keys.at,
        of_queries.longest,
        of_keys.longest,
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
        q: Tensor, k: Tensor, v: Tensor, of_queries: Bounds, of_keys: Bounds, scale: float | None, causal: bool
    ) -> Tensor:
        at = (of_queries.at, of_keys.at, of_queries.longest, of_keys.longest)
        out: Tensor = call(q, k, v, *at, softmax_scale=scale, causal=causal)
        return out

    return attend


# --- the op on CPUs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Batch:
    """Neighbours of equal length: their first query and key, their number, and queries and keys of each."""

    query: int
    key: int
    count: int
    queries: int
    keys: int

    def of_queries(self, tensor: Tensor) -> Tensor:
        """[sequences, heads, queries, head size], without a copy."""
        return _cut(tensor, self.query, self.count, self.queries)

    def of_keys(self, tensor: Tensor) -> Tensor:
        return _cut(tensor, self.key, self.count, self.keys)

    def norms(self, lse: Tensor) -> Tensor:
        """[sequences, heads, queries] of [heads, tokens], without a copy."""
        mine = lse[:, self.query : self.query + self.count * self.queries]
        return mine.unflatten(1, (self.count, self.queries)).transpose(0, 1)


def _cut(tensor: Tensor, begin: int, count: int, length: int) -> Tensor:
    return tensor[begin : begin + count * length].unflatten(0, (count, length)).transpose(1, 2)


def _batches(bounds_q: Tensor, bounds_k: Tensor, causal: bool) -> Iterator[_Batch]:
    queries, keys = bounds_q.tolist(), bounds_k.tolist()
    lengths = list(zip(map(sub, queries[1:], queries), map(sub, keys[1:], keys), strict=True))
    first = 0
    for k, length in enumerate(lengths):
        if k + 1 < len(lengths) and lengths[k + 1] == length:
            continue
        of_query, of_key = length
        if of_query and (of_key < of_query if causal else not of_key):
            raise NotImplementedError(f"on CPUs varlen attention takes no {of_query} queries of {of_key} keys")
        if of_query:
            yield _Batch(queries[first], keys[first], k + 1 - first, of_query, of_key)
        first = k + 1


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
    for batch in _batches(cu_seq_q, cu_seq_q if cu_seq_k is None else cu_seq_k, is_causal):
        q, k, v = batch.of_queries(query), batch.of_keys(key), batch.of_keys(value)
        k, v = (part.repeat_interleave(share, 1) if share > 1 else part for part in (k, v))
        before = batch.keys - batch.queries if is_causal else 0
        o, norm = _flash(q, k[:, :, before:], v[:, :, before:], 0.0, is_causal, scale=scale)
        if before:
            earlier, its_norm = _flash(q, k[:, :, :before], v[:, :, :before], 0.0, False, scale=scale)
            # both are means of values, by weights that add up to exp(norm)
            part = torch.sigmoid(its_norm - norm).unsqueeze(-1).to(o.dtype)
            o, norm = torch.lerp(o, earlier, part), torch.logaddexp(norm, its_norm)
        batch.of_queries(out).copy_(o)
        batch.norms(lse).copy_(norm)
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
    # keys that no query sees have none
    grads = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    heads, share = key.shape[1], query.shape[1] // key.shape[1]
    for batch in _batches(cu_seq_q, cu_seq_k, is_causal):
        g, q, o = (batch.of_queries(part) for part in (grad_out, query, out))
        k, v = (batch.of_keys(part) for part in (key, value))
        k, v = (part.repeat_interleave(share, 1) if share > 1 else part for part in (k, v))
        norm, before = batch.norms(lse).contiguous(), batch.keys - batch.queries if is_causal else 0
        # With the norm over all keys, a part of them has its part of the gradient.
        own = _flash_backward(g, q, k[:, :, before:], v[:, :, before:], o, norm, 0.0, is_causal, scale=scale)
        if before:
            its = _flash_backward(g, q, k[:, :, :before], v[:, :, :before], o, norm, 0.0, False, scale=scale)
            own = own[0] + its[0], *(torch.cat(parts, 2) for parts in zip(its[1:], own[1:], strict=True))
        batch.of_queries(grads[0]).copy_(own[0])
        for whole, part in zip(grads[1:], own[1:], strict=True):
            if share > 1:
                part = part.unflatten(1, (heads, share)).sum(2)
            batch.of_keys(whole).copy_(part)
    return grads


def _refuse(window: list[int] | None, causal: bool, *inference: Tensor | None) -> None:
    if (window or [-1, -1]) not in ([-1, -1], [-1, 0] if causal else [-1, -1]) or any(x is not None for x in inference):
        raise NotImplementedError("on CPUs varlen attention has neither sliding windows nor paged keys")


varlen._varlen_attn.register_kernel("cpu")(_forward)
varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
