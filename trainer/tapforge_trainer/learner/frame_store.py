"""Frames as the vision tower wants them: decoded once, cut into patches once, kept by name in bounded memory.

Rules:
- A frame already has the model's size (`agents/vision.py` saw to that): nothing is resized here, and a frame whose
  sides are not multiples of patch x merge is an error.
- Patches lie in the order of the model's image processor: block by block of merge x merge neighbours, each patch as
  channel, row, column. The processor's temporal copy is left out: the model gets it back (`packed.py`).
- Values stay bytes; scaling to floats happens in the tensor that a micro-batch makes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tapforge_trainer.agents.image_processor import ImageProcessor
from tapforge_trainer.frames.frame import FittedFrame, FrameError, decode


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """What of the image processor's settings is left when frames have the right size."""

    patch: int
    merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    #: visual tokens below which the processor would enlarge a frame
    least_tokens: int = 1

    @staticmethod
    def of_folder(folder: Path) -> PixelFormat:
        found = ImageProcessor.of_folder(folder)
        area = (found.patch * found.merge) ** 2
        return PixelFormat(found.patch, found.merge, found.mean, found.std, max(1, -(-found.min_pixels // area)))

    @property
    def cell(self) -> int:
        """Pixels along a side of one visual token."""
        return self.patch * self.merge

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Visual tokens (rows, columns) of a frame."""
        if width % self.cell or height % self.cell or not width or not height:
            raise FrameError(
                f"a frame of {width}x{height} pixels does not divide into cells of {self.cell}; fit it first"
            )
        return height // self.cell, width // self.cell


def cut(pixels: np.ndarray, form: PixelFormat) -> np.ndarray:
    """Bytes [patches, 3 * patch * patch] in the processor's order."""
    height, width, _ = pixels.shape
    rows, columns = form.grid(width, height)
    p, m = form.patch, form.merge
    # A row of a patch is one item: half the time of moving bytes.
    patches = np.empty((rows, columns, m, m, 3, p), f"V{p}")
    for channel in range(3):
        plane = np.ascontiguousarray(pixels[:, :, channel]).view(patches.dtype).reshape(rows, m, p, columns, m)
        patches[:, :, :, :, channel] = plane.transpose(0, 3, 1, 4, 2)
    return patches.view(np.uint8).reshape(rows * columns * m * m, 3 * p * p)


@dataclass(frozen=True, slots=True)
class Patches:
    """A frame, ready. `values` is [patches, 3 * patch * patch], bytes."""

    values: np.ndarray
    #: visual tokens
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


class FrameStore:
    """Ready frames by name; the least recently used ones go when `max_bytes` is exceeded."""

    def __init__(self, form: PixelFormat, max_bytes: int = 256 * 1024 * 1024):
        self.form = form
        self._max_bytes = max_bytes
        self._bytes = 0
        self._ready: OrderedDict[str, Patches] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._ready

    def get(self, names: Iterable[str], frames: Mapping[str, FittedFrame]) -> dict[str, Patches]:
        """The named frames; those not at hand are decoded from `frames`. Nothing that is asked for now is evicted."""
        found: dict[str, Patches] = {}
        for name in names:
            if name in found:
                continue
            ready = self._ready.get(name)
            if ready is None:
                frame = frames.get(name)
                if frame is None:
                    raise FrameError(f"frame {name[:12]} is not among the {len(frames)} that came with the samples")
                ready = self._keep(name, frame.pixels())
            else:
                self._ready.move_to_end(name)
            found[name] = ready
        self.trim()
        return found

    def at_hand(self, names: Iterable[str]) -> dict[str, Patches]:
        """The named frames, which are all there. Nothing is evicted."""
        for name in names:
            self._ready.move_to_end(name)
        return {name: self._ready[name] for name in names}

    def put(self, name: str, data: bytes) -> None:
        """Keeps a frame at hand, beyond the bound if need be, until `trim`."""
        if name not in self._ready:
            self._keep(name, decode(data, name))

    def trim(self) -> None:
        """Drops what exceeds the bound."""
        while self._bytes > self._max_bytes and self._ready:
            _, gone = self._ready.popitem(last=False)
            self._bytes -= gone.values.nbytes

    def _keep(self, name: str, pixels: np.ndarray) -> Patches:
        height, width, _ = pixels.shape
        rows, columns = self.form.grid(width, height)
        ready = Patches(cut(pixels, self.form), rows, columns)
        self._ready[name] = ready
        self._bytes += ready.values.nbytes
        return ready
