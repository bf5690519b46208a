"""An adapter's prompt as chat messages: what a teacher behind an endpoint is asked, and what its answer means.

There is no tokenizer between: the ids of a prompt are the bytes of its messages in JSON (`messages_of`), with a
placeholder for each of its frames in order, and those of an answer the bytes of its text. The rollout is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from tapforge_envs.protocol import Action, Observation

from ..agents.agent import ContextLimit, Prepared, Turn
from ..agents.chat import Message
from ..agents.chat_agent import ChatAgent
from ..agents.parsing import ParseFailure
from ..frames.frame import FittedFrame, Pixels
from ..records import FinishReason, Prompt

_IMAGE: Final = {"type": "image"}


class TeacherAgent:
    """An `Agent` whose answers come from an endpoint."""

    allowed_ids: tuple[int, ...] = tuple(range(256))
    banned_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def __init__(self, chat: ChatAgent):
        self.chat = chat

    def prepare(self, observation: Observation) -> tuple[Prepared, Callable[[], Pixels]]:
        return self.chat.prepare(observation)

    def outline(self, observation: Observation) -> Prepared:
        return self.chat.outline(observation)

    def prompt(self, goal: str, history: Sequence[Turn], seen: Prepared) -> Prompt | ContextLimit:
        """Never a limit: the context is the endpoint's, which refuses what is too long."""
        messages, frames = self.chat.conversation(goal, history, seen)
        ids = _bytes(json.dumps([_plain(message) for message in messages]))
        return Prompt(ids, frames, len(ids))

    def read(self, text: str, finish_reason: FinishReason, screen: FittedFrame) -> Action | ParseFailure:
        return self.chat.read(text, finish_reason, screen)

    def decode(self, ids: Sequence[int]) -> str:
        return text_of(ids)

    def expand(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(prompt.ids)

    def answer_ids(self, action: Action, screen: FittedFrame) -> tuple[int, ...]:
        return _bytes(self.chat.dialect.write(action, self.chat.plane(screen)))

    def tool(self, screen: FittedFrame) -> dict[str, Any] | None:
        """The schema of the family's tool on this screen; None: its answers are not tool calls."""
        schema = self.chat.dialect.schema
        return None if schema is None else schema(self.chat.plane(screen))


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """A `TeacherAgent`'s: role, and content of texts and places of images in order."""
    messages: list[dict[str, Any]] = json.loads(text_of(prompt.ids))
    return messages


def ids_of(text: str) -> tuple[int, ...]:
    """Of an answer."""
    return _bytes(text)


def text_of(ids: Sequence[int]) -> str:
    return bytes(iter(ids)).decode()  # of an array, bytes() would take the memory


def _bytes(text: str) -> tuple[int, ...]:
    return tuple(text.encode("utf-8", "replace"))  # half a character, which JSON may spell, is none


def _plain(message: Message) -> dict[str, Any]:
    parts: list[dict[str, str]] = []
    for part in message.parts:
        if part is None:
            parts.append(_IMAGE)
            continue
        text = part if isinstance(part, str) else part.text
        if parts and parts[-1] is not _IMAGE:
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + text}
        else:
            parts.append({"type": "text", "text": text})
    return {"role": message.role, "content": parts}
