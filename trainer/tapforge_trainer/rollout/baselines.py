"""Policies that learn nothing, to measure a learned one against: one answers at random among well-formed actions, the
other declares every task infeasible at once.

What the first one draws depends on the seed, the task, the repeat and the step alone, not on which episodes run beside
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tapforge_envs.protocol import Action, Back, Home, Tap, Terminate

from ..agents.agent import Agent
from ..frames.frame import FittedFrame
from ..records import Generation, Generator, Prompt, Sampling

#: of an action that the model has a word for
_DRAWS = 32


def random_action(rng: Random) -> Action:
    """A well-formed action: mostly a tap anywhere, else a button or the end."""
    draw = rng.random()
    if draw < 0.7:
        return Tap(x=rng.random(), y=rng.random())
    if draw < 0.8:
        return rng.choice((Home(), Back()))
    return Terminate(status="success") if draw < 0.95 else Terminate(status="infeasible")


@dataclass
class ScriptedPolicy:
    """A `Generator` without a model: answers with the agent's canonical words for an action."""

    agent: Agent
    #: draws from a generator that belongs to this answer alone
    choose: Callable[[Random], Action]

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        ids = self._answer(Random(sampling.seed), prompt.frames[-1])
        zeros = (0,) * len(ids)
        return Generation(prompt.ids, ids, zeros, zeros, "stop", prompt.expanded_length)

    def _answer(self, rng: Random, screen: FittedFrame) -> tuple[int, ...]:
        """Drawn again where the model has no word for the action, such as a phone's buttons on a desktop."""
        for _ in range(_DRAWS - 1):
            try:
                return self.agent.answer_ids(self.choose(rng), screen)
            except ValueError:
                continue
        return self.agent.answer_ids(self.choose(rng), screen)


def baselines(agent: Agent) -> dict[str, Generator]:
    return {
        "random": ScriptedPolicy(agent, random_action),
        "always_infeasible": ScriptedPolicy(agent, lambda rng: Terminate(status="infeasible")),
    }
