"""How well a data set is imitated that isn't learned from: after each pass over the one that is, the loss of held-out
steps and, where engines are there, type and parameters of the answers to them.

The loss is the cross-entropy per answer token, of the same steps each time. Answers are greedy, and judged as an
environment of recorded steps judges them (`data/comparison.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tapforge_api import TrainingRun
from tapforge_api.algorithm import Algorithm
from tapforge_api.dataset import DataSet
from tapforge_api.environment import EnvironmentSource, EnvironmentSpec
from tapforge_api.learning import Evaluation
from tapforge_api.learning import ImitationData as Asked
from tapforge_api.rewards import Rewards

from ..agents.agent import Agent
from ..data.folder import DataFolder
from ..data.imitation import TRIED, ImitationData
from ..frames.handles import BatchFrames

if TYPE_CHECKING:
    from ..learner.client import Learner

#: steps that a loss is of at most, and of which frames are in memory at once
_MOST: Final = 2000
_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class Epoch:
    """A pass over the data, and what the policy was like after it."""

    number: int
    #: optimizer steps so far
    steps: int
    #: mean of its optimizer steps, and of the held-out steps; nats per token
    loss: float
    held_out_loss: float


class HeldOut:
    """Steps that are not learned from."""

    def __init__(self, agent: Agent, folder: Path, outcomes: Collection[Any]):
        """Raises DataError where nothing is left, or too many steps can't be asked."""
        self._data = ImitationData(agent, DataFolder(folder), outcomes)
        order = np.random.default_rng(0).permutation(len(self._data))
        self._data.check(order[:TRIED].tolist())
        self._places: list[int] = order[:_MOST].tolist()

    async def loss(self, learner: Learner) -> float:
        """Of the learner's weights as they are."""
        total, tokens = 0.0, 0
        for start in range(0, len(self._places), _AT_ONCE):
            made = await asyncio.to_thread(self._data.batch, self._places[start : start + _AT_ONCE])
            if made.samples:
                for answer in await learner.logprobs(made.samples, BatchFrames(made.frames)):
                    total, tokens = total - sum(answer), tokens + len(answer)
        return total / max(1, tokens)


def answering(run: TrainingRun, data: Asked) -> TrainingRun:
    """The run with the held-out steps of `data` in place of its environment: what answers to them are measured by, and
    no phone is started."""
    assert data.held_out is not None
    source = DataSet(path=data.held_out, held_out=data.held_out, outcomes=data.outcomes)
    evaluation = Evaluation(
        seed=run.spec.evaluation.seed, episodes=run.spec.evaluation.episodes, sampled=False, greedy=True
    )
    changed = {
        "environment": EnvironmentSpec(source=EnvironmentSource(dataset=source)),
        "evaluation": evaluation,
        "rewards": Rewards(),
        "models": (),
        "algorithm": Algorithm(),
        "stages": (),
    }
    return run.model_copy(update={"spec": run.spec.model_copy(update=changed)})
