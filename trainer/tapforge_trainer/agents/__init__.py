"""Model adapters: observation and history -> prompt; model text -> action. No torch, no ray.

`make_agent` finds an adapter by name; `Agent` is what it gives. Importing this room loads no Pillow and no tokenizer.
"""

from .actions import format_action
from .agent import Agent, ContextLimit, Prepared, PromptStyle, Turn
from .parsing import ParseFailure, parse
from .registry import agent_names, make_agent

__all__ = [
    "Agent",
    "ContextLimit",
    "ParseFailure",
    "Prepared",
    "PromptStyle",
    "Turn",
    "agent_names",
    "format_action",
    "make_agent",
    "parse",
]
