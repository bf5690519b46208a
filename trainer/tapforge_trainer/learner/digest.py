"""Digests of tensors, by which two processes find out that they hold the same bytes.

    digest(t) = sum over all elements of bits(t[i, j, ...]) * a_0[i] * a_1[j] * ...   modulo 2^64
    contents(t) = sum over all elements of mix(bits(t[i, j, ...]))                    modulo 2^64

`bits` is an element as a signed integer of its size, the `a` are odd numbers that follow from axis and index alone.
Sums of integers are the same in any order, so every device has the same digest. One other element has another digest
for certain, several have the same one with a probability of about 2^-32. `contents` does not know where an element
lies: it is for layouts that only a kernel knows. In it zeros count nothing, so padding may be added.

On a GPU a digest reads the tensor once and writes and reads eight bytes for each element, a few million at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: elements that are taken at once: 32 MiB of products
_AT_ONCE = 2**22
#: splitmix64's, as signed numbers
_STEP, _FIRST, _SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def digest(tensor: Tensor) -> Tensor:
    """Of the elements and their places: an int64 on the tensor's device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = _words(tensor)
    rows = _factors(words.shape[0], 0, tensor.device)
    for start, part in _parts(words):
        for axis in range(part.dim() - 1, 0, -1):
            part = _weighted(part, _factors(part.shape[axis], axis, tensor.device))
        total = total + (part * rows[start : start + len(part)]).sum()
    return total


def contents(tensor: Tensor) -> Tensor:
    """Of the elements, wherever they lie."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for _, part in _parts(_words(tensor)):
        total = total + _mixed(part.to(torch.int64)).sum()
    return total


def values(found: dict[str, Tensor]) -> dict[str, int]:
    """Digests as numbers, read from their device at once."""
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}


def _words(tensor: Tensor) -> Tensor:
    words = tensor.detach().view(_WORDS[tensor.dtype.itemsize])
    return words.reshape(1) if words.dim() == 0 else words


def _parts(words: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Slices along the first axis, and where each begins."""
    count = words.shape[0]
    step = max(1, _AT_ONCE * count // max(1, words.numel()))
    for start in range(0, count, step):
        yield start, words[start : start + step]


def _weighted(words: Tensor, factors: Tensor) -> Tensor:
    """The sums along the last axis, int64."""
    if words.device.type == "cpu":  # ten times as fast there as torch's product of integers
        return torch.from_numpy(np.asarray(np.einsum("...j,j->...", words.numpy(), factors.numpy())))
    return (words * factors).sum(-1)


@lru_cache(maxsize=128)
def _factors(length: int, axis: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        index = torch.arange(1, length + 1, dtype=torch.int64, device=device)
        factors = _mixed((index + (axis << 40)) * _STEP) | 1
    if device.type == "cuda":  # the next reader of them may be on another stream
        torch.cuda.current_stream(device).synchronize()
    return factors


def _mixed(words: Tensor) -> Tensor:
    """Each bit of the result depends on each bit of the word; zero stays zero."""
    words = (words ^ (words >> 30)) * _FIRST
    words = (words ^ (words >> 27)) * _SECOND
    return words ^ (words >> 31)
