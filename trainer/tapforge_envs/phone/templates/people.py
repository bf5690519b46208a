"""Tasks in contacts and messages."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tapforge_envs.phone.apps.contacts import person
from tapforge_envs.phone.apps.world import CITIES, PEOPLE, full_name
from tapforge_envs.phone.device import State
from tapforge_envs.phone.judge import Apps
from tapforge_envs.phone.tasks import Do, Errs, Params

from .making import Plan, chore, combine, drop, fill, find, has, impossible, question, unless

FIRST = tuple(PEOPLE)
_SOME = FIRST[:8]
_NUMBERS = ("0151 2040", "0166 7312", "0178 9005")
_CONTACTS, _MESSAGES = ("contacts",), ("messages",)
TEXTS = ("I am on my way", "See you at eight", "Please bring the keys", "Good luck tomorrow", "The parcel has arrived")


def contact(apps: Apps, first: str) -> State:
    found: State = find(apps["contacts"]["people"], name=full_name(first))
    return found


def known(apps: Apps, first: str, rng: Random) -> None:
    """Puts a person into the contacts."""
    people = apps["contacts"]["people"]
    if not has(people, name=full_name(first)):
        people[rng.randrange(len(people))] = person(first, rng)


def unknown(apps: Apps, first: str) -> None:
    drop(apps["contacts"]["people"], name=full_name(first))


def thread(apps: Apps, first: str) -> State:
    found: State = find(apps["messages"]["threads"], **{"with": full_name(first)})
    return found


def talking(apps: Apps, first: str, rng: Random) -> None:
    """Sees to a conversation with a person."""
    threads = apps["messages"]["threads"]
    if not has(threads, **{"with": full_name(first)}):
        threads[rng.randrange(len(threads))]["with"] = full_name(first)


def to_person(first: str) -> Iterator[Do]:
    yield Do(app="contacts")
    yield Do(tap=f"person:{full_name(first)}")


def to_thread(first: str) -> Iterator[Do]:
    yield Do(app="messages")
    yield Do(tap=f"thread:{full_name(first)}")


# --- contacts ---------------------------------------------------------------------------------------------------------


def _add_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="contacts")
    yield Do(tap="add")
    yield fill("name", full_name(params["first"]))
    yield fill("phone", params["phone"])
    yield from unless(errs, "save")


def _add_wish(params: Params, apps: Apps) -> None:
    apps["contacts"]["people"].append(
        {"name": full_name(params["first"]), "phone": params["phone"], "email": "", "city": "", "birthday": "",
         "favorite": False}
    )  # fmt: skip


def _edit_plan(field: str) -> Plan:
    def plan(params: Params, errs: Errs) -> Iterator[Do]:
        yield from to_person(params["first"])
        yield Do(tap="edit")
        yield fill(field, params[field])
        yield from unless(errs, "save")

    return plan


def _delete_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_person(params["first"])
    yield Do(tap="delete")
    yield from unless(errs, "dialog:yes")


def _favorite_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_person(params["first"])
    yield Do(tap="favorite")


def _search_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="contacts")
    yield fill("search", params["first"])


def _lives_setup(apps: Apps, params: Params, rng: Random) -> None:
    first = next(name for name, (_, city) in PEOPLE.items() if city == params["city"])
    known(apps, first, rng)


def _who_lives(params: Params, apps: Apps) -> list[str]:
    return [find(apps["contacts"]["people"], city=params["city"])["name"].split()[0]]


def _other_people(params: Params, apps: Apps) -> list[str]:
    return [p["name"].split()[0] for p in apps["contacts"]["people"] if p["city"] != params["city"]]


# --- messages ---------------------------------------------------------------------------------------------------------


def _send_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_thread(params["first"])
    yield fill("text", params["text"])
    yield from unless(errs, "send")


def _send_wish(params: Params, apps: Apps) -> None:
    thread(apps, params["first"])["texts"].append({"from": "me", "text": params["text"]})


def _first_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="messages")
    yield Do(tap="add")
    yield fill("to", full_name(params["first"]))
    yield fill("text", params["text"])
    yield from unless(errs, "send")


def _first_wish(params: Params, apps: Apps) -> None:
    apps["messages"]["threads"].append(
        {"with": full_name(params["first"]), "texts": [{"from": "me", "text": params["text"]}], "muted": False}
    )


def _last_setup(apps: Apps, params: Params, rng: Random) -> None:
    talking(apps, params["first"], rng)
    texts = thread(apps, params["first"])["texts"]
    texts.append({"from": "them", "text": rng.choice(("The code is 4417", "Platform nine", "I chose the blue one"))})
    texts.append({"from": "me", "text": "Thank you"})


def _last(params: Params, apps: Apps) -> list[str]:
    return [[m["text"] for m in thread(apps, params["first"])["texts"] if m["from"] == "them"][-1]]


def _thread_plan(tool: str, sure: str = "") -> Plan:
    def plan(params: Params, errs: Errs) -> Iterator[Do]:
        yield from to_thread(params["first"])
        yield Do(tap=tool)
        if sure:
            yield from unless(errs, sure)

    return plan


def _unmuted(apps: Apps, params: Params, rng: Random) -> None:
    talking(apps, params["first"], rng)
    thread(apps, params["first"])["muted"] = False


TEMPLATES = (
    chore(
        "add_contact",
        combine(first=_SOME, phone=_NUMBERS),
        lambda q: f"Add {full_name(q['first'])} to the contacts, phone number {q['phone']}.",
        _CONTACTS,
        _add_plan,
        _add_wish,
        setup=lambda apps, q, rng: unknown(apps, q["first"]),
        steps=16,
    ),
    chore(
        "change_number",
        combine(first=_SOME, phone=_NUMBERS),
        lambda q: f"{full_name(q['first'])} has a new phone number: {q['phone']}. Change the contact.",
        _CONTACTS,
        _edit_plan("phone"),
        lambda q, apps: contact(apps, q["first"]).update(phone=q["phone"]),
        setup=lambda apps, q, rng: known(apps, q["first"], rng),
        steps=16,
    ),
    chore(
        "change_city",
        combine(first=_SOME[:4], city=CITIES[8:12]),
        lambda q: f"{full_name(q['first'])} moved to {q['city']}. Change the city in the contacts.",
        _CONTACTS,
        _edit_plan("city"),
        lambda q, apps: contact(apps, q["first"]).update(city=q["city"]),
        setup=lambda apps, q, rng: known(apps, q["first"], rng),
        steps=16,
        only="test",
    ),
    chore(
        "delete_contact",
        combine(first=FIRST),
        lambda q: f"Delete {full_name(q['first'])} from the contacts.",
        _CONTACTS,
        _delete_plan,
        lambda q, apps: unknown(apps, q["first"]),
        setup=lambda apps, q, rng: known(apps, q["first"], rng),
    ),
    impossible(
        "delete_missing_contact",
        combine(first=FIRST),
        lambda q: f"Delete {full_name(q['first'])} from the contacts.",
        _CONTACTS,
        _search_plan,
        setup=lambda apps, q, rng: unknown(apps, q["first"]),
    ),
    chore(
        "favorite_contact",
        combine(first=FIRST),
        lambda q: f"Make {full_name(q['first'])} a favorite contact.",
        _CONTACTS,
        _favorite_plan,
        lambda q, apps: contact(apps, q["first"]).update(favorite=True),
        setup=lambda apps, q, rng: known(apps, q["first"], rng),
    ),
    question(
        "ask_number",
        combine(first=FIRST),
        lambda q: f"What is the phone number of {full_name(q['first'])}?",
        _CONTACTS,
        lambda q, errs: to_person(q["first"]),
        lambda q, apps: [contact(apps, q["first"])["phone"]],
        setup=lambda apps, q, rng: known(apps, q["first"], rng),
    ),
    question(
        "ask_birthday",
        combine(first=FIRST),
        lambda q: f"When is the birthday of {full_name(q['first'])}?",
        _CONTACTS,
        lambda q, errs: to_person(q["first"]),
        lambda q, apps: contact(apps, q["first"])["birthday"].split(),
        setup=lambda apps, q, rng: known(apps, q["first"], rng),
        only="test",
    ),
    question(
        "ask_who_lives_in",
        combine(city=CITIES),
        lambda q: f"Which of my contacts lives in {q['city']}?",
        _CONTACTS,
        lambda q, errs: iter((Do(app="contacts"),)),
        _who_lives,
        others=_other_people,
        setup=_lives_setup,
    ),
    chore(
        "send_message",
        combine(first=_SOME, text=TEXTS),
        lambda q: f'Send {full_name(q["first"])} the message "{q["text"]}".',
        _MESSAGES,
        _send_plan,
        _send_wish,
        setup=lambda apps, q, rng: talking(apps, q["first"], rng),
    ),
    chore(
        "first_message",
        combine(first=_SOME, text=TEXTS[:3]),
        lambda q: f'Start a conversation with {full_name(q["first"])}: "{q["text"]}".',
        _MESSAGES,
        _first_plan,
        _first_wish,
        setup=lambda apps, q, rng: drop(apps["messages"]["threads"], **{"with": full_name(q["first"])}),
        steps=16,
    ),
    question(
        "ask_last_message",
        combine(first=FIRST),
        lambda q: f"What did {full_name(q['first'])} write to me last?",
        _MESSAGES,
        lambda q, errs: to_thread(q["first"]),
        _last,
        setup=_last_setup,
    ),
    chore(
        "delete_conversation",
        combine(first=FIRST),
        lambda q: f"Delete the conversation with {full_name(q['first'])}.",
        _MESSAGES,
        _thread_plan("delete", "dialog:yes"),
        lambda q, apps: drop(apps["messages"]["threads"], **{"with": full_name(q["first"])}),
        setup=lambda apps, q, rng: talking(apps, q["first"], rng),
    ),
    chore(
        "mute_conversation",
        combine(first=FIRST),
        lambda q: f"Mute the conversation with {full_name(q['first'])}.",
        _MESSAGES,
        _thread_plan("mute"),
        lambda q, apps: thread(apps, q["first"]).update(muted=True),
        setup=_unmuted,
    ),
)
