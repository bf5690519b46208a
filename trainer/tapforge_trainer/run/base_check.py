"""Whether a base model can play at all: what its first answers say about prompt, adapter and limits. Pure.

Reinforcement can't repair a model that is asked in a form that it was never trained on, or whose coordinates are read
in another convention: it learns something from noise, slowly. That shows in a few dozen answers, before update 1.
Findings are named in words with a remedy; nothing stops a run. Under `LEAST` answers nothing is found.

A check is of answers as the run records them: places of taps are shares of the screen, from 0 to 1, as executed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from ..records import EpisodeRecord, StepRecord

#: answers, actions or taps of which anything is said
LEAST: Final = 12
#: shares from which something is a finding
_CUT_OFF, _OUTSIDE, _UNREADABLE, _UNSUPPORTED, _SAME = 0.10, 0.05, 0.20, 0.20, 0.80
#: taps that lie in a part of the screen, of all; and how many are needed to speak of a half
_ALL: Final = 0.97
_HALF_TAPS: Final = 30
#: nearer than this to the upper left corner there is nothing to tap
_CORNER: Final = 0.012
#: as `agents/coordinates.py` words it, and pyautogui's reader
_OUT_OF_RANGE: Final = re.compile(
    r"which is not a (?:number from 0 to|pixel of a side of) "
    r"|the coordinate \S+ is not (?:between 0 and 1|on a side of)"
)

Kind = Literal["cut_off", "outside", "unreadable", "unsupported", "same_action", "corner", "half"]


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    #: of all answers, or of those that the finding is about
    share: float
    #: what was seen and what to do
    text: str


@dataclass(frozen=True, slots=True)
class BaseCheck:
    """Counts of answers, and what is found in them."""

    answers: int
    cut_off: int
    #: coordinates that the screen doesn't have
    outside: int
    #: answers that are not actions, by kind; those that were cut off and coordinates outside are not among them
    unreadable: dict[str, int]
    findings: tuple[Finding, ...]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def check_base(episodes: Iterable[EpisodeRecord], adapter: str) -> BaseCheck:
    """`adapter`: its name in the spec."""
    steps = [step for episode in episodes for step in episode.steps]
    cut = sum(step.generation.finish_reason == "length" for step in steps)
    read = [step for step in steps if step.generation.finish_reason == "stop"]
    outside = [step for step in read if step.parse_error and _OUT_OF_RANGE.search(step.parse_error)]
    failed = [step for step in read if step.parse_error and not _OUT_OF_RANGE.search(step.parse_error)]
    kinds = Counter(str(step.parse_error).partition(":")[0] for step in failed)
    findings: list[Finding] = []
    if len(steps) >= LEAST:
        findings += _limits(cut, len(steps))
        findings += _coordinates(outside, len(steps), adapter)
        findings += _forms(kinds, len(steps), adapter)
        findings += _actions([step for step in steps if step.action is not None], adapter)
    return BaseCheck(len(steps), cut, len(outside), dict(kinds), tuple(findings))


def _limits(cut: int, answers: int) -> list[Finding]:
    if cut < _CUT_OFF * answers:
        return []
    text = (
        f"{cut} of {answers} answers reach the limit of tokens and are not actions: raise spec.rollout.responseTokens, "
        "or give the model a prompt that asks for less reasoning (spec.model.adapter.promptFile)"
    )
    return [Finding("cut_off", cut / answers, text)]


def _coordinates(outside: Sequence[StepRecord], answers: int, adapter: str) -> list[Finding]:
    if len(outside) < _OUTSIDE * answers:
        return []
    example = str(outside[0].parse_error).partition(": ")[2][:120]
    text = (
        f"{len(outside)} of {answers} answers name a place outside of the screen ({example}): the model writes "
        f"coordinates in another convention than the adapter {adapter} reads, pixels for one; {_FAMILY}"
    )
    return [Finding("outside", len(outside) / answers, text)]


def _forms(kinds: Counter[str], answers: int, adapter: str) -> list[Finding]:
    found = []
    refused = kinds["unsupported_action"]
    if refused >= _UNSUPPORTED * answers:
        text = (
            f"{refused} of {answers} answers are actions that these phones don't have: the adapter {adapter} offers "
            "more than spec.environment can do, take the adapter for phones or for desktops"
        )
        found.append(Finding("unsupported", refused / answers, text))
    unreadable = sum(kinds.values()) - refused
    if unreadable >= _UNREADABLE * answers:
        most = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(3) if kind != "unsupported_action")
        text = (
            f"{unreadable} of {answers} answers are not actions ({most}): the model answers in no form that the "
            f"adapter {adapter} reads; {_FAMILY}"
        )
        found.append(Finding("unreadable", unreadable / answers, text))
    return found


#: the remedy for a model that is asked, or read, as another family
_FAMILY: Final = (
    "take the adapter of the model's family (spec.model.adapter.name) or give its own prompt "
    "(spec.model.adapter.promptFile); `tapforge agent show` prints what it is asked, for comparing with its model card"
)


def _actions(steps: Sequence[StepRecord], adapter: str) -> list[Finding]:
    screens = len({step.frames[-1] for step in steps if step.frames})
    if len(steps) < LEAST or screens < 3:
        return []
    taps = [(step.action["x"], step.action["y"]) for step in steps if step.action and _is_tap(step)]
    near = sum(x <= _CORNER and y <= _CORNER for x, y in taps)
    if len(taps) >= LEAST and near >= _ALL * len(taps):
        text = (
            f"{near} of {len(taps)} taps lie at the screen's upper left corner: the model writes shares from 0 to 1 "
            f"and the adapter {adapter} reads larger numbers; {_FAMILY}"
        )
        return [Finding("corner", near / len(taps), text)]
    # Coarse, so that sampling does not hide that the same place is meant.
    (most, count), *_ = Counter(tuple(sorted(_coarse(step).items())) for step in steps).most_common(1)
    if count >= _SAME * len(steps):
        words = ", ".join(f"{name} {value}" for name, value in most if value is not None)
        text = (
            f"{count} of {len(steps)} actions, on {screens} different screens, are the same ({words}): the model "
            f"doesn't look at the screen, or not at the one that it is asked about; {_FAMILY}"
        )
        return [Finding("same_action", count / len(steps), text)]
    return _places(taps, adapter)


def _places(taps: Sequence[tuple[float, float]], adapter: str) -> list[Finding]:
    different = len({(round(x, 2), round(y, 2)) for x, y in taps})
    if len(taps) < LEAST or different < 4:
        return []
    for across, right in ((x, y) for x in ("left", "right") for y in ("upper", "lower")):
        inside = [(x < 0.5) == (across == "left") and (y < 0.5) == (right == "upper") for x, y in taps]
        if (share := sum(inside) / len(taps)) >= _ALL:
            text = (
                f"{sum(inside)} of {len(taps)} taps lie in the {right} {across} quarter of the screen: coordinates are "
                f"probably of another convention than the adapter {adapter} reads, or of an image of another size "
                f"(spec.model.maxPixels); {_FAMILY}"
            )
            return [Finding("corner", share, text)]
    if len(taps) >= _HALF_TAPS and different >= 10:
        for axis, (name, side) in enumerate((("left", "width"), ("upper", "height"))):
            inside = [place[axis] < 0.5 for place in taps]
            if (share := sum(inside) / len(taps)) >= _ALL:
                text = (
                    f"{sum(inside)} of {len(taps)} taps lie in the {name} half of the screen: numbers up to 1000 that "
                    f"are read as pixels of a larger {side} would, or pixels of a smaller one that are read as "
                    f"thousandths; if this is not where the tasks lead, {_FAMILY}"
                )
                return [Finding("half", share, text)]
    return []


def _is_tap(step: StepRecord) -> bool:
    return step.action is not None and step.action.get("type") in ("tap", "double_tap", "long_press")


def _coarse(step: StepRecord) -> dict[str, Any]:
    assert step.action is not None
    return {name: round(value, 1) if isinstance(value, float) else str(value) for name, value in step.action.items()}
