"""Qwen2.5-VL with its tools: mobile_use for phones, computer_use for desktops.

- Coordinates are pixels of the picture as the model sees it, after it was fitted to its patches; the tool's description
  names that size. Its chat template leaves tools out: the schema is part of the system prompt.
- An answer may stand between <thinking> and <conclusion>, as the prompts of agents that are built on it ask for. An
  earlier answer whose screen is gone is its conclusion, where it has one.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from .agent import Turn
from .computer_use import COMPUTER_USE
from .coordinates import ImagePixels
from .dialect import spoken, step_line
from .mobile_use import MOBILE_USE
from .parsing import conclusion_of, parse_framed_call, without_thinking
from .qwen3vl import tool_dialect


def concluded_line(number: int, turn: Turn) -> str:
    said = spoken(turn.text)
    return step_line(number, turn, conclusion_of(said) or without_thinking(said) or said)


_parse = partial(parse_framed_call, conclusion=True)

MOBILE: Final = tool_dialect("qwen2.5-vl", MOBILE_USE, ImagePixels(), "phone", _parse, concluded_line)
COMPUTER: Final = tool_dialect("qwen2.5-vl-computer", COMPUTER_USE, ImagePixels(), "computer", _parse, concluded_line)
