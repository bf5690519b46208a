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
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError

from tapforge_envs.protocol import Outcome

from ..frames.frame import FrameError
from ..records import EpisodeRecord, StepRecord
from .gesture import Gesture, gesture_of

Format = Literal["GIF", "WEBP"]
#: by the ending of a file's name
FORMATS: Final[dict[str, Format]] = {".gif": "GIF", ".webp": "WEBP"}
SECONDS: Final = 2.0

_WIDEST, _HIGHEST = 640, 480
_PANEL, _EDGE = 320, 16
_PAPER, _INK, _SOFT, _RULE, _MARK, _WRONG = "#ffffff", "#1c2330", "#68707f", "#dde1e8", "#ff2d6f", "#c2313d"
_OUTCOMES = {Outcome.SUCCESS: "#12805c", Outcome.FAILURE: "#c2313d", Outcome.INVALID: "#9a6b00"}
#: gestures are drawn this much larger, then scaled down, which smooths their edges
_FINE = 3
#: a GIF's colours per picture: screens of apps need fewer, and each costs bytes
_COLORS = 128
#: characters of an answer that are looked at: the panel has room for fewer
_CHARACTERS = 1500
#: no font has this one: what it draws is what a font draws for a character that it lacks
_NO_CHARACTER = "\U0010ffff"


