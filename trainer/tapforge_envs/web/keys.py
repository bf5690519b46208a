"""Keys by the names that agents use, as the browser wants them. Pure.

A name is Android's without KEYCODE_, in capitals (DEL is backspace, FORWARD_DEL deletes ahead), a desktop's as
PyAutoGUI has it in any case (esc, del, pagedown, left), or a single character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import protocol as p

#: line ends in one text: each is a key, and a step has a deadline
MAX_ENTERS = 500
#: characters that are typed key by key; what follows in a longer text is inserted line by line
_KEYED = 500

ALT, CTRL, META, SHIFT = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class Press:
    """A key of a keyboard. `text`: what it writes where text is entered."""

    key: str
    code: str
    number: int
    text: str = ""

    def events(self, modifiers: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Down and up, as parameters of Input.dispatchKeyEvent."""
        writes = self.text if not modifiers & (ALT | CTRL | META) else ""
        common = {
            "key": self.key,
            "code": self.code,
            "windowsVirtualKeyCode": self.number,
            "nativeVirtualKeyCode": self.number,
            "modifiers": modifiers,
        }
        down = {"type": "keyDown" if writes else "rawKeyDown", **common}
        if writes:
            down |= {"text": writes, "unmodifiedText": writes}
        if modifiers == CTRL and self.key == "a":
            down["commands"] = ["selectAll"]
        return down, {"type": "keyUp", **common}


#: key of the event -> (bit, number, the words for it besides those with a side)
_HELD: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "Control": (CTRL, 17, ("ctrl", "control")),
    "Alt": (ALT, 18, ("alt", "option", "opt")),
    "Shift": (SHIFT, 16, ("shift",)),
    "Meta": (META, 91, ("meta", "win", "windows", "cmd", "command", "super")),
}


def _modifiers() -> dict[str, tuple[int, Press]]:
    """By every name in use: ctrl, ctrlleft and ctrlright (PyAutoGUI), control_l and control_r (X11), controlleft (the
    browser's own), ctrl_left (Android)."""
    found = {}
    for key, (bit, number, words) in _HELD.items():
        for word in words:
            found[word] = (bit, Press(key, f"{key}Left", number))
            for side, short in (("Left", "_l"), ("Right", "_r")):
                press = Press(key, f"{key}{side}", 92 if (key, side) == ("Meta", "Right") else number)
                for name in (f"{word}{side.lower()}", f"{word}_{side.lower()}", f"{word}{short}"):
                    found[name] = (bit, press)
    return found


MODIFIERS: dict[str, tuple[int, Press]] = _modifiers()

ENTER = Press("Enter", "Enter", 13, "\r")
TAB = Press("Tab", "Tab", 9)

_BACKSPACE = Press("Backspace", "Backspace", 8)
_DELETE = Press("Delete", "Delete", 46)
_SPACE = Press(" ", "Space", 32, " ")
_ESCAPE = Press("Escape", "Escape", 27)
_LEFT, _UP = Press("ArrowLeft", "ArrowLeft", 37), Press("ArrowUp", "ArrowUp", 38)
_RIGHT, _DOWN = Press("ArrowRight", "ArrowRight", 39), Press("ArrowDown", "ArrowDown", 40)
_HOME, _END = Press("Home", "Home", 36), Press("End", "End", 35)
_PAGE_UP, _PAGE_DOWN = Press("PageUp", "PageUp", 33), Press("PageDown", "PageDown", 34)

_ANDROID: dict[str, Press | None] = {
    "DEL": _BACKSPACE,
    "FORWARD_DEL": _DELETE,
    "DPAD_LEFT": _LEFT,
    "DPAD_UP": _UP,
    "DPAD_RIGHT": _RIGHT,
    "DPAD_DOWN": _DOWN,
    "MOVE_HOME": _HOME,
    "MOVE_END": _END,
    "PAGE_UP": _PAGE_UP,
    "PAGE_DOWN": _PAGE_DOWN,
    "NUMPAD_ENTER": ENTER,
    "HOME": None,  # of a phone; a desktop's moves the caret
}
_DESKTOP: dict[str, Press] = {
    **dict.fromkeys(("enter", "return"), ENTER),
    **dict.fromkeys(("esc", "escape"), _ESCAPE),
    **dict.fromkeys(("del", "delete"), _DELETE),
    **dict.fromkeys(("pageup", "pgup", "page_up", "prior"), _PAGE_UP),
    **dict.fromkeys(("pagedown", "pgdn", "page_down", "next"), _PAGE_DOWN),
    **dict.fromkeys(("backspace", "back_space"), _BACKSPACE),
    "tab": TAB,
    **dict.fromkeys(("space", "spacebar"), _SPACE),
    **dict.fromkeys(("left", "arrowleft", "arrow_left"), _LEFT),
    **dict.fromkeys(("up", "arrowup", "arrow_up"), _UP),
    **dict.fromkeys(("right", "arrowright", "arrow_right"), _RIGHT),
    **dict.fromkeys(("down", "arrowdown", "arrow_down"), _DOWN),
    "home": _HOME,
    "end": _END,
    **dict.fromkeys(("insert", "ins"), Press("Insert", "Insert", 45)),
    **dict.fromkeys(("kp_enter", "numpadenter"), Press("Enter", "NumpadEnter", 13, "\r")),
}

