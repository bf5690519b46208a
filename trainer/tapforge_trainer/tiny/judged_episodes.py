"""What the tiny judge learns from and is measured on: episodes of the simulated phone, quickstart suite, with what its
verifier says of them.

An episode is a demonstrator's plan with mistakes of an agent that learns: touches of other places, steps left out, done
twice or in another order, an end too early, or a wrong report of one. About half of the episodes are successes. Those
of the test split have sentences and arrangements of icons that no training episode has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from random import Random
from typing import Final, Literal

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.device import Phone
from tapforge_envs.phone.quickstart import CELLS, cell
from tapforge_envs.phone.screen import center
from tapforge_envs.protocol import ACTION, Action, Home, Tap, Task, Terminate

from ..judges.question import marked

WIDTH, HEIGHT = 96, 160
#: of the suite, the shorter ones that can be done
TEMPLATES = ("open", "open_two", "switch", "switch_two")


Split = Literal["train", "test"]
#: episodes that are made in one go
_PART: Final = 500


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    goal: str
    template: str
    #: with each touch marked on the screen before it; the last one is the screen at the end
    screens: tuple[bytes, ...]
    #: what the last action reported
    status: str
    solved: bool


def many(seed: int, split: Split, count: int, processes: int = 1) -> list[JudgedEpisode]:
    """The same for the same seed, in however many processes they are made."""
    sizes = [min(_PART, count - start) for start in range(0, count, _PART)]
    tasks = [(seed * 1_000_003 + part, split, size) for part, size in enumerate(sizes)]
    if processes == 1 or len(tasks) == 1:
        return [one for task in tasks for one in _part(task)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return [one for part in pool.map(_part, tasks) for one in part]


def _part(task: tuple[int, Split, int]) -> list[JudgedEpisode]:
    seed, split, count = task
    return list(islice(episodes(seed, split), count))


def episodes(seed: int, split: Split, templates: Sequence[str] = TEMPLATES) -> Iterator[JudgedEpisode]:
    """Without end. The same for the same seed."""
    rng, tasks = Random(f"judged:{split}:{seed}"), catalog.tasks("quickstart", split, templates)
    phone, number = catalog.phone_for("quickstart", WIDTH, HEIGHT), 0
    while True:
        wanted = rng.random() < 0.5
        for _ in range(12):
            number += 1
            found = _played(phone, tasks.sample(seed, number), rng, mistakes=0.25 if wanted else 0.75)
            if found is not None and found.solved == wanted:
                yield found
                break


def _played(phone: Phone, task: Task, rng: Random, mistakes: float) -> JudgedEpisode | None:
    """None: the demonstrator could not go on after a mistake."""
    template = catalog.template_of(task)
    first = phone.reset(task.seed, template.rules(task.params))
    frames, touches = [first.frame.data], list[Action]()
    careless = rng.random() < mistakes
    rate = rng.choice((0.15, 0.3, 0.6)) if rng.random() < mistakes else 0.0
    status: Literal["success", "failure", "infeasible"] = "success"
    if rng.random() < 0.06 * mistakes:
        status = "failure"

    def act(action: Action) -> bool:
        """Whether the episode goes on."""
        result = phone.step(action)
        touches.append(action)
        frames.append(result.observation.frame.data)
        return not result.done

    plan = demonstration(phone, template, task.params, lambda: careless and rng.random() < 0.5)
    try:
        for action in plan:
            while len(touches) < 10 and rng.random() < rate:
                kind = rng.random()
                if kind < 0.3:
                    act(_somewhere(rng))
                elif kind < 0.5 and touches:
                    act(touches[-1])
                elif kind < 0.62:
                    act(Home())
                elif kind < 0.75:
                    act(Terminate(status=status))
                    return _ended(phone, task, template.name, frames, touches)
                else:
                    act(_touch_of_screen(phone, rng))
            if isinstance(action, Terminate):
                action = Terminate(status=status)
            if not act(action):
                return _ended(phone, task, template.name, frames, touches)
    except LookupError:
        act(Terminate(status=status))
        return _ended(phone, task, template.name, frames, touches)
    return None


def _ended(phone: Phone, task: Task, template: str, frames: list[bytes], touches: list[Action]) -> JudgedEpisode | None:
    if len(frames) > 14:
        return None
    wires = [ACTION.dump_python(action) for action in touches]
    screens = [marked(frame, wire) for frame, wire in zip(frames, [*wires, None], strict=True)]
    return JudgedEpisode(
        task.goal, template, tuple(screens), str(wires[-1].get("status", "")), phone.evaluate().value >= task.threshold
    )


def _somewhere(rng: Random) -> Action:
    """Any cell, as an agent touches that has not learned."""
    column, row = rng.choice(CELLS)
    x, y = center(cell(column, row))
    return Tap(x=x, y=y)


def _touch_of_screen(phone: Phone, rng: Random) -> Action:
    """Something that can be touched."""
    x, y = center(rng.choice([widget for widget in phone.screen().widgets if widget.tap] or phone.screen().widgets).box)
    return Tap(x=x, y=y)
