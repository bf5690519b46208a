"""Clock: alarms, world clock and timer, each on its own page."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.layout import clock as time_now
from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import Do, Item, State, View, toast, up

from .world import as_time, is_time, time_of_day

NAME, GLYPH, COLOR = "clock", "clock", (64, 72, 120)
#: city -> hours ahead of the phone
ZONES = {"London": -1, "New York": -6, "Tokyo": 8, "Sydney": 10, "Cairo": 1, "Lima": -6, "Delhi": 4, "Nairobi": 2}
LABELS = ("Work", "Gym", "School run", "Medicine", "Train", "Swim")
_PAGES = {"": "Alarms", "world": "World", "timer": "Timer"}


def content(rng: Random) -> State:
    times: list[str] = []
    while len(times) < 4:
        time = time_of_day(rng, 5, 22)
        if time not in times:
            times.append(time)
    labels = rng.sample(LABELS, 4)
    alarms = [{"time": t, "label": x, "on": rng.random() < 0.6} for t, x in zip(times, labels, strict=True)]
    return {"alarms": alarms, "cities": rng.sample(list(ZONES), 3), "timer": 0}


def view(state: State) -> View:
    own = state["apps"][NAME]
    page, _, rest = state["nav"]["page"].partition("/")
    if page in ("new", "alarm"):
        return _alarm(state, own["alarms"], int(rest) if page == "alarm" else None)
    v = View(state, "Clock", COLOR)
    v.line(
        "tabs",
        [Item(f"tab:{t}", "chip", t, on=t == _PAGES[page], color=COLOR, do=_tab(state, p)) for p, t in _PAGES.items()],
    )
    if page == "world":
        _world(state, v, own)
    elif page == "timer":
        _timer(state, v, own)
    else:
        for i in sorted(range(len(own["alarms"])), key=lambda i: own["alarms"][i]["time"]):
            a = own["alarms"][i]
            v.line(
                f"alarm-line:{i}",
                (
                    Item(
                        f"alarm:{a['time']}",
                        text=a["time"],
                        detail=a["label"],
                        glyph="alarm",
                        color=COLOR,
                        do=v.to(f"alarm/{i}"),
                    ),
                    Item(f"switch:{a['time']}", text="", on=a["on"], color=COLOR, do=_flip(a)),
                ),
                height=0.084,
                shares=(0.72, 0.28),
            )
        v.floating("add", "add", v.to("new"))
    return v


def _tab(state: State, page: str) -> Do:
    def do() -> None:
        state["nav"]["page"] = page
        state["ui"]["frames"][-1].update(scroll=None, focus=None, ask=None)

    return do


def _flip(alarm: State) -> Do:
    return lambda: alarm.update(on=not alarm["on"])


def _world(state: State, v: View, own: State) -> None:
    hours, _, minutes = time_now(state).partition(":")
    for city in own["cities"]:
        ahead = ZONES[city]
        there = f"{(int(hours) + ahead) % 24:02d}:{minutes}"
        v.items.append(
            Item(
                f"city:{city}",
                text=city,
                detail=f"{ahead:+d} hours",
                trail=there,
                glyph="browser",
                color=COLOR,
                do=v.ask(f"city:{city}"),
            )
        )
        v.confirm(f"city:{city}", f"Remove {city}?", "It goes from the world clock.", "Remove", _remove(own, city))
    v.choose("cities", "Add a city", [c for c in ZONES if c not in own["cities"]], own["cities"].append)
    v.floating("add", "add", v.ask("cities"))


def _remove(own: State, city: str) -> Do:
    return lambda: own["cities"].remove(city)


def _timer(state: State, v: View, own: State) -> None:
    v.items.append(Item("running", "display", f"{own['timer']}:00" if own["timer"] else "0:00", "Timer", height=0.14))

    def start() -> None:
        text = v.value("minutes").strip()
        if text.isdecimal() and 1 <= int(text) <= 600:
            own["timer"] = int(text)
            toast(state, f"Timer set to {int(text)} minutes")
            state["ui"]["frames"][-1]["focus"] = None
        else:
            toast(state, "Minutes from 1 to 600")

    v.input("minutes", "Minutes", enter=start)
    v.button("start", "Start", start)
    if own["timer"]:
        v.button("cancel", "Cancel timer", lambda: own.update(timer=0), color=(196, 60, 54))


def _alarm(state: State, alarms: list[State], i: int | None) -> View:
    v = View(state, "New alarm" if i is None else "Edit alarm", COLOR)
    old: State = alarms[i] if i is not None else {"time": "", "label": "", "on": True}
    v.input("time", "Time, as 07:30", old["time"])
    v.input("label", "Label", old["label"])

    def save() -> None:
        if not is_time(v.value("time")):
            toast(state, "Write the time as 07:30")
            return
        new = {"time": as_time(v.value("time")), "label": v.value("label").strip(), "on": old["on"]}
        up(state)
        if i is None:
            alarms.append(new)
        else:
            alarms[i].update(new)
        toast(state, "Alarm saved")

    def delete() -> None:
        up(state)
        if i is not None:
            alarms.pop(i)
        toast(state, "Alarm deleted")

    v.tool("save", "save", save)
    if i is not None:
        v.button("delete", "Delete alarm", delete, color=(196, 60, 54))
    return v


APP = app(NAME, GLYPH, COLOR, content, view)
