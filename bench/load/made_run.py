"""A run's folder that was never played: as many episodes as are asked for, written by the run's own recorder.

Success rises over the updates, some answers can't be read, some episodes are invalid, and each group's episodes share
their first screens: what filters, groups and advantages show has something to show. The same seed makes the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tapforge_api import dump_set, load, to_yaml
from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.recording.learner_tokens import LearnerTokens
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import EpisodeRecord, Generation, GroupRecord, StepRecord

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "quickstart.yaml"
TEMPLATES = ("open", "switch", "two_panels", "send_mail", "add_contact", "set_alarm", "delete_note", "find_photo")
_NOUNS = ("wifi", "alarm", "camera", "invoice", "holiday", "grandmother", "train", "dentist", "garden", "piano")
#: unix seconds at which it began
BEGAN = 1_790_000_000.0

#: what an engine generated, its text, and the action
Answer = tuple[Generation, str, dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of everything."""

    episodes: int
    steps: int = 15
    group: int = 8
    groups: int = 16
    screens: int = 200
    width: int = 96
    height: int = 160
    prompt: int = 60
    answer: int = 24
    measured: int = 40

    @property
    def updates(self) -> int:
        return math.ceil(self.episodes / (self.group * self.groups))


def make_run(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Writes spec, events and recordings; returns the folder."""
    folder.mkdir(parents=True)
    run = load(SAMPLE, [f"metadata.name={folder.name}", f"spec.seed={seed}", *_sizes(shape)])
    (folder / "spec.yaml").write_text(to_yaml(dump_set(run)))
    frames = screens(shape.screens, shape.width, shape.height, seed)
    rng, rates = Random(seed), []
    pool, numbers = answers(shape, seed), np.random.default_rng(seed)
    recorder = Recorder(folder / "rollout")
    for update in range(1, shape.updates + 1):
        wins: list[bool] = []
        learned: list[LearnerTokens] = []
        left = shape.episodes - (update - 1) * shape.group * shape.groups
        for number in range(min(shape.groups, math.ceil(left / shape.group))):
            group = made_group(rng, shape, update, (update - 1) * shape.groups + number, frames, pool)
            for episode in group.episodes:
                recorder.episode(episode, {name: frames[name] for name in episode.frames})
                wins.append(episode.outcome is Outcome.SUCCESS)
            recorder.group(group)
            learned += [learner_tokens(numbers, episode) for episode in group.episodes]
        recorder.learner_tokens(update, learned)
        recorder.sync()
        rates.append(sum(wins) / len(wins))
    recorder.close()
    for name, chance in (("before-sampled", 0.3), ("after-sampled", 0.8)) if shape.measured else ():
        _measured(folder / "evaluation" / name, name, shape, chance, frames, seed)
    with (folder / "events.jsonl").open("w") as file:
        file.writelines(json.dumps(event) + "\n" for event in events(rates, shape))
    return folder


def _sizes(shape: Shape) -> list[str]:
    return [
        f"spec.rollout.groupSize={shape.group}",
        f"spec.rollout.groupsPerUpdate={shape.groups}",
        f"spec.stop.maxUpdates={shape.updates}",
    ]


def made_group(
    rng: Random,
    shape: Shape,
    update: int,
    order: int,
    frames: dict[str, FittedFrame],
    pool: list[Answer] | None = None,
    count: int = 0,
) -> GroupRecord:
    name, task = f"g1-{order:06d}", _task(rng, order)
    chance = 0.2 + 0.7 * update / (shape.updates + 1)
    names, pool = list(frames), pool or answers(shape, order)
    shared = [rng.choice(names) for _ in range(3)]
    episodes = [
        made_episode(rng, shape, f"{name}.{n}.0", name, task, update, chance, names, shared, pool)
        for n in range(count or shape.group)
    ]
    return GroupRecord(name, order, task, update, tuple(episodes))


def made_episode(
    rng: Random,
    shape: Shape,
    name: str,
    group: str,
    task: Task,
    update: int,
    chance: float,
    names: list[str],
    shared: list[str],
    pool: list[Answer],
) -> EpisodeRecord:
    count = max(1, shape.steps + rng.randrange(-2, 3)) if shape.steps > 3 else shape.steps
    screens = [*shared, *(rng.choice(names) for _ in range(count))][:count]
    steps = tuple(
        _step(rng, shape, name, index, screen, update, rng.choice(pool)) for index, screen in enumerate(screens)
    )
    won, broken = rng.random() < chance, rng.random() < 0.01
    outcome = Outcome.INVALID if broken else Outcome.SUCCESS if won else Outcome.FAILURE
    reason = Reason.ENV_ERROR if broken else Reason.DONE if won or rng.random() < 0.7 else Reason.STEP_LIMIT
    began = BEGAN + 60 * update + rng.random() * 50
    return EpisodeRecord(
        name, group, task, 0, f"phone-{rng.randrange(64)}", rng.getrandbits(60), reason, outcome,
        None if broken else float(won), "the phone did not answer" if broken else "as asked" if won else "not as asked",
        steps, began, began + count * 2.0,
    )  # fmt: skip


def _task(rng: Random, number: int) -> Task:
    template = TEMPLATES[number % len(TEMPLATES)]
    noun, other = rng.choice(_NOUNS), rng.choice(_NOUNS)
    goal = f"{template.replace('_', ' ')}: the {noun} of the {other}"
    return Task(suite="made", template=template, params={"noun": noun, "other": other}, seed=number, goal=goal)


def answers(shape: Shape, seed: int, count: int = 300) -> list[Answer]:
    """What steps say; each of them many times, as making them takes longer than writing them."""
    rng, found = Random(seed), []
    for _ in range(count):
        x, y = rng.randrange(1000), rng.randrange(1000)
        unread = rng.random() < 0.03
        text = f'<tool_call>\n{{"action": "click", "coordinate": [{x}, {y}]}}\n</tool_call>'
        generation = Generation(
            [rng.randrange(1000) for _ in range(shape.prompt)],
            [rng.randrange(1000) for _ in range(shape.answer)],
            [-rng.random() * rng.choice((0.001, 0.1, 2.0)) for _ in range(shape.answer)],
            [0] * shape.answer,
            "stop",
            shape.prompt + 90,
        )
        action = None if unread else {"type": "tap", "x": x / 999, "y": y / 999}
        found.append((generation, f"I think I should {rng.choice(_NOUNS)}" if unread else text, action))
    return found


def _step(rng: Random, shape: Shape, episode: str, index: int, screen: str, update: int, answer: Answer) -> StepRecord:
    generation, text, action = answer
    versions = [update - (rng.random() < 0.3)] * shape.answer
    return StepRecord(
        episode, index, (screen,), screen[:32], rng.choice(("home", "settings", "mail")),
        replace(generation, versions=versions), text, action,
        None if action else "no tool call in the answer", 0.0, "", 0.4 + rng.random(), 0.2 + rng.random(),
    )  # fmt: skip


def learner_tokens(rng: np.random.Generator, episode: EpisodeRecord) -> LearnerTokens:
    """Of an episode that an update trained on; engine and learner hardly differ."""
    steps = tuple((step.index, len(step.generation.ids)) for step in episode.steps)
    count = sum(tokens for _, tokens in steps)
    return LearnerTokens(episode.id, steps, rng.normal(0, 1e-3, count), rng.exponential(0.3, count))


def _measured(folder: Path, name: str, shape: Shape, chance: float, frames: dict[str, FittedFrame], seed: int) -> None:
    folder.parent.mkdir(exist_ok=True)
    recorder, tasks, rng = Recorder(folder), Random(1), Random(f"{seed}{name}")
    names, pool = list(frames), answers(shape, seed)
    for number in range(shape.measured):
        task = _task(tasks, 10_000 + number)
        group = f"{name}-{number:06d}"
        episode = made_episode(rng, shape, f"{group}.0.0", group, task, 0, chance, names, names[:3], pool)
        recorder.episode(episode, {one: frames[one] for one in episode.frames})
    recorder.close()


def screens(count: int, width: int, height: int, seed: int) -> dict[str, FittedFrame]:
    """By name. Each is like no other."""
    rng, found = Random(seed), dict[str, FittedFrame]()
    while len(found) < count:
        image = Image.new("RGB", (width, height), tuple(rng.randrange(140, 250) for _ in range(3)))
        draw = ImageDraw.Draw(image)
        for _ in range(9):
            x, y, size = rng.randrange(width), rng.randrange(height), max(4, width // 6)
            draw.rectangle((x, y, x + size, y + size), fill=tuple(rng.randrange(256) for _ in range(3)))
        frame = FittedFrame.of(np.asarray(image))
        found[frame.name] = frame
    return found


def events(rates: list[float], shape: Shape) -> Iterator[dict[str, Any]]:
    """As the driver writes them, with the figures that the first screen shows."""
    yield {"at": BEGAN, "event": "phase", "text": "starting"}
    if shape.measured:
        yield evaluation("before", 0, 0.3, shape.measured)
        yield {"at": BEGAN + 2, "event": "baseline", "policy": "random", **_rate(0.05, shape.measured)}
    yield {"at": BEGAN + 3, "event": "reinforcement", "update": 0, "version": 1}
    for update, rate in enumerate(rates, start=1):
        yield update_event(update, rate)
    if shape.measured:
        yield evaluation("after", len(rates), 0.8, shape.measured)


def evaluation(name: str, update: int, rate: float, episodes: int) -> dict[str, Any]:
    at = BEGAN + 60 * update + 59
    return {"at": at, "event": "evaluation", "name": name, "mode": "sampled", "update": update, **_rate(rate, episodes)}


def _rate(rate: float, episodes: int) -> dict[str, Any]:
    interval = [max(0.0, round(rate - 0.1, 4)), min(1.0, round(rate + 0.1, 4))]
    by_template = {name: min(1.0, rate * (0.6 + 0.1 * n)) for n, name in enumerate(TEMPLATES)}
    return {
        "success": rate, "interval": interval, "interval_by_template": interval, "episodes": episodes, "invalid": 0,
        "success_attempted": rate, "policy_version": 1, "by_template": by_template, "reasons": {"done": episodes},
    }  # fmt: skip


def update_event(update: int, rate: float) -> dict[str, Any]:
    templates = {name: {"success": rate, "low": rate, "high": rate, "episodes": 16} for name in TEMPLATES}
    learner = {
        "seconds_rollout_wait": 30 - 10 * rate, "seconds_learn": 18.0, "seconds_sync": 4.0, "seconds_checkpoint": 0.0,
        "seconds": 17.0, "entropy": 0.4 - 0.3 * rate, "gradient_norm": 0.5 + rate, "policy_loss": 0.01 / update,
    }  # fmt: skip
    return {
        "at": BEGAN + 60 * update + 58, "event": "update", "update": update, "seconds": 60.0 * update, "groups": 16,
        "episodes": 128, "success_rate": rate, "success_rate_all": rate, "valid_action_ratio": 0.97,
        "attempts": {"success": round(128 * rate), "failure": 128 - round(128 * rate)}, "sample_age": 0.3,
        "so_far": {"version": update + 1, "busy_share": 0.8, "env_steps_per_second": 32.0}, "templates": templates,
        "staleness": {"mean": 0.3, "max": 1}, "learner": learner, "alarms": [], "driver_stall_seconds": {},
        "rollout_workers": {}, "phones": {"free": 10, "leased": 54},
    }  # fmt: skip
