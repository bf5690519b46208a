"""Qwen3-VL with its tools: mobile_use for phones, computer_use for desktops.

Coordinates are 0..999 on each side, whatever the size of the picture: 0 is the first pixel and 999 the last. On sides
of up to 998 pixels the centre of every pixel survives the round trip.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from tapforge_envs.protocol import Action

from .agent import Turn
from .computer_use import COMPUTER_USE
from .coordinates import Coordinates, Grid, Plane
from .dialect import Dialect, step_line
from .mobile_use import MOBILE_USE
from .parsing import ParseFailure, parse_call
from .tools import Tool

_Parse = Callable[[str, Tool, Plane], Action | ParseFailure]

GRID: Final = Grid(999)
#: coordinates that don't depend on the image
_PLANE: Final = Plane(GRID, GRID.largest + 1, GRID.largest + 1)

_ROLE: Final = "You operate a {device} for the user. At each turn you see its screen and decide on one action."
_TOOL: Final = (
    "\n\n# Tool\n\nThis function is yours; its signature stands between the XML tags:\n<tools>\n{tool}\n</tools>"
)
_ANSWER: Final = (
    "\n\n# Answer\n\nYou may first think in a sentence or two. Then call the function exactly once, as JSON between "
    'tags, and write nothing after it:\n<tool_call>\n{{"name": "{name}", "arguments": {{"action": ..., ...}}}}\n'
    "</tool_call>\n"
    "When the task is done, use terminate with success; when it can't be done on this {device}, with infeasible."
)


def tool_dialect(
    name: str,
    tool: Tool,
    coordinates: Coordinates,
    device: str,
    parse: _Parse = parse_call,
    line: Callable[[int, Turn], str] = step_line,
) -> Dialect:
    """An adapter of Qwen's: reasoning, then one call. The schema goes to the chat template where it is always the
    same, and into the system prompt where it depends on the image or the template leaves tools out."""

    def system(plane: Plane, written: bool) -> str:
        shown = "" if written else _TOOL.format(tool=json.dumps(tool.schema(plane), ensure_ascii=False))
        return _ROLE.format(device=device) + shown + _ANSWER.format(name=tool.name, device=device)

    return Dialect(
        name,
        coordinates,
        system,
        parse=lambda text, plane: parse(text, tool, plane),
        write=tool.format,
        schema=tool.schema,
        tool=tool.schema(_PLANE) if isinstance(coordinates, Grid) else None,
        line=line,
    )


MOBILE: Final = tool_dialect("qwen3-vl", MOBILE_USE, GRID, "phone")
COMPUTER: Final = tool_dialect("qwen3-vl-computer", COMPUTER_USE, GRID, "computer")


def parse(text: str) -> Action | ParseFailure:
    """The action of a complete answer of the phone adapter."""
    return parse_call(text, MOBILE_USE, _PLANE)


def format_action(action: Action) -> str:
    """The canonical answer of the phone adapter. Raises ValueError for an action that mobile_use has no word for."""
    return MOBILE_USE.format(action, _PLANE)
