"""Calendar: a month to swipe through, the chosen day's events below it, a form to add or change one."""

from __future__ import annotations

import calendar as months
from functools import lru_cache
from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import Do, Item, State, View, frame_of, toast, up

from .world import EVENTS, MONTHS, PLACES, as_time, is_time, spoken, time_of_day

NAME, GLYPH, COLOR = "calendar", "calendar", (46, 110, 200)


def content(rng: Random) -> State:
    days = rng.sample(range(2, 29), 6)
    events = [
        {"title": title, "date": f"2026-03-{day:02d}", "time": time_of_day(rng), "place": rng.choice(PLACES)}
        for title, day in zip(rng.sample(EVENTS, 6), days, strict=True)
    ]
    return {"events": events}


def view(state: State) -> View:
    events = state["apps"][NAME]["events"]
    page, _, rest = state["nav"]["page"].partition("/")
    if page == "event":
        return _event(state, events, int(rest))
    if page == "edit":
        return _form(state, events, int(rest), "")
    if page == "new":
        return _form(state, events, None, rest)
    return _month(state, events)


@lru_cache(maxsize=64)
def _weeks(year: int, month: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(week) for week in months.Calendar().monthdayscalendar(year, month))


def _month(state: State, events: list[State]) -> View:
    frame = frame_of(state)
    chosen = frame.get("day", state["now"][:10])
    year, month = int(chosen[:4]), int(chosen[5:7])
    v = View(state, f"{MONTHS[month - 1]} {year}", COLOR)

    def choose(date: str) -> Do:
        return lambda: frame.update(day=date)

    def turn(direction: str) -> bool:
        ahead = month + (1 if direction == "right" else -1)
        if not 1 <= ahead <= 12:
            return False
        frame["day"] = f"{year}-{ahead:02d}-01"
        return True

    v.swiped = turn
    v.tool("previous", "back", lambda: void(turn("left")))
    v.tool("next", "next", lambda: void(turn("right")))
    v.line("weekdays", [Item(f"weekday:{i}", "day", letter) for i, letter in enumerate("MTWTFSS")], height=0.035)
    busy = {event["date"] for event in events}
    for number, week in enumerate(_weeks(year, month)):
        days = []
        for place, day in enumerate(week):
            date = f"{year}-{month:02d}-{day:02d}"
            if day:
                days.append(
                    Item(
                        f"day:{day}",
                        "day",
                        str(day),
                        "." if date in busy else "",
                        on=date == chosen,
                        color=COLOR,
                        do=choose(date),
                    )
                )
            else:
                days.append(Item(f"blank:{number}:{place}", "day"))
        v.line(f"week:{number}", days, height=0.062)
    v.heading(spoken(chosen))
    today = sorted((i for i, e in enumerate(events) if e["date"] == chosen), key=lambda i: events[i]["time"])
    for i in today:
        v.row(
            f"event:{events[i]['title']}",
            events[i]["title"],
            events[i]["place"],
            trail=events[i]["time"],
            do=v.to(f"event/{i}"),
        )
    if not today:
        v.prose("empty", "No events.")
    v.tool("agenda", "menu", v.ask("agenda"))
    ahead = sorted(events, key=lambda e: (e["date"], e["time"]))
    coming = (f"{spoken(e['date'])}: {e['title']}" for e in ahead if e["date"] >= state["now"][:10])
    names = list(dict.fromkeys(coming))[:7]
    by_name = {f"{spoken(e['date'])}: {e['title']}": e["date"] for e in events}
    v.choose("agenda", "Coming up", names, lambda name: frame.update(day=by_name[name]))
    v.floating("add", "add", v.to(f"new/{chosen}"))
    return v


def void(_: bool) -> None:
    """Drops an answer that a tap doesn't need."""


def _event(state: State, events: list[State], i: int) -> View:
    e = events[i]
    v = View(state, e["title"], COLOR)

    def delete() -> None:
        up(state)
        events.pop(i)
        toast(state, "Event deleted")

    v.row("date", spoken(e["date"]), "Date", glyph="calendar")
    v.row("time", e["time"], "Time", glyph="clock")
    v.row("place", e["place"] or "No place", "Place", glyph="maps")
    v.button("edit", "Edit", v.to(f"edit/{i}"))
    v.button("delete", "Delete event", v.ask("delete"), color=(196, 60, 54))
    v.confirm("delete", "Delete event?", f"{e['title']} on {spoken(e['date'])}.", "Delete", delete)
    return v


def _form(state: State, events: list[State], i: int | None, date: str) -> View:
    v = View(state, "New event" if i is None else "Edit event", COLOR)
    old = events[i] if i is not None else {"title": "", "date": date, "time": "", "place": ""}
    v.input("title", "Title", old["title"])
    v.input(
        "day", "Day of March" if old["date"].startswith("2026-03") else "Day of the month", str(int(old["date"][8:]))
    )
    v.input("time", "Time, as 07:30", old["time"])
    v.input("place", "Place", old["place"])

    def save() -> None:
        day, time = v.value("day").strip(), v.value("time")
        last = months.monthrange(int(old["date"][:4]), int(old["date"][5:7]))[1]
        if not v.value("title").strip():
            toast(state, "An event needs a title")
        elif not (day.isdecimal() and 1 <= int(day) <= last):
            toast(state, f"The day is a number from 1 to {last}")
        elif not is_time(time):
            toast(state, "Write the time as 07:30")
        else:
            new = {
                "title": v.value("title").strip(),
                "date": f"{old['date'][:8]}{int(day):02d}",
                "time": as_time(time),
                "place": v.value("place").strip(),
            }
            up(state)
            if i is None:
                events.append(new)
                frame_of(state)["day"] = new["date"]
            else:
                events[i].update(new)
            toast(state, "Event saved")

    v.tool("save", "save", save)
    return v


APP = app(NAME, GLYPH, COLOR, content, view)