#: keys that do something to a text or a page together with control
_EDITING = {*"acvxzybiu"} | {
    press.key.lower() for press in (_LEFT, _UP, _RIGHT, _DOWN, _HOME, _END, _BACKSPACE, _DELETE, ENTER)
}

#: character -> (code, number) of the key that it is written with on a US keyboard
_MARKS = {
    **{c: (f"Digit{d}", 48 + d) for d, c in enumerate(")!@#$%^&*(")},
    **dict.fromkeys("-_", ("Minus", 189)),
    **dict.fromkeys("=+", ("Equal", 187)),
    **dict.fromkeys("[{", ("BracketLeft", 219)),
    **dict.fromkeys("]}", ("BracketRight", 221)),
    **dict.fromkeys("\\|", ("Backslash", 220)),
    **dict.fromkeys(";:", ("Semicolon", 186)),
    **dict.fromkeys("'\"", ("Quote", 222)),
    **dict.fromkeys(",<", ("Comma", 188)),
    **dict.fromkeys(".>", ("Period", 190)),
    **dict.fromkeys("/?", ("Slash", 191)),
    **dict.fromkeys("`~", ("Backquote", 192)),
}


def character(text: str) -> tuple[Press, int] | None:
    """The key that writes one character, and the modifiers for it; None when no key does (other scripts)."""
    if text == "\n":
        return ENTER, 0
    if text == "\t":
        return TAB, 0
    if text == " ":
        return _SPACE, 0
    if not text.isascii() or not text.isprintable():
        return None
    if text.isalpha():
        return Press(text, f"Key{text.upper()}", ord(text.upper()), text), SHIFT if text.isupper() else 0
    if text.isdigit():
        return Press(text, f"Digit{text}", ord(text), text), 0
    code, number = _MARKS[text]
    return Press(text, code, number, text), SHIFT if text in '~!@#$%^&*()_+{}|:"<>?' else 0


def writing(text: str) -> list[tuple[Press, int] | str]:
    """What writes a text, in order: keys with the modifiers for them, and pieces without a line end that are inserted
    as they are. A line end is always the Enter key."""
    found: list[tuple[Press, int] | str] = []
    keyed = _KEYED
    for stroke in p.keystrokes(text):
        if isinstance(stroke, p.Enter):
            found.append((ENTER, 0))
            continue
        found += [character(one) or one for one in stroke.text[:keyed]]
        if rest := stroke.text[keyed:]:
            found.append(rest)
        keyed = max(0, keyed - len(stroke.text))
    return found


def combination(names: Sequence[str]) -> tuple[list[Press], list[Press], int] | None:
    """(keys that are held, keys that are pressed meanwhile, modifiers) of keys pressed together; None for what is the
    browser's own (a new tab, the end of a window) and for names of no key. Control goes with what edits text."""
    plain = [name.strip().lower() for name in names]
    held = [MODIFIERS[name] for name in plain if name in MODIFIERS]
    pressed = [named(name) for name, word in zip(names, plain, strict=True) if word not in MODIFIERS]
    modifiers = sum({number for number, _ in held})
    found = [press for press in pressed if press is not None]
    if len(found) < len(pressed) or modifiers & (ALT | META):
        return None
    if modifiers & CTRL and not all(press.key.lower() in _EDITING for press in found):
        return None
    return [press for _, press in held], found, modifiers


def named(name: str) -> Press | None:
    """The key of this name; None where a browser has no such key."""
    if len(name) == 1:
        found = character(name)
        return found[0] if found else None
    if name in _ANDROID:
        return _ANDROID[name]
    word = name.strip().lower()
    return MODIFIERS[word][1] if word in MODIFIERS else _DESKTOP.get(word)
