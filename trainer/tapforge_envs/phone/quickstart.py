"""The quickstart phone: a small image and suite that a model of a million parameters can learn in minutes.

Everything is icons on a 3 x 5 grid (at 96x160 pixels one cell is one visual token of a Qwen3-VL): six of eight apps on
the home screen and the buttons inside each app lie in random cells, another place for every seed. Cells are dealt to
icons from one part of all arrangements in training and from another one in validation and test (`layout`).

- Panels (settings, camera, clock) show three of four switches and a check mark. Flipping changes a draft; the check
  mark stores it, turns green when nothing is left to store, and leaving the app drops the draft.
- Counters (the others) have a plus. The count is nowhere on the screen: it has to be remembered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import combinations, permutations, product
from random import Random

from tapforge_envs.protocol import Score

from .device import HOME, App, Event, PhoneImage, State, Trial
from .screen import Box, Color, Screen, Widget
from .tasks import DONE, HOME_KEY, INFEASIBLE, Do, Errs, Params, Template, split_of_seed

COLUMNS, ROWS = 3, 5
VISIBLE_APPS = 6
SWITCHES = ("wifi", "sound", "dark", "lock")
PANELS = ("settings", "camera", "clock")
COUNTERS = ("shop", "music", "notes", "mail", "maps")
TIMES = ("2", "3", "4", "5")
APPS: dict[str, Color] = {
    "mail": (214, 72, 62),
    "maps": (38, 150, 100),
    "settings": (88, 96, 112),
    "camera": (150, 84, 180),
    "clock": (32, 38, 54),
    "shop": (226, 134, 32),
    "music": (222, 70, 136),
    "notes": (196, 164, 24),
}
#: what a title bar takes: no icon lies in the first row
CELLS = tuple((column, row) for row in range(1, ROWS) for column in range(COLUMNS))
WALLPAPERS: tuple[Color, ...] = (
    (52, 92, 140),
    (96, 72, 120),
    (40, 110, 110),
    (120, 88, 64),
    (64, 68, 84),
    (130, 70, 84),
)
_SAVE: Color = (132, 136, 146)


def cell(column: int, row: int) -> Box:
    return (column / COLUMNS, row / ROWS, 1 / COLUMNS, 1 / ROWS)


def layout(rng: Random, count: int, seed: int, place: str) -> list[tuple[int, int]]:
    """`count` different cells: of three quarters of all arrangements (by a hash) for train seeds, else of the rest."""
    held_out = split_of_seed(seed) != "train"
    while True:
        cells = rng.sample(CELLS, count)
        digest = hashlib.blake2b(f"{place}:{cells}".encode(), digest_size=1).digest()[0]
        if (digest < 64) == held_out:
            return cells


# --- apps -------------------------------------------------------------------------------------------------------------


def _tile(id: str, glyph: str, at: tuple[int, int], color: Color, on: bool | None = None, tap: bool = True) -> Widget:
    return Widget(id, "tile", cell(*at), glyph=glyph, color=color, on=on, tap=tap)


def _home_content(rng: Random) -> State:
    return {
        "apps": rng.sample(list(APPS), VISIBLE_APPS),
        "wallpaper": rng.randrange(len(WALLPAPERS)),
        "pattern": rng.randrange(8),
    }


def _home_screen(state: State) -> Screen:
    home = state["apps"][HOME]
    cells = layout(Random(f"home:{state['seed']}"), len(home["apps"]), state["seed"], HOME)
    tiles = tuple(_tile(f"app:{name}", name, at, APPS[name]) for name, at in zip(home["apps"], cells, strict=True))
    return Screen(WALLPAPERS[home["wallpaper"]], tiles, home["pattern"])


def _home_act(state: State, event: Event) -> bool:
    if event.kind != "tap" or not event.target:
        return False
    state["nav"]["open"] = event.target.removeprefix("app:")
    return True


def _title(name: str) -> Widget:
    return _tile("title", name, (0, 0), APPS[name], tap=False)


def _panel_app(name: str) -> App:
    def content(rng: Random) -> State:
        shown = rng.sample(SWITCHES, 3)
        stored = {switch: rng.random() < 0.5 for switch in SWITCHES}
        return {"shown": shown, "stored": stored, "draft": dict(stored)}

    def screen(state: State) -> Screen:
        own = state["apps"][name]
        cells = layout(Random(f"{name}:{state['seed']}"), len(own["shown"]) + 1, state["seed"], name)
        tiles = [
            _tile(f"switch:{s}", s, at, APPS[name], on=own["draft"][s])
            for s, at in zip(own["shown"], cells, strict=False)
        ]
        tiles.append(_tile("save", "save", cells[-1], _SAVE, on=own["draft"] == own["stored"]))
        return Screen((236, 238, 242), (_title(name), *tiles))

    def act(state: State, event: Event) -> bool:
        own = state["apps"][name]
        if event.kind != "tap":
            return False
        if event.target == "save":
            own["stored"] = dict(own["draft"])
            return True
        if event.target.startswith("switch:"):
            switch = event.target.removeprefix("switch:")
            own["draft"][switch] = not own["draft"][switch]
            return True
        return False

    def leave(state: State) -> None:
        own = state["apps"][name]
        own["draft"] = dict(own["stored"])

    return App(name, name, APPS[name], content, screen, act, leave)


def _counter_app(name: str) -> App:
    def screen(state: State) -> Screen:
        (at,) = layout(Random(f"{name}:{state['seed']}"), 1, state["seed"], name)
        return Screen((236, 238, 242), (_title(name), _tile("add", "add", at, APPS[name])))

    def act(state: State, event: Event) -> bool:
        if event.kind == "tap" and event.target == "add":
            state["apps"][name]["count"] += 1
            return True
        return False

    return App(name, name, APPS[name], lambda rng: {"count": 0}, screen, act)


IMAGE = PhoneImage(
    "quickstart",
    {
        HOME: App(HOME, "", (0, 0, 0), _home_content, _home_screen, _home_act),
        **{name: _panel_app(name) for name in PANELS},
        **{name: _counter_app(name) for name in COUNTERS},
    },
)


# --- tasks ------------------------------------------------------------------------------------------------------------


def _prepare(state: State, params: Params, rng: Random, *, missing: bool = False) -> None:
    """Puts the named apps on the home screen, the named switches into their panels and turns them off."""
    home = state["apps"][HOME]
    for name in (params[k] for k in ("app", "other") if k in params):
        if name not in home["apps"]:
            named = set(params.values())
            victim = rng.choice([i for i, other in enumerate(home["apps"]) if other not in named])
            home["apps"][victim] = name
    for app, switch in wanted_switches(params):
        panel = state["apps"][app]
        if missing:
            panel["shown"] = rng.sample([s for s in SWITCHES if s != switch], 3)
        elif switch not in panel["shown"]:
            keep = {s for a, s in wanted_switches(params) if a == app}
            victim = rng.choice([i for i, s in enumerate(panel["shown"]) if s not in keep])
            panel["shown"][victim] = switch
        panel["stored"][switch] = panel["draft"][switch] = False


def wanted_switches(params: Params) -> list[tuple[str, str]]:
    """(app, switch) pairs that a task wants on."""
    pairs = []
    if "switch" in params:
        pairs.append((params["app"], params["switch"]))
    if "switch2" in params:
        pairs.append((params.get("other", params["app"]), params["switch2"]))
    return pairs


def _expected(params: Params, before: State) -> dict[str, State]:
    """The apps' content after a clean solution."""
    expected = {name: {k: v for k, v in own.items() if k != "draft"} for name, own in before["apps"].items()}
    for app, switch in wanted_switches(params):
        expected[app] = {**expected[app], "stored": {**expected[app]["stored"], switch: True}}
    if "times" in params:
        expected[params["app"]] = {"count": int(params["times"])}
    return expected


