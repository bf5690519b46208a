"""Pixels from a screen. The same screen and size give the same bytes, so equal screens are drawn once.

The finished frames that are kept take at most `KEPT` bytes, whatever the size of the screen.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from functools import lru_cache

from PIL import Image, ImageDraw

from tapforge_envs.protocol import Frame

from . import overlays, surfaces
from .glyphs import sprite
from .pen import Pen
from .screen import Color, Screen, Widget

#: bytes of encoded frames
KEPT = 48 * 1024 * 1024
_WHITE: Color = (255, 255, 255)
_ON: Color = (46, 176, 84)
_OFF: Color = (132, 136, 146)
_PAINTERS = {**surfaces.PAINTERS, **overlays.PAINTERS}


class _Kept:
    """The frames that were drawn last."""

    def __init__(self, limit: int):
        self.limit = limit
        self.bytes = 0
        self.frames: OrderedDict[tuple[Screen, int, int], Frame] = OrderedDict()

    def get(self, key: tuple[Screen, int, int]) -> Frame | None:
        found = self.frames.get(key)
        if found is not None:
            self.frames.move_to_end(key)
        return found

    def put(self, key: tuple[Screen, int, int], frame: Frame) -> None:
        self.frames[key] = frame
        self.bytes += len(frame.data)
        while self.bytes > self.limit and len(self.frames) > 1:
            _, old = self.frames.popitem(last=False)
            self.bytes -= len(old.data)


_KEPT = _Kept(KEPT)


def frame(screen: Screen, width: int, height: int) -> Frame:
    """The encoded screen (PNG), `width` x `height` pixels."""
    key = (screen, width, height)
    found = _KEPT.get(key)
    if found is None:
        out = io.BytesIO()
        picture(screen, width, height).save(out, "PNG", compress_level=1)
        found = Frame.of(out.getvalue(), width, height)
        _KEPT.put(key, found)
    return found


def picture(screen: Screen, width: int, height: int) -> Image.Image:
    image = _wallpaper(screen.background, screen.pattern, width, height).copy()
    pen = Pen(image, screen.dark, screen.caret)
    for widget in screen.widgets:
        x, y, w, h = widget.box
        box = (round(x * width), round(y * height), round((x + w) * width) - 1, round((y + h) * height) - 1)
        if widget.kind == "tile":
            _tile(image, pen.draw, widget, box)
        else:
            _PAINTERS[widget.kind](pen, widget, box)
    return image


@lru_cache(maxsize=64)
def _wallpaper(background: Color, pattern: int, width: int, height: int) -> Image.Image:
    image = Image.new("RGB", (width, height), background)
    if pattern >= 8:
        _gradient(image, background, pattern)
    elif pattern:
        draw = ImageDraw.Draw(image)
        shade = tuple(max(0, c - 22) for c in background)
        step = max(4, width // (3 + pattern % 4))
        for k in range(-height, width + height, step * 2):
            if pattern % 3 == 0:
                draw.rectangle((0, k, width, k + step - 1), fill=shade)
            elif pattern % 3 == 1:
                draw.polygon([(k, 0), (k + step, 0), (k + step - height, height), (k - height, height)], fill=shade)
            else:
                draw.rectangle((k, 0, k + step - 1, height), fill=shade)
    return image


def _gradient(image: Image.Image, color: Color, pattern: int) -> None:
    """From light to dark, with hills."""
    draw = ImageDraw.Draw(image)
    width, height = image.size
    for y in range(height):
        share = 1.1 - 0.55 * y / height
        draw.line((0, y, width, y), fill=tuple(min(255, round(c * share)) for c in color))
    for number in range(3):
        shade = tuple(round(c * (0.62 - 0.14 * number)) for c in color)
        x, top = width * ((pattern * 0.37 + number * 0.45) % 1.2 - 0.1), height * (0.86 + number * 0.07)
        reach = width * (0.75 + 0.1 * number)
        draw.ellipse((x - reach, top, x + reach, top + height * 0.6), fill=shade)


def _tile(image: Image.Image, draw: ImageDraw.ImageDraw, w: Widget, box: tuple[int, int, int, int]) -> None:
    """An icon on a rounded tile; a switch shows its state by the tile's colour."""
    left, top, right, bottom = box
    side = min(right - left + 1, bottom - top + 1)
    middle = ((left + right) / 2, (top + bottom) / 2)
    inset = max(1, side // 16)
    plate = w.color if w.on is None else (_ON if w.on else _OFF)
    half = side / 2 - inset
    area = (middle[0] - half, middle[1] - half, middle[0] + half, middle[1] + half)
    draw.rounded_rectangle(area, radius=side / 5, fill=plate)
    if w.glyph:
        icon = sprite(w.glyph, max(4, round(side * 0.68)), _WHITE)
        image.paste(icon, (round(middle[0] - icon.width / 2), round(middle[1] - icon.height / 2)), icon)
