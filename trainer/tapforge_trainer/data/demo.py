"""A small data set in verl's form, made on the simulated phone by its demonstrator: to try converters with."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration

from ..agents.coordinates import Grid, Plane
from ..agents.mobile_use import MOBILE_USE
from .episodes import DataError

SUITE, SPLIT = "quickstart", "train"
ROWS = "demo.jsonl"


def demo(folder: Path, *, episodes: int, seed: int, error_rate: float = 0.0, width: int = 96, height: int = 160) -> int:
    """Writes `demo.jsonl` and `screenshots/` into a new folder; a row is {instruction, screenshots, actions}, with a
    screen more than actions. Returns the steps. Raises DataError where something is there."""
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} isn't empty; name another folder")
    (folder / "screenshots").mkdir(parents=True)
    tasks, rng, count = catalog.tasks(SUITE, SPLIT), Random(f"demo:{seed}"), 0
    plane = Plane(Grid(999), width, height)
    with (folder / ROWS).open("w") as file:
        for number in range(episodes):
            task = tasks.sample(seed, number)
            template = catalog.template_of(task)
            phone = catalog.phone_for(SUITE, width, height)
            screens = [phone.reset(task.seed, template.rules(task.params)).frame.data]
            actions = []
            for action in demonstration(phone, template, task.params, lambda: rng.random() < error_rate):
                actions.append(MOBILE_USE.write(action, plane))
                screens.append(phone.step(action).observation.frame.data)
            names = [f"screenshots/{number:05d}-{place:02d}.png" for place in range(len(screens))]
            for name, data in zip(names, screens, strict=True):
                (folder / name).write_bytes(data)
            row = {"instruction": task.goal, "screenshots": names, "actions": actions}
            file.write(json.dumps(row) + "\n")
            count += len(actions)
    return count
