"""An episode as one still picture: the screens of its steps in order, each with its gesture and the action in words.

Promises:
- A step is one cell, its screen as `animation.py` draws it; the screen after the last action follows where it was
  recorded. A screen that can't be shown is replaced by the reason; an episode without any screen has no picture.
- Of a long episode the first and the last `SHOWN` steps are shown, and how many lie between.
- The picture is a JPEG of at most `MOST_BYTES`: a larger one is scaled down.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageDraw

from ..records import EpisodeRecord
from .screens import Box, fitted, screen_of, step_screen
from .text_writer import TextWriter

MOST_BYTES: Final = 300_000
#: of each end of an episode
SHOWN: Final = 20

_BOX: Final[Box] = (480, 360)
_COLUMNS, _EDGE, _LINES = 8, 8, 2
#: of a cell, so that words fit under a narrow screen
_NARROWEST = 120
_QUALITY = 80
_PAPER, _INK, _WRONG = "#ffffff", "#1c2330", "#c2313d"


@dataclass(frozen=True, slots=True)
class _Cell:
    screen: Image.Image | str
    words: str


def strip(episode: EpisodeRecord, frame: Callable[[str], bytes]) -> bytes | None:
    """`frame`: the encoded image of a name; raises FrameError for one that can't be shown."""
    cells = _cells(episode, frame)
    sizes = [cell.screen.size for cell in cells if isinstance(cell.screen, Image.Image)]
    if not sizes:
        return None
    width, height = max(_NARROWEST, *(w for w, _ in sizes)), max(h for _, h in sizes)
    return _packed(_drawn(cells, width, height))


def _cells(episode: EpisodeRecord, frame: Callable[[str], bytes]) -> list[_Cell]:
    count = len(episode.steps)
    cells = []
    for place, step in enumerate(episode.steps):
        if SHOWN <= place < count - SHOWN:
            if place == SHOWN:
                cells.append(_Cell(f"{count - 2 * SHOWN} steps are left out", ""))
            continue
        screen, words = step_screen(step, frame, _BOX)
        cells.append(_Cell(screen, f"{place + 1}  {words}"))
    if episode.steps and episode.last_frame is not None:
        last = screen_of(episode.last_frame, frame)
        cells.append(_Cell(last if isinstance(last, str) else fitted(last, _BOX), "the end"))
    return cells


def _drawn(cells: list[_Cell], width: int, height: int) -> Image.Image:
    """On a grid with room for a screen of that size in each cell."""
    write = TextWriter(None)
    columns, rows = min(_COLUMNS, len(cells)), math.ceil(len(cells) / _COLUMNS)
    wide, high = width + _EDGE, height + _LINES * write.small.line + 2 * _EDGE
    picture = Image.new("RGB", (columns * wide + _EDGE, rows * high + _EDGE), _PAPER)
    draw = ImageDraw.Draw(picture)
    for number, cell in enumerate(cells):
        left, top = _EDGE + number % _COLUMNS * wide, _EDGE + number // _COLUMNS * high
        if isinstance(cell.screen, str):
            text, color = write.lines(cell.screen, write.small, width, height // write.small.line), _WRONG
            _write(draw, write, text, (left, top), color)
        else:
            picture.paste(cell.screen, (left, top + height - cell.screen.height))
        words = write.lines(cell.words, write.small, width, _LINES)
        _write(draw, write, words, (left, top + height + _EDGE // 2), _INK)
    return picture


def _write(draw: ImageDraw.ImageDraw, write: TextWriter, lines: list[str], at: tuple[int, int], color: str) -> None:
    for number, line in enumerate(lines):
        draw.text((at[0], at[1] + number * write.small.line), line, color, write.small.font)


def _packed(picture: Image.Image) -> bytes:
    while True:
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=_QUALITY)
        size = buffer.tell()
        if size <= MOST_BYTES:
            return buffer.getvalue()
        # Smaller pictures have more bytes per pixel, hence the tenth.
        scale = 0.9 * math.sqrt(MOST_BYTES / size)
        smaller = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        picture = picture.resize(smaller, Image.Resampling.LANCZOS)
