"""UI-TARS: phones and desktops, with calls written as text: "Thought: ...", then "Action: click(start_box='(x,y)')".

- UI-TARS of before, built on Qwen2-VL, writes coordinates 0..1000 on each side. UI-TARS-1.5, built on Qwen2.5-VL,
  writes pixels of the picture as it sees it. Which one a folder holds is read from its config.json.
- The marks <|box_start|> and <|box_end|> around a place are tokens in prompts and answers. A place is read in all forms
  that the family writes: (x,y), [x,y], <point>x y</point>, <bbox>x1 y1 x2 y2</bbox>, with or without the marks; four
  numbers mean the middle of a box.
- The action is what the last line that begins with "Action:" says, one call. Text in `content` ends at the last quote,
  so that an unescaped quote does no harm, unless another call or parameter follows it: that is a failure.
- Reading takes time in proportion to the answer's length.
- Every earlier answer is a turn of its own, thought included; the oldest screens go.
- `wait` is 5 s. `finished` without content is success, with content it is the answer, which ends the episode as well.
  `call_user`, and `error_env` of its agents, say that the task can't be done. A line's end in `type` stays in the text:
  it is how UI-TARS submits.
- On phones, UI-TARS of before strokes with `scroll(start_box, end_box)`: a swipe, as the finger goes. The `time` of its
  `long_press` is seconds. A parameter that may be missing may be empty, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

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
    Move,
    OpenApp,
    RightClick,
    Scroll,
    Swipe,
    Tap,
    Terminate,
    Type,
    Wait,
)

from .computer_use import keys_action
from .coordinates import Coordinates, Grid, ImagePixels, Plane, short
from .dialect import Dialect, convention_of
from .parsing import ParseFailure, without_reasoning
from .tools import MAX_SECONDS

BOX: Final = ("<|box_start|>", "<|box_end|>")
#: model_type of config.json -> the convention
CONVENTIONS: Final[dict[str, Coordinates]] = {"qwen2_vl": Grid(1000), "qwen2_5_vl": ImagePixels()}
#: seconds of `wait`
_WAIT: Final = 5.0
#: characters of an answer that are looked at
_MOST: Final = 50_000

_ACTION_LINE: Final = re.compile(r"(?m)^[ \t]*Action:")
_CALL: Final = re.compile(r"([a-z_]+)\((.*)\)", re.DOTALL)
_SECOND: Final = re.compile(r"\)[^\S\n]*\n\s*[a-z_]+\(")
_TEXT: Final = re.compile(r"\s*(?:content|app_name)\s*=\s*(['\"])")
#: by the quote that a text is in: the name of a call, or of a parameter, after such a quote that is not escaped
_BEHIND: Final = {q: re.compile(rf"(?<!\\)(?:\\\\)*{q}\s*\)[\s;]*([a-z_]+)\(") for q in "'\""}
_FURTHER: Final = {q: re.compile(rf"(?<!\\)(?:\\\\)*{q}\s*,\s*(\w+)\s*=\s*['\"(\[]") for q in "'\""}
_CONTENT: Final = re.compile(r"(\w+)\s*=\s*(['\"])(.*)\2", re.DOTALL)
_PAIR: Final = re.compile(r"\s*(\w+)\s*=\s*(?:'([^']*)'|\"([^\"]*)\"|([(\[][^()\[\]]*[)\]]))\s*(?:,|$)")
_NUMBER: Final = r"[+-]?(?:[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})"
_NUMBERS: Final = rf"({_NUMBER}(?:(?:\s*,\s*|\s+){_NUMBER}){{1,3}})"
_PLACE: Final = re.compile(
    rf"\(\s*{_NUMBERS}\s*\)|\[\s*{_NUMBERS}\s*\]|<point>\s*{_NUMBERS}\s*</point>|<bbox>\s*{_NUMBERS}\s*</bbox>"
    rf"|{_NUMBERS}"
)
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "'": "'", '"': '"', "\\": "\\"}
#: names that versions of the family have for the same parameter
_PARAMETERS: Final = {
    "point": "start_box",
    "start_point": "start_box",
    "end_point": "end_box",
    "hotkey": "key",
    "press": "key",
}
_NAMES: Final = {*_PARAMETERS, *_PARAMETERS.values(), "content", "app_name", "direction", "time"}


@dataclass(frozen=True, slots=True)
class _Given:
    """The parameters of one call. Every method raises ValueError that names parameter and value."""

    values: Mapping[str, str]
    plane: Plane

    def place(self, name: str) -> tuple[float, float]:
        text = self.values[name]
        for mark in BOX:
            text = text.replace(mark, "")
        found = _PLACE.fullmatch(text.strip())
        numbers = [float(n) for n in re.findall(_NUMBER, next(g for g in found.groups() if g))] if found else []
        if len(numbers) not in (2, 4):
            raise ValueError(f"{name} {short(self.values[name])} is not a place such as (x,y)")
        x, y = self.plane.place(_tidy(numbers[0]), _tidy(numbers[1]), name)
        if len(numbers) == 4:
            x2, y2 = self.plane.place(_tidy(numbers[2]), _tidy(numbers[3]), name)
            x, y = (x + x2) / 2, (y + y2) / 2
        return x, y

    def way(self) -> str:
        way = self.values["direction"].strip().lower()
        if way not in ("up", "down", "left", "right"):
            raise ValueError(f"unknown direction {short(way)}; known are up, down, left, right")
        return way

    def seconds(self) -> float:
        text = self.values["time"].strip()
        if re.fullmatch(_NUMBER, text) and 0 < float(text) <= MAX_SECONDS:
            return float(text)
        raise ValueError(f"time {short(text)} is not a number of seconds over 0, at most {MAX_SECONDS}")

    def keys(self) -> Action:
        """ "ctrl c", and "ctrl+c" as some write."""
        words = self.values["key"].split()
        return keys_action([key for w in words for key in (w.split("+") if len(w) > 2 and "+" in w[1:-1] else [w])])


def _tidy(number: float) -> int | float:
    return int(number) if number.is_integer() else number


def _at(kind: Callable[..., Action]) -> Callable[[_Given], Action]:
    def build(given: _Given) -> Action:
        x, y = given.place("start_box")
        return kind(x=x, y=y)

    return build


def _drag(given: _Given) -> Action:
    (x, y), (x2, y2) = given.place("start_box"), given.place("end_box")
    return Drag(x=x, y=y, x2=x2, y2=y2)


def _scroll(given: _Given) -> Action:
    way = given.way()
    if "start_box" not in given.values:
        return Scroll.model_validate({"direction": way})
    x, y = given.place("start_box")
    return Scroll.model_validate({"direction": way, "x": x, "y": y})


def _stroke(given: _Given) -> Action:
    """Of phones: by its direction, or by the two places of the finger."""
    missing = "end_box" in given.values and "start_box" not in given.values
    if missing or ("direction" in given.values) == ("end_box" in given.values):
        raise ValueError("takes a direction, or start_box and end_box")
    if "direction" in given.values:
        return _scroll(given)
    (x, y), (x2, y2) = given.place("start_box"), given.place("end_box")
    return Swipe(x=x, y=y, x2=x2, y2=y2)


def _long_press(given: _Given) -> Action:
    x, y = given.place("start_box")
    return LongPress(x=x, y=y, seconds=given.seconds() if "time" in given.values else 1.0)


def _finished(given: _Given) -> Action:
    said = given.values.get("content", "")
    return Answer(text=said) if said.strip() else Terminate(status="success")


@dataclass(frozen=True, slots=True)
class _Call:
    needs: tuple[str, ...]
    build: Callable[[_Given], Action]
    allows: tuple[str, ...] = ()
    #: of the action list in prompts; "": read and not offered
    shown: str = ""


_PLACE_SHOWN: Final = "start_box='<|box_start|>(x1,y1)<|box_end|>'"
_COMMON: Final[dict[str, _Call]] = {
    "click": _Call(("start_box",), _at(Tap), shown=f"click({_PLACE_SHOWN})"),
    "type": _Call(("content",), lambda g: Type(text=g.values["content"]), shown="type(content='')"),
    "scroll": _Call(
        ("direction",),
        _scroll,
        ("start_box",),
        shown=f"scroll({_PLACE_SHOWN}, direction='down or up or right or left')",
    ),
    "drag": _Call(
        ("start_box", "end_box"), _drag, shown=f"drag({_PLACE_SHOWN}, end_box='<|box_start|>(x2,y2)<|box_end|>')"
    ),
    "wait": _Call((), lambda g: Wait(seconds=_WAIT), shown="wait()"),
    "finished": _Call((), _finished, ("content",), shown="finished(content='')"),
    "call_user": _Call((), lambda g: Terminate(status="infeasible"), ("content",), shown="call_user()"),
    "error_env": _Call((), lambda g: Terminate(status="infeasible"), ("content",)),
}
MOBILE: Final[dict[str, _Call]] = {
    **_COMMON,
    "scroll": _Call((), _stroke, ("start_box", "direction", "end_box"), shown=_COMMON["scroll"].shown),
    "long_press": _Call(("start_box",), _long_press, ("time",), shown=f"long_press({_PLACE_SHOWN})"),
    "open_app": _Call(("app_name",), lambda g: OpenApp(name=g.values["app_name"]), shown="open_app(app_name='')"),
    "press_home": _Call((), lambda g: Home(), shown="press_home()"),
    "press_back": _Call((), lambda g: Back(), shown="press_back()"),
}
COMPUTER: Final[dict[str, _Call]] = {
    **_COMMON,
    "left_double": _Call(("start_box",), _at(DoubleTap), shown=f"left_double({_PLACE_SHOWN})"),
    "right_single": _Call(("start_box",), _at(RightClick), shown=f"right_single({_PLACE_SHOWN})"),
    "hotkey": _Call(("key",), _Given.keys, shown="hotkey(key='ctrl c')"),
    "hover": _Call(("start_box",), _at(Move)),
    "left_single": _Call(("start_box",), _at(Tap)),
    "select": _Call(("start_box", "end_box"), _drag),
    "press": _Call(("key",), _Given.keys),
}


def parse(text: str, plane: Plane, calls: Mapping[str, _Call]) -> Action | ParseFailure:
    """The action of a complete answer."""
    said = without_reasoning(text[:_MOST])
    if said is None:
        return ParseFailure("reasoning", "<think> is never closed")
    lines = list(_ACTION_LINE.finditer(said))
    if lines:
        call = said[lines[-1].end() :].strip()
    elif said.count("Action:") == 1:
        call = said.partition("Action:")[2].strip()
    else:
        return ParseFailure("no_action", 'no line begins with "Action:"')
    if "\ufffd" in call:
        return ParseFailure("broken_block", "the action holds bytes that are not UTF-8")
    found = _CALL.fullmatch(call)
    if found is None:
        return ParseFailure("shape", f"{short(call)} is not a call such as click({_PLACE_SHOWN})")
    name, inside = found.groups()
    if name not in calls:
        return ParseFailure("action", f"unknown action {short(name)}; known are {', '.join(calls)}")
    if _several(inside, call, calls):
        return ParseFailure("several_actions", "one answer says one action")
    try:
        return _built(name, calls[name], _parameters(inside), plane)
    except ValidationError as error:
        first = error.errors()[0]
        return ParseFailure("action", f"{name}: {short(first['input'])}: {first['msg']}")
    except ValueError as error:
        return ParseFailure("action", f"{name}: {error}")


def _several(inside: str, call: str, calls: Mapping[str, _Call]) -> bool:
    """Whether another call follows. In text that is typed a line may look like one: there it is another call where the
    text's quote was closed before it."""
    text = _TEXT.match(inside)
    if text is None:
        return _SECOND.search(call) is not None
    return any(found[1] in calls for found in _BEHIND[text[1]].finditer(inside, text.end()))


