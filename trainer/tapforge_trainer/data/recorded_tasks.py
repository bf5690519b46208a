"""The steps of a data set as tasks: each is practised once before any comes again, in another order each time.

Of a data set's steps two numbers each are kept (8 bytes); a task is read from its line when it is drawn. A task's
template is the type of the recorded action, so that figures by template are by type. Of a task that comes from here
`step_of` finds the step again.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Final

from tapforge_envs.protocol import Task

from .episodes import DataError, Episode
from .folder import ABOUT, EPISODES, DataFolder

#: suites of such tasks: of what is practised, and of what is measured where that is another data set
PRACTISED, HELD_OUT = "recorded", "recorded-held-out"
SUITES: Final = (PRACTISED, HELD_OUT)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTasks:
    """A `TaskSet`. The order of the steps depends on the seed and the round."""

    suite: str
    data: DataFolder
    #: of each step, its episode and its number there
    episodes: array[int]
    steps: array[int]

    def __len__(self) -> int:
        return len(self.steps)

    def sample(self, seed: int, index: int) -> Task:
        """Raises DataError for a line that was damaged since."""
        around, place = divmod(index, len(self.steps))
        return self.at(_order(len(self.steps), seed, around)[place])

    def at(self, number: int) -> Task:
        episode = self.data[self.episodes[number]]
        return task_of(self.suite, episode, self.episodes[number], self.steps[number])


def task_of(suite: str, episode: Episode, number: int, step: int) -> Task:
    """Whether the end of a task is right is the recorded action's to say: `feasible` is not known."""
    action = episode.steps[step].action
    assert action is not None, "steps without an action are not tasks"
    params = {"episode": str(number), "step": str(step)}
    return Task(suite=suite, template=action.type, params=params, goal=episode.asked, max_steps=1, feasible=None)


def step_of(task: Task) -> tuple[int, int]:
    """Episode and step, by number."""
    return int(task.params["episode"]), int(task.params["step"])


def recorded_tasks(folder: Path, outcomes: Collection[str], suite: str = PRACTISED) -> RecordedTasks:
    """Steps that have an action, of episodes that ended so. Raises DataError where there is none."""
    try:
        written = (folder / ABOUT).stat().st_mtime_ns
    except OSError:
        written = 0  # which the reader says in words
    return _read(folder, frozenset(outcomes), suite, written)


@lru_cache(maxsize=4)
def _read(folder: Path, outcomes: frozenset[str], suite: str, written: int) -> RecordedTasks:
    """A start asks several times. Only what is counted is looked at: lines are checked when they are drawn."""
    data, episodes, steps = DataFolder(folder), array("I"), array("I")
    with (folder / EPISODES).open("rb") as file:
        for number, line in enumerate(file):
            try:
                found = json.loads(line)
                if found.get("outcome", "unknown") in outcomes:
                    for place, step in enumerate(found["steps"]):
                        if "action" in step:
                            episodes.append(number)
                            steps.append(place)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise DataError(f"{folder / EPISODES} line {number + 1}: {error!r}") from error
    if not steps:
        raise DataError(
            f"{folder} has no step to answer: no episode that ended as {' or '.join(sorted(outcomes))} has an action; "
            "see tapforge data inspect"
        )
    return RecordedTasks(suite, data, episodes, steps)


@lru_cache(maxsize=4)
def _order(count: int, seed: int, around: int) -> array[int]:
    order = array("I", range(count))
    Random(f"recorded/{seed}/{around}").shuffle(order)
    return order
