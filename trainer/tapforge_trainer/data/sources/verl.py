"""What verl's GUI agent example prepares: JSON Lines of {instruction, screenshots | images: [path], actions: [...]}, or
the parquet files that its script writes of them ({images: [bytes], extra_info: {instruction, expected_actions}}).

Actions are calls of mobile_use: {"action": "click", "coordinate": [x, y]}, on a grid of 999 by default.
The parquet files hold the first screen alone: of an episode of several actions only the first step is there, and the
rest is counted as `no_screen`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ...agents.coordinates import Coordinates, is_number
from ...agents.mobile_use import MOBILE_USE
from ..convert import Bad, Row, RowStep
from ..episodes import DataError
from ..images import image_at, plane_of
from ..rows import convention, json_rows, parquet_rows

#: fields that verl's tool lets out
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {"long_press": {"time": 1.0}, "wait": {"time": 1.0}}


def verl(path: Path, /, *, images: str = "", coordinates: str = "grid") -> Iterator[Row | Bad]:
    """`path`: a .jsonl or .parquet file. `images`: the folder of images that are paths; default: the file's own."""
    folder, how = Path(images) if images else path.parent, convention(coordinates)
    rows = parquet_rows(path) if path.suffix == ".parquet" else json_rows(path)
    for name, value in rows:
        if isinstance(value, DataError) or not isinstance(value, dict):
            yield Bad(name, "row", str(value)[:200])
            continue
        try:
            yield from _rows(name, value, folder, how)
        except DataError as error:
            yield Bad(name, "image", str(error))


def _rows(name: str, value: dict[str, Any], folder: Path, how: Coordinates) -> Iterator[Row | Bad]:
    about = value.get("extra_info") or value
    if not isinstance(about, dict):
        yield Bad(name, "row", f"extra_info is {type(about).__name__}, not the fields of a task")
        return
    goal = about.get("instruction") or value.get("instruction")
    actions = about.get("expected_actions", about.get("actions"))
    shown = value.get("images") or value.get("screenshots")
    if not isinstance(goal, str) or not goal.strip():
        yield Bad(name, "row", "no instruction")
    elif not isinstance(actions, list) or not actions:
        yield Bad(name, "row", "no actions")
    elif not isinstance(shown, list) or not shown:
        yield Bad(name, "image", "no images")
    else:
        screens = [_image(one, folder) for one in shown]
        steps = []
        for place, (screen, action) in enumerate(zip(screens, actions, strict=False)):
            try:
                given = {key: one for key, one in dict(action).items() if one is not None}
                given = {**_DEFAULTS.get(str(given.get("action")), {}), **given}
                steps.append(RowStep(screen, MOBILE_USE.read(given, plane_of(screen, how))))
            except (TypeError, ValueError) as error:
                yield Bad(f"{name} action {place + 1}", "action", str(error), _numbers(action))
                break
        if len(actions) > len(screens):
            yield Bad(name, "no_screen", f"{len(actions)} actions and {len(screens)} screens; the rest is left out")
        if steps:
            last = screens[len(actions)] if len(screens) > len(actions) and len(steps) == len(actions) else None
            yield Row(name, goal.strip(), steps, last_screen=last)


def _numbers(action: Any) -> list[float]:
    """Of its places."""
    values = action.values() if isinstance(action, dict) else ()
    return [number for one in values if isinstance(one, list) for number in one if is_number(number)][:4]


def _image(value: Any, folder: Path) -> bytes:
    """Bytes, {bytes} or a path: all three are found in the wild, also mixed. Raises DataError."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value:
        return image_at(folder, value)
    raise DataError(f"an image is {type(value).__name__}, not bytes or a path")
