"""A text as the PyAutoGUI program that types it on a desktop of OSWorld. Pure.

- A line end in the text is the Enter key, whether its line is typed or pasted.
- `pyautogui.write` types what an American keyboard has, and on X11 types `>` for `<`: lines with `<` or another script,
  and all lines of a longer text, go through the clipboard by xclip, which OSWorld's virtual machines have, and Ctrl+V.
  That pastes in applications, and not in a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from .. import protocol as p
from ..protocol import UnsupportedAction

#: characters that are typed one by one; all lines of a longer text are pasted
_TYPED: Final = 1000
#: lines of a text that are pasted one by one, and seconds until an application has read the clipboard
_PASTED: Final = 100
_PASTE_SECONDS: Final = 0.3

#: xclip stays to serve the clipboard: with our pipes it would hold up the process that waits for their end
_PASTE: Final = (
    "import subprocess; paste = lambda text: (subprocess.run(['xclip', '-selection', 'clipboard'], "
    "input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=10, check=True), "
    f"pyautogui.hotkey('ctrl', 'v'), time.sleep({_PASTE_SECONDS})); "
)


def typing_program(text: str) -> str:
    """Statements on one line; `pyautogui` and `time` are imported before it. Raises UnsupportedAction."""
    if not text:
        raise UnsupportedAction("there is nothing to type")
    if "\0" in text:
        raise UnsupportedAction("the text holds a NUL, which nothing can type")
    strokes = p.keystrokes(text)
    if len(text) <= _TYPED and _typable(text):
        whole = "".join(stroke.text if isinstance(stroke, p.Type) else "\n" for stroke in strokes)
        return f"pyautogui.write({whole!a}, interval=0.02)"
    pasted = [s.text for s in strokes if isinstance(s, p.Type) and (len(text) > _TYPED or not _typable(s.text))]
    if len(pasted) > _PASTED:
        raise UnsupportedAction(f"{len(pasted)} lines to paste; at most {_PASTED} are in one step: type fewer at once")
    return _PASTE + "; ".join(_pieces(strokes, set(pasted)))


def _typable(text: str) -> bool:
    return all((" " <= c <= "~" and c != "<") or c in "\r\n\t" for c in text)


def _pieces(strokes: list[p.Type | p.Enter], pasted: set[str]) -> Iterator[str]:
    for enter, group in groupby(strokes, key=lambda stroke: isinstance(stroke, p.Enter)):
        pieces = list(group)
        if enter:
            yield f"pyautogui.press('enter'{f', presses={len(pieces)}' if len(pieces) > 1 else ''})"
        for line in pieces:
            if isinstance(line, p.Type):
                how = "paste({})" if line.text in pasted else "pyautogui.write({}, interval=0.02)"
                yield how.format(ascii(line.text))
