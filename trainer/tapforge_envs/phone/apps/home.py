"""The launcher: two pages of icons over a wallpaper, a dock, and the list of recent apps."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.device import HOME, App, Event
from tapforge_envs.phone.layout import NAVIGATION, around, clock
from tapforge_envs.phone.screen import Color, Screen, Widget
from tapforge_envs.phone.shell import app, system
from tapforge_envs.phone.view import State, View

from .world import MONTHS

NAME = HOME
_WALLPAPERS: tuple[Color, ...] = (
    (70, 104, 168),
    (128, 92, 158),
    (52, 128, 128),
    (176, 112, 92),
    (84, 96, 128),
    (156, 88, 112),
    (74, 122, 84),
)
_COLUMNS = 4
_DOCK = 4
_FIRST = 8
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
#: relative height of an icon with its name
_CELL = 0.135


def launcher(icons: dict[str, tuple[str, Color]]) -> App:
    """The home screen for these apps (name -> glyph, colour)."""

    def content(rng: Random) -> State:
        order = list(icons)
        rng.shuffle(order)
        return {"order": order, "wallpaper": rng.randrange(len(_WALLPAPERS)), "pattern": rng.randint(8, 14)}

    def screen(state: State) -> Screen:
        own = state["apps"][HOME]
        order = own["order"]
        second = state["nav"]["page"] == "second"
        found: list[Widget] = []
        if second:
            shown, top = order[_DOCK + _FIRST :], 0.10
        else:
            shown, top = order[_DOCK : _DOCK + _FIRST], 0.42
            found.append(
                Widget("today", "words", (0.05, 0.13, 0.9, 0.16), clock(state), _today(state), tap=False, volatile=True)
            )
        places = [(shown, top), (order[:_DOCK], 1 - NAVIGATION - _CELL - 0.01)]
        for names, y in places:
            for number, name in enumerate(names):
                glyph, color = icons[name]
                row, column = divmod(number, _COLUMNS)
                box = (0.02 + 0.24 * column, y + _CELL * row, 0.24, _CELL)
                found.append(Widget(f"app:{name}", "app", box, name, glyph=glyph, color=color))
        found.append(Widget("page", "dots", (0.4, 0.775, 0.2, 0.02), "1/2" if second else "0/2", tap=False))
        found.extend(around(state, clear=True))
        return Screen(_WALLPAPERS[own["wallpaper"]], tuple(found), own["pattern"])

    def act(state: State, event: Event) -> bool:
        done = system(state, event)
        if done is not None:
            return done
        nav = state["nav"]
        if event.kind == "tap" and event.target.startswith("app:"):
            nav["open"] = event.target.removeprefix("app:")
            return True
        direction = event.direction if event.kind in ("scroll", "swipe", "drag") else ""
        if event.kind in ("swipe", "drag"):
            direction = {"left": "right", "right": "left"}.get(direction, "")
        if direction == "right" and nav["page"] == "":
            nav["page"] = "second"
            return True
        if direction == "left" and nav["page"] == "second":
            nav["page"] = ""
            return True
        return False

    return App(HOME, "", (0, 0, 0), content, screen, act)


def _today(state: State) -> str:
    year, month, day = (int(part) for part in state["now"][:10].split("-"))
    # 1 March 2026 was a Sunday; a phone's calendar starts there
    return f"{_DAYS[(day + 5) % 7]}, {day} {MONTHS[month - 1]}" if (year, month) == (2026, 3) else state["now"][:10]


def switcher(icons: dict[str, tuple[str, Color]]) -> App:
    """The apps that were used last, latest first."""

    def view(state: State) -> View:
        v = View(state, "Recent apps", (70, 80, 100))
        seen = [name for name in dict.fromkeys(reversed(state["opened"])) if name in icons]
        for name in seen[:6]:
            glyph, color = icons[name]
            v.row(f"recent:{name}", name.capitalize(), glyph=glyph, color=color, do=v.open(name))
        if not seen:
            v.prose("empty", "No recent apps.")
        return v

    return app("recents", "", (70, 80, 100), lambda rng: {}, view)
