"""Model adapters: observation and history -> prompt; model text -> action. No torch, no ray.

`make_agent` finds an adapter by name; `Agent` is what it gives. Importing this room loads no Pillow and no tokenizer.
"""

from .agent import Agent, ContextLimit, Prepared, PromptStyle, Turn
from .context import Added, Context
from .parsing import ParseFailure
from .qwen3vl import format_action, parse
from .registry import agent_names, make_agent

__all__ = [
    "Added",
    "Agent",
    "Context",
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
