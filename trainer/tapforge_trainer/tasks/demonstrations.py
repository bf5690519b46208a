"""Demonstrations for the warm start: a person's plan for a task, played on a phone in this process, or on a page of a
browser that this process starts.

The demonstrator has an error rate and no noise: at every decision where a person in a hurry goes wrong (storing,
counting to the end, opening the second app, admitting that something isn't there, reading which button is meant) it
errs with the same probability. What it does is consistent, so a model that imitates it errs when it answers greedily,
too; only the outcome tells what is right.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.tasks import TaskSet as PhoneTasks
from tapforge_envs.protocol import Action, EnvironmentFault, Observation, Task
from tapforge_envs.web.catalog import TaskSet as PageTasks

from ..agents.agent import Agent, ContextLimit, Turn
from ..frames.frame import FittedFrame
from ..records import ResponseSpan, Sample
from .source import TaskError

#: pages of one browser that are played at the same time
_PAGES = 4


@dataclass(frozen=True, slots=True)
class Demonstrations:
    samples: tuple[Sample, ...]
    #: by episode, by name
    frames: dict[str, dict[str, FittedFrame]]
    episodes: int
    #: shares of the episodes
    success: float


def demonstrate(
    agent: Agent,
    tasks: PhoneTasks | PageTasks,
    *,
    episodes: int,
    error_rate: float,
    seed: int,
    width: int,
    height: int,
) -> Demonstrations:
    """Every decision of every episode as a sample with weight 1 on the whole answer."""
    if isinstance(tasks, PageTasks):
        played = asyncio.run(_on_pages(agent, tasks, episodes, error_rate, seed, width))
    else:
        played = _on_phone(agent, tasks, episodes, error_rate, seed, width, height)
    samples = tuple(sample for episode in played for sample in episode.samples)
    frames = {f"demonstration-{episode.number}": episode.frames for episode in played}
    return Demonstrations(samples, frames, episodes, sum(episode.won for episode in played) / episodes)


@dataclass
class _Episode:
    """One demonstration, decision by decision."""

    number: int
    task: Task
    samples: list[Sample] = field(default_factory=list)
    frames: dict[str, FittedFrame] = field(default_factory=dict)
    history: list[Turn] = field(default_factory=list)
    won: bool = False

    def decide(self, agent: Agent, observation: Observation, action: Action) -> None:
        seen, _ = agent.prepare(observation)
        prompt = agent.prompt(self.task.goal, self.history, seen)
        if isinstance(prompt, ContextLimit):
            raise TaskError(f"demonstration of {self.task.key}: {prompt}; raise model.contextTokens")
        answer = agent.answer_ids(action, seen.frame)
        start, end = len(prompt.ids), len(prompt.ids) + len(answer)
        span = ResponseSpan(len(self.history), start, end, (0.0,) * len(answer), (0,) * len(answer), 1.0)
        name, shown = f"demonstration-{self.number}", tuple(f.name for f in prompt.frames)
        self.frames.update((frame.name, frame) for frame in prompt.frames)
        length = prompt.expanded_length + len(answer)
        self.samples.append(Sample(name, name, (*prompt.ids, *answer), length, shown, (span,)))
        self.history.append(Turn(seen, agent.decode(answer), action, answer))


def _on_phone(
    agent: Agent, tasks: PhoneTasks, episodes: int, error_rate: float, seed: int, width: int, height: int
) -> list[_Episode]:
    phone = catalog.phone_for(tasks.suite, width, height)
    rng = Random(f"demonstrator:{seed}")
    played = []
    for number in range(episodes):
        task = tasks.sample(seed, number)
        template = catalog.template_of(task)
        observation = phone.reset(task.seed, template.rules(task.params))
        episode = _Episode(number, task)
        for action in demonstration(phone, template, task.params, lambda: rng.random() < error_rate):
            episode.decide(agent, observation, action)
            observation = phone.step(action).observation
        ended = phone.state["ended"]
        episode.won = (not task.feasible) if ended == "infeasible" else phone.evaluate().value >= task.threshold
        played.append(episode)
    return played


async def _on_pages(
    agent: Agent, tasks: PageTasks, episodes: int, error_rate: float, seed: int, width: int
) -> list[_Episode]:
    """Each episode has random numbers of its own: whichever page plays it, it is the same."""
    from tapforge_envs.web.demonstrator import demonstration as tap_of
    from tapforge_envs.web.environment import WIDTH, PageOptions, WebEnvironment
    from tapforge_envs.web.pages import Pages

    numbers = iter(range(episodes))

    async def play(page: WebEnvironment) -> list[_Episode]:
        played = []
        for number in numbers:
            task = tasks.sample(seed, number)
            observation = await page.reset(task)
            episode = _Episode(number, task.model_copy(update={"goal": task.goal or observation.goal}))
            action = tap_of(task, observation, Random(f"demonstrator:{seed}:{number}").random() < error_rate)
            episode.decide(agent, observation, action)
            await page.step(action, 0)
            episode.won = (await page.evaluate()).value >= task.threshold
            played.append(episode)
        return played

    pages = Pages()
    options = PageOptions(scale=width // WIDTH)
    try:
        at_once = (play(WebEnvironment(f"demonstration page {i}", pages, options)) for i in range(_PAGES))
        parts = await asyncio.gather(*at_once)
    except (EnvironmentFault, LookupError) as error:
        raise TaskError(f"spec.warmStart: {error}") from error
    finally:
        await pages.close()
    return sorted((episode for part in parts for episode in part), key=lambda episode: episode.number)
