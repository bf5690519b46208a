"""What the tiny base learns before anything else: to find the thing that a sentence asks for on a screen it never saw.

An example is a screen of 1 to 6 random icons in random cells, a goal in the quickstart suite's wording, the words of
what was done so far, and the one place to tap:

- on a home screen the first app that the sentence names, or the second one when the home button was pressed before;
- in an app the first of the switches that the sentence wants on in *this* app and that is still off; "infeasible" when
  the only one it names is not there;
- the plus where something is to be added, the check mark where the sentence says just "save".

Single-icon screens matter: without them the look-up is found far later. Screens mix icons as no phone does. What is not
here is how a task goes on: nothing stores, counts to an end, goes home or finishes. And what is held out for measuring
is held out here, too: no sentence and no arrangement of cells of the validation and test splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tapforge_envs.phone.device import HOME
from tapforge_envs.phone.quickstart import (
    APPS,
    COUNTERS,
    PANELS,
    SWITCHES,
    TEMPLATES,
    TIMES,
    WALLPAPERS,
    cell,
    layout,
)
from tapforge_envs.phone.screen import Screen, Widget, center
from tapforge_envs.protocol import Action, Home, Tap, Terminate

NAMES = (*APPS, *SWITCHES, "save", "add")
#: icons on a screen, each as likely as the others
ICONS = (1, 2, 3, 4, 6)
_PLATE = (132, 136, 146)
_HELD_OUT = {t.goal(c) for t in TEMPLATES for c in (*t.split("validation"), *t.split("test"))}
_TAP, _HOME = Tap(x=0.5, y=0.5), Home()


@dataclass(frozen=True, slots=True)
class Example:
    screen: Screen
    goal: str
    history: tuple[Action, ...]
    action: Action


@dataclass(frozen=True, slots=True)
class _Sentence:
    text: str
    #: apps in the order in which they are wanted
    apps: tuple[str, ...]
    #: (app, switch) pairs in order
    switches: tuple[tuple[str, str], ...] = ()


def example(rng: Random, icons: int | None = None) -> Example:
    count = icons or rng.choice(ICONS)
    while (found := _example(rng, count)).goal in _HELD_OUT:
        pass
    return found


def _example(rng: Random, count: int) -> Example:
    draw = rng.random()
    if draw < 0.5:
        return _on_home(rng, count)
    if draw < 0.88:
        return _in_panel(rng, count)
    if draw < 0.96:
        app, times = rng.choice(COUNTERS), int(rng.choice(TIMES))
        history = (_TAP,) * rng.randint(1, times)
        return _finish(rng, f"add {times} in {app}", history, app, ["add"], count, set(APPS), target="add")
    return _finish(rng, "save", (), rng.choice(list(APPS)), ["save"], count, set(), target="save")


def _on_home(rng: Random, count: int) -> Example:
    sentence = rng.choice((_open, _open_two, _switch, _switch_two, _switch_then_open, _two_panels, _add))(rng)
    went_home = len(sentence.apps) > 1 and rng.random() < 0.5
    history: tuple[Action, ...] = (*(_TAP,) * rng.randint(1, 4), _HOME) if went_home else ()
    target = sentence.apps[1 if went_home else 0]
    rivals = [app for app in sentence.apps if app != target and rng.random() < 0.8]
    named = {*sentence.apps, *(switch for _, switch in sentence.switches)}
    return _finish(rng, sentence.text, history, None, [target, *rivals], count, named, target=target)


def _in_panel(rng: Random, count: int) -> Example:
    sentence = rng.choice((_switch, _switch_two, _switch_then_open, _two_panels))(rng)
    second = sentence.switches[-1][0] != sentence.switches[0][0] and rng.random() < 0.5
    app = sentence.switches[-1 if second else 0][0]
    wanted = [switch for where, switch in sentence.switches if where == app]
    before: tuple[Action, ...] = (_TAP, _TAP, _TAP, _HOME) if second else ()
    if len(sentence.switches) == 1 and rng.random() < 0.2:
        others = rng.sample([s for s in SWITCHES if s not in wanted], min(count, 3))
        history = (*before, _TAP)
        return _finish(rng, sentence.text, history, app, others, count, {*wanted, *APPS}, target=None)
    done = rng.randrange(len(wanted))
    rivals = [s for where, s in sentence.switches if where != app and s not in wanted and rng.random() < 0.6]
    shown = [wanted[done], *wanted[:done], *wanted[done + 1 :], *rivals]
    history = (*before, *(_TAP,) * (1 + done))
    on = {switch: index < done for index, switch in enumerate(wanted)}
    named = {*wanted, *rivals, *APPS}
    return _finish(rng, sentence.text, history, app, shown, count, named, target=wanted[done], on=on)


def _finish(
    rng: Random,
    goal: str,
    history: tuple[Action, ...],
    title: str | None,
    shown: Sequence[str],
    count: int,
    named: set[str],
    *,
    target: str | None,
    on: dict[str, bool] | None = None,
) -> Example:
    """Fills up with icons that the sentence doesn't ask for, and lays everything out. `shown[0]` always stays."""
    tiles = list(shown[:count])
    others = [name for name in NAMES if name not in named and name not in shown]
    tiles += rng.sample(others, min(count - len(tiles), len(others)))
    cells = layout(rng, len(tiles), 0, title or HOME)
    widgets = tuple(_tile(rng, name, at, (on or {}).get(name)) for name, at in zip(tiles, cells, strict=True))
    if title is None:
        screen = Screen(rng.choice(WALLPAPERS), widgets, rng.randrange(8))
    else:
        bar = Widget("title", "tile", cell(0, 0), glyph=title, color=APPS[title], tap=False)
        screen = Screen((236, 238, 242), (bar, *widgets))
    if target is None:
        return Example(screen, goal, history, Terminate(status="infeasible"))
    x, y = center(cell(*cells[tiles.index(target)]))
    return Example(screen, goal, history, Tap(x=x, y=y))


