"""What a rollout asks of a model adapter.

An agent is pure but for bounded caches: the same goal, history and observation give the same prompt, and the same text
gives the same action. It knows nothing of engines. An answer that can't be understood is a value (`ParseFailure`), a
prompt that can't fit is a value (`ContextLimit`); only a frame that is not what it says raises (`EnvironmentFault`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tapforge_envs.protocol import Action, Observation

from ..frames.frame import FittedFrame, Pixels
from ..records import FinishReason, Prompt
from .parsing import ParseFailure

PromptStyle = Literal["full", "compact", "turns"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """An observation whose frame is fitted: what prompts and records are made of, now and as history."""

    frame: FittedFrame
    visual_tokens: int
    # As in `Observation`:
    app: str | None = None
    state_key: str | None = None
    ui_tree: str | None = None
    window: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """An earlier step: what was seen, what the model answered, and the action it was understood as."""

    seen: Prepared
    text: str
    action: Action | None
    #: the answer as it was sampled, with its end mark if it had one; none where it is known as a text alone
    ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Not even the shortest form of the prompt leaves room for an answer: the episode ends as context_limit."""

    prompt_tokens: int
    response_tokens: int
    context_tokens: int

    def __str__(self) -> str:
        return (
            f"a prompt of {self.prompt_tokens} tokens and an answer of {self.response_tokens} exceed the context of "
            f"{self.context_tokens}"
        )


class Agent(Protocol):
    #: what the policy may say: every ordinary token and the end mark
    allowed_ids: tuple[int, ...]
    #: the rest of the vocabulary: few ids, for engines that mask those instead
    banned_ids: tuple[int, ...]
    #: what ends an answer
    stop_ids: tuple[int, ...]

    def prepare(self, observation: Observation) -> tuple[Prepared, Callable[[], Pixels]]:
        """The observation with its frame as the model sees it, and the frame's pixels: they are at hand now, and what
        is kept for history does without them. Costs what decoding and resizing cost, so large screens are prepared in
        a thread. Raises EnvironmentFault for a frame that is not what it says."""
        ...

    def outline(self, observation: Observation) -> Prepared:
        """As `prepare`, of the frame its size alone: for a step that is history, whose frame most prompts don't show.
        `prompt.frames` has it as it is here where the prompt shows it. Raises EnvironmentFault."""
        ...

    def prompt(self, goal: str, history: Sequence[Turn], seen: Prepared) -> Prompt | ContextLimit:
        """The prompt for the next step; `history` holds all earlier steps, oldest first."""
        ...

    def read(self, text: str, finish_reason: FinishReason, screen: FittedFrame) -> Action | ParseFailure:
        """What the answer means. `screen`: the current one, the prompt's last frame: some models count its pixels."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without the end mark."""
        ...

    def expand(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's ids as the engine sees them: one placeholder per visual token."""
        ...

    def answer_ids(self, action: Action, screen: FittedFrame) -> tuple[int, ...]:
        """The canonical answer for an action on this screen, with the end mark: a demonstration. Raises ValueError for
        an action that the model has no word for."""
        ...
