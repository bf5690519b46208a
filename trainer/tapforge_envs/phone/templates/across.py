"""Tasks that need several apps: something is looked up in one and used in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from tapforge_envs.phone.apps.world import EVENTS, NOTE_LINES, NOTE_TITLES, PEOPLE, PRODUCTS, TOPICS, full_name
from tapforge_envs.phone.device import State
from tapforge_envs.phone.judge import Apps
from tapforge_envs.phone.tasks import Do, Errs, Params

from .mail import code, sent, to_mail, with_code, write_plan
from .making import Setup, chore, drop, every, fill, question, taps, unless
from .media import followed, to_city, to_product
from .papers import note, noted, to_note
from .people import contact, known, talking, thread, to_person, to_thread
from .time import event, planned, to_event

_FIRST = tuple(PEOPLE)


def _all(*setups: Setup) -> Setup:
    def setup(apps: Apps, params: Params, rng: Random) -> None:
        for part in setups:
            part(apps, params, rng)

    return setup


def _tell(first: str, text: str, apps: Apps) -> None:
    thread(apps, first)["texts"].append({"from": "me", "text": text})


def _then_send(params: Params, errs: Errs, text: Callable[[Params, Apps], str]) -> Iterator[Do]:
    """Sends what was looked up to the person `first`."""
    yield from to_thread(params["first"])
    yield Do(late=lambda state: fill("text", text(params, state["apps"])))
    yield from unless(errs, "send")


def _number(params: Params, apps: Apps) -> str:
    return str(contact(apps, params["other"])["phone"])


def _number_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_person(params["other"])
    yield from _then_send(params, errs, _number)


def _place(params: Params, apps: Apps) -> str:
    return str(event(apps, params["title"])["place"])


def _place_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_event(params["title"])
    yield from _then_send(params, errs, _place)


def _today(params: Params, apps: Apps) -> str:
    return str(apps["weather"]["forecasts"][params["city"]][0]["high"])


def _today_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_city(params["city"])
    yield from _then_send(params, errs, _today)


def _in_celsius(apps: Apps, params: Params, rng: Random) -> None:
    apps["weather"]["unit"] = "C"


def _code_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_mail(params["subject"])
    yield Do(app="notes")
    yield Do(tap="add")
    yield fill("title", params["title"])
    yield Do(late=lambda state: fill("body", code(params, state["apps"])[0]))
    yield from unless(errs, "save")


def _code_wish(params: Params, apps: Apps) -> None:
    apps["notes"]["notes"].append({"title": params["title"], "body": code(params, apps)[0], "pinned": False})


def _two_lines(apps: Apps, params: Params, rng: Random) -> None:
    noted(apps, params["title"], rng)
    note(apps, params["title"])["body"] = "\n".join(rng.sample(NOTE_LINES, 2))
    for line in NOTE_LINES:
        drop(apps["todo"]["items"], text=line)


def _lines_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_note(params["title"])
    yield Do(app="todo")
    yield Do(tap="list:Home")
    for number in range(2):
        if number and errs():
            return

        def line(state: State, number: int = number) -> Do:
            return fill("new", note(state["apps"], params["title"])["body"].split("\n")[number])

        yield Do(late=line)
        yield Do(tap="add")


def _lines_wish(params: Params, apps: Apps) -> None:
    for line in note(apps, params["title"])["body"].split("\n"):
        apps["todo"]["items"].append({"text": line, "list": "Home", "done": False})


def _alarm_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_event(params["title"])
    yield Do(app="clock")
    yield Do(tap="add")
    yield Do(late=lambda state: fill("time", event(state["apps"], params["title"])["time"]))
    yield fill("label", params["title"])
    yield from unless(errs, "save")


def _alarm_wish(params: Params, apps: Apps) -> None:
    time = event(apps, params["title"])["time"]
    apps["clock"]["alarms"].append({"time": time, "label": params["title"], "on": True})


def _no_alarm_then(apps: Apps, params: Params, rng: Random) -> None:
    planned(apps, params["title"], rng)
    drop(apps["clock"]["alarms"], time=event(apps, params["title"])["time"])


def _mail_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_person(params["first"])
    steps = write_plan("", params["subject"], params["text"], errs)
    for do in steps:
        if do.fill is not None and do.fill[0] == "to":
            yield Do(late=lambda state: fill("to", contact(state["apps"], params["first"])["email"]))
        else:
            yield do


def _another_address(apps: Apps, params: Params, rng: Random) -> None:
    known(apps, params["first"], rng)
    contact(apps, params["first"])["email"] = f"{params['first'].lower()}{rng.randint(10, 99)}@post.example"


def _together_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_product(params["one"])
    yield from to_product(params["two"])
    yield Do(app="calculator")
    for number, name in enumerate((params["one"], params["two"])):
        for place in range(3):

            def figure(state: Apps, name: str = name, place: int = place) -> Do:
                price = str(state["apps"]["shop"]["products"][name]["price"])
                return Do(tap=f"press:{price[place]}")

            yield Do(late=figure)
        yield from taps("press:+" if number == 0 else "press:=")


def _three_figures(apps: Apps, params: Params, rng: Random) -> None:
    for name in (params["one"], params["two"]):
        apps["shop"]["products"][name]["price"] = rng.randint(101, 399)


def _together(params: Params, apps: Apps) -> list[str]:
    prices = apps["shop"]["products"]
    return [str(prices[params["one"]]["price"] + prices[params["two"]]["price"])]


def _pairs(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Everyone with the one five places on."""
    return {"first": names, "other": tuple(names[(i + 5) % len(names)] for i in range(len(names)))}


