"""Rows of text as lines whose columns stand below each other: the first one from the left, others from the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
