"""Linear layers on CPUs through oneDNN. PyTorch sends fp32 matrix products to MKL, which on processors of other makers
than its own uses half of their vector width: oneDNN was 2 to 3 times faster there, with the same rounding error, and no
slower elsewhere.

- Only fp32 on CPU goes this way; everything else takes PyTorch's own path.
- oneDNN compiles a kernel per shape and does not give all of its memory back (a gigabyte after a few thousand shapes),
  and batches have a new shape nearly every time. So rows are taken in blocks of fixed sizes, and the last few by MKL.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


#: rows per product, largest first; what is left goes to MKL
_BLOCKS = (1024, 128)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _blocks(rows: int) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, whether oneDNN takes them)."""
    begin = 0
    for size in _BLOCKS:
        while rows - begin >= size:
            yield begin, begin + size, True
            begin += size
    if begin < rows:
        yield begin, rows, False


def _rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias for x [rows, inner]."""
    if len(x) in _BLOCKS:
        return _product(x, weight, bias)
    out = x.new_empty(len(x), weight.shape[0])
    for begin, end, ours in _blocks(len(x)):
        out[begin:end] = (_product if ours else F.linear)(x[begin:end], weight, bias)
    return out


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """a.T @ b for a [rows, outer] and b [rows, inner]."""
    total: Tensor | None = None
    for begin, end, ours in _blocks(len(a)):
        left, right = a[begin:end], b[begin:end]
        part = _product(left.t(), right.t()) if ours else left.t() @ right
        total = part if total is None else total.add_(part)
    return a.new_zeros(a.shape[1], b.shape[1]) if total is None else total


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return _rows(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = _rows(flat, weight.t(), None).view(x.shape)
        if ctx.needs_input_grad[1]:
            for_weight = _sum_of_products(flat, x.reshape(-1, x.shape[-1]))
        if ctx.biased and ctx.needs_input_grad[2]:
            for_bias = flat.sum(0)
        return for_x, for_weight, for_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, like `torch.nn.functional.linear`."""
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and x.numel() and available():
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def accelerate(module: nn.Module) -> None:
    """Lets every `nn.Linear` inside compute this way. Parameters and names stay as they are."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.forward = MethodType(_forward, part)


def _forward(part: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, part.weight, part.bias)
