"""Rico's interaction traces (interactionmining.org/rico, doi:10.1145/3126594.3126651): people's ways through Android
apps, a folder per trace, `APP/trace_0/`, with `gestures.json`, `screenshots/12.jpg` and `view_hierarchies/12.json`.

`gestures.json` has by number of a screen the places that the finger touched, in shares of the screen: one for a tap,
several for a stroke, none where nothing was done. Traces have no goals. So a row is one tap on something that has
words, and its goal names these; right is the whole element, whose bounds are in the pixels of the root element. With
`goals`, a JSON object of {"APP/trace_0": goal}, a row is a whole trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from tapforge_envs.protocol import Action, Swipe, Tap

from ...agents.coordinates import is_number, short
from ..convert import Bad, Row, RowStep
from ..episodes import Box, DataError, wrong
from ..images import image_at

#: a file of JSON is none if it is larger
_LARGEST: Final = 64 << 20
#: of the screen, from which on a finger that has moved is a stroke
_MOVED: Final = 0.02
#: characters of an element's words in a goal
_WORDS: Final = 80
#: elements of a screen that are looked at
_ELEMENTS: Final = 20_000


def rico(path: Path, /, *, goals: str = "") -> Iterator[Row | Bad]:
    """`path`: a folder with traces, at whatever depth. `goals`: a file of goals by trace."""
    files = sorted(path.rglob("gestures.json"))
    if not files:
        raise DataError(f"{path} has no gestures.json; name the folder filtered_traces")
    named = _goals(Path(goals)) if goals else None
    if named is not None and not any(_name(file) in named for file in files):
        raise DataError(f"{goals} names none of the {len(files):,} traces, of which the first is {_name(files[0])}")
    for file in files:
        trace, name = file.parent, _name(file)
        if named is not None and name not in named:
            continue
        try:
            gestures = _json(file)
            if not isinstance(gestures, dict):
                raise DataError("gestures.json is not an object")
        except DataError as error:
            yield Bad(name, "row", str(error))
            continue
        numbers = [key for key in gestures if key.isascii() and key.isdecimal()]
        screens = sorted(numbers, key=lambda number: (len(number), number))
        if named is not None:
            yield _trace(name, named[name], trace, gestures, screens)
        else:
            for screen in screens:
                if gestures[screen]:
                    yield _tap(f"{name} screen {screen}", trace, screen, gestures[screen])


def _name(gestures: Path) -> str:
    return f"{gestures.parent.parent.name}/{gestures.parent.name}"


def _trace(name: str, goal: str, trace: Path, gestures: dict[str, Any], screens: list[str]) -> Row | Bad:
    steps = []
    for screen in screens:
        where = f"{name} screen {screen}"
        action = _action(where, gestures[screen]) if gestures[screen] else None
        if isinstance(action, Bad):
            return action
        try:
            steps.append(RowStep(image_at(trace / "screenshots", f"{screen}.jpg"), action))
        except DataError as error:
            return Bad(where, "image", str(error))
    return Row(name, goal, steps) if steps else Bad(name, "row", "the trace has no screens")


def _tap(name: str, trace: Path, screen: str, places: Any) -> Row | Bad:
    action = _action(name, places)
    if isinstance(action, Bad):
        return action
    if not isinstance(action, Tap):
        return Bad(name, "no_goal", "a stroke says nothing of what it is for; give --option goals=FILE")
    try:
        image = image_at(trace / "screenshots", f"{screen}.jpg")
    except DataError as error:
        return Bad(name, "image", str(error))
    try:
        hierarchy = _json(trace / "view_hierarchies" / f"{screen}.json")
    except DataError as error:
        return Bad(name, "row", str(error))
    if (found := _touched(hierarchy, action)) is None:
        return Bad(name, "no_goal", "what was tapped has no words; give --option goals=FILE")
    words, box = found
    return Row(name, f'Tap "{words}"', [RowStep(image, action, target=box)])


def _action(name: str, places: Any) -> Action | Bad:
    good = isinstance(places, list) and all(
        isinstance(one, list) and len(one) == 2 and all(is_number(part) for part in one) for one in places
    )
    if not good:
        return Bad(name, "action", f"gesture {short(places)} is not a list of places")
    (x, y), (x2, y2) = places[0], places[-1]
    try:
        if abs(x2 - x) <= _MOVED and abs(y2 - y) <= _MOVED:
            return Tap(x=x, y=y)
        return Swipe(x=x, y=y, x2=x2, y2=y2)
    except ValidationError as error:
        return Bad(name, "coordinates", wrong(error), [float(part) for part in (x, y, x2, y2) if abs(part) < 1e9])


def _touched(hierarchy: Any, tap: Tap) -> tuple[str, Box] | None:
    """The smallest element with words at this place: these, and its box."""
    activity = hierarchy.get("activity") if isinstance(hierarchy, dict) else None
    root = activity.get("root") if isinstance(activity, dict) else None
    whole = _bounds(root)
    if whole is None or whole[2] <= 0 or whole[3] <= 0:
        return None
    best: tuple[float, str, Box] | None = None
    waiting, count = [root], 0
    while waiting and (count := count + 1) <= _ELEMENTS:
        element = waiting.pop()
        if not isinstance(element, dict) or element.get("visible-to-user") is False:
            continue
        children = element.get("children")
        waiting += children if isinstance(children, list) else []
        words, bounds = _words(element), _bounds(element)
        if not words or bounds is None:
            continue
        left, top, right, bottom = bounds
        sides = [left / whole[2], top / whole[3], right / whole[2], bottom / whole[3]]
        try:
            box = Box(left=sides[0], top=sides[1], right=sides[2], bottom=sides[3])
        except ValidationError:  # outside the screen, or reversed: it wasn't tapped
            continue
        area = (box.right - box.left) * (box.bottom - box.top)
        if box.holds(tap.x, tap.y) and (best is None or area < best[0]):
            best = area, words, box
    return None if best is None else best[1:]


def _bounds(element: Any) -> list[float] | None:
    bounds = element.get("bounds") if isinstance(element, dict) else None
    good = isinstance(bounds, list) and len(bounds) == 4 and all(is_number(one) and abs(one) < 1e9 for one in bounds)
    return bounds if good else None


def _words(element: dict[str, Any]) -> str:
    described = element.get("content-desc")
    said = [element.get("text"), *(described if isinstance(described, list) else [described])]
    words = next((" ".join(one.split()) for one in said if isinstance(one, str) and one.strip()), "")
    return words if len(words) <= _WORDS else ""


def _goals(path: Path) -> dict[str, str]:
    goals = _json(path)
    if not isinstance(goals, dict) or not all(isinstance(one, str) and one.strip() for one in goals.values()):
        raise DataError(f'{path} is not a JSON object of goals, as {{"com.example/trace_0": "Open the menu"}}')
    return goals


def _json(path: Path) -> Any:
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"larger than {_LARGEST >> 20} MiB")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path.name} is not JSON: {str(error)[:120]}") from error