class FontUnreadable(ValueError):
    """A file that is not a font."""


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
    write = _Writer(style.font)
    cards = [card for episode in episodes for card in _cards(episode, frame)]
    sizes = [card.screen.size for card in cards if isinstance(card.screen, Image.Image)]
    width, height = max((w for w, _ in sizes), default=270), max(h for h in (_HIGHEST // 2, *(h for _, h in sizes)))
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
        screen, action = _step_screen(step, frame)
        last = place == count and episode.last_frame is None
        error = f"not understood: {step.parse_error}" if step.parse_error else ""
        head = f"step {place} of {count}"
        yield _Card(goal, head, screen, action, error, step.text, end if last else "", color)
    if episode.steps and episode.last_frame is not None:
        shown = _picture(episode.last_frame, frame)
        yield _Card(goal, "the end", shown if isinstance(shown, str) else _fitted(shown), end=end, end_color=color)


def _step_screen(step: StepRecord, frame: Callable[[str], bytes]) -> tuple[Image.Image | str, str]:
    """The screen with the gesture on it, and the action in words."""
    found = _picture(step.frames[-1], frame) if step.frames else "the step has no screen"
    if step.action is None:
        return (found if isinstance(found, str) else _fitted(found)), "no action"
    text = f": {said}" if (said := step.action.get("text")) else ""
    if isinstance(found, str):  # without its size coordinates are no pixels
        return found, str(step.action.get("type", "?")).replace("_", " ") + text
    shown = _fitted(found)
    width, height = shown.width * _FINE, shown.height * _FINE
    gesture = gesture_of(step.action, width, height, found.size)
    return _with_gesture(shown, gesture), gesture.words + text


def _picture(name: str, frame: Callable[[str], bytes]) -> Image.Image | str:
    try:
        return Image.open(io.BytesIO(frame(name))).convert("RGB")
    except (FrameError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        return str(error)


def _fitted(screen: Image.Image) -> Image.Image:
    fit = min(_WIDEST / screen.width, _HIGHEST / screen.height)
    if fit >= 1:
        return screen.resize((screen.width * int(fit), screen.height * int(fit)), Image.Resampling.NEAREST)
    size = max(1, round(screen.width * fit)), max(1, round(screen.height * fit))
    return screen.resize(size, Image.Resampling.LANCZOS)


def _with_gesture(screen: Image.Image, gesture: Gesture) -> Image.Image:
    """The colours and widths of `replay.html`: a mark on a white edge."""
    if not gesture.shapes:
        return screen
    layer = Image.new("RGBA", (screen.width * _FINE, screen.height * _FINE), (255, 255, 255, 0))
    draw, unit = ImageDraw.Draw(layer), min(layer.size) / 100
    for color, stroke in (("#ffffff", 4.6 * unit), (_MARK, 2.4 * unit)):
        for shape in gesture.shapes:
            if shape.kind == "line":
                draw.line([*shape.points], color, round(stroke), "curve")
            elif shape.kind == "head":
                draw.polygon([*shape.points], color, color, round(stroke) if color != _MARK else 1)
            else:
                (x, y), grown = shape.points[0], shape.radius + stroke / 2
                if shape.kind == "dot":
                    grown = shape.radius + (stroke / 2 if color != _MARK else 0)
                    draw.ellipse((x - grown, y - grown, x + grown, y + grown), color)
                elif shape.kind == "dashed" and color == _MARK:
                    for angle in range(0, 360, 30):
                        draw.arc((x - grown, y - grown, x + grown, y + grown), angle, angle + 16, color, round(stroke))
                else:
                    draw.ellipse((x - grown, y - grown, x + grown, y + grown), None, color, round(stroke))
    shown = screen.copy()
    smooth = layer.resize(screen.size, Image.Resampling.LANCZOS)
    shown.paste(smooth, (0, 0), smooth)
    return shown


# --- how they are drawn ---


@dataclass(frozen=True, slots=True)
class _Type:
    """A font in one size."""

    font: ImageFont.FreeTypeFont
    #: from one line to the next
    line: int


class _Writer:
    """Text in the two sizes of a picture; remembers the characters that the font lacks."""

    def __init__(self, font: Path | None):
        self.large, self.small = _Type(_font(font, 17), 24), _Type(_font(font, 14), 19)
        self._none = bytes(self.small.font.getmask(_NO_CHARACTER))
        self._known: dict[str, bool] = {}
        self.lacks: set[str] = set()

    def lines(self, text: str, kind: _Type, width: int, most: int) -> list[str]:
        """Broken at blanks, and inside what is longer than a line; "…" at the end: text is left out."""
        text = text.strip().expandtabs(2)
        found = [line for whole in text[:_CHARACTERS].splitlines() for line in _broken(whole, kind.font, width)]
        if len(found) > most or len(text) > _CHARACTERS:
            found = found[:most]
            if found:
                while found[-1] and kind.font.getlength(f"{found[-1]} …") > width:
                    found[-1] = found[-1][:-1]
                found[-1] += " …"
        self.lacks |= {one for line in found for one in line if not self._has(one)}
        return found

    def _has(self, character: str) -> bool:
        if character not in self._known:
            # Of some fonts what is drawn for a character that they lack is empty, as a blank is.
            blank = character.isspace() and not any(self._none)
            self._known[character] = blank or bytes(self.small.font.getmask(character)) != self._none
        return self._known[character]


def _broken(text: str, font: ImageFont.FreeTypeFont, width: int) -> Iterator[str]:
    begun = ""
    for word in text.split(" "):
        joined = f"{begun} {word}" if begun else word
        if font.getlength(joined) <= width:
            begun = joined
            continue
        if begun:
            yield begun
        begun = ""
        for character in word:
            if begun and font.getlength(begun + character) > width:
                yield begun
                begun = ""
            begun += character
    yield begun


def _font(path: Path | None, size: int) -> ImageFont.FreeTypeFont:
    if path is not None:
        try:
            return ImageFont.truetype(path, size)
        except OSError as error:
            raise FontUnreadable(f"{path} can't be read as a font: {error}; give a .ttf, .otf or .ttc file") from error
    # Matplotlib brings DejaVu Sans, and is not imported for it; Pillow looks for the name among the system's fonts.
    beside = find_spec("matplotlib")
    folders = (beside.submodule_search_locations or ()) if beside else ()
    for found in (*(f"{folder}/mpl-data/fonts/ttf/DejaVuSans.ttf" for folder in folders), "DejaVuSans.ttf"):
        try:
            return ImageFont.truetype(found, size)
        except OSError:
            continue
    usual = ImageFont.load_default(size)
    assert isinstance(usual, ImageFont.FreeTypeFont)  # with a size it is
    return usual


def _drawn(card: _Card, write: _Writer, width: int, height: int) -> Image.Image:
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
    y = _write(draw, write, card.action, write.large, 4, (right, y), _MARK) + 4
    y = _write(draw, write, card.error, write.small, 3, (right, y), _WRONG) + 6
    room = max(0, (bottom - y) // write.small.line)
    _write(draw, write, card.answer, write.small, room, (right, y), _SOFT)
    if card.end:
        _write(draw, write, card.end, write.large, 1, (right, bottom + 8), card.end_color)
    return picture


def _write(
    draw: ImageDraw.ImageDraw, write: _Writer, text: str, kind: _Type, most: int, at: tuple[int, int], color: str
) -> int:
    """In the panel. Returns where the next line begins."""
    x, y = at
    for line in write.lines(text, kind, _PANEL, most):
        draw.text((x, y), line, color, kind.font)
        y += kind.line
    return y
