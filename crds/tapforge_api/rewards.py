"""What an episode is worth: named streams of rewards, and which of them says that it succeeded.

A file that names no streams has two: how the episode ended, by the environment, and the rewards that the environment
gives for steps.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import Fraction, Keyed, Rule, Seconds, Spec, Word
from .judge import JudgeSpec
from .plugin import OPTIONS, PluginOptions

StreamName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z][A-Za-z0-9_]*$")]
Gate = Literal["always", "mixedOutcomes", "success", "failure"]
#: a factor of either sign
Factor = Annotated[float, Field(ge=-1_000_000, le=1_000_000)]

#: rewards that ask a judge
JUDGED = ("judge", "steps")


class RewardStream(Spec):
    """A reward by name, and what it counts for."""

    name: StreamName = Field(description="name in records, figures and credits; without `reward`, the reward's too")
    reward: Word | None = Field(
        None,
        description="outcome, environment, format, length, judge (a verdict on the episode), steps (a verdict on each "
        "step), or an entry point of the group tapforge.rewards; without it the one called `name`",
    )
    judge: JudgeSpec | None = Field(None, description="the models that give the verdicts of judge and steps")
    options: PluginOptions = OPTIONS
    weight: Factor = Field(1.0, description="factor in the sum of all streams")
    scale: Factor = Field(1.0, description="factor on each value, before streams are compared or summed")
    gate: Gate = Field(
        "always",
        description="where it counts, elsewhere it is 0: always; mixedOutcomes: in groups of which some episodes "
        "succeeded and some didn't; success, failure: in episodes that ended so",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="judge is needed by the rewards judge and steps, and by no other",
            cel="((has(self.reward) ? self.reward : self.name) in ['judge', 'steps']) == has(self.judge)",
            holds=lambda o: ((o.reward or o.name) in JUDGED) == (o.judge is not None),
        ),
    )

    @property
    def kind(self) -> str:
        """The reward's own name."""
        return self.reward or self.name


class Rewards(Spec):
    """What an episode is worth, and how its success is known."""

    streams: Annotated[tuple[RewardStream, ...], Field(max_length=16), Keyed("name")] = Field(
        (), description="rewards that count; without any: outcome and environment"
    )
    success: StreamName | None = Field(
        None,
        description="stream that says whether an episode succeeded: a judge of episodes, or an entry point's. Without "
        "it the environment does",
    )
    threshold: Fraction = Field(0.5, description="value of the stream `success` from which an episode succeeded")
    verifier: Literal["asked", "ignored"] = Field(
        "asked",
        description="whether environments are asked how training episodes ended. ignored: neither their evaluators nor "
        "labels of tasks are read, and a task needs only a goal; needs `success`. Measurements ask them, but with "
        "evaluation.judged",
    )
    deadline_seconds: Seconds = Field(
        600.0,
        description="longest wait for the rewards of an episode, from its end on; then a step's are left out, and an "
        "episode leaves its group",
    )
    max_missing_share: Fraction = Field(
        0.5, description="share of an update's episodes without a verdict, above which the run stops"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="success must name one of streams",
            cel="!has(self.success) || !self.streams.all(s, s.name != self.success)",
            holds=lambda o: o.success is None or any(s.name == o.success for s in o.streams),
        ),
        Rule(
            message="success can't be outcome, environment, format, length or steps: name a judge of episodes, or "
            "leave it out for the environment's verdict",
            cel="!has(self.success) || self.streams.all(s, s.name != self.success || !((has(s.reward) ? s.reward : "
            "s.name) in ['outcome', 'environment', 'format', 'length', 'steps']))",
            holds=lambda o: (
                o.success is None
                or not any(
                    s.name == o.success and s.kind in ("outcome", "environment", "format", "length", "steps")
                    for s in o.streams
                )
            ),
        ),
        Rule(
            message="verifier: ignored needs success, a stream that says how episodes ended",
            cel="self.verifier != 'ignored' || has(self.success)",
            holds=lambda o: o.verifier != "ignored" or o.success is not None,
        ),
    )

    @property
    def asked(self) -> tuple[RewardStream, ...]:
        """Streams that are asked for after an episode's end; the others are computed from its record."""
        return tuple(s for s in self.streams if s.kind not in ("outcome", "environment", "format", "length"))