def _parameters(inside: str) -> dict[str, str]:
    """Raises ValueError."""
    if not inside.strip():
        return {}
    whole = _CONTENT.fullmatch(inside.strip())
    if whole is not None and whole[1] in ("content", "app_name"):
        for further in _FURTHER[whole[2]].finditer(whole[3]):
            if further[1] in _NAMES:
                raise ValueError(f"has no parameter {further[1]} beside {whole[1]}")
        return {whole[1]: _unescaped(whole[3])}
    given: dict[str, str] = {}
    at = 0
    while at < len(inside):
        found = _PAIR.match(inside, at)
        if found is None:
            raise ValueError(f"{short(inside[at:])} are not parameters such as name='value'")
        name = _PARAMETERS.get(found[1], found[1])
        if name in given:
            raise ValueError(f"the parameter {name} comes twice")
        given[name] = next(value for value in found.groups()[1:] if value is not None)
        at = found.end()
    return given


def _built(name: str, call: _Call, given: Mapping[str, str], plane: Plane) -> Action:
    given = {p: value for p, value in given.items() if value.strip() or p not in call.allows}
    missing = [p for p in call.needs if p not in given]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    extra = [p for p in given if p not in call.needs and p not in call.allows]
    if extra:
        raise ValueError(f"has no parameter {', '.join(short(p) for p in extra)}")
    return call.build(_Given(given, plane))


