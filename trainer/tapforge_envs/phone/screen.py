"""What a screen is made of: widgets in relative boxes. Frozen and hashable, so that equal screens share their pixels.

A box is (x, y, width, height) in relative units. Later widgets lie on top of earlier ones. A widget with `tap` False is
decoration: taps fall through to what lies below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Box = tuple[float, float, float, float]
Color = tuple[int, int, int]
#: `draw` paints the first line, `surfaces` the second, `overlays` the others
Kind = Literal[
    "tile",
    "title", "glyph", "item", "heading", "prose", "bubble", "chip", "day", "action", "input", "picture", "display",
    "app", "words", "dots", "fab", "keyboard", "key", "navigation", "status", "scrim", "dialog", "banner", "toast",
    "panel",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Widget:
    #: unique on its screen and stable over time: "app:mail", "toggle:wifi"
    id: str
    kind: Kind
    box: Box
    text: str = ""
    detail: str = ""
    glyph: str | None = None
    color: Color = (90, 90, 90)
    #: switches, check boxes and the field that has the focus; None for what has no such state
    on: bool | None = None
    tap: bool = True
    #: changes with time or caret alone: drawn, but neither in the state key nor in the UI tree's identity
    volatile: bool = False
    #: text at the far end of a row
    trail: str = ""
    #: a letter or two on a coloured disc before the text
    badge: str = ""


@dataclass(frozen=True, slots=True)
class Screen:
    background: Color
    widgets: tuple[Widget, ...]
    #: index of a wallpaper pattern; 0 is plain
    pattern: int = 0
    #: dark theme
    dark: bool = False
    #: whether the caret of the field that has the focus shows; real ones blink
    caret: bool = True

    def at(self, x: float, y: float) -> Widget | None:
        """The topmost tappable widget under a relative point."""
        for widget in reversed(self.widgets):
            left, top, width, height = widget.box
            if widget.tap and left <= x < left + width and top <= y < top + height:
                return widget
        return None

    def find(self, id: str) -> Widget | None:
        return next((widget for widget in self.widgets if widget.id == id), None)

    def identity(self) -> tuple[tuple[str | bool | None, ...], ...]:
        """What a user would call the same screen: everything but colours, places and volatile parts."""
        return tuple(
            (w.id, w.text, w.detail, w.on, w.trail) if w.trail else (w.id, w.text, w.detail, w.on)
            for w in self.widgets
            if not w.volatile
        )


def center(box: Box) -> tuple[float, float]:
    return box[0] + box[2] / 2, box[1] + box[3] / 2
