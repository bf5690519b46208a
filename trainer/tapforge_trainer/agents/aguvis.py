"""Aguvis: phones and desktops, with calls of pyautogui and of a few functions for phones. Built on Qwen2-VL.

- Coordinates are fractions 0..1 of each side, written with four decimals.
- An answer is for a recipient: thoughts and a line "Action: ..." for `all`, then the code for `os`. Its chat format has
  the tokens <|recipient|> and <|diff_marker|> for it, and the answer ends with the latter. A vocabulary without them
  gets the plain chat format, and answers end as usual.
- The code is what follows the last border to `os`; without one, what stands from the first line that is code. It is
  read as syntax, from a closed list of calls with literal arguments; one action per answer.
- `scroll` and `hscroll` with a `page` turn the wheel by a part of the screen, ten notches for a whole one: up and right
  where it is positive, as in its data and as the notches of PyAutoGUI.
- Aguvis sees one screen, and of its earlier steps their "Action:" lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from pydantic import ValidationError

from tapforge_envs.clients.model_code import expression
from tapforge_envs.clients.pyautogui_text import NOTCHES, Scale, actions_of, key_name
from tapforge_envs.protocol import (
    Action,
    Answer,
    Back,
    DoubleTap,
    Drag,
    Enter,
    Home,
    Hotkey,
    Key,
    LongPress,
    MiddleClick,
    Move,
    OpenApp,
    RightClick,
    Scroll,
    Swipe,
    Tap,
    Terminate,
    TripleClick,
    Type,
    Wait,
)

from .agent import Turn
from .coordinates import Fraction, Plane, short
from .dialect import Dialect, spoken, step_line
from .parsing import ParseFailure

_RECIPIENT: Final = "<|recipient|>"
_BORDER: Final = re.compile(r"(?:<\|recipient\|>|(?m:^)(?:<\|im_start\|>)?assistant)\s*os\s*\n")
_CODE: Final = re.compile(r"(?m)^[ \t]*(?:(?:pyautogui|mobile|browser|computer|time)\.|terminate\(|answer\(|import )")
_WORDS: Final = re.compile(r"(?:os[^\S\n]*\n)?\s*(WAIT|DONE|FAIL)\s*", re.IGNORECASE)
_ACTION: Final = re.compile(r"(?m)^[ \t]*Action:[ \t]*(.*?)(?:<\|im_end\|>)?$")
_Status = Literal["success", "failure", "infeasible"]
#: calls of pyautogui that are a click at a place
_CLICKS: Final = {
    Tap: "click",
    DoubleTap: "doubleClick",
    RightClick: "rightClick",
    MiddleClick: "middleClick",
    TripleClick: "tripleClick",
    Move: "moveTo",
}
#: parameters of each function for phones, in their order
FUNCTIONS: Final[dict[str, tuple[str, ...]]] = {
    "mobile.swipe": ("from_coord", "to_coord"),
    "mobile.home": (),
    "mobile.back": (),
    "mobile.wait": ("seconds",),
    "mobile.long_press": ("x", "y"),
    "mobile.open_app": ("app_name",),
    "terminate": ("status",),
    "answer": ("answer",),
}
#: other names of parameters that are read
_PARAMETERS: Final = {("answer", "text"): "answer"}
_ALIASES: Final = {
    "mobile.terminate": "terminate",
    "computer.terminate": "terminate",
    "mobile.answer": "answer",
    "computer.answer": "answer",
    "computer.wait": "mobile.wait",
}


def parse(text: str, plane: Plane) -> Action | ParseFailure:
    """The action of a complete answer."""
    word = _WORDS.fullmatch(text)
    code = word[1] if word is not None else _code(text)
    if code is None:
        return ParseFailure("no_action", "no line is code, such as pyautogui.click(x=0.5, y=0.5)")
    if "\ufffd" in code:
        return ParseFailure("broken_block", "the code holds bytes that are not UTF-8")
    try:
        actions = _function(code, plane) or actions_of(code, Scale())
    except ValidationError as error:
        first = error.errors()[0]
        return ParseFailure("action", f"{short(first['input'])}: {first['msg']}")
    except ValueError as error:
        return ParseFailure("action", str(error)[:300])
    if len(actions) != 1:
        return ParseFailure("several_actions", f"the code holds {len(actions)} actions; one is allowed")
    return actions[0]


def _code(text: str) -> str | None:
    borders = list(_BORDER.finditer(text))
    if borders:
        return text[borders[-1].end() :].strip()
    if text.startswith("os\n"):
        return text[3:].strip()
    found = _CODE.search(text)
    return None if found is None else text[found.start() :].strip()


def _function(code: str, plane: Plane) -> list[Action] | None:
    """The action of a single call of a function for phones; None: it is none. Raises ValueError."""
    if code.startswith(("pyautogui", "import", "time")) or len(code) > 20_000:
        return None
    try:
        tree = expression(code)
    except ValueError:
        return None
    if not isinstance(tree, ast.Call):
        return None
    name = _name(tree.func)
    name = _ALIASES.get(name, name)
    if name not in FUNCTIONS:
        return None
    parameters = FUNCTIONS[name]
    if len(tree.args) > len(parameters):
        raise ValueError(f"{name} has {len(parameters)} parameters")
    given = dict(zip(parameters, tree.args, strict=False))
    for keyword in tree.keywords:
        word = _PARAMETERS.get((name, keyword.arg or ""), keyword.arg)
        if word not in parameters or word in given:
            raise ValueError(f"{name} has no parameter {short(keyword.arg)}, or it comes twice")
        given[word] = keyword.value
    missing = [p for p in parameters if p not in given]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    return [_build(name, {p: _literal(p, node) for p, node in given.items()}, plane)]


def _name(node: ast.expr) -> str:
    match node:
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
        case ast.Name(id=name):
            return name
    return ""


def _literal(name: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{name} is not a literal") from error


def _build(name: str, given: Mapping[str, Any], plane: Plane) -> Action:
    def place(field: str) -> tuple[float, float]:
        value = given[field]
        return plane.point(list(value) if isinstance(value, tuple) else value, field)

    match name:
        case "mobile.swipe":
            (x, y), (x2, y2) = place("from_coord"), place("to_coord")
            return Swipe(x=x, y=y, x2=x2, y2=y2)
        case "mobile.home":
            return Home()
        case "mobile.back":
            return Back()
        case "mobile.wait":
            seconds = given["seconds"]
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise ValueError(f"seconds {short(seconds)} is not a number")
            return Wait(seconds=seconds)
        case "mobile.long_press":
            x, y = plane.place(given["x"], given["y"])
            return LongPress(x=x, y=y)
        case "mobile.open_app":
            return OpenApp(name=_text("app_name", given["app_name"]))
        case "terminate":
            status = given["status"]
            if status not in get_args(_Status):
                raise ValueError(f"unknown status {short(status)}; known are {', '.join(get_args(_Status))}")
            return Terminate(status=status)
        case "answer":
            return Answer(text=_text("answer", given["answer"]))
    raise AssertionError(f"{name} is in FUNCTIONS and not read here")


def _text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{name} {short(value)} is not text")


def write(action: Action, plane: Plane) -> str:
    """The canonical answer. Raises ValueError for an action that the family has no word for."""

    def at(x: float, y: float) -> str:
        across, down = plane.at(x, y)
        return f"x={across}, y={down}"

    def pair(x: float, y: float) -> str:
        across, down = plane.at(x, y)
        return f"[{across}, {down}]"

    code = ""
    if (name := _CLICKS.get(type(action))) is not None:
        place: Any = action
        return f"os\npyautogui.{name}({at(place.x, place.y)})"
    match action:
        case Drag():
            code = f"pyautogui.moveTo({at(action.x, action.y)})\npyautogui.dragTo({at(action.x2, action.y2)})"
        case Scroll():
            notches = action.notches or NOTCHES
            turned = notches if action.direction in ("up", "right") else -notches
            call = "scroll" if action.direction in ("up", "down") else "hscroll"
            code = f"pyautogui.{call}({turned}, {at(action.x, action.y)})"
        case Type():
            code = f"pyautogui.write(message={_quoted(action.text)})"
        case Enter():
            code = "pyautogui.press('enter')"
        case Key() if key_name(action.name) == action.name and action.name != "enter":
            code = f"pyautogui.press({_quoted(action.name)})"
        case Hotkey():
            code = f"pyautogui.hotkey({', '.join(ascii(key) for key in action.keys)})"
        case Swipe():
            code = f"mobile.swipe(from_coord={pair(action.x, action.y)}, to_coord={pair(action.x2, action.y2)})"
        case LongPress(seconds=1.0):
            code = f"mobile.long_press({at(action.x, action.y)})"
        case Home():
            code = "mobile.home()"
        case Back():
            code = "mobile.back()"
        case Wait():
            code = f"mobile.wait(seconds={action.seconds:g})"
        case OpenApp():
            code = f"mobile.open_app(app_name={_quoted(action.name)})"
        case Terminate():
            code = f"terminate(status={_quoted(action.status)})"
        case Answer():
            code = f"answer(answer={_quoted(action.text)})"
    if not code:
        raise ValueError(f"Aguvis has no word for the action {action.type!r}: it writes calls of pyautogui and mobile")
    return f"os\n{code}"


def _quoted(text: str) -> str:
    """A literal that spells no token of the chat."""
    return ascii(text).replace("<|", "\\x3c|")


def _system(plane: Plane, written: bool) -> str:
    listed = "\n".join(f"- {name}({', '.join(parameters)})" for name, parameters in FUNCTIONS.items())
    return (
        "You operate a phone or a computer for the user, by calls of pyautogui and of these functions:\n"
        f"{listed}\n"
        f"Places are fractions of the screen: {plane.words()}. Each answer is one action."
    )


def _task(goal: str, lines: str) -> str:
    return f"Instruction: {goal}\n\nPrevious actions:\n{lines.rstrip() or 'None'}\n"


def _line(number: int, turn: Turn) -> str:
    found = _ACTION.search(turn.text)
    if found is not None:
        return step_line(number, turn, found[1])
    return step_line(number, turn, _code(turn.text) or spoken(turn.text))


DIALECT: Final = Dialect(
    "aguvis",
    Fraction(4),
    _system,
    parse,
    write,
    line=_line,
    task=_task,
    sayable=("<|im_start|>", _RECIPIENT),
    stop="<|diff_marker|>",
    opening=f"<|im_start|>assistant{_RECIPIENT}",
)
