"""GUI-Odyssey (huggingface.co/datasets/OpenGVLab/GUI-Odyssey, arXiv:2406.08451): people's ways through several apps, a
JSON file per episode in `annotations/`, with the screens in `screenshots/` beside it.

A step is {screenshot, action, info}. CLICK and LONG_PRESS have info [[x, y]], SCROLL [[x1, y1], [x2, y2]] from where to
where the finger goes, all from 0 to 1000; TYPE (or TEXT) has the text; keys are actions, or the info of a CLICK with a
KEY_ before them. COMPLETE and IMPOSSIBLE (or INCOMPLETE) end an episode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from tapforge_envs.protocol import Action, AppSwitch, Back, Home, LongPress, Swipe, Tap, Terminate, Type

from ...agents.coordinates import Plane, is_number, short
from ..convert import Bad, Row, RowStep
from ..episodes import DataError, wrong
from ..images import image_at, plane_of
from ..rows import convention

#: an annotation is none if it is larger
_LARGEST: Final = 64 << 20
_KEYS: Final[dict[str, Action]] = {
    "HOME": Home(), "BACK": Back(), "APPSELECT": AppSwitch(), "RECENT": AppSwitch(),
    "COMPLETE": Terminate(status="success"),
    "IMPOSSIBLE": Terminate(status="infeasible"), "INCOMPLETE": Terminate(status="infeasible"),
}  # fmt: skip


def gui_odyssey(path: Path, /, *, images: str = "", instruction: str = "instruction") -> Iterator[Row | Bad]:
    """`path`: the folder of annotations, or one of them. `images`: the folder of the screens; default: `screenshots`
    beside it. `instruction`: which of task_info, instruction or task."""
    if instruction not in ("instruction", "task"):
        raise DataError(f"instruction={instruction}; known are instruction, task")
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} has no JSON file; name the folder annotations")
    folder = Path(images) if images else files[0].parent.parent / "screenshots"
    for file in files:
        try:
            if file.stat().st_size > _LARGEST:
                raise ValueError(f"larger than {_LARGEST >> 20} MiB")
            value = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            yield Bad(file.name, "row", f"no JSON: {str(error)[:120]}")
            continue
        try:
            yield _row(file.name, value, folder, instruction)
        except DataError as error:
            yield Bad(file.name, "image", str(error))


def _row(name: str, value: Any, folder: Path, instruction: str) -> Row | Bad:
    task, listed = (value.get(key) for key in ("task_info", "steps")) if isinstance(value, dict) else (None, None)
    goal = task.get(instruction) if isinstance(task, dict) else None
    if not isinstance(goal, str) or not goal.strip():
        return Bad(name, "row", f"no {instruction} in task_info")
    if not isinstance(listed, list) or not listed or not all(isinstance(step, dict) for step in listed):
        return Bad(name, "row", "no list of steps")
    steps = []
    for place, step in enumerate(listed, start=1):
        where = f"{name} step {place}"
        if not isinstance(file := step.get("screenshot"), str) or not file:
            return Bad(where, "image", "the step names no screenshot")
        screen = image_at(folder, file)
        action = _action(where, step, plane_of(screen, convention("grid1000")))
        if isinstance(action, Bad):
            return action
        steps.append(RowStep(screen, action))
    ended = steps[-1].action
    done = isinstance(ended, Terminate) and ended.status == "success"
    return Row(name, goal.strip(), steps, "success" if done else "unknown")


def _action(name: str, step: dict[str, Any], plane: Plane) -> Action | Bad:
    kind, info = str(step.get("action")).upper(), step.get("info")
    key = info.upper() if kind == "CLICK" and isinstance(info, str) else kind
    if (found := _KEYS.get(key.removeprefix("KEY_"))) is not None:
        return found
    try:
        if kind in ("TYPE", "TEXT"):
            return Type(text=info)
        places = [plane.point(one) for one in info] if isinstance(info, list) else []
        if kind in ("CLICK", "LONG_PRESS") and len(places) == 1:
            (x, y) = places[0]
            return Tap(x=x, y=y) if kind == "CLICK" else LongPress(x=x, y=y)
        if kind == "SCROLL" and len(places) == 2:
            (x, y), (x2, y2) = places
            return Swipe(x=x, y=y, x2=x2, y2=y2)
    except ValidationError as error:
        return Bad(name, "action", f"{kind}: {wrong(error)}")
    except ValueError as error:
        listed = info if isinstance(info, list) else []
        numbers = [float(one) for point in listed if isinstance(point, list) for one in point if is_number(one)]
        return Bad(name, "coordinates", f"{kind}: {error}", numbers)
    return Bad(name, "action", f"{short(kind)} with info {short(info)} has no counterpart")
