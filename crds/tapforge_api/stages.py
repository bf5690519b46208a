"""Stages of a run: what it practises one after another, each with tasks, rewards, rates and an end of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from .base import Fraction, Positive, Rule, Spec
from .environment import Tasks
from .rewards import Rewards


class StageStop(Spec):
    """When a stage ends: at the first limit that it reaches. What `stop` of the run says holds for all stages
    together."""

    max_updates: Positive | None = Field(None, description="updates of this stage")
    target_success: Fraction | None = Field(
        None, description="success rate over all valid attempts of an update, from which the stage ends"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="maxUpdates or targetSuccess must be set",
            cel="has(self.maxUpdates) || has(self.targetSuccess)",
            holds=lambda o: o.max_updates is not None or o.target_success is not None,
        ),
    )


class Stage(Spec):
    """What is different in a stage of a run. The optimizer begins afresh with each, and the KL term pulls towards the
    policy that the stage began with; updates count through."""

    tasks: Tasks | None = Field(None, description="what is practised; without it the run's tasks")
    rewards: Rewards | None = Field(None, description="what an episode is worth; without it the run's rewards")
    temperature: Annotated[float, Field(gt=0, le=2)] | None = Field(
        None, description="sampling temperature; without it rollout.temperature"
    )
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="learning rate of AdamW; without it learner.learningRate"
    )
    stop: StageStop = Field(description="when it ends; after the last one the run does")


def updates_at_most(limit: int, stages: Sequence[Stage]) -> int:
    """Of a run whose `stop.maxUpdates` is `limit`."""
    own = [stage.stop.max_updates for stage in stages]
    return min(limit, sum(number or limit for number in own)) if own else limit