def _tile(rng: Random, name: str, at: tuple[int, int], on: bool | None) -> Widget:
    if on is None and (name in SWITCHES or name == "save"):
        on = rng.random() < 0.5
    color = APPS[rng.choice(COUNTERS)] if name == "add" else APPS.get(name, _PLATE)
    return Widget(name, "tile", cell(*at), glyph=name, color=color, on=on)


# --- sentences: the suite's wording -----------------------------------------------------------------------------------


def _open(rng: Random) -> _Sentence:
    app = rng.choice(list(APPS))
    return _Sentence(f"open {app}", (app,))


def _open_two(rng: Random) -> _Sentence:
    first, second = rng.sample(list(APPS), 2)
    return _Sentence(f"open {first} then {second}", (first, second))


def _switch(rng: Random) -> _Sentence:
    app, switch = rng.choice(PANELS), rng.choice(SWITCHES)
    return _Sentence(f"turn on {switch} in {app}", (app,), ((app, switch),))


def _switch_two(rng: Random) -> _Sentence:
    app, (one, two) = rng.choice(PANELS), rng.sample(SWITCHES, 2)
    return _Sentence(f"turn on {one} and {two} in {app}", (app,), ((app, one), (app, two)))


def _switch_then_open(rng: Random) -> _Sentence:
    app, switch = rng.choice(PANELS), rng.choice(SWITCHES)
    other = rng.choice([name for name in APPS if name != app])
    return _Sentence(f"turn on {switch} in {app} then open {other}", (app, other), ((app, switch),))


def _two_panels(rng: Random) -> _Sentence:
    (one, two), first, second = rng.sample(PANELS, 2), rng.choice(SWITCHES), rng.choice(SWITCHES)
    return _Sentence(f"turn on {first} in {one} and {second} in {two}", (one, two), ((one, first), (two, second)))


def _add(rng: Random) -> _Sentence:
    app = rng.choice(COUNTERS)
    return _Sentence(f"add {rng.choice(TIMES)} in {app}", (app,))
