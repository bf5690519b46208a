"""Calculator: keys for a sum, worked out with + and - after * and /."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import Do, Item, State, View, frame_of

NAME, GLYPH, COLOR = "calculator", "calculator", (70, 84, 104)
_KEYS = ("C", "(", ")", "/", "7", "8", "9", "*", "4", "5", "6", "-", "1", "2", "3", "+", "0", ".", "<", "=")
_FIGURES = 18


def content(rng: Random) -> State:
    return {"angle": "degrees"}


def view(state: State) -> View:
    v = View(state, "Calculator", COLOR)
    frame = frame_of(state)
    v.items.append(
        Item("display", "display", frame["fields"].get("sum", "") or "0", frame["fields"].get("last", ""), height=0.16)
    )
    for start in range(0, len(_KEYS), 4):
        row = [
            Item(f"press:{key}", "chip", key, on=key == "=" or None, color=COLOR, do=_press(frame, key))
            for key in _KEYS[start : start + 4]
        ]
        v.line(f"keys:{start}", row, height=0.115)
    return v


def _press(frame: State, key: str) -> Do:
    def do() -> None:
        fields = frame["fields"]
        text = fields.get("sum", "")
        if key == "C":
            fields["sum"] = fields["last"] = ""
        elif key == "<":
            fields["sum"] = text[:-1]
        elif key == "=":
            if text:
                fields["last"] = text
                fields["sum"] = work_out(text)
        elif len(text) < _FIGURES:
            fields["sum"] = key if text == "Error" else text + key

    return do


def work_out(text: str) -> str:
    """The value of a sum as the display shows it, "Error" where there is none."""
    try:
        value, rest = _sum(text.replace(" ", ""))
    except (ValueError, ZeroDivisionError, RecursionError):
        return "Error"
    if rest:
        return "Error"
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def _sum(text: str) -> tuple[Fraction, str]:
    value, text = _product(text)
    while text[:1] in ("+", "-") and text:
        sign, (other, text) = text[0], _product(text[1:])
        value = value + other if sign == "+" else value - other
    return value, text


def _product(text: str) -> tuple[Fraction, str]:
    value, text = _atom(text)
    while text[:1] in ("*", "/") and text:
        sign, (other, text) = text[0], _atom(text[1:])
        value = value * other if sign == "*" else value / other
    return value, text


def _atom(text: str) -> tuple[Fraction, str]:
    if text.startswith("-"):
        value, rest = _atom(text[1:])
        return -value, rest
    if text.startswith("("):
        value, rest = _sum(text[1:])
        if not rest.startswith(")"):
            raise ValueError("a bracket is open")
        return value, rest[1:]
    length = 0
    while length < len(text) and (text[length].isdecimal() or text[length] == "."):
        length += 1
    return Fraction(text[:length]), text[length:]


APP = app(NAME, GLYPH, COLOR, content, view)
