"""The records that flow through the trainer, one way: prompt -> generation -> step -> episode -> sample -> update.

Plain data: no torch, no ray. Invariants:
- Token ids are the engine's own; nothing is ever tokenised twice.
- `prompt_ids` are *expanded*: one vision placeholder per visual token. `Prompt.ids` are not: one per image.
- Per-token tuples (`ids`, `logprobs`, `versions`) of a generation have equal lengths.
- A sample's spans cover exactly the tokens that the policy produced, in order, without overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from tapforge_envs.protocol import Outcome, Reason, Task

from .frames import FittedFrame

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an adapter asks the engine. `frames` are of the size that the model sees (`agents/vision.py`)."""

    #: token ids with ONE image placeholder per frame
    ids: tuple[int, ...]
    frames: tuple[FittedFrame, ...]
    #: length after expansion: what counts against the context
    expanded_length: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """top_p is 1 and there are no penalties: behaviour log-probabilities stay the model's own."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine answered."""

    prompt_ids: tuple[int, ...]  # expanded, as the engine saw it
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # processed: after temperature and mask, renormalised
    versions: tuple[int, ...]  # policy version per token
    finish_reason: FinishReason


class Generator(Protocol):
    """The rollout's view of the engines. Every answer has a deadline of the generator's own: it alone knows when the
    engines stand still for new weights."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation: ...


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One observation, one model answer, one action. Written as a line of JSON; frames by name."""

    episode: str
    index: int
    #: names of the frames in the prompt, in order of their placeholders; the last one is the current screen
    frames: tuple[str, ...]
    state_key: str | None
    app: str | None
    generation: Generation
    text: str
    #: the wire form of the action, or None when the answer could not be parsed
    action: dict | None
    parse_error: str | None
    reward: float
    note: str
    seconds_model: float
    seconds_environment: float
    # What tells the state where the environment has no exact key (`states`):
    #: the activity or window in front
    window: str | None = None
    #: sha256 of the UI tree, which is in the recording
    ui_tree: str | None = None
    ui_key: str | None = None
    frame_key: str | None = None


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One attempt at a task. `outcome` None: stopped by ourselves, not counted."""

    id: str
    group: str
    task: Task
    attempt: int  # 0, or how often the same place in the group was re-run
    slot: str
    seed: int
    reason: Reason
    outcome: Outcome | None
    score: float | None
    message: str
    steps: tuple[StepRecord, ...]
    #: unix seconds
    started: float
    ended: float

    @property
    def valid(self) -> bool:
        return self.outcome in (Outcome.SUCCESS, Outcome.FAILURE)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Episodes of one task, compared with each other. `order` is the issue order; groups are consumed in it."""

    id: str
    order: int
    task: Task
    #: policy version at admission
    version: int
    episodes: tuple[EpisodeRecord, ...]


@dataclass(frozen=True, slots=True)
class ResponseSpan:
    """Tokens [start, end) of a sample that the policy produced in one step."""

    step: int
    start: int
    end: int
    #: processed behaviour log-probabilities, one per token
    logprobs: tuple[float, ...]
    #: policy version per token
    versions: tuple[int, ...]
    advantage: float
    #: 1 for a span that counts; 0 for padding samples that keep ranks in step
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A token sequence with one or more response spans. One step per sample today."""

    episode: str
    group: str
    ids: tuple[int, ...]  # expanded prompt + response
    frames: tuple[str, ...]
    spans: tuple[ResponseSpan, ...] = field(default=())
