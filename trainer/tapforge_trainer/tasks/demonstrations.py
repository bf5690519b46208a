"""Demonstrations for the warm start: a person's plan for a task, played on a phone in this process.

The demonstrator has an error rate and no noise: at every decision where a person in a hurry goes wrong (storing,
counting to the end, opening the second app, admitting that something isn't there) it errs with the same probability.
What it does is consistent, so a model that imitates it errs when it answers greedily, too; only the outcome tells what
is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.tasks import TaskSet

from ..agents.agent import Agent, ContextLimit, Turn
from ..frames import FittedFrame
from ..records import ResponseSpan, Sample
from .source import TaskError


@dataclass(frozen=True, slots=True)
class Demonstrations:
    samples: tuple[Sample, ...]
    #: by episode, by name
    frames: dict[str, dict[str, FittedFrame]]
    episodes: int
    #: shares of the episodes
    success: float


def demonstrate(
    agent: Agent, tasks: TaskSet, *, episodes: int, error_rate: float, seed: int, width: int, height: int
) -> Demonstrations:
    """Every decision of every episode as a sample with weight 1 on the whole answer."""
    phone = catalog.phone_for(tasks.suite, width, height)
    rng = Random(f"demonstrator:{seed}")
    samples: list[Sample] = []
    frames: dict[str, dict[str, FittedFrame]] = {}
    won = 0
    for number in range(episodes):
        task = tasks.sample(seed, number)
        template = catalog.template_of(task)
        observation = phone.reset(task.seed, template.rules(task.params))
        history: list[Turn] = []
        actions = demonstration(phone, template, task.params, lambda: rng.random() < error_rate)
        for index, action in enumerate(actions):
            seen, _ = agent.prepare(observation)
            prompt = agent.prompt(task.goal, history, seen)
            if isinstance(prompt, ContextLimit):
                raise TaskError(f"demonstration of {task.key}: {prompt}; raise model.contextTokens")
            answer = agent.answer_ids(action)
            start, end = len(prompt.ids), len(prompt.ids) + len(answer)
            span = ResponseSpan(index, start, end, (0.0,) * len(answer), (0,) * len(answer), 1.0)
            episode, shown = f"demonstration-{number}", tuple(f.name for f in prompt.frames)
            frames.setdefault(episode, {}).update((frame.name, frame) for frame in prompt.frames)
            length = prompt.expanded_length + len(answer)
            samples.append(Sample(episode, episode, (*prompt.ids, *answer), length, shown, (span,)))
            history.append(Turn(seen, agent.decode(answer), action))
            observation = phone.step(action).observation
        ended = phone.state["ended"]
        won += (not task.feasible) if ended == "infeasible" else phone.evaluate().value >= task.threshold
    return Demonstrations(tuple(samples), frames, episodes, won / episodes)
