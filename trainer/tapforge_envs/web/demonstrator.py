"""Plays the pages that take one tap, as a person would who reads the goal: finds the element in the tree and taps it.

`DEMONSTRATED` names the pages. A careless demonstrator taps another element that could be meant, or, where there is
only one, below it. Taps lie on a grid of `GRID` thousandths, as a person's estimate would. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tapforge_envs.protocol import Observation, Tap, Task

from .environment import HEIGHT, WIDTH

#: of 999, the scale that models write coordinates in
GRID = 50

_Node = dict[str, Any]
#: (goal, every element) -> the elements that could be meant, the right one first
_Finder = Callable[[str, list[_Node]], list[_Node]]


def demonstration(task: Task, seen: Observation, err: bool) -> Tap:
    """The one action of an episode. `err`: whether it goes wrong. Raises LookupError for a page without
    a demonstration, or where what the goal names can't be found."""
    if task.template not in DEMONSTRATED:
        known = ", ".join(sorted(DEMONSTRATED))
        raise LookupError(f"page {task.template!r} has no demonstration; there are demonstrations of {known}")
    goal = task.goal or seen.goal
    found = DEMONSTRATED[task.template](goal, list(_below(json.loads(seen.ui_tree or "{}"))))
    if not found:
        raise LookupError(f"{task.key}: nothing on the page is what the goal {goal!r} names")
    if not err:
        return _tap(found[0])
    return _tap(found[1]) if len(found) > 1 else _tap(found[0], below=True)


def _below(node: _Node) -> Iterator[_Node]:
    yield node
    for child in node.get("children", ()):
        yield from _below(child)


def _tap(node: _Node, below: bool = False) -> Tap:
    down = node["height"] + 12 if below else 0
    x, y = node["left"] + node["width"] / 2, node["top"] + node["height"] / 2 + down
    if y >= HEIGHT:
        y -= 2 * down
    return Tap(x=_on_grid(x / WIDTH), y=_on_grid(y / HEIGHT))


def _on_grid(relative: float) -> float:
    return min(999, max(0, round(relative * 999 / GRID) * GRID)) / 999


def _first(found: list[_Node], right: Callable[[_Node], bool]) -> list[_Node]:
    """A right one before the wrong ones; nothing where none is right."""
    best = [node for node in found if right(node)]
    return best and [best[0], *(node for node in found if not right(node))]


def _quoted(goal: str) -> str:
    said = re.search(r'"([^"]*)"', goal)
    return said[1] if said else ""


def _button(goal: str, nodes: list[_Node]) -> list[_Node]:
    return [node for node in nodes if node["tag"] == "button"]


def _one_or_two(goal: str, nodes: list[_Node]) -> list[_Node]:
    wanted = "ONE" if "ONE" in goal else "TWO"
    return _first(_button(goal, nodes), lambda node: node.get("text") == wanted)


def _named_button(goal: str, nodes: list[_Node]) -> list[_Node]:
    return _first(_button(goal, nodes), lambda node: node.get("text") == _quoted(goal))


def _close_button(goal: str, nodes: list[_Node]) -> list[_Node]:
    return [node for node in nodes if "ui-dialog-titlebar-close" in node.get("class", "")]


def _tab(goal: str, nodes: list[_Node]) -> list[_Node]:
    wanted = goal.removeprefix("Click on ").removesuffix(".")
    tabs = [node for node in nodes if "ui-tabs-anchor" in node.get("class", "")]
    return _first(tabs, lambda node: node.get("text") == wanted)


def _link(goal: str, nodes: list[_Node]) -> list[_Node]:
    links = [node for node in nodes if "alink" in node.get("class", "")]
    return _first(links, lambda node: node.get("text") == _quoted(goal))


def _color(goal: str, nodes: list[_Node]) -> list[_Node]:
    boxes = [node for node in nodes if node.get("class") == "color" and node.get("id") != "query-color"]
    wanted = goal.removeprefix("Click on the ").removesuffix(" colored box.")
    return _first(boxes, lambda node: node.get("background") == wanted)


def _field(goal: str, nodes: list[_Node]) -> list[_Node]:
    fields = [node for node in nodes if node["tag"] == "input"]
    place = re.search(r"(\d+)(?:st|nd|rd|th)", goal)
    wanted = fields[int(place[1]) - 1] if place else fields[0]
    return _first(fields, lambda node: node is wanted)


DEMONSTRATED: dict[str, _Finder] = {
    "click-button": _named_button,
    "click-color": _color,
    "click-dialog": _close_button,
    "click-link": _link,
    "click-tab": _tab,
    "click-test": _button,
    "click-test-2": _one_or_two,
    "click-test-transfer": _one_or_two,
    "focus-text": _field,
    "focus-text-2": _field,
}
