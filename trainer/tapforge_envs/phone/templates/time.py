"""Tasks in calendar and clock."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tapforge_envs.phone.apps.clock import LABELS, ZONES
from tapforge_envs.phone.apps.world import EVENTS, PLACES, spoken, time_of_day
from tapforge_envs.phone.device import State
from tapforge_envs.phone.judge import Apps
from tapforge_envs.phone.tasks import Do, Errs, Params
from tapforge_envs.protocol import Back

from .making import chore, combine, drop, fill, find, has, impossible, question, taps, unless

_CALENDAR, _CLOCK = ("calendar",), ("clock",)
_DAYS = ("11", "16", "19", "24", "27")
_TIMES = ("08:15", "13:45", "18:30")
_ALARMS = ("05:45", "06:30", "07:15", "08:00", "21:30", "22:45")


def event(apps: Apps, title: str) -> State:
    found: State = find(apps["calendar"]["events"], title=title)
    return found


def planned(apps: Apps, title: str, rng: Random) -> None:
    """Sees to one event with this title, still to come, at none of the times that tasks name."""
    events = apps["calendar"]["events"]
    if not has(events, title=title):
        events.append({"title": title, "date": "", "time": "", "place": rng.choice(PLACES)})
    taken = {e["date"] for e in events if e["title"] != title}
    free = [date for date in (f"2026-03-{day:02d}" for day in range(10, 29)) if date not in taken]
    event(apps, title).update(date=rng.choice(free), time=time_of_day(rng).replace(":45", ":00"))


def to_event(title: str) -> Iterator[Do]:
    yield Do(app="calendar")
    yield Do(late=lambda state: Do(tap=f"day:{int(event(state['apps'], title)['date'][8:])}"))
    yield Do(tap=f"event:{title}")


def _add_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="calendar")
    yield from taps(f"day:{params['day']}", "add")
    yield fill("title", params["title"])
    yield fill("time", params["time"])
    yield from unless(errs, "save")


def _add_wish(params: Params, apps: Apps) -> None:
    apps["calendar"]["events"].append(
        {"title": params["title"], "date": f"2026-03-{params['day']}", "time": params["time"], "place": ""}
    )


def _move_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_event(params["title"])
    yield Do(tap="edit")
    yield fill("time", params["time"])
    yield from unless(errs, "save")


def _delete_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_event(params["title"])
    yield Do(tap="delete")
    yield from unless(errs, "dialog:yes")


def _look_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="calendar")
    yield Do(tap="agenda")
    yield Do(action=Back())


# --- clock ------------------------------------------------------------------------------------------------------------


def rings(apps: Apps, time: str, rng: Random, on: bool = True) -> None:
    """Sees to one alarm at this time."""
    alarms = apps["clock"]["alarms"]
    if not has(alarms, time=time):
        alarms[rng.randrange(len(alarms))]["time"] = time
    find(alarms, time=time)["on"] = on


def _alarm_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="clock")
    yield Do(tap="add")
    yield fill("time", params["time"])
    yield fill("label", params["label"])
    yield from unless(errs, "save")


def _alarm_wish(params: Params, apps: Apps) -> None:
    apps["clock"]["alarms"].append({"time": params["time"], "label": params["label"], "on": True})


def _delete_alarm_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="clock")
    yield Do(tap=f"alarm:{params['time']}")
    yield from unless(errs, "delete")


def _timer_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="clock")
    yield Do(tap="tab:Timer")
    yield fill("minutes", params["minutes"])
    yield from unless(errs, "start")


def _zone_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="clock")
    yield from taps("tab:World", "add", f"dialog:{params['city']}")


TEMPLATES = (
    chore(
        "add_event",
        combine(title=("Chess evening", "Picnic", "Flat viewing"), day=_DAYS, time=_TIMES),
        lambda q: f'Add the event "{q["title"]}" on {q["day"]} March at {q["time"]} to the calendar.',
        _CALENDAR,
        _add_plan,
        _add_wish,
        steps=18,
    ),
    chore(
        "move_event",
        combine(title=EVENTS, time=("09:45", "15:45", "20:45")),
        lambda q: f'Move the event "{q["title"]}" to {q["time"]} on the same day.',
        _CALENDAR,
        _move_plan,
        lambda q, apps: event(apps, q["title"]).update(time=q["time"]),
        setup=lambda apps, q, rng: planned(apps, q["title"], rng),
        steps=16,
    ),
    chore(
        "delete_event",
        combine(title=EVENTS),
        lambda q: f'Delete the event "{q["title"]}" from the calendar.',
        _CALENDAR,
        _delete_plan,
        lambda q, apps: drop(apps["calendar"]["events"], title=q["title"]),
        setup=lambda apps, q, rng: planned(apps, q["title"], rng),
    ),
    impossible(
        "delete_missing_event",
        combine(title=EVENTS),
        lambda q: f'Delete the event "{q["title"]}" from the calendar.',
        _CALENDAR,
        _look_plan,
        setup=lambda apps, q, rng: drop(apps["calendar"]["events"], title=q["title"]),
    ),
    question(
        "ask_event_day",
        combine(title=EVENTS),
        lambda q: f'On which day is the event "{q["title"]}"?',
        _CALENDAR,
        _look_plan,
        lambda q, apps: spoken(event(apps, q["title"])["date"]).split(),
        setup=lambda apps, q, rng: planned(apps, q["title"], rng),
    ),
    question(
        "ask_event_place",
        combine(title=EVENTS),
        lambda q: f'Where is the event "{q["title"]}"?',
        _CALENDAR,
        lambda q, errs: to_event(q["title"]),
        lambda q, apps: [event(apps, q["title"])["place"]],
        setup=lambda apps, q, rng: planned(apps, q["title"], rng),
        only="test",
    ),
    chore(
        "add_alarm",
        combine(time=_ALARMS, label=LABELS[:4]),
        lambda q: f'Set an alarm for {q["time"]} with the label "{q["label"]}".',
        _CLOCK,
        _alarm_plan,
        _alarm_wish,
        setup=lambda apps, q, rng: drop(apps["clock"]["alarms"], time=q["time"]),
        steps=16,
    ),
    chore(
        "turn_off_alarm",
        combine(time=_ALARMS),
        lambda q: f"Turn off the alarm at {q['time']}.",
        _CLOCK,
        lambda q, errs: iter((Do(app="clock"), Do(tap=f"switch:{q['time']}"))),
        lambda q, apps: find(apps["clock"]["alarms"], time=q["time"]).update(on=False),
        setup=lambda apps, q, rng: rings(apps, q["time"], rng),
        steps=8,
    ),
    chore(
        "delete_alarm",
        combine(time=_ALARMS),
        lambda q: f"Delete the alarm at {q['time']}.",
        _CLOCK,
        _delete_alarm_plan,
        lambda q, apps: drop(apps["clock"]["alarms"], time=q["time"]),
        setup=lambda apps, q, rng: rings(apps, q["time"], rng),
        steps=10,
    ),
    impossible(
        "delete_missing_alarm",
        combine(time=_ALARMS),
        lambda q: f"Delete the alarm at {q['time']}.",
        _CLOCK,
        lambda q, errs: iter((Do(app="clock"),)),
        setup=lambda apps, q, rng: drop(apps["clock"]["alarms"], time=q["time"]),
        steps=8,
    ),
    chore(
        "set_timer",
        combine(minutes=("3", "7", "12", "20", "35", "50", "75", "90")),
        lambda q: f"Start a timer of {q['minutes']} minutes.",
        _CLOCK,
        _timer_plan,
        lambda q, apps: apps["clock"].update(timer=int(q["minutes"])),
        steps=12,
    ),
    chore(
        "add_clock_city",
        combine(city=tuple(ZONES)),
        lambda q: f"Add {q['city']} to the world clock.",
        _CLOCK,
        _zone_plan,
        lambda q, apps: apps["clock"]["cities"].append(q["city"]),
        setup=lambda apps, q, rng: apps["clock"].update(cities=[c for c in apps["clock"]["cities"] if c != q["city"]]),
        steps=10,
    ),
)
