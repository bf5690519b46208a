"""Positions of a sequence's tokens: (temporal, row, column), by which multimodal rotary embeddings turn queries and
keys."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: (row of the batch [tokens], column of its sequence [tokens], visual tokens among all [visual], their numbers inside
#: their frame [visual], (rows, columns) of each shown frame [frames, 2], visual tokens of each [frames], rows of the
#: batch) -> [3, tokens]
Positions = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]


def grid_positions(
    row: np.ndarray,
    column: np.ndarray,
    visual: np.ndarray,
    within: np.ndarray,
    grids: np.ndarray,
    counts: np.ndarray,
    rows: int,
) -> np.ndarray:
    """[3, tokens]. Text counts on in all three at once; a frame stays at one temporal position, and its tokens have
    their row's and column's (Qwen2-VL's report, section 2.1: M-RoPE). What follows a frame begins after the largest
    position in it."""
    begin = visual[np.cumsum(counts) - counts]
    # A frame of n tokens takes max(rows, columns) positions: what follows in its row moves by the difference.
    shift = grids.max(1, initial=0) - counts
    ends = np.zeros(len(row) + 1, np.int64)
    np.add.at(ends, begin + counts, shift)
    of_rows = np.bincount(row[begin], weights=shift, minlength=rows).astype(np.int64)
    moved = np.cumsum(ends[:-1]) - (np.cumsum(of_rows) - of_rows)[row]
    text = column + moved
    places = np.stack([text, text, text])
    frame_of = np.repeat(np.arange(len(counts)), counts)
    base = text[begin][frame_of]
    places[0, visual] = base
    places[1, visual] = base + within // grids[frame_of, 1]
    places[2, visual] = base + within % grids[frame_of, 1]
    return places
