"""Pixels of what lies on a page of the standard phone: one painter per kind of widget. `overlays` has the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from .pen import LIGHT, READABLE, WHITE, Area, Pen, hue_of, length, readable
from .screen import Color, Widget

_GREEN: Color = (46, 160, 84)


def _title(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    pen.draw.rectangle(a, fill=pen.theme.page)
    high = bottom - top + 1
    middle = top + high * 0.66
    x = left + pen.width * (0.13 if w.detail else 0.045)
    pen.text(x, middle, w.text, pen.size(high, 0.4, 0.058), pen.theme.ink, room=pen.width * 0.6, bold=True)
    pen.draw.line((left, bottom, right, bottom), fill=pen.theme.line, width=max(1, pen.width // 540))


def _glyph(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    side = min(right - left, bottom - top)
    color = readable(w.color, pen.theme)
    if w.glyph:
        size = min(side * 0.62, max(pen.width * 0.062, 9))
        pen.glyph(w.glyph, (left + right + 1) / 2, (top + bottom + 1) / 2, size, color)
    pen.text((left + right) / 2, (top + bottom) / 2, w.text, pen.size(bottom - top, 0.45, 0.045), color, "mm")


def _item(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    theme = pen.theme
    high, middle = bottom - top + 1, (top + bottom) / 2
    pen.draw.rectangle(a, fill=theme.surface)
    margin = pen.width * 0.045
    pen.draw.line((left + margin, bottom, right, bottom), fill=theme.line, width=max(1, pen.width // 540))
    x = left + margin
    color = readable(w.color, theme)
    if w.badge:
        side = min(high * 0.74, pen.width * 0.11)
        disc = hue_of(w.badge + w.text[-3:])
        pen.draw.ellipse((x, middle - side / 2, x + side, middle + side / 2), fill=disc)
        pen.text(x + side / 2, middle, w.badge[:2], pen.size(side, 0.55, 0.045), WHITE, "mm")
        x += side + margin * 0.7
    elif w.glyph:
        side = min(high * 0.6, max(pen.width * 0.062, 9))
        pen.glyph(w.glyph, x + side / 2, middle, side, color)
        x += side + margin * 0.8
    end = right - margin
    if w.on is not None:
        end = _switch(pen, w.on, end, middle, high)
    room = end - x - margin * 0.3
    if w.trail:
        size = pen.size(high, 0.36, 0.037)
        end -= pen.text(end, middle, w.trail, size, theme.soft, "rm", room=room * 0.55)
        room = end - x - margin * 0.3
    main, small = pen.size(high, 0.42, 0.043), pen.size(high, 0.34, 0.035)
    both = bool(w.detail) and small >= READABLE and high >= 2 * READABLE + 3
    if not both:
        main = pen.size(high, 0.6, 0.043)
    if both:
        pen.text(x, middle - main * 0.58, w.text, main, theme.ink, room=room)
        pen.text(x, middle + small * 0.82, w.detail, small, theme.soft, room=room)
    else:
        pen.text(x, middle, w.text, main, theme.ink, room=room)


def _switch(pen: Pen, on: bool, end: float, middle: float, high: float) -> float:
    """A sliding switch that ends at `end`; returns where it starts."""
    tall = min(high * 0.42, pen.width * 0.058)
    tall = max(tall, 7)
    wide = tall * 1.75
    pen.round((end - wide, middle - tall / 2, end, middle + tall / 2), tall / 2, _GREEN if on else pen.theme.off)
    knob = tall * 0.76
    x = end - knob - tall * 0.12 if on else end - wide + tall * 0.12
    pen.draw.ellipse((x, middle - knob / 2, x + knob, middle + knob / 2), fill=WHITE)
    return end - wide


def _heading(pen: Pen, w: Widget, a: Area) -> None:
    left, top, _, bottom = a
    size = pen.size(bottom - top, 0.8, 0.036)
    pen.text(left + pen.width * 0.045, (top + bottom) / 2 + 1, w.text, size, readable(w.color, pen.theme), bold=True)


def _prose(pen: Pen, w: Widget, a: Area) -> None:
    left, top, _, bottom = a
    pen.draw.rectangle(a, fill=pen.theme.surface)
    count = w.text.count("\n") + 1
    pad = (bottom - top) * 0.018 / (0.031 * count + 0.018)
    step = (bottom - top - pad) / count
    size = pen.size(step, 0.95, 0.0415)
    pen.lines(left + pen.width * 0.045, top + pad / 2, w.text, size, step, pen.theme.ink)


def _bubble(pen: Pen, w: Widget, a: Area) -> None:
    """A chat message: ours at the right (on True), theirs at the left."""
    left, top, right, bottom = a
    count = w.text.count("\n") + 1
    pad = pen.width * 0.02
    step = (bottom - top - pad * 1.6) / count
    size = pen.size(step, 0.95, 0.0415)
    wide = max(length(line, size) for line in w.text.split("\n")) + pad * 3
    margin = pen.width * 0.035
    start = right - margin - wide if w.on else left + margin
    fill = w.color if w.on else pen.theme.chip
    pen.round((start, top + pad * 0.3, start + wide, bottom - pad * 0.3), pen.width * 0.035, fill)
    pen.lines(start + pad * 1.5, top + pad * 0.8, w.text, size, step, WHITE if w.on else pen.theme.ink)


def _chip(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    pad = max(1, pen.width // 90)
    area = (left + pad, top + pad, right - pad, bottom - pad)
    fill = readable(w.color, pen.theme) if w.on else pen.theme.chip
    ink = (WHITE if pen.theme is LIGHT else pen.theme.page) if w.on else pen.theme.ink
    pen.round(area, (bottom - top) * 0.32, fill)
    middle = ((left + right) / 2, (top + bottom) / 2)
    if w.glyph:
        pen.glyph(w.glyph, *middle, min(bottom - top, right - left) * 0.56, ink)
    pen.text(*middle, w.text, pen.size(bottom - top, 0.66, 0.045), ink, "mm", room=right - left - 2 * pad)


def _day(pen: Pen, w: Widget, a: Area) -> None:
    """A day of a month: a disc when chosen, a dot below when something is on."""
    left, top, right, bottom = a
    x, y = (left + right) / 2, (top + bottom) / 2
    side = min(right - left, bottom - top) * 0.9
    ink = pen.theme.ink if w.tap else pen.theme.soft
    if w.on:
        pen.draw.ellipse((x - side / 2, y - side / 2, x + side / 2, y + side / 2), fill=w.color)
        ink = WHITE
    pen.text(x, y, w.text, pen.size(bottom - top, 0.7, 0.038), ink, "mm")
    if w.detail:
        dot = max(0.8, side * 0.06)
        low = y + side * 0.36
        pen.draw.ellipse((x - dot, low - dot, x + dot, low + dot), fill=WHITE if w.on else w.color)


def _action(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    high = bottom - top
    pad = (min(high * 0.12, pen.width * 0.02), pen.width * 0.02)
    pen.round((left + pad[1], top + pad[0], right - pad[1], bottom - pad[0]), high * 0.3, w.color)
    middle = ((left + right) / 2, (top + bottom) / 2)
    if w.glyph:
        pen.glyph(w.glyph, *middle, high * 0.5, WHITE)
    pen.text(*middle, w.text, pen.size(high, 0.6, 0.043), WHITE, "mm", room=right - left - 4 * pad[1])


def _input(pen: Pen, w: Widget, a: Area) -> None:
    left, top, right, bottom = a
    theme = pen.theme
    margin = pen.width * 0.03
    gap = max(1, (bottom - top) * 0.07)
    area = (left + margin, top + gap, right - margin, bottom - gap)
    color = readable(w.color, theme)
    pen.round(area, pen.width * 0.022, theme.surface, color if w.on else theme.off)
    x, room = area[0] + margin, area[2] - area[0] - (4 if w.on else 2) * margin
    row = min(area[3] - area[1], pen.width * 0.16)
    size = pen.size(row, 0.64, 0.043)
    label = pen.size(row, 0.3, 0.03)
    if not w.text:
        pen.text(x, area[1] + row / 2, w.detail, size, theme.soft, room=room)
        if w.on and pen.caret:
            pen.draw.line(
                (x - 2, area[1] + row * 0.25, x - 2, area[1] + row * 0.75), fill=color, width=max(1, pen.width // 300)
            )
        return
    several = area[3] - area[1] > row * 1.3
    lines = _broken(w.text, size, int(room)) if several else [w.text.replace("\n", " ")]
    fits = max(1, int((area[3] - area[1]) / (size * 1.25))) if several else 1
    lines = lines[-fits:]
    y = area[1] + row / 2
    if label >= READABLE and not several:
        pen.text(x, area[1] + row * 0.24, w.detail, label, color, room=room)
        y = area[1] + row * 0.63
    if several:
        y = area[1] + size * 0.9
    end = x
    for number, line in enumerate(lines):
        # the end is what is being typed, so a long text shows its end
        while length(line, size) > room:
            line = line[max(1, len(line) // 12) :]
        end = x + pen.text(x, y + number * size * 1.25, line, size, theme.ink, room=room + size)
    if w.on and pen.caret:
        low = y + (len(lines) - 1) * size * 1.25
        pen.draw.line(
            (end + 2, low - size * 0.6, end + 2, low + size * 0.6), fill=color, width=max(1, pen.width // 300)
        )


@lru_cache(maxsize=512)
def _broken(text: str, size: int, room: int) -> list[str]:
    """Lines that fit into `room` pixels."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            if line and length(f"{line} {word}", size) > room:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
    return lines


