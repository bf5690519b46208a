"""What an adapter says of its model family, and nothing of how prompts are made: `chat_agent.py` does that for all.

A dialect is data and pure functions. `Plane` is the image that the model saw when it answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tapforge_envs.protocol import Action

from .agent import Turn
from .coordinates import Coordinates, Plane
from .parsing import ParseFailure, without_reasoning

#: shown: an earlier answer is a turn of its own as long as its screen is shown, and a line of text after that;
#: all: every earlier answer is a turn of its own, and the oldest screens go
History = Literal["shown", "all"]


#: characters of one "Step n: ..." line
_LINE_CHARACTERS = 400


def spoken(text: str) -> str:
    """An earlier answer without its reasoning, as chat templates show earlier turns."""
    said = without_reasoning(text)
    return (text if said is None else said).strip()


def step_line(number: int, turn: Turn, said: str | None = None) -> str:
    words = " ".join((spoken(turn.text) if said is None else said).split())
    if len(words) > _LINE_CHARACTERS:
        words = words[:_LINE_CHARACTERS] + " ..."
    note = "" if turn.action is not None else " (could not be understood)"
    return f"Step {number}: {words}{note}\n"


def task_text(goal: str, lines: str) -> str:
    return f"Task: {goal}\n" + (f"Your earlier steps:\n{lines}" if lines else "")


def convention_of(name: str, model_type: str, known: Mapping[str, Coordinates]) -> Coordinates:
    """Of a family that has been built on several models. Raises ValueError for another one."""
    if model_type in known:
        return known[model_type]
    raise ValueError(
        f"the adapter {name} is for models built on {', '.join(known)}, and config.json says "
        f"{model_type or 'nothing'!r}: what its coordinates mean is unknown"
    )


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    coordinates: Coordinates
    #: the system prompt, before the task. True: without the tool's schema, which the chat template writes
    system: Callable[[Plane, bool], str]
    #: the model's answer -> action; never raises
    parse: Callable[[str, Plane], Action | ParseFailure]
    #: the canonical answer. Raises ValueError for an action that the family has no word for
    write: Callable[[Action, Plane], str]
    #: schema of the family's tool; None: its answers are not tool calls
    schema: Callable[[Plane], dict] | None = None
    #: the same for the chat template's `tools`, where it doesn't depend on the image
    tool: dict | None = None
    history: History = "shown"
    #: an earlier answer as a turn of its own
    spoken: Callable[[str], str] = spoken
    #: an earlier answer as a line
    line: Callable[[int, Turn], str] = step_line
    #: what the first user message says before the task; the family's markup counts in it
    preface: str = ""
    #: the text of the first user message, of the goal and the lines
    task: Callable[[str, str], str] = task_text
    #: special tokens with no meaning for the chat, that prompts and answers of the family hold as tokens
    markup: tuple[str, ...] = ()
    #: special tokens that answers alone hold
    sayable: tuple[str, ...] = ()
    #: what ends an answer
    stop: str = "<|im_end|>"
    #: structure that opens an answer, in place of the chat template's own; "" keeps that
    opening: str = ""
