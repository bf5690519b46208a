"""Pixels of what lies over and around the pages: launcher icons, keyboard, bars, dialogs, banners."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from PIL import Image

from . import keyboard
from .pen import DARK, WHITE, Area, Pen, readable
from .screen import Widget


def _fab(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    side = min(right - left, bottom - top)
    x, y = (left + right) / 2, (top + bottom) / 2
    area = (x - side / 2, y - side / 2, x + side / 2, y + side / 2)
    pen.round(area, side * 0.32, w.color)
    pen.glyph(w.glyph or "add", x, y, side * 0.5, WHITE)


def _keyboard(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    board = _board(right - left + 1, bottom - top + 1, w.text, pen.theme is DARK)
    pen.image.paste(board, (left, top))


@lru_cache(maxsize=24)
def _board(width: int, height: int, mode: str, dark: bool) -> Image.Image:
    image = Image.new("RGB", (width, height), (40, 42, 50) if dark else (222, 225, 231))
    pen = Pen(image, dark)
    rows = keyboard.face(mode)
    gap = max(1.0, width / 130)
    for number, row in enumerate(rows):
        total = sum(share for _, _, share in row)
        x = 0.0
        for key, label, share in row:
            wide = width * share / total
            high = height / len(rows)
            area = (x + gap / 2, number * high + gap, x + wide - gap / 2, (number + 1) * high - gap)
            if key:
                special = len(key) > 1 and key != "space"
                pen.round(area, width * 0.012, pen.theme.off if special else pen.theme.surface)
                middle = ((area[0] + area[2]) / 2, (area[1] + area[3]) / 2)
                if key in ("shift", "del", "enter"):
                    pen.glyph(
                        {"shift": "shift", "del": "erase", "enter": "save"}[key], *middle, high * 0.42, pen.theme.ink
                    )
                else:
                    pen.text(*middle, label, pen.size(high, 0.55, 0.046), pen.theme.ink, "mm")
            x += wide
    return image


def _nothing(pen: Pen, w: Widget, a: Area) -> None:
    """Only there to be hit."""


def _navigation(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    if w.text != "clear":
        pen.draw.rectangle(a, fill=pen.theme.page)
    ink = WHITE if w.text == "clear" else pen.theme.soft
    wide, middle = (right - left + 1) / 3, (top + bottom) / 2
    for number, name in enumerate(("nav_back", "nav_home", "nav_recents")):
        pen.glyph(name, left + wide * (number + 0.5), middle, min(bottom - top, pen.width * 0.07) * 0.72, ink)


def _status(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    ink = WHITE if w.detail == "clear" else pen.theme.ink
    high, middle = bottom - top, (top + bottom) / 2 + 1
    pen.text(left + pen.width * 0.045, middle, w.text, max(pen.size(high, 0.75, 0.034), 6), ink)
    side = min(high * 0.75, pen.width * 0.04)
    x = right - pen.width * 0.045 - side / 2
    for name in ("battery", *(w.glyph or "").split()):
        pen.glyph(name, x, middle, side, ink)
        x -= side * 1.35


def _scrim(pen: Pen, w: Widget, a: Area) -> None:
    shade = Image.new("RGB", (a[2] - a[0] + 1, a[3] - a[1] + 1), (0, 0, 0))
    under = pen.image.crop((a[0], a[1], a[2] + 1, a[3] + 1))
    pen.image.paste(Image.blend(under, shade, 0.5), (a[0], a[1]))


def _dialog(pen: Pen, w: Widget, a: Area) -> None:
    left, top, _, _ = a
    pen.round(a, pen.width * 0.05, pen.theme.surface)
    x = left + pen.width * 0.05
    titles, lines = w.text.count("\n") + 1, w.detail.count("\n") + 1 if w.detail else 0
    screen = pen.image.height
    step = 0.034 * screen
    y = top + 0.02 * screen
    pen.lines(x, y, w.text, pen.size(step, 0.95, 0.048), step, pen.theme.ink)
    if lines:
        low = 0.031 * screen
        pen.lines(x, y + step * titles + 0.008 * screen, w.detail, pen.size(low, 0.9, 0.04), low, pen.theme.soft)


def _banner(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    high = bottom - top
    pen.round(a, pen.width * 0.04, pen.theme.surface, pen.theme.off)
    side = min(high * 0.55, pen.width * 0.1)
    x = left + pen.width * 0.03
    pen.glyph(w.glyph or "bell", x + side / 2, (top + bottom) / 2, side, readable((26, 115, 232), pen.theme))
    x += side + pen.width * 0.03
    room = right - x - pen.width * 0.12
    main, small = pen.size(high, 0.34, 0.043), pen.size(high, 0.3, 0.036)
    pen.text(x, top + high * 0.3, w.text, main, pen.theme.ink, room=room, bold=True)
    pen.text(x, top + high * 0.7, w.detail, small, pen.theme.soft, room=room + pen.width * 0.08)


def _toast(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    pen.round(a, (bottom - top) / 2, (50, 52, 60))
    size = pen.size(bottom - top, 0.5, 0.038)
    pen.text((left + right) / 2, (top + bottom) / 2, w.text, size, WHITE, "mm", room=(right - left) * 0.94)


def _app(pen: Pen, w: Widget, a: Area) -> None:
    """A launcher icon with its name below."""
    left, top, right, bottom = a
    high, x = bottom - top, (left + right) / 2
    label = int(max(min(high * 0.2, pen.width * 0.033), 6))
    side = min((right - left) * 0.74, high - label * 1.6)
    y = top + (high - side - label * 1.5) / 2 + side / 2
    pen.round((x - side / 2, y - side / 2, x + side / 2, y + side / 2), side * 0.26, w.color)
    if w.glyph:
        pen.glyph(w.glyph, x, y, side * 0.6, WHITE)
    if w.text:
        pen.text(x, y + side / 2 + label * 0.95, w.text, label, WHITE, "mm", room=(right - left) * 1.02)


def _panel(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    seen = (left, top, max(left, right), max(top, bottom))  # a scroll bar is thinner than a pixel of a tiny screen
    pen.draw.rectangle(seen, fill=w.color if w.color != (90, 90, 90) else pen.theme.page)


def _label(pen: Pen, w: Widget, a: Area) -> None:
    """Big words on a wallpaper, with smaller ones below."""
    left, top, right, bottom = a
    high, x = bottom - top, (left + right) / 2
    pen.text(x, top + high * 0.36, w.text, pen.size(high, 0.55, 0.16), WHITE, "mm")
    pen.text(x, top + high * 0.8, w.detail, pen.size(high, 0.26, 0.043), WHITE, "mm")


def _dots(pen: Pen, w: Widget, a: Area) -> None:
    """Which page of how many: text "1/2"."""
    at, count = (int(n) for n in w.text.split("/"))
    x, y = (a[0] + a[2]) / 2, (a[1] + a[3]) / 2
    size = max(2.0, pen.width * 0.012)
    for number in range(count):
        place = x + (number - (count - 1) / 2) * size * 2.4
        fill = WHITE if number == at else (170, 176, 190)
        pen.draw.ellipse((place - size / 2, y - size / 2, place + size / 2, y + size / 2), fill=fill)


PAINTERS: dict[str, Callable[[Pen, Widget, Area], None]] = {
    "app": _app, "words": _label, "dots": _dots, "fab": _fab, "keyboard": _keyboard, "key": _nothing,
    "navigation": _navigation, "status": _status, "scrim": _scrim, "dialog": _dialog, "banner": _banner,
    "toast": _toast, "panel": _panel,
}  # fmt: skip
