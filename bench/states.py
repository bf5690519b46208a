"""How well state keys tell states apart: false merges and false splits against the simulated phone's exact keys.

    python bench/states.py [--groups 88] [--members 8]

Groups of both suites are played by a demonstrator with an error rate that does something else at a fifth of its
steps. As on real phones, the clocks of a group's phones differ by up to three minutes and the caret blinks. Every key
is measured on the same steps, over all pairs of steps of a group:

    false merges    pairs with one key whose exact keys differ, of all pairs with one key; in brackets those whose
                    screens show a difference: the others no key of a screen can tell apart
    false splits    pairs with one exact key whose keys differ, of all pairs with one exact key
    alone           share of steps whose state no other step has
    advantages      correlation of GiGPO's step advantages with those of the exact keys

Prints a table per suite and writes bench-results/states.json.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from load.machine import machine, show, write
from PIL import Image

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.device import Phone
from tapforge_envs.phone.draw import picture
from tapforge_envs.phone.screen import Screen, center
from tapforge_envs.phone.tree import ui_tree
from tapforge_envs.protocol import Action, Back, Home, Scroll, Tap, Task, Type, Wait
from tapforge_envs.ui_tree import ui_key
from tapforge_trainer.algorithms.gigpo import gigpo
from tapforge_trainer.algorithms.steps import Steps
from tapforge_trainer.records import Generation, StepRecord
from tapforge_trainer.states.frame import FrameKey, frame_key
from tapforge_trainer.states.grouping import states_of

SIZES = {"quickstart": (96, 160), "standard": (1080, 2400)}
#: shares of steps that aren't the plan's, and of decisions at which the demonstrator goes wrong
ASTRAY, ERROR_RATE = 0.2, 0.3
#: minutes by which the clocks of a group's phones differ
CLOCKS = 3
_GENERATION = Generation((), (), (), (), "stop", 0)


@dataclass(frozen=True, slots=True)
class Looks:
    """What was computed from a screen as it was drawn."""

    key: FrameKey
    tree: str
    whole: bytes
    #: of 16 x 16 differences between neighbours
    difference: bytes


@dataclass(frozen=True, slots=True)
class Seen:
    """A step: where it was, and what it saw."""

    trajectory: int
    index: int
    exact: str
    app: str
    screen: Screen
    reward: float = 0.0


def astray(phone: Phone, rng: Random) -> Action:
    reachable = [w for w in phone.screen().widgets if w.tap and w.box[1] < 0.98]
    if reachable and rng.random() < 0.7:
        x, y = center(rng.choice(reachable).box)
        return Tap(x=min(x, 1.0), y=min(y, 1.0))
    other = (Back(), Home(), Scroll(direction="down"), Scroll(direction="up"), Type(text="a"), Wait())
    return rng.choice(other)


def play(task: Task, member: int) -> list[Seen]:
    rng = Random(f"{task.key}:{member}")
    template = catalog.template_of(task)
    phone = catalog.phone_for(task.suite, *SIZES[task.suite])
    phone.begin(task.seed, template.rules(task.params))
    if "now" in phone.state:
        now = phone.state["now"]
        phone.state["now"] = f"{now[:14]}{min(59, int(now[14:16]) + rng.randint(0, CLOCKS)):02d}"
    plan: Iterator[Action] = demonstration(phone, template, task.params, lambda: rng.random() < ERROR_RATE)
    steps: list[Seen] = []
    while len(steps) < task.max_steps and phone.state["ended"] is None:
        screen = replace(phone.screen(), caret=rng.random() < 0.5)
        steps.append(Seen(member, len(steps), phone.state_key(), phone.state["nav"]["app"], screen))
        try:
            action = astray(phone, rng) if rng.random() < ASTRAY else next(plan)
        except (LookupError, StopIteration):  # where it went astray to, the plan doesn't know
            action, plan = astray(phone, rng), iter(())
        phone.act(action)
    ended = phone.state["ended"]
    won = ended == "infeasible" if not task.feasible else ended is not None and phone.evaluate().value >= task.threshold
    steps[-1] = replace(steps[-1], reward=float(won))
    return steps


class Album:
    """Every screen is drawn and read once."""

    def __init__(self, width: int, height: int):
        self.size = width, height
        self._seen: dict[tuple[Screen, str], Looks] = {}

    def __call__(self, step: Seen) -> Looks:
        place = step.screen, step.app
        if place not in self._seen:
            image = picture(step.screen, *self.size)
            pixels = np.asarray(image)
            small = np.asarray(image.convert("L").resize((17, 16), Image.Resampling.LANCZOS)).astype(int)
            self._seen[place] = Looks(
                frame_key(pixels),
                ui_tree(step.screen, step.app, *self.size),
                hashlib.blake2b(pixels, digest_size=16).digest(),
                (small[:, 1:] > small[:, :-1]).tobytes(),
            )
        return self._seen[place]


Labels = Callable[[Sequence[Seen], Album], Sequence[Hashable]]


def record(step: Seen, **told: Any) -> StepRecord:
    return StepRecord(
        f"{step.trajectory}", step.index, (), None, step.app, _GENERATION, "", None, None, 0.0, "", 0.0, 0.0, **told
    )


def by_tree(steps: Sequence[Seen], album: Album) -> Sequence[Hashable]:
    return states_of([record(s, ui_key=ui_key(album(s).tree)) for s in steps])


def by_tree_without_focus(steps: Sequence[Seen], album: Album) -> Sequence[Hashable]:
    trees = (album(s).tree.replace('focused="true"', 'focused="false"') for s in steps)
    return states_of([record(s, ui_key=ui_key(tree)) for s, tree in zip(steps, trees, strict=True)])


def by_frame(steps: Sequence[Seen], album: Album) -> Sequence[Hashable]:
    return states_of([record(s, frame_key=album(s).key.text()) for s in steps])


def by_frame_without_app(steps: Sequence[Seen], album: Album) -> Sequence[Hashable]:
    return states_of([record(replace(s, app=""), frame_key=album(s).key.text()) for s in steps])


def by_tiles(steps: Sequence[Seen], album: Album) -> Sequence[Hashable]:
    """Without neighbours."""
    return [(s.app, album(s).key.tiles.tobytes()) for s in steps]


def by_loose_tiles(steps: Sequence[Seen], album: Album) -> Sequence[Hashable]:
    """Chains of neighbours that differ in at most four tiles."""
    tiles = np.stack([album(s).key.tiles.ravel() for s in steps])
    label = np.arange(len(steps))
    for i, step in enumerate(steps):
        near = (tiles != tiles[i]).sum(1) <= 4
        for j in np.flatnonzero(near):
            if steps[j].app == step.app and label[j] != label[i]:
                label[label == label[j]] = label[i]
    return label.tolist()


KEYS: dict[str, Labels] = {
    "what is visible": lambda steps, album: [(s.app, s.screen.identity()) for s in steps],
    "UI tree": by_tree,
    "UI tree without focus": by_tree_without_focus,
    "frame": by_frame,
    "frame, no app known": by_frame_without_app,
    "tiles alone": by_tiles,
    "tiles, up to 4 differ": by_loose_tiles,
    "difference hash 16x16": lambda steps, album: [(s.app, album(s).difference) for s in steps],
    "whole frame": lambda steps, album: [album(s).whole for s in steps],
    "app": lambda steps, album: [s.app for s in steps],
}


def pairs(labels: Sequence[Hashable]) -> int:
    return sum(n * (n - 1) // 2 for n in Counter(labels).values())


def step_advantages(steps: Sequence[Seen], labels: Sequence[Hashable]) -> np.ndarray:
    numbers: dict[Hashable, int] = {}
    return gigpo(
        Steps(
            group=np.zeros(len(steps), dtype=np.int64),
            trajectory=np.array([s.trajectory for s in steps]),
            state=np.array([numbers.setdefault(label, len(numbers)) for label in labels]),
            reward=np.array([s.reward for s in steps]),
            valid=np.ones(len(steps), dtype=bool),
        ),
        normalization="mean",
    ).step


def measure(groups: Sequence[Sequence[Seen]], album: Album, key: Labels) -> dict[str, float]:
    same_key = same_exact = both = seen_alike = alone = 0
    ours, exact_ones = [], []
    for steps in groups:
        labels = list(key(steps, album))
        exact = [s.exact for s in steps]
        visible = [(s.app, s.screen.identity()) for s in steps]
        same_key += pairs(labels)
        same_exact += pairs(exact)
        both += pairs(list(zip(labels, exact, strict=True)))
        seen_alike += pairs([*zip(labels, visible, strict=True)])
        sizes = Counter(labels)
        alone += sum(sizes[label] == 1 for label in labels)
        ours.append(step_advantages(steps, labels))
        exact_ones.append(step_advantages(steps, exact))
    return {
        "false_merges": round(1 - both / max(same_key, 1), 4),
        "false_merges_visible": round(1 - seen_alike / max(same_key, 1), 4),
        "false_splits": round(1 - both / max(same_exact, 1), 4),
        "alone": round(alone / sum(map(len, groups)), 4),
        "advantages": round(float(np.corrcoef(np.concatenate(ours), np.concatenate(exact_ones))[0, 1]), 4),
    }


def milliseconds(album: Album, steps: Sequence[Seen]) -> dict[str, float]:
    """Medians of one call."""
    frames = [np.asarray(picture(s.screen, *album.size)) for s in steps[:20]]
    fitted = [np.asarray(Image.fromarray(f).resize((768, 1696))) for f in frames]
    found = {}
    for name, call, over in (
        ("frame_key_1080x2400", frame_key, frames),
        ("frame_key_768x1696", frame_key, fitted),
        ("ui_key", ui_key, [album(s).tree for s in steps[:20]]),
    ):
        seconds = []
        for item in [*over, *over]:
            begun = time.perf_counter()
            call(item)  # type: ignore[operator]
            seconds.append(time.perf_counter() - begun)
        found[name] = round(sorted(seconds)[len(seconds) // 2] * 1000, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=88, help="of each suite")
    parser.add_argument("--members", type=int, default=8, help="episodes of a group")
    parser.add_argument("--out", type=Path, default=Path("bench-results/states.json"))
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": machine(), "suites": {}}
    for suite, size in SIZES.items():
        tasks = catalog.tasks(suite, "train")
        groups = []
        for number in range(args.groups):
            task = tasks.sample(7, number)
            groups.append([step for member in range(args.members) for step in play(task, member)])
        album = Album(*size)
        found = {name: measure(groups, album, key) for name, key in KEYS.items()}
        count = sum(map(len, groups))
        figures["suites"][suite] = {"width": size[0], "height": size[1], "groups": len(groups), "steps": count, **found}
        rows = [
            (
                name,
                f"{row['false_merges']:.1%} ({row['false_merges_visible']:.1%})",
                f"{row['false_splits']:.1%}",
                f"{row['alone']:.1%}",
                f"{row['advantages']:.3f}",
            )
            for name, row in found.items()
        ]
        title = f"{suite}, {size[0]}x{size[1]}, {len(groups)} groups, {count} steps"
        show(title, ("key", "false merges (visible)", "false splits", "alone", "advantages"), rows)
        if suite == "standard":
            figures["milliseconds"] = milliseconds(album, groups[0])
    print("\nmilliseconds of a call:", figures["milliseconds"])
    write(args.out, figures)


if __name__ == "__main__":
    main()
