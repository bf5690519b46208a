"""How success is measured: fixed tasks, fixed policy version, intervals, and two baselines beside it.

- The tasks depend on `spec.evaluation.seed` alone, not on the run's seed, so that runs are compared on the same tasks.
- Every answer of a measurement comes from one policy version; a mixture is an error, not a figure.
- An invalid episode is in no rate; it is counted, and the rate over attempted episodes stands beside the other.
- The baselines play the same tasks through the same code: a policy that answers at random among well-formed actions,
  and one that declares every task infeasible at once. What the first one draws depends on the seed, the task, the
  repeat and the step alone, not on which episodes run beside it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tapforge_envs.protocol import Action, Back, Home, Outcome, Tap, Task, Terminate
from tapforge_envs.slots.source import SlotSource

from .agents.agent import Agent
from .records import EpisodeRecord, Generation, Generator, Prompt, Sampling
from .rollout.attempt import EpisodeLimits, Player
from .rollout.groups import GroupLimits
from .rollout.recorder import Recorder
from .rollout.scheduler import Scheduler
from .statistics import success_of


@dataclass(frozen=True, slots=True)
class Arena:
    """Where and by whom episodes are played."""

    slots: SlotSource
    agent: Agent
    player: Player
    episodes: EpisodeLimits
    groups: GroupLimits
    response_tokens: int
    concurrency: int | None
    acquire_seconds: float


async def play(
    arena: Arena,
    tasks: Sequence[Task],
    *,
    policy: str = "",
    repeats: int,
    temperature: float,
    seed: int,
    folder: Path,
) -> list[EpisodeRecord]:
    """Plays every task `repeats` times and records it in `folder`, in place of an earlier measurement. `policy`: one of
    `baselines`; "": the one that learns."""
    if folder.exists():
        await asyncio.to_thread(shutil.rmtree, folder)
    recorder = Recorder(folder)
    scheduler = Scheduler(
        arena.slots,
        arena.player,
        Sampling(max_tokens=arena.response_tokens, temperature=temperature),
        groups=arena.groups,
        episodes=arena.episodes,
        recorder=recorder,
        concurrency=arena.concurrency,
        acquire_seconds=arena.acquire_seconds,
        seed=seed,
        prefix=f"{folder.name}-",
    )
    try:
        return await scheduler.run_fixed(tasks, repeats, policy=policy)
    finally:
        await scheduler.close()
        recorder.close()


def measured(episodes: Sequence[EpisodeRecord], *, seed: int = 0, version: int | None = None) -> dict[str, Any]:
    """The figures of a measurement, as they stand in summary.json. Rates and intervals are None over nothing. An answer
    of another policy version than `version` is an error."""
    versions = {v for e in episodes for s in e.steps for v in s.generation.versions}
    if len(versions) > 1:
        raise ValueError(f"one measurement mixed the policy versions {sorted(versions)}; pause training meanwhile")
    if version is not None and versions - {version}:
        raise ValueError(
            f"policy version {version} was to be measured, and version {min(versions)} answered; sync first"
        )
    success = success_of([(e.task.template, e.outcome) for e in episodes], seed=seed)
    templates: dict[str, list[bool]] = defaultdict(list)
    for e in episodes:
        if e.valid:
            templates[e.task.template].append(e.outcome is Outcome.SUCCESS)
    interval, clustered = success.interval, success.interval_by_template
    return {
        "success": success.rate,
        "interval": [interval.low, interval.high] if interval else None,
        "interval_by_template": [clustered.low, clustered.high] if clustered else None,
        "episodes": success.valid,
        "invalid": success.invalid,
        "success_attempted": success.rate_attempted,
        "policy_version": versions.pop() if versions else None,
        "by_template": {name: round(sum(won) / len(won), 4) for name, won in sorted(templates.items())},
        "reasons": dict(Counter(e.reason.value for e in episodes)),
    }


# --- baselines --------------------------------------------------------------------------------------------------------


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
        ids = self.agent.answer_ids(self.choose(Random(sampling.seed)))
        zeros = (0,) * len(ids)
        return Generation(prompt.ids, ids, zeros, zeros, "stop", prompt.expanded_length)


def baselines(agent: Agent) -> dict[str, Generator]:
    return {
        "random": ScriptedPolicy(agent, random_action),
        "always_infeasible": ScriptedPolicy(agent, lambda rng: Terminate(status="infeasible")),
    }
