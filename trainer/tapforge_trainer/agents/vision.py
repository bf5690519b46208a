"""Frames as the model sees them: resized once, here, so that no image processor has anything left to resize.

Promises:
- The size of a fitted frame is a multiple of patch x merge on both sides and within the processor's bounds: a fixed
  point of the processor's own resizing. One visual token is one cell of patch x merge pixels squared.
- A frame that can't be shown whole raises EnvironmentFault (`screens.py`).
- The cache is bounded and belongs to the `FrameFitter`, which may be called from several threads.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tapforge_envs.protocol import EnvironmentFault, Frame

from ..frames.frame import FittedFrame, Pixels
from .image_processor import ImageProcessor
from .screens import decode_screen, resize

#: a screen that is longer than this compared with its other side is none; image processors refuse it too
_MAX_ASPECT = 200


@dataclass(frozen=True, slots=True)
class VisionGrid:
    """How an image becomes visual tokens. Bounds are numbers of visual tokens, both inclusive."""

    patch: int
    merge: int
    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        if self.patch < 1 or self.merge < 1 or not 1 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"{self} is not a vision grid: patch, merge and 1 <= min_tokens <= max_tokens are needed")

    @property
    def cell(self) -> int:
        """Pixels of a visual token's side."""
        return self.patch * self.merge

    @staticmethod
    def load(model_folder: Path) -> VisionGrid:
        """From the image processor's own configuration, so that the two can't disagree."""
        found = ImageProcessor.of_folder(model_folder)
        area = (found.patch * found.merge) ** 2
        return VisionGrid(
            found.patch,
            found.merge,
            min_tokens=max(1, -(-found.min_pixels // area)),
            max_tokens=found.max_pixels // area,
        )

    def at_most(self, pixels: int) -> VisionGrid:
        """With frames of at most so many pixels. Raises ValueError where the image processor would enlarge them."""
        tokens = pixels // self.cell**2
        if tokens < self.min_tokens:
            raise ValueError(
                f"maxPixels {pixels:,} is less than the {self.min_tokens * self.cell**2:,} pixels to which the model's "
                "image processor enlarges the smallest frame; give at least that many"
            )
        return self.within(tokens)

    def at_least(self, pixels: int) -> VisionGrid:
        """With frames of at least so many pixels. Raises ValueError where the image processor enlarges further, or
        where no frame may have as many."""
        area = self.cell**2
        tokens = -(-pixels // area)
        if tokens < self.min_tokens:
            raise ValueError(
                f"minPixels {pixels:,} is less than the {self.min_tokens * area:,} pixels to which the model's image "
                "processor enlarges the smallest frame; leave it out, or give at least that many"
            )
        if tokens > self.max_tokens:
            raise ValueError(
                f"minPixels {pixels:,} are {tokens:,} visual tokens of {self.cell}x{self.cell} pixels, and a frame may "
                f"have {self.max_tokens:,} (maxPixels, or the model's image processor); give less"
            )
        return replace(self, min_tokens=tokens)

    def bounded(self, least: int | None, most: int | None, *, otherwise: int) -> VisionGrid:
        """With frames of at least and at most so many pixels; without `most`, of at most `otherwise` visual tokens.
        Raises ValueError for bounds that no frame keeps."""
        grid = self if most is None else self.at_most(most)
        grid = grid if least is None else grid.at_least(least)
        return grid.within(otherwise) if most is None else grid

    def within(self, tokens: int) -> VisionGrid:
        """With frames of at most so many visual tokens, as far as the image processor allows."""
        return replace(self, max_tokens=max(self.min_tokens, min(self.max_tokens, tokens)))

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """The size that an image of this size is resized to: itself if it is already right."""
        if width < 1 or height < 1 or max(width, height) > _MAX_ASPECT * min(width, height):
            raise ValueError(f"{width}x{height} is not a size of a screen")
        cell = self.cell
        columns, rows = round(width / cell), round(height / cell)
        if columns * rows > self.max_tokens:
            shrink = math.sqrt(self.max_tokens * cell * cell / (width * height))
            columns, rows = math.floor(width * shrink / cell), math.floor(height * shrink / cell)
        elif columns * rows < self.min_tokens:
            grow = math.sqrt(self.min_tokens * cell * cell / (width * height))
            columns, rows = math.ceil(width * grow / cell), math.ceil(height * grow / cell)
        columns, rows = max(1, columns), max(1, rows)
        if not self._allows(columns, rows):
            columns, rows = self._nearest(width / height)
        return columns * cell, rows * cell

    def _allows(self, columns: int, rows: int) -> bool:
        within = self.min_tokens <= columns * rows <= self.max_tokens
        return within and max(columns, rows) <= _MAX_ASPECT * min(columns, rows)

    def _nearest(self, aspect: float) -> tuple[int, int]:
        """Narrow bounds or extreme shapes: of all allowed grids the one whose shape is nearest, larger ones first."""
        best: tuple[float, int, int, int] | None = None
        for columns in range(1, self.max_tokens + 1):
            low, high = -(-self.min_tokens // columns), self.max_tokens // columns
            rows = min(max(round(columns / aspect), low, 1), high)
            if rows < low or not self._allows(columns, rows):
                continue
            candidate = (abs(math.log(columns / rows / aspect)), -columns * rows, columns, rows)
            best = candidate if best is None else min(best, candidate)
        if best is None:
            raise ValueError(f"no image has {self.min_tokens} to {self.max_tokens} visual tokens; widen the bounds")
        return best[2], best[3]

    def visual_tokens(self, width: int, height: int) -> int:
        """Tokens of an image of this size, after fitting."""
        width, height = self.fit(width, height)
        return (width // self.cell) * (height // self.cell)


def tokens_per_frame(context_tokens: int, response_tokens: int, history_images: int) -> int:
    """Visual tokens that a frame may have by default: as many as let all the frames that a prompt shows take
    three quarters of it. Then no screen is left out for want of room, and the system prompt, the goal and the earlier
    answers have the last quarter. Processors of real models allow 16,384 tokens, twice a usual context."""
    return max(1, (context_tokens - response_tokens) * 3 // (4 * max(1, history_images)))


class FrameFitter:
    """Checks frames and brings them to the model's size. What it saw lately it gives again for nothing: screens that
    didn't change, and those with which the episodes of a group begin. Several threads may use it."""

    def __init__(self, grid: VisionGrid, *, max_bytes: int = 64 * 1024 * 1024):
        self.grid = grid
        self._max_bytes = max_bytes
        #: (hash, width, height) of what came -> what it was made into
        self._seen: OrderedDict[tuple[str, int, int], FittedFrame] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def fit(self, frame: Frame) -> tuple[FittedFrame, Callable[[], Pixels]]:
        """The frame as the model sees it, and its pixels. Raises EnvironmentFault for a frame that is not what it
        says."""
        key = (frame.sha256, frame.width, frame.height)
        with self._lock:
            known = self._seen.get(key)
            if known is not None:
                self._seen.move_to_end(key)
                return known, known.pixels
        fitted, pixels = fit_frame(frame, self.grid)  # outside the lock: several threads fit side by side
        with self._lock:
            if key not in self._seen:
                self._seen[key] = fitted
                self._bytes += _kept(fitted)
            while self._bytes > self._max_bytes:
                _, old = self._seen.popitem(last=False)
                self._bytes -= _kept(old)
        return fitted, lambda: pixels

    def outline(self, frame: Frame) -> FittedFrame:
        """The frame's size as the model sees it, without pixels, and named as it came. Raises EnvironmentFault."""
        return FittedFrame(frame.sha256, b"", *_fitted(frame, self.grid))


def _kept(frame: FittedFrame) -> int:
    """Bytes of an entry: those of the frame, and about as much as keys and records take."""
    return len(frame.data) + 1024


def fit_frame(frame: Frame, grid: VisionGrid) -> tuple[FittedFrame, Pixels]:
    """The frame as the model sees it, and its pixels. Raises EnvironmentFault (see module)."""
    pixels = decode_screen(frame)
    width, height = _fitted(frame, grid)
    if (width, height) != (frame.width, frame.height):
        pixels = resize(pixels, width, height)
    return FittedFrame.of(pixels), pixels


def _fitted(frame: Frame, grid: VisionGrid) -> tuple[int, int]:
    try:
        return grid.fit(frame.width, frame.height)
    except ValueError as error:
        raise EnvironmentFault(f"frame {frame.sha256[:12]}: {error}") from error
