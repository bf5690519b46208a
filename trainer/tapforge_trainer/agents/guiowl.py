"""GUI-Owl: phones and desktops, with Qwen's tools and a line "Action: ..." before the call.

- GUI-Owl 1.5, built on Qwen3-VL, writes coordinates 0..1000 on each side. GUI-Owl of before, built on Qwen2.5-VL,
  writes pixels of the picture as it sees it, thinks between <thinking> and </thinking>, and may end with a
  <conclusion>. Which one a folder holds is read from its config.json.
- An earlier answer whose screen is shown is a turn of its own; of the others the conclusion or the line "Action: ..."
  stays.
- Its own tools lack `infeasible`. Names of its published tools and agents are read (`_PHONE_NAMES`,
  `_COMPUTER_NAMES`); `interact` asks the user.
- On desktops its `type` has `enter` and `clear`: `enter` is a line end after the text. `clear` would be an action of
  its own before it, and one answer is one action: 0 is read and 1 is a failure.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Final

from tapforge_envs.protocol import Action, AskUser, Enter, Type

from . import computer_use
from .agent import Turn
from .computer_use import COMPUTER_USE
from .coordinates import Coordinates, Grid, ImagePixels, Plane
from .dialect import Dialect, convention_of, spoken, step_line
from .mobile_use import MOBILE_USE
from .parsing import conclusion_of, parse_framed_call
from .tools import Arguments, Form, Tool

GRID: Final = Grid(1000)
#: model_type of config.json -> the convention
CONVENTIONS: Final[dict[str, Coordinates]] = {
    "qwen3_vl": GRID,
    "qwen3_vl_moe": GRID,
    "qwen2_5_vl": ImagePixels(),
    "qwen2_vl": ImagePixels(),
}
_ACTION: Final = re.compile(r"Action:[ \t]*([^\n]*)")
_ASKS: Final = dict.fromkeys(("interact", "call_user", "calluser"), "ask_user")
_PHONE_NAMES: Final = {"tap": "click", "scroll": "swipe", "open_app": "open", **_ASKS}
_COMPUTER_NAMES: Final = {
    "click": "left_click",
    "right click": "right_click",
    "computer_double_click": "double_click",
    "drag": "left_click_drag",
    "hotkey": "key",
    **_ASKS,
}


def _build(name: str, given: Arguments) -> Action:
    match name:
        case "type":
            return _typed(given)
        case "ask_user":
            return AskUser(text=given.text())
    return computer_use.build(name, given)


def _typed(given: Arguments) -> Action:
    text = given.text()
    if given.flag("clear"):
        raise ValueError("clear 1 is an action of its own: select the old text in a step before this one")
    if not given.flag("enter"):
        return Type(text=text)
    if not text:
        return Enter()
    return Type(text=text if text.endswith("\n") else text + "\n")


_PHONE: Final = replace(MOBILE_USE, aliases=_PHONE_NAMES)
_COMPUTER: Final = replace(
    COMPUTER_USE,
    forms={
        **COMPUTER_USE.forms,
        "type": replace(COMPUTER_USE.forms["type"], unshown=("clear", "enter")),
        "ask_user": Form(("text",), "ask the user for something that only the user knows"),
    },
    build=_build,
    aliases=_COMPUTER_NAMES,
    unshown=frozenset(("ask_user",)),
)


def dialect(name: str, tool: Tool, device: str, coordinates: Coordinates) -> Dialect:
    def system(plane: Plane, written: bool) -> str:
        shown = "" if written else "\n\n# Tool\n" + json.dumps(tool.schema(plane), ensure_ascii=False)
        return (
            f"You operate a {device} for the user. At each turn you see its screen and decide on one action.{shown}\n\n"
            '# Answer\n\nOne line "Action: ..." that says in a few words what to do, then one call of the function as '
            f'JSON between tags, and nothing else:\nAction: ...\n<tool_call>\n{{"name": "{tool.name}", "arguments": '
            '{"action": ..., ...}}\n</tool_call>\nWhen the task is done, use terminate with success; when it can\'t be '
            f"done on this {device}, with infeasible."
        )

    return Dialect(
        name,
        coordinates,
        system,
        parse=lambda text, plane: parse_framed_call(text, tool, plane, conclusion=isinstance(coordinates, ImagePixels)),
        write=tool.format,
        schema=tool.schema,
        tool=tool.schema(Plane(coordinates, 1, 1)) if isinstance(coordinates, Grid) else None,
        line=_line,
    )


def _line(number: int, turn: Turn) -> str:
    said = spoken(turn.text)
    if (conclusion := conclusion_of(said)) is not None:
        return step_line(number, turn, conclusion)
    found = _ACTION.search(said)
    return step_line(number, turn, found[1] if found is not None else said)


def of_model(name: str, model_type: str) -> Dialect:
    """Raises ValueError for a model of a family that GUI-Owl is not built on."""
    coordinates = convention_of(name, model_type, CONVENTIONS)
    if name.endswith("-computer"):
        return dialect(name, _COMPUTER, "computer", coordinates)
    return dialect(name, _PHONE, "phone", coordinates)
