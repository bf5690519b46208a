"""The pen that paints the standard phone: themes, text that fits, icons, rounded boxes.

Text sizes follow the width of the screen, with a floor that keeps a line readable on a tiny one. Text that doesn't fit
is cut with an ellipsis; nothing is drawn outside its box.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from .glyphs import sprite
from .screen import Color

Area = tuple[int, int, int, int]
#: pixels; text of a lower height is not drawn, because a smear is worse than nothing for a small model
READABLE = 6
_FLOOR = 7
WHITE: Color = (255, 255, 255)


@dataclass(frozen=True, slots=True)
class Theme:
    page: Color
    surface: Color
    ink: Color
    soft: Color
    line: Color
    off: Color
    chip: Color


LIGHT = Theme(
    (246, 247, 250), (255, 255, 255), (26, 28, 34), (98, 104, 116), (226, 229, 235), (176, 181, 190), (234, 236, 242)
)
DARK = Theme((18, 19, 23), (30, 32, 38), (236, 238, 242), (164, 170, 182), (52, 55, 64), (96, 101, 112), (48, 51, 60))


class Pen:
    """A picture that is being painted."""

    def __init__(self, image: Image.Image, dark: bool, caret: bool = True):
        self.image = image
        self.caret = caret
        self.draw = ImageDraw.Draw(image)
        self.width = image.width
        self.theme = DARK if dark else LIGHT

    def size(self, height: float, share: float, cap: float) -> int:
        """Font size for a line that may take `share` of a box's height: `cap` of the screen's width, but readable."""
        room = height * share
        return int(max(min(room, self.width * cap), min(room, _FLOOR)))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int,
        ink: Color,
        anchor: str = "lm",
        room: float = 1e9,
        bold: bool = False,
    ) -> float:
        """Writes one line and returns its width; `anchor` is Pillow's: left, middle or right of `x`, middle of `y`."""
        if not text or size < READABLE or room < size:
            return 0.0
        text = _fitted(text, size, int(room))
        wide = length(text, size)
        start = x - {"l": 0.0, "m": 0.5, "r": 1.0}[anchor[0]] * wide
        mask, left, top = _stamp(text, size, max(1, round(size / 38)) if bold and size >= 20 else 0)
        self.image.paste(ink, (round(start) + left, round(y) + top), mask)
        return wide

    def lines(self, x: float, y: float, text: str, size: int, step: float, ink: Color) -> None:
        for number, line in enumerate(text.split("\n")):
            self.text(x, y + step * (number + 0.5), line, size, ink)

    def glyph(self, name: str, x: float, y: float, size: float, color: Color) -> None:
        icon = sprite(name, max(4, round(size)), color)
        self.image.paste(icon, (round(x - icon.width / 2), round(y - icon.height / 2)), icon)

    def round(
        self, area: tuple[float, float, float, float], radius: float, fill: Color, outline: Color | None = None
    ) -> None:
        left, top, right, bottom = area
        if right < left or bottom < top:
            return
        limit = min(right - left, bottom - top) / 2
        wide = max(1, self.width // 400)
        self.draw.rounded_rectangle(area, radius=min(radius, limit), fill=fill, outline=outline, width=wide)


@lru_cache(maxsize=64)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


@lru_cache(maxsize=2048)
def _stamp(text: str, size: int, stroke: int) -> tuple[Image.Image, int, int]:
    """A line of text as a mask, and where its corner lies from the left end of its middle. Text is most of the work of
    a screen, and the same words come again and again."""
    font = _font(size)
    left, top, right, bottom = (round(v) for v in font.getbbox(text, anchor="lm", stroke_width=stroke))
    mask = Image.new("L", (max(1, right - left), max(1, bottom - top)))
    ImageDraw.Draw(mask).text((-left, -top), text, fill=255, font=font, anchor="lm", stroke_width=stroke)
    return mask, left, top


@lru_cache(maxsize=8192)
def length(text: str, size: int) -> float:
    return _font(size).getlength(text)


@lru_cache(maxsize=8192)
def _fitted(text: str, size: int, room: int) -> str:
    """The text, or as much of it as fits with an ellipsis."""
    if length(text, size) <= room:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if length(text[:middle].rstrip() + "…", size) <= room:
            low = middle
        else:
            high = middle - 1
    return text[:low].rstrip() + "…"


def tint(color: Color, theme: Theme, strength: float = 0.16) -> Color:
    """A light wash of a colour on the theme's surface."""
    return tuple(round(s + (c - s) * strength) for c, s in zip(color, theme.surface, strict=True))  # type: ignore[return-value]


@lru_cache(maxsize=512)
def hue_of(text: str) -> Color:
    """A calm colour that belongs to a name."""
    place = sum(ord(c) * (i + 7) for i, c in enumerate(text)) % 360
    r, g, b = colorsys.hls_to_rgb(place / 360, 0.45, 0.45)
    return round(r * 255), round(g * 255), round(b * 255)


def readable(color: Color, theme: Theme) -> Color:
    """The colour as ink on the theme: lighter on dark surfaces."""
    if theme is LIGHT:
        return color
    r, g, b = (round(c + (255 - c) * 0.45) for c in color)
    return r, g, b
