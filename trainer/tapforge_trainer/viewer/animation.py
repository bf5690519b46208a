"""Episodes as one animated picture for a slide: GIF or WebP, the screens in order beside the goal and the actions.

Promises:
- A step is one picture: its screen with the gesture, the goal, the action in words, and as much of the answer as fits.
  The screen after the last action follows where it was recorded. The last picture says how the episode ended.
- A screen that can't be shown is replaced by the reason, in words.
- A screen fits into 640 x 480 pixels: a larger one is scaled down, a small one is enlarged by a whole factor.
- Characters that the font lacks are counted, so that the caller can name them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from PIL import Image, ImageDraw

from tapforge_envs.protocol import Outcome

from ..records import EpisodeRecord
from .screens import MARK, Box, fitted, screen_of, step_screen
from .text_writer import TextWriter, Typeface

Format = Literal["GIF", "WEBP"]
#: by the ending of a file's name
FORMATS: Final[dict[str, Format]] = {".gif": "GIF", ".webp": "WEBP"}
SECONDS: Final = 2.0

_BOX: Final[Box] = (640, 480)
_PANEL, _EDGE = 320, 16
_PAPER, _INK, _SOFT, _RULE, _WRONG = "#ffffff", "#1c2330", "#68707f", "#dde1e8", "#c2313d"
_OUTCOMES = {Outcome.SUCCESS: "#12805c", Outcome.FAILURE: "#c2313d", Outcome.INVALID: "#9a6b00"}
#: a GIF's colours per picture: screens of apps need fewer, and each costs bytes
_COLORS = 128


@dataclass(frozen=True, slots=True)
class Style:
    format: Format
    seconds_per_step: float = SECONDS
    #: a TrueType or OpenType file; None: DejaVu Sans where it is installed, else Pillow's own, which has only ASCII
    font: Path | None = None


@dataclass(frozen=True, slots=True)
class Animation:
    data: bytes
    #: characters of the text that the font lacks
    lacks: str


@dataclass(frozen=True, slots=True)
class _Card:
    """One picture. `screen`: ready to be shown, or why there is none."""

    goal: str
    head: str
    screen: Image.Image | str
    action: str = ""
    error: str = ""
    answer: str = ""
    #: how the episode ended
    end: str = ""
    end_color: str = _SOFT


def animate(episodes: Sequence[EpisodeRecord], frame: Callable[[str], bytes], style: Style) -> Animation:
    """At least one episode. Raises FontUnreadable."""
    write = TextWriter(style.font)
    cards = [card for episode in episodes for card in _cards(episode, frame)]
    sizes = [card.screen.size for card in cards if isinstance(card.screen, Image.Image)]
    width, height = max((w for w, _ in sizes), default=270), max(h for h in (_BOX[1] // 2, *(h for _, h in sizes)))
    pictures = [_drawn(card, write, width, height) for card in cards]
    milliseconds = [round(1000 * style.seconds_per_step * (2 if card.end else 1)) for card in cards]
    if style.format == "GIF":
        few = [one.quantize(_COLORS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE) for one in pictures]
        return Animation(_saved(few, milliseconds, "GIF", optimize=True), "".join(sorted(write.lacks)))
    return Animation(_saved(pictures, milliseconds, "WEBP", quality=80, method=4), "".join(sorted(write.lacks)))


def _saved(pictures: Sequence[Image.Image], milliseconds: list[int], kind: Format, **options: object) -> bytes:
    buffer, (first, *others) = io.BytesIO(), pictures
    first.save(buffer, kind, save_all=True, append_images=others, duration=milliseconds, loop=0, **options)
    return buffer.getvalue()


# --- what is on the pictures ---


def _cards(episode: EpisodeRecord, frame: Callable[[str], bytes]) -> Iterator[_Card]:
    goal, count = episode.task.goal, len(episode.steps)
    outcome = episode.outcome.value if episode.outcome else "stopped"
    end = f"{outcome}: {episode.reason.value.replace('_', ' ')}"
    color = _OUTCOMES[episode.outcome] if episode.outcome else _SOFT
    if not episode.steps:
        yield _Card(goal, "no step", "ended before the first answer", end=end, end_color=color)
    for place, step in enumerate(episode.steps, 1):
        screen, action = step_screen(step, frame, _BOX)
        last = place == count and episode.last_frame is None
        error = f"not understood: {step.parse_error}" if step.parse_error else ""
        head = f"step {place} of {count}"
        yield _Card(goal, head, screen, action, error, step.text, end if last else "", color)
    if episode.steps and episode.last_frame is not None:
        shown = screen_of(episode.last_frame, frame)
        yield _Card(goal, "the end", shown if isinstance(shown, str) else fitted(shown, _BOX), end=end, end_color=color)


# --- how they are drawn ---


def _drawn(card: _Card, write: TextWriter, width: int, height: int) -> Image.Image:
    """On a picture with room for a screen of that size."""
    picture = Image.new("RGB", (3 * _EDGE + width + _PANEL, 2 * _EDGE + height), _PAPER)
    draw = ImageDraw.Draw(picture)
    left, right = _EDGE, 2 * _EDGE + width
    if isinstance(card.screen, str):
        draw.rectangle((left, _EDGE, left + width - 1, _EDGE + height - 1), None, _RULE)
        for number, line in enumerate(write.lines(card.screen, write.small, width - 2 * _EDGE, 8)):
            draw.text((left + _EDGE, 2 * _EDGE + number * write.small.line), line, _WRONG, write.small.font)
    else:
        at = left + (width - card.screen.width) // 2, _EDGE + (height - card.screen.height) // 2
        picture.paste(card.screen, at)
        draw.rectangle((at[0] - 1, at[1] - 1, at[0] + card.screen.width, at[1] + card.screen.height), None, _RULE)
    bottom = _EDGE + height - (write.large.line + 8 if card.end else 0)
    y = _write(draw, write, card.goal, write.large, 5, (right, _EDGE), _INK) + 8
    draw.line((right, y, right + _PANEL, y), _RULE)
    y = _write(draw, write, card.head, write.small, 1, (right, y + 10), _SOFT) + 2
    y = _write(draw, write, card.action, write.large, 4, (right, y), MARK) + 4
    y = _write(draw, write, card.error, write.small, 3, (right, y), _WRONG) + 6
    room = max(0, (bottom - y) // write.small.line)
    _write(draw, write, card.answer, write.small, room, (right, y), _SOFT)
    if card.end:
        _write(draw, write, card.end, write.large, 1, (right, bottom + 8), card.end_color)
    return picture


def _write(
    draw: ImageDraw.ImageDraw, write: TextWriter, text: str, kind: Typeface, most: int, at: tuple[int, int], color: str
) -> int:
    """In the panel. Returns where the next line begins."""
    x, y = at
    for line in write.lines(text, kind, _PANEL, most):
        draw.text((x, y), line, color, kind.font)
        y += kind.line
    return y
