"""The records that flow through the trainer, one way: prompt -> generation -> step -> episode -> sample -> update.

Plain data: no torch, no ray. Invariants:
- Token ids are the engine's own; nothing is ever tokenised twice.
- Prompts are kept as they were asked, with ONE placeholder per frame, and with their length after expansion, when there
  is one per visual token: three large screens are thousands of equal numbers. The engine's expanded ids are compared
  token for token where its answer arrives; the learner's ranks expand again what they compute with.
- `ids`, `logprobs` and `versions` of a generation have equal lengths.
- A sample's spans cover exactly the tokens that the policy produced, in order, without overlap.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from tapforge_envs.protocol import Outcome, Reason, Task

from .frames.frame import FittedFrame

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
    #: which engine is asked, if it lives: the one that has the episode's prompts in its caches; None: any
    engine: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine answered. Any sequences are taken; they are kept as arrays of 4 bytes per number, a tenth of what
    tuples take once they have been in another process."""

    prompt_ids: Sequence[int]  # one placeholder per frame
    ids: Sequence[int]
    logprobs: Sequence[float]  # processed: after temperature and mask, renormalised; float32, as the engine has them
    versions: Sequence[int]  # policy version per token
    finish_reason: FinishReason
    #: of the prompt as the engine saw it: one placeholder per visual token
    prompt_length: int

    def __post_init__(self) -> None:
        for name, typecode in (("prompt_ids", "i"), ("ids", "i"), ("logprobs", "f"), ("versions", "i")):
            numbers = getattr(self, name)
            if not isinstance(numbers, array):
                object.__setattr__(self, name, array(typecode, numbers))


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
    #: name of the current screen as the device drew it, where that is kept and is another size than the model's
    screen: str | None = None


@dataclass(frozen=True, slots=True)
class EpisodeRewards:
    """What was found out about an episode after its end, by judges and other rewards that are asked.

    `streams` by name: a value per step; None at a step that has no verdict. `outcome` and `reason` are what the run
    counts; `verified` is what the environment said, None where it was not asked."""

    streams: Mapping[str, tuple[float | None, ...]]
    outcome: Outcome
    reason: Reason
    verified: Outcome | None = None
    #: by stream: a judge's reason per step, "" at a step without one
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: why an outcome is missing, or a verdict of a step
    message: str = ""
    #: what judges used (`judges/usage.py:Usage`), steps without a verdict and questions that were asked again
    usage: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One attempt at a task. `outcome` None: stopped by ourselves, not counted; or its verdict is not there yet."""

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
    #: name of the frame after the last action; None where it wasn't looked at
    last_frame: str | None = None
    #: the same as the device drew it
    last_screen: str | None = None
    #: its rewards are asked for, and not there yet: it is in no statistic until then
    awaits_rewards: bool = False
    rewards: EpisodeRewards | None = None

    @property
    def valid(self) -> bool:
        return self.outcome in (Outcome.SUCCESS, Outcome.FAILURE) and not self.awaits_rewards

    @property
    def verified(self) -> Outcome | None:
        """How it ended by the environment; None where that was not asked."""
        return self.outcome if self.rewards is None else self.rewards.verified

    @property
    def frames(self) -> tuple[str, ...]:
        """Names of all frames, each once, in the order in which they were seen, the device's own ones after these."""
        seen = [name for step in self.steps for name in step.frames]
        drawn = [step.screen for step in self.steps]
        return tuple(name for name in dict.fromkeys([*seen, self.last_frame, *drawn, self.last_screen]) if name)

    def rewarded(self, rewards: EpisodeRewards) -> EpisodeRecord:
        """With what was found out after its end."""
        message = rewards.message or self.message
        return replace(
            self,
            outcome=rewards.outcome,
            reason=rewards.reason,
            message=message,
            awaits_rewards=False,
            rewards=rewards,
        )

    @property
    def out_of_steps(self) -> bool:
        """Whether it had not succeeded at its step limit."""
        return self.reason is Reason.STEP_LIMIT and self.outcome is Outcome.FAILURE


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What the learner, before an update, says of an answer, most of it as sums over its tokens; None: not
    asked."""

    #: log-probability less that of the reference: k1 of the divergence from it
    divergence: float | None = None
    #: 1 - 2 p + sum of p^2 over the vocabulary
    score_square: float | None = None
    #: a critic's, of the step before its answer; no sum
    value: float | None = None


#: by episode and step
Facts = Mapping[tuple[str, int], AnswerFacts]


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
    logprobs: Sequence[float]
    #: policy version per token
    versions: Sequence[int]
    advantage: float
    #: 1 for a span that counts; 0 for padding samples that keep ranks in step
    weight: float = 1.0
    #: return of the episode, for losses that ask how it ended
    score: float = 0.0
    #: what a critic said of the step before the update, and the return that it is to say
    value: float | None = None
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A token sequence with one or more response spans: a step each (`samples.py`)."""

    episode: str
    group: str
    ids: Sequence[int]  # prompt with one placeholder per frame, and response; spans are places in these
    length: int  # after expansion: one placeholder per visual token
    frames: tuple[str, ...]
    spans: tuple[ResponseSpan, ...] = field(default=())
    #: tokens of the first span's prompt after expansion; None: what `length` leaves it, where all frames are in it
    prompt_length: int | None = None


def facts_at_steps(name: str, episodes: Iterable[EpisodeRecord], facts: Facts | None) -> list[float]:
    """At each step; 0 at one without an answer. Raises ValueError for one that wasn't read."""
    found = []
    for episode in episodes:
        for step in episode.steps:
            fact = (facts or {}).get((episode.id, step.index), AnswerFacts())
            value = getattr(fact, name) if step.generation.ids else 0.0
            if value is None:
                where = "the learner reads it in a run, or in `tapforge relearn --gradients`"
                if name == "value":
                    where = "a critic's values are those of a run while it learns, and not recorded"
                raise ValueError(f"the {name} of step {step.index} of episode {episode.id} was not read; {where}")
            found.append(value)
    return found
