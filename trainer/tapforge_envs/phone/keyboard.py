"""The on-screen keyboard: which keys it has and what a press makes of a text. Pure."""

from __future__ import annotations

from .screen import Box, Widget

Mode = str
_ROWS: dict[Mode, tuple[str, str, str]] = {
    "abc": ("qwertyuiop", "asdfghjkl", "zxcvbnm"),
    "ABC": ("QWERTYUIOP", "ASDFGHJKL", "ZXCVBNM"),
    "123": ("1234567890", "@#$%&-+()/", "*\"':;!?_="),
}
_SHIFT = {"abc": "ABC", "ABC": "abc", "123": "123"}


def face(mode: Mode) -> list[list[tuple[str, str, float]]]:
    """Rows of (key, label, share of the row's width); a key is a character or the name of what it does."""
    top, middle, low = _ROWS[mode]
    side = [] if mode == "123" else [("shift", "^", 1.5)]
    return [
        [(c, c, 1.0) for c in top],
        [("", "", (10 - len(middle)) / 2), *((c, c, 1.0) for c in middle), ("", "", (10 - len(middle)) / 2)],
        [*side, *((c, c, 1.0) for c in low), ("del", "<", 1.5 if side else 1.0)],
        [
            ("mode", "abc" if mode == "123" else "123", 1.5),
            (",", ",", 1.0),
            ("space", "", 4.5),
            (".", ".", 1.0),
            ("enter", "ok", 2.0),
        ],
    ]


def widgets(mode: Mode, box: Box) -> list[Widget]:
    """The board, which is drawn, and its keys, which are only there to be hit."""
    left, top, width, height = box
    found = [Widget("keyboard", "keyboard", box, text=mode)]
    rows = face(mode)
    for number, row in enumerate(rows):
        total = sum(share for _, _, share in row)
        x = left
        for key, _, share in row:
            wide = width * share / total
            if key:
                place = (x, top + height * number / len(rows), wide, height / len(rows))
                found.append(Widget(f"key:{key}", "key", place, volatile=True))
            x += wide
    return found


def press(key: str, mode: Mode, text: str) -> tuple[Mode, str]:
    """Keyboard and text after a key that isn't Enter."""
    if key == "shift":
        return _SHIFT[mode], text
    if key == "mode":
        return ("abc" if mode == "123" else "123"), text
    if key == "del":
        return mode, text[:-1]
    # one capital, then small letters again, as keyboards do
    return ("abc" if mode == "ABC" else mode), text + (" " if key == "space" else key)