def _judge(params: Params, trial: Trial) -> Score:
    """Right content everywhere, and, where the task is about opening, the right apps in the right order."""
    if not trial.declared_done:
        return Score(0.0, f"ended with {trial.status!r} instead of success")
    missing, side_effects = list[str](), list[str]()
    targets = {params["app"], params.get("other")}
    for name, content in _expected(params, trial.before).items():
        after = {k: v for k, v in trial.after["apps"][name].items() if k != "draft"}
        if after != content:
            (missing if name in targets else side_effects).append(name)
    opened = opened_wanted(params)
    if opened is not None and trial.after["opened"] != opened:
        missing.append(f"opened {trial.after['opened']} instead of {opened}")
    front = params.get("then")
    if front is not None and trial.after["nav"]["app"] != front:
        missing.append(f"{front} is not in front")
    if missing or side_effects:
        return Score(0.0, "not as asked: " + ", ".join(missing) if missing else "side effects", tuple(side_effects))
    return Score(1.0, "as asked")


def opened_wanted(params: Params) -> list[str] | None:
    if set(params) <= {"app", "then"}:
        return [params[k] for k in ("app", "then") if k in params]
    return None


def _judged(params: Params, state: State) -> object:
    stored = {
        name: {k: v for k, v in own.items() if k != "draft"} for name, own in state["apps"].items() if name != HOME
    }
    return [stored, state["opened"] if opened_wanted(params) is not None else None]


def _open(app: str) -> Do:
    return Do(tap=f"app:{app}")


def _set(app: str, switches: list[str], errs: Errs) -> Iterator[Do]:
    yield _open(app)
    for switch in switches:
        yield Do(tap=f"switch:{switch}")
    if not errs():  # a careless person forgets to store
        yield Do(tap="save")


