"""GUI-Owl: phones and desktops, with Qwen's tools and a line "Action: ..." before the call.

- GUI-Owl 1.5, built on Qwen3-VL, writes coordinates 0..1000 on each side. GUI-Owl of before, built on Qwen2.5-VL,
  writes pixels of the picture as it sees it. Which one a folder holds is read from its config.json.
- An earlier answer whose screen is shown is a turn of its own; of the others the line "Action: ..." stays.
- Its own tools lack `infeasible`; on phones `tap` is read as click, and `interact` asks the user.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Final

from .agent import Turn
from .computer_use import COMPUTER_USE
from .coordinates import Coordinates, Grid, ImagePixels, Plane
from .dialect import Dialect, convention_of, spoken, step_line
from .mobile_use import MOBILE_USE
from .parsing import parse_call
from .tools import Tool

GRID: Final = Grid(1000)
#: model_type of config.json -> the convention
CONVENTIONS: Final[dict[str, Coordinates]] = {
    "qwen3_vl": GRID,
    "qwen3_vl_moe": GRID,
    "qwen2_5_vl": ImagePixels(),
    "qwen2_vl": ImagePixels(),
}
_ACTION: Final = re.compile(r"Action:[ \t]*([^\n]*)")
_PHONE: Final = replace(MOBILE_USE, aliases={"tap": "click", "interact": "ask_user"})


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
        parse=lambda text, plane: parse_call(text, tool, plane),
        write=tool.format,
        schema=tool.schema,
        tool=tool.schema(Plane(coordinates, 1, 1)) if isinstance(coordinates, Grid) else None,
        line=_line,
    )


def _line(number: int, turn: Turn) -> str:
    said = spoken(turn.text)
    found = _ACTION.search(said)
    return step_line(number, turn, found[1] if found is not None else said)


def of_model(name: str, model_type: str) -> Dialect:
    """Raises ValueError for a model of a family that GUI-Owl is not built on."""
    coordinates = convention_of(name, model_type, CONVENTIONS)
    if name.endswith("-computer"):
        return dialect(name, COMPUTER_USE, "computer", coordinates)
    return dialect(name, _PHONE, "phone", coordinates)
