"""MiniWoB++'s tasks that run here: every page that needs no network, and which tasks belong to which split.

- A task is a page and a seed; the words of the goal come from the page when it is reset.
- A split has seeds of its own. Pages that MiniWoB++ draws from other data for tests (`MODES`) use `train` data in the
  split train and `test` data in the others.
- Pages of `HELD_OUT` belong to one split alone: variants of other pages, for what a run has never practised.
- `LEFT_OUT` says which pages of the package are not tasks here, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

from tapforge_api.installing import install_extra
from tapforge_envs.protocol import Task, UnknownTask

SUITE = "miniwob"
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
#: seeds of a split: [index * SEEDS, (index + 1) * SEEDS)
SEEDS = 1_000_000_000
#: success is a raw reward above 0
THRESHOLD = 1e-9

_PAGES = """
ascending-numbers bisect-angle book-flight-nodelay book-flight button-delay buy-ticket chase-circle choose-date-easy
choose-date-medium choose-date-nodelay choose-date choose-list circle-center click-button-sequence click-button
click-checkboxes-large click-checkboxes-soft click-checkboxes-transfer click-checkboxes click-collapsible-2-nodelay
click-collapsible-2 click-collapsible-nodelay click-collapsible click-color click-dialog-2 click-dialog click-link
click-menu-2 click-menu click-option click-pie-nodelay click-pie click-scroll-list click-shades click-shape
click-tab-2-easy click-tab-2-hard click-tab-2-medium click-tab-2 click-tab click-test-2 click-test-transfer click-test
click-widget copy-paste-2 copy-paste count-shape count-sides daily-calendar drag-box drag-circle drag-cube
drag-items-grid drag-items drag-shapes-2 drag-shapes drag-single-shape drag-sort-numbers draw-circle draw-line
email-inbox-delete email-inbox-forward-nl-turk email-inbox-forward-nl email-inbox-forward email-inbox-important
email-inbox-nl-turk email-inbox-noscroll email-inbox-reply email-inbox-star-reply email-inbox enter-date
enter-password enter-text-2 enter-text-dynamic enter-text enter-time find-greatest find-midpoint find-word
focus-text-2 focus-text form-sequence-2 form-sequence-3 form-sequence generate-number grid-coordinate guess-number
highlight-text-2 highlight-text hot-cold hover-shape identify-shape login-user-popup login-user moving-items
multi-layouts multi-orderings navigate-tree number-checkboxes odd-or-even order-food phone-book read-table-2
read-table resize-textarea right-angle scroll-text-2 scroll-text search-engine sign-agreement simon-says
simple-algebra simple-arithmetic social-media-all social-media-some social-media stock-market terminal text-editor
text-transform tic-tac-toe unicode-test use-autocomplete-nodelay use-autocomplete use-colorwheel-2 use-colorwheel
use-slider-2 use-slider use-spinner visual-addition
"""

#: page -> why it is not a task here
LEFT_OUT: dict[str, str] = {
    "hover-shape": "its script never ends an episode",
    "flight/*": "an airline's site of 375x667 pixels in a frame of its own, whose script waits for a network",
}
#: pages that draw from other data in tests than in training
MODES = frozenset(
    (
        "click-checkboxes-transfer",
        "click-test-transfer",
        "email-inbox-forward-nl",
        "email-inbox-forward-nl-turk",
        "email-inbox-nl-turk",
    )
)
#: page -> the one split that it belongs to
HELD_OUT: dict[str, Split] = {
    "choose-date-medium": "validation",
    "click-checkboxes-soft": "validation",
    "email-inbox-star-reply": "validation",
    "click-scroll-list": "validation",
    "social-media-some": "validation",
    "use-slider-2": "validation",
    "click-checkboxes-large": "test",
    "click-collapsible-2": "test",
    "click-tab-2-hard": "test",
    "enter-text-2": "test",
    "form-sequence-3": "test",
    "login-user-popup": "test",
    "multi-layouts": "test",
    "navigate-tree": "test",
    "scroll-text-2": "test",
    "use-colorwheel-2": "test",
}
#: pages that a single tap ends, and what an agent may do on one: a tap that hits nothing leaves another try
_ONE_TAP = frozenset(
    (
        "click-button",
        "click-color",
        "click-dialog",
        "click-dialog-2",
        "click-link",
        "click-tab",
        "click-test",
        "click-test-2",
        "click-test-transfer",
        "click-widget",
        "focus-text",
        "focus-text-2",
        "identify-shape",
    )
)
_TRIES = 3
#: actions that another page may take; where it is not named, `_STEPS`
_LONG = {
    "book-flight": 40,
    "book-flight-nodelay": 40,
    "chase-circle": 25,
    "moving-items": 25,
    "terminal": 30,
    "text-editor": 20,
    "tic-tac-toe": 20,
}
_STEPS = 15


@dataclass(frozen=True)
class Template:
    """A page. `seeds`: as many tasks as a split has of it."""

    name: str

    @property
    def max_steps(self) -> int:
        return _TRIES if self.name in _ONE_TAP else _LONG.get(self.name, _STEPS)

    def task(self, split: Split, seed: int) -> Task:
        mode = {"mode": "train" if split == "train" else "test"} if self.name in MODES else {}
        return Task(
            suite=SUITE,
            template=self.name,
            params=mode,
            seed=SPLITS.index(split) * SEEDS + seed,
            max_steps=self.max_steps,
            threshold=THRESHOLD,
        )

    def splits(self) -> tuple[Split, ...]:
        only = HELD_OUT.get(self.name)
        return SPLITS if only is None else (only,)


TEMPLATES: dict[str, Template] = {name: Template(name) for name in _PAGES.split() if name not in LEFT_OUT}


@dataclass(frozen=True)
class TaskSet:
    """Tasks of some pages and one split, drawn by a seed: every page equally often, in rounds."""

    suite: ClassVar[str] = SUITE
    split: Split
    templates: tuple[Template, ...]

    def sample(self, seed: int, index: int) -> Task:
        """The task at a place of the endless order that `seed` fixes."""
        round_, place = divmod(index, len(self.templates))
        order = list(self.templates)
        Random(f"order:{seed}:{round_}").shuffle(order)
        return order[place].task(self.split, Random(f"task:{self.split}:{seed}:{index}").randrange(SEEDS))


def tasks(split: str, templates: Sequence[str] = ()) -> TaskSet:
    """Raises UnknownTask."""
    if split not in SPLITS:
        raise UnknownTask(_unknown("split", split, SPLITS))
    for name in templates:
        _template(name)
    chosen: Split = SPLITS[SPLITS.index(split)]
    found = tuple(t for t in TEMPLATES.values() if (not templates or t.name in templates) and chosen in t.splits())
    if not found:
        raise UnknownTask(f"no task in split {split!r} of suite {SUITE!r} with templates {list(templates)}")
    return TaskSet(chosen, found)


def page_of(task: Task) -> str:
    """The page's name. Raises UnknownTask for a task that is none of this suite."""
    if task.suite != SUITE:
        raise UnknownTask(_unknown("suite", task.suite, (SUITE,)))
    template = _template(task.template)
    allowed = {"mode"} if template.name in MODES else set()
    if set(task.params) - allowed or task.params.get("mode", "train") not in ("train", "test"):
        raise UnknownTask(
            f"page {template.name!r} has no parameters {task.params}; "
            + ("mode is train or test" if allowed else "its seed says all")
        )
    return template.name


def url(page: str) -> str:
    """Where the page lies. Raises UnknownTask where the package `miniwob` is not installed."""
    return (_html() / "miniwob" / f"{page}.html").as_uri()


@cache
def _html() -> Path:
    spec = find_spec("miniwob")  # finds the package and imports nothing of it
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (html := Path(folder, "html")).is_dir():
            return html
    raise UnknownTask(f"MiniWoB++'s pages are not installed here: {install_extra('web')}")


def _template(name: str) -> Template:
    if name not in TEMPLATES:
        if name in LEFT_OUT:
            raise UnknownTask(f"page {name!r} is not a task here: {LEFT_OUT[name]}")
        raise UnknownTask(_unknown(f"template of suite {SUITE!r}", name, tuple(TEMPLATES)))
    return TEMPLATES[name]


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"unknown {what}: {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}")
