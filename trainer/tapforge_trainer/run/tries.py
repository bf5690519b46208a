"""`tapforge tasks try`: every task of a run's file, some times, by a policy that stays as it is.

Written is the file again, task by task in its order, with `about.tries`; `feasible` becomes what the tries show where
it was unknown. It is written in parts: stopped anywhere, the same call goes on behind what is there.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tapforge_api import TrainingRun
from tapforge_envs.protocol import Task

from ..records import EpisodeRecord
from ..tasks.files import read_abouts, read_tasks
from ..tasks.lines import kept, line_of, written
from ..tasks.source import TaskError
from ..tasks.tries import tries_of
from .context import RunContext
from .evaluation import play
from .folder import EVALUATION
from .shutdown import unless_stopped

#: tasks that are played before they are written
_PART: Final = 64
_TRIES: Final = "tries"


class TriedFile:
    """What is to be tried, and what an earlier call has done of it. Raises TaskError."""

    def __init__(self, run: TrainingRun, path: Path, count: int, weights: Path):
        """`weights`: folder of the policy's."""
        file = run.spec.tasks.file
        if file is None:
            raise TaskError("spec.tasks.file is not set: there is no task file to try; name one with --set")
        if path.exists() and path.samefile(file):
            raise TaskError(f"{path} is the file that is tried; name another one for the result")
        protocol, judged = run.spec.environment.protocol, run.spec.rewards.verifier == "ignored"
        self.path = path
        self.count, self._asked = count, {"tries_asked": count, "tries_of": str(weights.absolute())}
        self.tasks = read_tasks(Path(file), protocol, judged=judged).tasks
        self._about = read_abouts(Path(file), protocol)
        there = kept(path, _TRIES)
        for (task, about), own in zip(there, self.tasks, strict=False):
            if task.key != own.key:
                raise TaskError(f"{path} was begun with another file: {own.key} was {task.key}; name another one")
            for name, words in (("tries_asked", "--tries"), ("tries_of", "the weights of")):
                if about.get(name, self._asked[name]) != self._asked[name]:
                    raise TaskError(f"{path} was begun with {words} {about.get(name)}: name another one")
        if len(there) > len(self.tasks):
            raise TaskError(f"{path} has more tasks than {file}: name another one")
        self.done = [about[_TRIES] for _, about in there]

    def parts(self) -> Iterator[tuple[Task, ...]]:
        """What is left."""
        for start in range(len(self.done), len(self.tasks), _PART):
            yield self.tasks[start : start + _PART]

    def write(self, tasks: Sequence[Task], episodes: Sequence[EpisodeRecord]) -> None:
        by_task: Mapping[str, list[EpisodeRecord]] = defaultdict(list)
        for one in episodes:
            by_task[one.task.key].append(one)
        lines = []
        for task in tasks:
            tries = tries_of(by_task[task.key])
            known = tries.feasible if task.feasible is None else task.feasible
            said = tries.as_json()
            about = {**self._about.get(task.key, {}), _TRIES: said, **self._asked}
            lines.append(line_of(task.model_copy(update={"feasible": known}), about))
            self.done.append(said)
        with self.path.open("a", encoding="utf-8") as file:
            written(file, lines)

    def summary(self) -> dict[str, Any]:
        counts = Counter(dict.fromkeys(("feasible", "infeasible", "contradictory", "never done"), 0))
        counts.update(tries["says"] for tries in self.done)
        return {"tasks": len(self.done), "tries": self.count, **counts}


async def try_tasks(context: RunContext, tried: TriedFile) -> dict[str, Any]:
    """How many tasks turned out to be what."""
    evaluation = context.run.spec.evaluation
    for part in tried.parts():
        number = len(tried.done)
        context.telemetry.phase(
            f"trying tasks {number + 1} to {number + len(part)} of {len(tried.tasks)}", "Evaluating"
        )
        playing = play(
            context.rollout_setup,
            part,
            repeats=tried.count,
            temperature=evaluation.sampled_temperature,
            seed=evaluation.seed,
            folder=context.folder / EVALUATION / f"tries-{number:06d}",
            judged=evaluation.judged,
            budget=context.judge_budget,
        )
        episodes = await unless_stopped(context.stop, playing)
        await asyncio.to_thread(tried.write, part, episodes)
    return tried.summary()
