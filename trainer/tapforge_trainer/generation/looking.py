"""Screens that tasks are proposed from: of the simulated phone, drawn here, or of a phone that is leased.

A screen is the first page of an app, or the home screen, of a phone in a state that a task can begin in: of the
simulated phone a seed, of a phone over adb as it is. A phone that has no such app is passed over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from tapforge_envs.phone import catalog
from tapforge_envs.phone.device import HOME, Phone, fresh_state, open_app
from tapforge_envs.phone.tasks import SEEDS
from tapforge_envs.protocol import Environment, Observation, OpenApp, Task, UnsupportedAction

from ..tasks.source import TaskError

#: of the screens of the simulated phone, pixels
SIZES: Final = {"quickstart": (96, 160), "standard": (540, 1200)}
_PHONES: Final = 1_000_003


@dataclass(frozen=True, slots=True)
class Screen:
    #: a PNG
    picture: bytes
    sha256: str
    #: in front; "" is the home screen
    app: str
    #: that are on the phone, as far as it is known
    apps: tuple[str, ...]
    suite: str
    #: of the phone's state; 0 where it has none
    seed: int = 0


def simulated_screens(suite: str, apps: Sequence[str], phones: int, seed: int) -> list[Screen]:
    """The home screen and the apps' first pages of so many phones. `apps`: all for none. Raises TaskError."""
    image = catalog.suite(suite).image
    known = [name for name, app in image.apps.items() if app.glyph and name != HOME]
    if unknown := [name for name in apps if name not in known]:
        raise TaskError(f"the suite {suite} has no app {unknown[0]!r}; it has {', '.join(known)}")
    found = []
    for number in range(phones):
        phone_seed = (seed * _PHONES + number) % SEEDS
        there = fresh_state(image, phone_seed)["apps"][HOME].get("apps", known)
        for app in ("", *(name for name in apps or known if name in there)):
            phone = Phone(image, *SIZES[suite])
            phone.state = fresh_state(image, phone_seed)
            if app:
                open_app(image, phone.state, app)
            frame = phone.observe().frame
            found.append(Screen(frame.data, frame.sha256, app, tuple(there), suite, phone_seed))
    return found


async def look(phone: Environment, task: Task, apps: Sequence[str]) -> AsyncIterator[Screen]:
    """The screen that `task` begins with, and each app's first page, of a phone that can open apps by name. Raises
    EnvironmentFault."""
    seen = await phone.reset(task)
    yield _screen(seen, "", apps, task)
    index = 0
    for app in apps:
        try:
            result = await phone.step(OpenApp(name=app), index)
        except UnsupportedAction:
            continue
        index += 1
        if not result.note:  # else it has no such app
            yield _screen(result.observation, app, apps, task)


def _screen(seen: Observation, app: str, apps: Sequence[str], task: Task) -> Screen:
    return Screen(seen.frame.data, seen.frame.sha256, app, tuple(apps), task.suite, task.seed)
