"""The UI tree of a screen, as Android's accessibility service would write it: XML with texts, states and places.

It says what a real tree says: a widget's id is that of its kind ("row", "field"), not of what it shows, and the clock
of the status bar, toasts and the keys of the keyboard are nodes as well.
"""

from __future__ import annotations

from xml.sax.saxutils import quoteattr

from .screen import Screen, Widget

_CLASSES = {
    "input": "android.widget.EditText",
    "action": "android.widget.Button",
    "fab": "android.widget.ImageButton",
    "glyph": "android.widget.ImageButton",
    "key": "android.widget.Button",
    "toast": "android.widget.Toast",
    "picture": "android.widget.ImageView",
    "app": "android.widget.TextView",
}
#: drawn, but nothing that a tree names
_DRAWN_ONLY = ("panel", "scrim", "navigation")


def ui_tree(screen: Screen, app: str, width: int, height: int) -> str:
    nodes = "".join(_node(w, app, width, height) for w in screen.widgets if w.kind not in _DRAWN_ONLY)
    return f'<?xml version="1.0" encoding="UTF-8"?><hierarchy rotation="0">{nodes}</hierarchy>'


def _node(w: Widget, app: str, width: int, height: int) -> str:
    kind = w.id.partition(":")[0].partition("#")[0]
    package, name, role = f"dev.tapforge.{app}", f"{app}:id/{kind}", _CLASSES.get(w.kind, "android.widget.TextView")
    if w.kind == "status":
        package, name = "com.android.systemui", "com.android.systemui:id/clock"
    elif w.kind in ("keyboard", "key"):
        package = "com.android.inputmethod"
    elif w.kind == "words" and w.volatile:
        role = "android.widget.TextClock"
    checked = w.on if w.kind != "input" else None
    if w.glyph in ("radio", "radio_on"):
        role, checked = "android.widget.RadioButton", w.glyph == "radio_on"
    elif checked is not None:
        role = "android.widget.Switch"
    x, y, wide, high = w.box
    said = {
        "text": w.text or w.trail,
        "resource-id": name,
        "class": role,
        "package": package,
        "content-desc": " ".join(part for part in (w.glyph, w.detail, w.trail if w.text else "") if part),
        "checkable": _word(checked is not None),
        "checked": _word(bool(checked)),
        "clickable": _word(w.tap),
        "focused": _word(w.kind == "input" and bool(w.on)),
        "bounds": f"[{round(x * width)},{round(y * height)}][{round((x + wide) * width)},{round((y + high) * height)}]",
    }
    return f"<node {' '.join(f'{name}={quoteattr(value)}' for name, value in said.items())}/>"


def _word(yes: bool) -> str:
    return "true" if yes else "false"
