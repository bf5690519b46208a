"""What a demonstrator does in a task, step by step, and how far answers agree with it.

An answer has a reference as long as everything before it was as the demonstrator did it: after a difference the two are
in other states, and nothing is compared any more. So each episode is compared up to its first difference, that one
included. A touch is right within the box of the thing that the demonstrator touches, for however long; what else an
action says has to be the same. A scroll is right by its direction, wherever and how far; so is the swipe that moves the
content as the scroll does, for most models on phones have no other word for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.screen import Box
from tapforge_envs.protocol import ACTION, Action, Task

from ..records import EpisodeRecord

#: pixels of the phone on which plans are carried out: nothing is drawn
_SIZE: Final = (128, 224)
_SCROLL, _SWIPE = "scroll", "swipe"
#: of an action, that is not compared as it is
_MEASURES: Final = ("x", "y", "seconds", "notches")


@dataclass(frozen=True, slots=True)
class Reference:
    """An action of a demonstrator. `box`: of what it touches, in shares of the screen; None: it touches nothing."""

    type: str
    box: Box | None
    #: what else it says
    more: Mapping[str, Any]

    def typed(self, action: Mapping[str, Any]) -> bool:
        return bool(_as_scroll(action, self.type).get("type") == self.type)

    def same(self, action: Mapping[str, Any]) -> bool:
        action = _as_scroll(action, self.type)
        if not self.typed(action) or _more(action) != self.more:
            return False
        if self.box is None:
            return True
        left, top, width, height = self.box
        return left <= action["x"] <= left + width and top <= action["y"] <= top + height


def references_of(tasks: Iterable[Task]) -> dict[str, tuple[Reference, ...]]:
    """By the task's key, of tasks that have a plan."""
    found = {}
    for task in tasks:
        if task.suite not in catalog.SUITES:
            continue
        try:
            template = catalog.template_of(task)
            phone = catalog.phone_for(task.suite, *_SIZE)
            phone.begin(task.seed, template.rules(task.params))
            actions = []
            for action in demonstration(phone, template, task.params):
                actions.append(_reference(phone.screen(), action))
                phone.act(action)
        except LookupError:  # it says its check itself, or has none: there is no plan
            continue
        found[task.key] = tuple(actions)
    return found


def _reference(screen: Any, action: Action) -> Reference:
    wire = ACTION.dump_python(action)
    touches = "x" in wire and wire["type"] != _SCROLL
    touched = screen.at(wire["x"], wire["y"]) if touches else None
    return Reference(str(wire["type"]), None if touched is None else touched.box, _more(wire))


def _more(action: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in action.items() if name not in ("type", *_MEASURES)}


def _as_scroll(action: Mapping[str, Any], wanted: str) -> Mapping[str, Any]:
    """A swipe as the scroll that moves the content alike, where a scroll is wanted: the finger goes the other way. As
    the phone has it, by the longer side in shares of the screen."""
    if wanted != _SCROLL or action.get("type") != _SWIPE:
        return action
    across, down = action["x2"] - action["x"], action["y2"] - action["y"]
    if abs(across) > abs(down):
        return {"type": _SCROLL, "direction": "right" if across < 0 else "left"}
    return {"type": _SCROLL, "direction": "down" if down < 0 else "up"}


@dataclass(frozen=True, slots=True)
class Agreement:
    #: answers that have a reference
    compared: int
    typed: int
    same: int

    @property
    def type_accuracy(self) -> float | None:
        return self.typed / self.compared if self.compared else None

    @property
    def parameter_accuracy(self) -> float | None:
        """Of the answers with the right type."""
        return self.same / self.typed if self.typed else None


def agreement(episodes: Iterable[EpisodeRecord], references: Mapping[str, Sequence[Reference]]) -> Agreement:
    compared = typed = same = 0
    for episode in episodes:
        for step, reference in zip(episode.steps, references.get(episode.task.key, ()), strict=False):
            compared += 1
            action = step.action
            if action is None or not reference.typed(action):
                break
            typed += 1
            if not reference.same(action):
                break
            same += 1
    return Agreement(compared, typed, same)
