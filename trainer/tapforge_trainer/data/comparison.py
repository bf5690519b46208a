"""What an answer to a recorded step is worth: pure, of two actions and a screen's size.

| action | what it says is right |
|---|---|
| tap, long_press and others with one place | inside the box, or by distance |
| swipe, drag | both places by distance, their mean |
| scroll | the same direction |
| type, answer, ask_user | the same text, or words shared |
| key, open_app, hotkey | the same name, but for upper and lower case |
| terminate | the same status |
| all others | nothing more than the type |

Distances are shares of the screen's diagonal, in pixels of the recorded screen. `f1` is SQuAD's (arXiv:1606.05250),
over words; texts in which there are none count as equal or not.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Final

from tapforge_api.dataset import StepReward
from tapforge_envs.protocol import (
    Action,
    Answer,
    AskUser,
    Drag,
    Hotkey,
    Key,
    OpenApp,
    Scroll,
    Swipe,
    Terminate,
    Type,
)

from .episodes import Box

#: kana and Han
_UNSPACED: Final = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


@dataclass(frozen=True, slots=True)
class Compared:
    #: whether the type is the recorded one
    type: bool
    #: from 0 to 1: how right what the action says is; 0 where its type is another
    parameters: float

    def worth(self, reward: StepReward) -> float:
        return reward.type * self.type + (1 - reward.type) * self.parameters

    @property
    def right(self) -> bool:
        return self.type and self.parameters >= 1

    def words(self) -> str:
        return f"type {'right' if self.type else 'wrong'}, parameters {self.parameters:g}"


def compare(
    said: Action, recorded: Action, size: tuple[int, int], reward: StepReward, target: Box | None = None
) -> Compared:
    """`size`: of the recorded screen, pixels; `target`: its box, where the data has one."""
    if said.type != recorded.type:
        return Compared(False, 0.0)
    return Compared(True, _parameters(said, recorded, size, reward, target))


def _parameters(said: Action, recorded: Action, size: tuple[int, int], reward: StepReward, target: Box | None) -> float:
    match said, recorded:
        case (Swipe() | Drag(), Swipe() | Drag()):
            first = _near((said.x, said.y), (recorded.x, recorded.y), size, reward)
            return (first + _near((said.x2, said.y2), (recorded.x2, recorded.y2), size, reward)) / 2
        case Scroll(), Scroll():
            return float(said.direction == recorded.direction)
        case (Type() | Answer() | AskUser(), Type() | Answer() | AskUser()):
            return _text(said.text, recorded.text, reward)
        case (Key() | OpenApp(), Key() | OpenApp()):
            return float(said.name.casefold().strip() == recorded.name.casefold().strip())
        case Hotkey(), Hotkey():
            return float([key.casefold() for key in said.keys] == [key.casefold() for key in recorded.keys])
        case Terminate(), Terminate():
            return float(said.status == recorded.status)
    place = getattr(said, "x", None), getattr(said, "y", None)
    asked = getattr(recorded, "x", None), getattr(recorded, "y", None)
    if place[0] is None or place[1] is None or asked[0] is None or asked[1] is None:
        return 1.0
    if target is not None and reward.place == "box":
        return float(target.holds(place[0], place[1]))
    return _near((place[0], place[1]), (asked[0], asked[1]), size, reward)


def _near(said: tuple[float, float], asked: tuple[float, float], size: tuple[int, int], reward: StepReward) -> float:
    width, height = size
    distance = math.hypot((said[0] - asked[0]) * width, (said[1] - asked[1]) * height) / math.hypot(width, height)
    if distance <= reward.tolerance:
        return 1.0
    if distance >= reward.reach:
        return 0.0
    return (reward.reach - distance) / (reward.reach - reward.tolerance)


def _text(said: str, asked: str, reward: StepReward) -> float:
    if reward.text == "exact" or said == asked:
        return float(said == asked)
    ours, theirs = _words(said), _words(asked)
    if reward.text == "normalized" or not (ours and theirs):
        return float(bool(ours) and "".join(ours) == "".join(theirs))
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    """Letters with their marks and digits, of any script, in one case; what is written without spaces is a word per
    sign."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(one if unicodedata.category(one)[0] in "LMN" else " " for one in plain)
    return _UNSPACED.sub(r" \g<0> ", kept).split()
