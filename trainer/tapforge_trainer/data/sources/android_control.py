"""AndroidControl (github.com/google-research/google-research, android_control; arXiv:2406.03679): demonstrations by
people on 833 apps, as gzipped TFRecord files with an episode per record.

Of a record `goal`, `screenshots` (PNG, one more than actions), `actions` (JSON with `action_type`; places are pixels of
the screenshot) and `step_instructions` are read. `scroll` names what comes into view, as ours does. `type` is a click,
a text and Enter in one, and has no counterpart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from tapforge_envs.protocol import Action, Back, Home, LongPress, OpenApp, Scroll, Tap, Type, Wait

from ...agents.coordinates import Plane, is_number, short
from ..convert import Bad, Row, RowStep
from ..episodes import DataError, wrong
from ..images import plane_of
from ..rows import convention
from ..tfrecord import Example, examples

_LEVELS: Final = ("high", "low")


def android_control(path: Path, /, *, level: str = "high") -> Iterator[Row | Bad]:
    """`path`: a TFRecord file, or a folder of them. `level`: high, whole episodes by their goals; low, single steps by
    their own instructions."""
    if level not in _LEVELS:
        raise DataError(f"level={level}; known are {', '.join(_LEVELS)}")
    files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    for file in files:
        for name, value in examples(file):
            if isinstance(value, DataError):
                yield Bad(name, "row", str(value))
                continue
            try:
                yield from _rows(name, value, level)
            except DataError as error:
                yield Bad(name, "image", str(error))


def _rows(name: str, value: Example, level: str) -> Iterator[Row | Bad]:
    screens, actions, said = (value.get(key, []) for key in ("screenshots", "actions", "step_instructions"))
    if not screens or len(screens) != len(actions) + 1 or not all(isinstance(one, bytes) for one in screens):
        yield Bad(name, "row", f"{len(screens)} screenshots for {len(actions)} actions; there is one more of them")
        return
    try:
        goal, instructions = _text(value.get("goal", [b""])[0]), [_text(one) for one in said]
    except (UnicodeDecodeError, AttributeError, IndexError):
        yield Bad(name, "row", "a goal or an instruction that is not text in UTF-8")
        return
    if level == "high" and not goal.strip():
        yield Bad(name, "row", "no goal")
        return
    if level == "low" and len(instructions) != len(actions):
        yield Bad(name, "row", f"{len(instructions)} instructions for {len(actions)} actions")
        return
    steps: list[RowStep] = []
    for place, (screen, written) in enumerate(zip(screens, actions, strict=False)):
        where = f"{name} action {place + 1}"
        found = _action(where, written, plane_of(screen, convention("pixels")))
        if isinstance(found, Bad):
            yield found
            if level == "high":
                return
            continue
        if level == "low":
            yield Row(where, instructions[place], [RowStep(screen, found)], last_screen=screens[place + 1])
        steps.append(RowStep(screen, found))
    if level == "high":
        yield Row(name, goal, steps, last_screen=screens[-1])


def _text(value: bytes) -> str:
    return value.decode()


def _action(name: str, written: Any, plane: Plane) -> Action | Bad:
    try:
        value = json.loads(written)
        kind = value["action_type"]
    except (ValueError, KeyError, TypeError):
        return Bad(name, "action", f"{short(written)} is not an action")
    try:
        if kind in ("click", "long_press"):
            x, y = plane.place(value.get("x"), value.get("y"))
            return Tap(x=x, y=y) if kind == "click" else LongPress(x=x, y=y)
        if kind == "scroll":
            return Scroll(direction=value.get("direction"))
        if kind == "open_app":
            return OpenApp(name=value.get("app_name"))
        if kind == "input_text":
            return Type(text=value.get("text"))
    except ValidationError as error:
        return Bad(name, "action", f"{kind}: {wrong(error)}")
    except ValueError as error:
        numbers = [float(one) for one in (value.get("x"), value.get("y")) if is_number(one)]
        return Bad(name, "coordinates", f"{kind}: {error}", numbers)
    known: dict[str, Action] = {"navigate_home": Home(), "navigate_back": Back(), "wait": Wait()}
    return known.get(kind) or Bad(name, "action", f"{short(kind)} has no counterpart")
