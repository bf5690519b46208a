"""Faults on demand: what a sick phone does, at a step or with a seeded probability. Off by default.

Every decision is a pure function of (fault, episode, call, index): the same episode breaks at the same place again, and
a re-sent step meets the same fault.

    slow         the answer is late by a log-normal time {median_seconds, sigma, seed}
    hung         the call is never answered, nor any later one of that slot; health says so
    crashed      the server process exits at once
    corrupt      one byte of the frame is another one: its hash doesn't match
    half         the frame stops in the middle of the picture, and its hash is the hash of the half
    wrong_size   the picture has another size than is announced
    lying_health the slot refuses resets, steps and verdicts with 503, but its health check says ok
    lost_task    the phone starts afresh: another instance answers, with a phone that knows nothing of the task
    error        the call is answered with 500
    stale        the answer is the one that was given before this one, perhaps in an earlier episode; 503 without one
    foreign      the answer is the last one of another phone of the same server; 503 without one
    bad_score    the verdict is none: missing, no number, outside 0 to 1, or an error in an answer with status 200
"""

from __future__ import annotations

import io
import math
from dataclasses import replace
from random import Random
from typing import Annotated, Literal

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from pydantic.alias_generators import to_camel

from tapforge_envs.protocol import Frame, StepResult

Call = Literal["reset", "step", "evaluate"]
Kind = Literal[
    "slow",
    "hung",
    "crashed",
    "corrupt",
    "half",
    "wrong_size",
    "lying_health",
    "lost_task",
    "error",
    "stale",
    "foreign",
    "bad_score",
]

#: what each fault applies to unless it says so; the others to steps
_CALLS: dict[Kind, tuple[Call, ...]] = {
    "slow": ("reset", "step", "evaluate"),
    "lying_health": ("reset", "step", "evaluate"),
    "bad_score": ("evaluate",),
}
#: answers that a careless client makes a verdict of
NO_SCORES: tuple[str, ...] = (
    "{}",
    "null",
    '{"value": null}',
    '{"value": NaN}',
    '{"value": Infinity}',
    '{"value": "1.0"}',
    '{"value": true}',
    '{"value": -1}',
    '{"value": 100}',
    '{"value": [1.0]}',
    '{"score": 0.0}',
    '{"error": "the judge is not loaded"}',
    "0.0",
)


class Fault(BaseModel):
    """One thing that goes wrong. Without `at_step` and `probability` it goes wrong every time."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    kind: Kind
    calls: tuple[Call, ...] = Field((), description="calls it applies to; default: step, for slow every call, ...")
    at_step: int | None = Field(None, ge=0, description="only the step with this index")
    probability: float | None = Field(None, ge=0, le=1, description="of each call on its own")
    seed: int = 0
    median_seconds: float = Field(0.05, ge=0, description="slow: median of the latency")
    sigma: float = Field(0.0, ge=0, description="slow: standard deviation of the latency's logarithm")

    @model_validator(mode="after")
    def _one_trigger(self) -> Fault:
        if self.at_step is not None and self.probability is not None:
            raise ValueError("a fault has atStep or probability, not both")
        return self

    def hits(self, call: Call, episode: str, index: int) -> bool:
        """Whether it strikes this call. `index` is -1 for what is not a step."""
        if call not in (self.calls or _CALLS.get(self.kind, ("step",))):
            return False
        if self.at_step is not None:
            return call == "step" and index == self.at_step
        return self.probability is None or self._rng("hit", call, episode, index).random() < self.probability

    def latency(self, call: Call, episode: str, index: int) -> float:
        """Seconds that a slow phone takes for this call."""
        return self.median_seconds * math.exp(self.sigma * self._rng("latency", call, episode, index).gauss(0.0, 1.0))

    def no_score(self, episode: str) -> bytes:
        """The body of a verdict that is none."""
        return self._rng("score", "evaluate", episode, -1).choice(NO_SCORES).encode()

    def _rng(self, what: str, call: str, episode: str, index: int) -> Random:
        return Random(f"{what}:{self.kind}:{self.seed}:{episode}:{call}:{index}")


FAULTS: TypeAdapter[list[Fault]] = TypeAdapter(Annotated[list[Fault], Field(max_length=64)])


def striking(faults: list[Fault], call: Call, episode: str, index: int) -> Fault | None:
    """The first fault that strikes this call, besides slowness."""
    return next((f for f in faults if f.kind != "slow" and f.hits(call, episode, index)), None)


def latency(faults: list[Fault], call: Call, episode: str, index: int) -> float:
    """Seconds by which the answer is late."""
    return sum(f.latency(call, episode, index) for f in faults if f.kind == "slow" and f.hits(call, episode, index))


def corrupt(body: bytes) -> bytes:
    """The same answer with one wrong byte in the middle of its frame."""
    start = body.index(b"\n") + 1
    at = start + (len(body) - start) // 2
    return body[:at] + bytes([body[at] ^ 0xFF]) + body[at + 1 :]


def halved(result: StepResult) -> StepResult:
    """The same result with the first half of its picture's bytes, hashed as if that were all."""
    frame = result.observation.frame
    return _with_frame(result, Frame.of(frame.data[: len(frame.data) // 2], frame.width, frame.height))


def resized(result: StepResult) -> StepResult:
    """The same result with a picture of half the announced size."""
    frame = result.observation.frame
    out = io.BytesIO()
    with Image.open(io.BytesIO(frame.data)) as image:
        image.resize((max(1, frame.width // 2), max(1, frame.height // 2))).save(out, "PNG")
    return _with_frame(result, Frame.of(out.getvalue(), frame.width, frame.height))


def _with_frame(result: StepResult, frame: Frame) -> StepResult:
    return replace(result, observation=replace(result.observation, frame=frame))