def _unescaped(text: str) -> str:
    def meant(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] in "xuU" and len(code) > 1:
            value = int(code[1:], 16)
            return chr(value) if value <= 0x10FFFF else found[0]
        return _ESCAPED.get(code, found[0])

    return _ESCAPE.sub(meant, text)


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("'", "\\'").replace('"', '\\"')
    text = text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return text.replace("<", "\\x3c").replace("\ufffd", "\\ufffd")


def _quoted(text: str) -> str:
    """Of a text without escapes. Raises ValueError where it holds both quotes."""
    if "'" in text and '"' in text:
        raise ValueError(f"UI-TARS has no way to write {text} between quotes")
    return f'"{text}"' if "'" in text else f"'{text}'"


def write(action: Action, plane: Plane, calls: Mapping[str, _Call]) -> str:
    """The canonical answer. Raises ValueError for an action that the family has no word for."""

    def place(x: float, y: float) -> str:
        shown = ",".join(str(n) for n in plane.at(x, y))
        return f"'<|box_start|>({shown})<|box_end|>'"

    said = ""
    match action:
        case Tap():
            said = f"click(start_box={place(action.x, action.y)})"
        case LongPress(seconds=1.0):
            said = f"long_press(start_box={place(action.x, action.y)})"
        case DoubleTap():
            said = f"left_double(start_box={place(action.x, action.y)})"
        case RightClick():
            said = f"right_single(start_box={place(action.x, action.y)})"
        case Move():
            said = f"hover(start_box={place(action.x, action.y)})"
        case Drag():
            said = f"drag(start_box={place(action.x, action.y)}, end_box={place(action.x2, action.y2)})"
        case Scroll(notches=None):
            said = f"scroll(start_box={place(action.x, action.y)}, direction='{action.direction}')"
        case Type():
            said = f"type(content='{_escaped(action.text)}')"
        case Hotkey():
            said = f"hotkey(key={_quoted(' '.join(action.keys))})"
        case Key():
            said = f"hotkey(key={_quoted(action.name)})"
        case Enter():
            said = "hotkey(key='enter')"
        case OpenApp():
            said = f"open_app(app_name='{_escaped(action.name)}')"
        case Home():
            said = "press_home()"
        case Back():
            said = "press_back()"
        case Wait(seconds=5.0):
            said = "wait()"
        case Answer() if action.text.strip():
            said = f"finished(content='{_escaped(action.text)}')"
        case Terminate(status="success"):
            said = "finished()"
        case Terminate(status="infeasible"):
            said = "call_user()"
    if not said or said.partition("(")[0] not in calls:
        raise ValueError(f"UI-TARS has no word for the action {action.type!r}; use one of {', '.join(calls)}")
    return f"Action: {said}"


def of_model(name: str, model_type: str) -> Dialect:
    """Raises ValueError for a model of a family that UI-TARS is not built on."""
    coordinates = convention_of(name, model_type, CONVENTIONS)
    computer = name.endswith("-computer")
    calls = COMPUTER if computer else MOBILE
    device = "computer" if computer else "phone"
    listed = "\n".join(call.shown for call in calls.values() if call.shown)
    role = (
        f"You operate a {device} for the user, one action at a time, by what you see of its screen.\n\n"
        "## Answer\n```\nThought: ...\nAction: ...\n```\n\n"
        f"## Actions\n{listed}\n\n"
        "## Notes\n- In Thought, say your plan in short and the next action in one sentence.\n"
        "- In content, write \\' \\\" and \\n for quotes and line ends; a line end as the last character submits.\n"
        "- Where the task can't be done, call_user.\n\n## Task\n"
    )
    return Dialect(
        name,
        coordinates,
        lambda plane, written: "",
        parse=lambda text, plane: parse(text, plane, calls),
        write=lambda action, plane: write(action, plane, calls),
        history="all",
        spoken=str.strip,
        preface=role,
        task=lambda goal, lines: goal,
        markup=BOX,
        sayable=BOX,
    )