TEMPLATES = (
    chore(
        "send_number",
        every(**_pairs(_FIRST)),
        lambda q: f"Send {full_name(q['first'])} a message with nothing but {full_name(q['other'])}'s phone number.",
        ("contacts", "messages"),
        _number_plan,
        lambda q, apps: _tell(q["first"], _number(q, apps), apps),
        setup=_all(lambda a, q, r: talking(a, q["first"], r), lambda a, q, r: known(a, q["other"], r)),
        steps=20,
    ),
    chore(
        "send_event_place",
        every(first=_FIRST[:8], title=EVENTS),
        lambda q: f'Send {full_name(q["first"])} a message with nothing but the place of the event "{q["title"]}".',
        ("calendar", "messages"),
        _place_plan,
        lambda q, apps: _tell(q["first"], _place(q, apps), apps),
        setup=_all(lambda a, q, r: talking(a, q["first"], r), lambda a, q, r: planned(a, q["title"], r)),
        steps=20,
    ),
    chore(
        "send_temperature",
        every(first=_FIRST[:12], city=tuple(city for _, city in PEOPLE.values())[4:]),
        lambda q: f"Send {full_name(q['first'])} today's degrees in {q['city']} as a message: the number alone.",
        ("weather", "messages"),
        _today_plan,
        lambda q, apps: _tell(q["first"], _today(q, apps), apps),
        setup=_all(_in_celsius, lambda a, q, r: talking(a, q["first"], r), lambda a, q, r: followed(a, q["city"], r)),
        steps=20,
        only="test",
    ),
    chore(
        "note_code_from_mail",
        every(subject=TOPICS, title=("Code", "Login", "Access", "Safe", "Door", "Account", "Key", "Entry")),
        lambda q: f'Write the code from the mail "{q["subject"]}" into a new note with the title "{q["title"]}".',
        ("mail", "notes"),
        _code_plan,
        _code_wish,
        setup=with_code,
        steps=20,
    ),
    chore(
        "note_to_tasks",
        every(title=NOTE_TITLES),
        lambda q: f'Add each line of the note "{q["title"]}" as a task to the list Home in Todo.',
        ("notes", "todo"),
        _lines_plan,
        _lines_wish,
        setup=_two_lines,
        steps=20,
    ),
    chore(
        "alarm_for_event",
        every(title=EVENTS),
        lambda q: f'Set an alarm for the time of the event "{q["title"]}", with "{q["title"]}" as its label.',
        ("calendar", "clock"),
        _alarm_plan,
        _alarm_wish,
        setup=_no_alarm_then,
        steps=20,
    ),
    chore(
        "mail_to_contact",
        every(first=_FIRST[:8], subject=("News", "Plan") * 4, text=("I will be late", "All is ready") * 4),
        lambda q: (
            f'Write {full_name(q["first"])} (see the contacts) a mail, subject "{q["subject"]}", text "{q["text"]}".'
        ),
        ("contacts", "mail"),
        _mail_plan,
        lambda q, apps: sent(apps, contact(apps, q["first"])["email"], q["subject"], q["text"]),
        setup=_another_address,
        steps=24,
    ),
    question(
        "add_up_prices",
        every(one=tuple(PRODUCTS)[:8], two=tuple(PRODUCTS)[8:]),
        lambda q: f"How many euros do the {q['one'].lower()} and the {q['two'].lower()} cost together in the shop?",
        ("shop", "calculator"),
        _together_plan,
        _together,
        setup=_three_figures,
        steps=28,
        only="test",
    ),
)
