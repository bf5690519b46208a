"""The key of a frame: what its tiles hold, below the status bar. A pure function of the pixels; numpy only.

- The top `STATUS_BAR` of the height counts for nothing: clock, battery and signs are there.
- The rest is a grid of square tiles, `TILES` along the shorter side. Each has 16 bits of a hash of all its pixels:
  screens are sharp and drawn alike, so a tile is equal or it is not; a switch, a digit or a letter shows.
- Beside them 64 bits of the frame without thin upright bars, by which `grouping` knows a caret that blinks.
- It takes about 1.5 ms for a fitted screen (768x1696) and 3.5 ms for one of 1080x2400 (`make bench-states`): call it
  off the event loop.

Keys are written as text, and equal on every machine.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..frames.frame import Pixels

#: share of the height
STATUS_BAR = 0.04
TILES = 16
#: width of a bar that is taken away, of the screen's width, to both sides of its middle
_BAR = 0.004
#: every second row is enough to know a bar
_EVERY = 2
#: rows at once, so that they stay in the processor's cache
_BAND = 64
#: another way of making keys gets another number, so that the two are never compared
_VERSION = 1


@dataclass(frozen=True, slots=True)
class FrameKey:
    #: rows and columns of 16 bits
    tiles: NDArray[np.uint16]
    #: the frame without thin upright bars
    barless: bytes

    def text(self) -> str:
        rows, columns = self.tiles.shape
        head = bytes((_VERSION, rows >> 8, rows & 255, columns))
        return base64.b64encode(head + self.barless + self.tiles.astype("<u2").tobytes()).decode()

    @staticmethod
    def of_text(text: str) -> FrameKey:
        """Raises ValueError for what `text` of this version didn't write."""
        try:
            data = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"{text[:20]!r}... is not a frame key: {error}") from error
        rows, columns = int.from_bytes(data[1:3], "big"), data[3] if len(data) > 3 else 0
        if data[:1] != bytes((_VERSION,)) or len(data) != 12 + 2 * rows * columns:
            raise ValueError(f"{text[:20]!r}... is not a frame key of version {_VERSION}")
        return FrameKey(np.frombuffer(data, "<u2", offset=12).reshape(rows, columns), data[4:12])


def frame_key(pixels: Pixels) -> FrameKey:
    """Of an image of height x width x 3."""
    height, width, _ = pixels.shape
    seen = pixels[min(round(height * STATUS_BAR), height - 1) :]
    side = min(height, width) / TILES
    down, across = max(1, round(len(seen) / side)), max(1, round(width / side))
    tiles = _hashes(seen.reshape(len(seen), -1), down, across)
    reach, rest = round(width * _BAR), tiles
    if reach:  # on a smaller screen a caret is no thinner than a letter
        grey = np.ascontiguousarray(seen[::_EVERY, :, 1])
        rest = _hashes(_without_bars(grey, reach), down, across)
    digest = hashlib.blake2b(rest.tobytes(), digest_size=8).digest()
    return FrameKey((tiles >> np.uint64(48)).astype(np.uint16), digest)


def _hashes(rows: Pixels, down: int, across: int) -> NDArray[np.uint64]:
    """A sum per tile of its words of eight bytes, each times a fixed odd number of its place: exact, and fast."""
    if rows.shape[1] % 8:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
    words = np.ascontiguousarray(rows).view("<u8")
    y, x = _edges(words.shape[0], down), _edges(words.shape[1], across)
    weights = _weights(int(np.diff(y).max()), words.shape[1])
    sums = np.stack([(words[a:b] * weights[: b - a]).sum(0) for a, b in itertools.pairwise(y)])
    return np.add.reduceat(sums, x[:-1], axis=1)


def _edges(length: int, parts: int) -> NDArray[np.int64]:
    return np.linspace(0, length, min(parts, length) + 1).astype(np.int64)


@lru_cache(maxsize=8)
def _weights(rows: int, words: int) -> NDArray[np.uint64]:
    """Odd numbers by the mixer of splitmix64: the same everywhere."""
    z = np.arange(1, rows * words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).reshape(rows, words)


def _without_bars(grey: Pixels, reach: int) -> Pixels:
    """Dark bars on light ground and light ones on dark are filled where they are at most 2 x `reach` wide. Rows are
    joined end to end, which is twice as fast; what that does at the edges, it does in every frame."""
    window = 2 * reach + 1
    filled = grey.copy()
    for at in range(0, len(grey), _BAND):
        band = grey[at : at + _BAND].reshape(-1)
        closed = _slide(_slide(band, window, np.maximum), window, np.minimum)
        filled[at : at + _BAND].reshape(-1)[: len(closed) - 4 * reach] = _slide(
            _slide(closed, window, np.minimum), window, np.maximum
        )
    return filled


def _slide(line: Pixels, window: int, most: np.ufunc) -> Pixels:
    """The largest or smallest of every `window` neighbours, by doubling."""
    reach = 1
    while reach < window:
        step = min(reach, window - reach)
        line = most(line[:-step], line[step:])
        reach += step
    return line