def _picture(pen: Pen, w: Widget, a: Area) -> None:
    """A photo or a product: two tones of a colour and a glyph."""
    left, top, right, bottom = a
    pad = max(1, pen.width // 120)
    area = (left + pad, top + pad, right - pad, bottom - pad)
    pen.round(area, pen.width * 0.02, w.color)
    wide, high = area[2] - area[0], area[3] - area[1]
    lighter: Color = tuple(min(255, c + 34) for c in w.color)  # type: ignore[assignment]
    pen.draw.ellipse(
        (area[2] - wide * 0.42, area[1] + high * 0.1, area[2] - wide * 0.12, area[1] + high * 0.1 + wide * 0.3),
        fill=lighter,
    )
    low = area[3] - pen.width * 0.02
    pen.draw.polygon(
        [(area[0] + wide * 0.06, low), (area[0] + wide * 0.38, area[1] + high * 0.45), (area[0] + wide * 0.7, low)],
        fill=lighter,
    )
    if w.glyph:
        side = min(wide, high) * 0.3
        pen.glyph(w.glyph, area[0] + side * 0.8, area[1] + side * 0.8, side, WHITE)
    if w.text:
        strip = (
            area[0],
            area[3] - max(high * 0.24, 9) if high < pen.width else area[3] - pen.width * 0.08,
            area[2],
            area[3],
        )
        darker: Color = tuple(round(c * 0.55) for c in w.color)  # type: ignore[assignment]
        pen.round(strip, pen.width * 0.02, darker)
        size = pen.size(strip[3] - strip[1], 0.8, 0.034)
        pen.text(area[0] + wide * 0.06, (strip[1] + strip[3]) / 2, w.text, size, WHITE, room=wide * 0.7)


def _display(pen: Pen, w: Widget, a: Area) -> None:
    """A big line of figures, with a small one above it."""
    _, top, right, bottom = a
    high = bottom - top
    pen.draw.rectangle(a, fill=pen.theme.surface)
    pen.text(
        right - pen.width * 0.05,
        top + high * 0.25,
        w.detail,
        pen.size(high, 0.22, 0.045),
        pen.theme.soft,
        "rm",
        room=pen.width * 0.9,
    )
    pen.text(
        right - pen.width * 0.05,
        top + high * 0.66,
        w.text,
        pen.size(high, 0.5, 0.11),
        pen.theme.ink,
        "rm",
        room=pen.width * 0.9,
    )


PAINTERS: dict[str, Callable[[Pen, Widget, Area], None]] = {
    "title": _title, "glyph": _glyph, "item": _item, "heading": _heading, "prose": _prose, "bubble": _bubble,
    "chip": _chip, "day": _day, "action": _action, "input": _input, "picture": _picture, "display": _display,
}  # fmt: skip
