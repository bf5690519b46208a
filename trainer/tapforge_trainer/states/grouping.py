"""Which steps of a group saw the same state. Pure, and independent of the order in which steps are given.

Rules, in order:
1. A step's state is given by the first that it has: the environment's exact key, the key of its UI tree, the key of its
   frame. Steps whose states are given by different ones are different states.
2. Without an exact key, another app or another window is another state.
3. Without exact keys, the first steps of all episodes are one state: a group's episodes begin alike, whatever a clock
   or a picture of the day shows.
4. Frames with the same key are one state. So are two more kinds of neighbours:
   - frames that differ from the first ones only where these differ among themselves, or right beside it: what changed
     there, changed by itself (the clock of a home screen). None is joined where that is over a tenth of the screen.
   - frames that are equal without thin upright bars, if all that varies among all of them lies in a box of the size of
     a caret. One that would not fit keeps all of them apart: there are no chains from one field to the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..records import StepRecord
from .frame import FrameKey

#: the state of a step of which nothing is known
UNKNOWN = -1
#: share of a screen's tiles that may change by itself
_RESTLESS = 0.1
#: tiles to the left and to the right of what changed by itself
_BESIDE = 2
#: tiles that a caret can touch: rows, columns
_CARET = (3, 2)


def states_of(steps: Sequence[StepRecord]) -> list[int]:
    """One number per step of one group; equal numbers are equal states."""
    labels: dict[Hashable, int] = {}
    found = [UNKNOWN] * len(steps)
    joined = _Joined()
    frames: dict[Hashable, set[str]] = defaultdict(set)
    firsts: dict[Hashable, set[str]] = defaultdict(set)
    beginnings: list[Hashable] = []
    for at, step in enumerate(steps):
        told = _told(step)
        if told is None:
            continue
        found[at] = labels.setdefault(told, len(labels))
        if step.state_key is not None:
            continue
        if step.index == 0:
            beginnings.append(told)
        if step.ui_key is None and step.frame_key is not None:
            frames[_place(step)].add(step.frame_key)
            if step.index == 0:
                firsts[_place(step)].add(step.frame_key)
    joined.all(beginnings)
    for place, keys in frames.items():
        for near in _neighbours(keys, firsts[place]):
            joined.all(("frame", place, key) for key in near)
    numbers = {label: told for told, label in labels.items()}
    return [n if n == UNKNOWN else labels[joined.root(numbers[n])] for n in found]


def _place(step: StepRecord) -> Hashable:
    return step.app, step.window


def _told(step: StepRecord) -> Hashable | None:
    if step.state_key is not None:
        return "exact", None, step.state_key
    if step.ui_key is not None:
        return "ui", _place(step), step.ui_key
    if step.frame_key is not None:
        return "frame", _place(step), step.frame_key
    return None


class _Joined:
    """Sets that were joined; the root of a set is one of its members."""

    def __init__(self) -> None:
        self._above: dict[Hashable, Hashable] = {}

    def root(self, one: Hashable) -> Hashable:
        while one in self._above:
            one = self._above[one]
        return one

    def all(self, members: Iterable[Hashable]) -> None:
        roots = list(dict.fromkeys(map(self.root, members)))
        for other in roots[1:]:
            self._above[other] = roots[0]


def _neighbours(texts: set[str], first: set[str]) -> list[list[str]]:
    """Sets of frame keys of one app and window that are one state (rule 4)."""
    if len(texts) < 2:
        return []
    sizes: dict[Hashable, dict[str, FrameKey]] = defaultdict(dict)
    for text in texts:
        key = FrameKey.of_text(text)
        sizes[key.tiles.shape][text] = key
    found = []
    for keys in sizes.values():
        found.append(_unmoved(keys, first))
        carets: dict[bytes, list[str]] = defaultdict(list)
        for text, key in keys.items():
            carets[key.barless].append(text)
        found += [alike for alike in carets.values() if _only_a_caret(_varies(keys[text] for text in alike))]
    return found


def _unmoved(keys: dict[str, FrameKey], first: set[str]) -> list[str]:
    """The frames that are the first one but for what changes by itself."""
    begun = [keys[text] for text in keys if text in first]
    if len(begun) < 2:
        return []
    restless = _varies(begun)
    if restless.mean() > _RESTLESS:
        return []
    still = ~_widened(restless)
    there = begun[0].tiles[still]
    return [text for text, key in keys.items() if np.array_equal(key.tiles[still], there)]


def _varies(keys: Iterable[FrameKey]) -> NDArray[np.bool_]:
    tiles = np.stack([key.tiles for key in keys])
    return (tiles != tiles[0]).any(0)


def _widened(marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    wide = marked.copy()
    for by in range(1, min(_BESIDE, marked.shape[1] - 1) + 1):
        wide[:, by:] |= marked[:, :-by]
        wide[:, :-by] |= marked[:, by:]
    return wide


def _only_a_caret(varies: NDArray[np.bool_]) -> bool:
    rows, columns = np.flatnonzero(varies.any(1)), np.flatnonzero(varies.any(0))
    if not len(rows):
        return False
    return bool(rows[-1] - rows[0] < _CARET[0] and columns[-1] - columns[0] < _CARET[1])