def _plan_open(params: Params, errs: Errs) -> Iterator[Do]:
    yield _open(params["app"])
    if "then" in params and not errs():  # a careless person stops after the first
        yield HOME_KEY
        yield _open(params["then"])
    yield DONE


def _plan_switch(params: Params, errs: Errs) -> Iterator[Do]:
    yield from _set(params["app"], [s for _, s in wanted_switches(params)], errs)
    if "then" in params:
        yield HOME_KEY
        yield _open(params["then"])
    yield DONE


def _plan_two_panels(params: Params, errs: Errs) -> Iterator[Do]:
    yield from _set(params["app"], [params["switch"]], errs)
    yield HOME_KEY
    yield from _set(params["other"], [params["switch2"]], errs)
    yield DONE


def _plan_count(params: Params, errs: Errs) -> Iterator[Do]:
    yield _open(params["app"])
    for _ in range(int(params["times"]) - 1):
        yield Do(tap="add")
    if not errs():  # a careless person is one short
        yield Do(tap="add")
    if "then" in params:
        yield HOME_KEY
        yield _open(params["then"])
    yield DONE


def _plan_missing(params: Params, errs: Errs) -> Iterator[Do]:
    yield _open(params["app"])
    yield DONE if errs() else INFEASIBLE


def _steps(count: int) -> int:
    return count + 3  # room for a slip and its repair


def _combine(**values: tuple[str, ...]) -> list[Params]:
    return [dict(zip(values, choice, strict=True)) for choice in product(*values.values())]


TEMPLATES: tuple[Template, ...] = (
    Template(
        "open",
        tuple(_combine(app=tuple(APPS))),
        lambda q: f"open {q['app']}",
        _plan_open,
        _judge,
        _judged,
        _prepare,
        lambda q: _steps(2),
    ),
    Template(
        "open_two",
        tuple({"app": a, "then": b} for a, b in permutations(APPS, 2)),
        lambda q: f"open {q['app']} then {q['then']}",
        _plan_open,
        _judge,
        _judged,
        lambda s, q, r: _prepare(s, {"app": q["app"], "other": q["then"]}, r),
        lambda q: _steps(4),
    ),
    Template(
        "switch",
        tuple(_combine(app=PANELS, switch=SWITCHES)),
        lambda q: f"turn on {q['switch']} in {q['app']}",
        _plan_switch,
        _judge,
        _judged,
        _prepare,
        lambda q: _steps(4),
    ),
    Template(
        "switch_two",
        tuple({"app": a, "switch": s, "switch2": t} for a in PANELS for s, t in combinations(SWITCHES, 2)),
        lambda q: f"turn on {q['switch']} and {q['switch2']} in {q['app']}",
        _plan_switch,
        _judge,
        _judged,
        _prepare,
        lambda q: _steps(5),
    ),
    Template(
        "count",
        tuple(_combine(app=COUNTERS, times=TIMES)),
        lambda q: f"add {q['times']} in {q['app']}",
        _plan_count,
        _judge,
        _judged,
        _prepare,
        lambda q: _steps(int(q["times"]) + 2),
    ),
    Template(
        "count_then_open",
        tuple(
            {"app": a, "times": n, "then": b}
            for a in COUNTERS
            for n in TIMES[:3]
            for b in (*COUNTERS, *PANELS)
            if a != b
        ),
        lambda q: f"add {q['times']} in {q['app']} then open {q['then']}",
        _plan_count,
        _judge,
        _judged,
        lambda s, q, r: _prepare(s, {"app": q["app"], "other": q["then"]}, r),
        lambda q: _steps(int(q["times"]) + 4),
    ),
    Template(
        "switch_then_open",
        tuple({"app": a, "switch": s, "then": b} for a in PANELS for s in SWITCHES for b in COUNTERS),
        lambda q: f"turn on {q['switch']} in {q['app']} then open {q['then']}",
        _plan_switch,
        _judge,
        _judged,
        lambda s, q, r: _prepare(s, {"app": q["app"], "switch": q["switch"], "other": q["then"]}, r),
        lambda q: _steps(6),
    ),
    Template(
        "two_panels",
        tuple(
            {"app": a, "switch": s, "other": b, "switch2": t}
            for a, b in permutations(PANELS, 2)
            for s in SWITCHES
            for t in SWITCHES
        ),
        lambda q: f"turn on {q['switch']} in {q['app']} and {q['switch2']} in {q['other']}",
        _plan_two_panels,
        _judge,
        _judged,
        _prepare,
        lambda q: _steps(8),
    ),
    Template(
        "missing_switch",
        tuple(_combine(app=PANELS, switch=SWITCHES)),
        lambda q: f"turn on {q['switch']} in {q['app']}",
        _plan_missing,
        _judge,
        _judged,
        lambda s, q, r: _prepare(s, q, r, missing=True),
        lambda q: _steps(2),
        feasible=False,
    ),
)
