"""Which prompts there are: what each shows of an episode, in which words, and what its file may name.

A convention is what a prompt shows: which screens, in which order, and whether a touch is marked on them. The words are
in `prompts/NAME.jinja`; a user's file (`promptFile`) replaces them and keeps the convention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["task", "step"]

_EPISODE: Final[Mapping[str, str]] = {
    "goal": "what the task asks for",
    "form": "the form of an answer, with the question's key",
    "data": "the task and the actions as JSON, for endpoints that compute",
}
VARIABLES: Final[Mapping[Kind, Mapping[str, str]]] = {
    "task": {
        **_EPISODE,
        "screens": "the screens that are shown: number (of the step that it comes before, from 1), image, last",
        "steps": "all steps: number, action, text (the model's answer), note (what the phone said of the action)",
        "last": "the last one of them",
        "count": "number of steps",
        "end": "why the episode ended: done, step_limit, ...",
        "final": "whether the screen after the last action is among the screens",
    },
    "step": {
        **_EPISODE,
        "step": "the step in question: number, action, text, note",
        "earlier": "the steps before it, the oldest first",
        "before": "the screen before the action: image",
        "after": "the screen after it: image",
    },
}


@dataclass(frozen=True, slots=True)
class Convention:
    kind: Kind
    #: all: as many as spec.screens allows; last: before and after the last action; none
    screens: Literal["all", "last", "none"] = "all"
    #: whether each touch is marked on the screen before it
    marks: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """Variables that a prompt must name."""
        if self.screens == "none":
            return frozenset({"data"})
        images = {"screens"} if self.kind == "task" else {"before", "after"}
        return frozenset({"goal", "form"} | images)


CONVENTIONS: Final[Mapping[str, Convention]] = {
    # ours: screens and actions; screens alone
    "task": Convention("task"),
    "task-screens": Convention("task"),
    # screens with every touch marked, for models that read places better from a screen than from numbers
    "task-marked": Convention("task", marks=True),
    "tiny": Convention("task", marks=True),
    "step": Convention("step"),
    # ZeroGUI (arXiv:2505.23762): every screen, neither actions nor texts
    "zerogui": Convention("task"),
    # ClawGUI: before and after the last action, with the last answer; a step with its touch marked, the last five
    # answers, the newest first
    "clawgui-task": Convention("task", "last"),
    "clawgui-step": Convention("step", marks=True),
    # for `tapforge judge serve`: data, and no screen
    "simulated-phone": Convention("task", "none"),
    "simulated-phone-step": Convention("step", "none"),
}


def shown(screens: int, limit: int) -> list[int]:
    """Which of so many screens are shown, in order: all of them; of more than `limit` (at least 2) the first, the last,
    and those between at equal distances."""
    if screens <= limit:
        return list(range(screens))
    return [round(place * (screens - 1) / (limit - 1)) for place in range(limit)]


def names(kind: Kind) -> Sequence[str]:
    return [name for name, convention in CONVENTIONS.items() if convention.kind == kind]
