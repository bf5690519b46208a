"""What a frozen vision tower made of frames, by content hash, in bounded memory. It never goes stale, because the tower
never changes; the least recently used frames go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

#: bytes kept
FEATURES_KEPT = 256 * 1024 * 1024


class FrozenFeatures:
    """Of one tower: for each frame one tensor [visual tokens, width] per level of its output."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, list[Tensor]] = OrderedDict()
        self._bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def add(self, names: Sequence[str], counts: Sequence[int], levels: Sequence[Tensor]) -> None:
        """`levels` hold the frames one after another, each with its count of visual tokens."""
        split = zip(*(level.split(list(counts)) for level in levels), strict=True)
        for name, parts in zip(names, split, strict=True):
            self._drop(name)
            self._kept[name] = [part.clone() for part in parts]
            self._bytes += sum(part.nbytes for part in parts)

    def take(self, names: Sequence[str]) -> list[Tensor]:
        """The named frames one after another, per level; then what exceeds the bound is dropped."""
        found = [self._kept[name] for name in names]
        for name in names:
            self._kept.move_to_end(name)
        while self._bytes > FEATURES_KEPT:
            self._drop(next(iter(self._kept)))
        return [torch.cat(level) for level in zip(*found, strict=True)]

    def _drop(self, name: str) -> None:
        self._bytes -= sum(part.nbytes for part in self._kept.pop(name, ()))

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0
