"""Contacts: a sorted list with search, a page for each person, a form to add or edit."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import State, View, go, toast, up

from .world import PEOPLE, email, full_name, phone_number

NAME, GLYPH, COLOR = "contacts", "contacts", (30, 118, 210)
FIELDS = {"name": "Name", "phone": "Phone", "email": "Email", "city": "City"}


def person(first: str, rng: Random) -> State:
    return {
        "name": full_name(first),
        "phone": phone_number(rng),
        "email": email(first),
        "city": PEOPLE[first][1],
        "birthday": f"{rng.randint(1, 28)} {rng.choice(('January', 'May', 'July', 'October'))}",
        "favorite": False,
    }


def content(rng: Random) -> State:
    return {"people": [person(first, rng) for first in rng.sample(list(PEOPLE), 9)]}


def view(state: State) -> View:
    people = state["apps"][NAME]["people"]
    page, _, number = state["nav"]["page"].partition("/")
    if page == "person":
        return _person(state, people, int(number))
    if page in ("new", "edit"):
        return _form(state, people, int(number) if page == "edit" else None)
    v = View(state, "Contacts", COLOR)
    v.input("search", "Search contacts")
    wanted = v.value("search").strip().casefold()
    order = sorted(range(len(people)), key=lambda i: (not people[i]["favorite"], people[i]["name"].casefold()))
    for i in order:
        p = people[i]
        if wanted in p["name"].casefold():
            initials = "".join(word[0] for word in p["name"].split()[:2]) or "?"
            v.row(
                f"person:{p['name']}",
                p["name"],
                p["city"],
                badge=initials,
                trail="favorite" if p["favorite"] else "",
                do=v.to(f"person/{i}"),
            )
    v.floating("add", "add", v.to("new"))
    return v


def _person(state: State, people: list[State], i: int) -> View:
    p = people[i]
    v = View(state, p["name"], COLOR)

    def star() -> None:
        p["favorite"] = not p["favorite"]
        toast(state, "Added to favorites" if p["favorite"] else "Removed from favorites")

    def delete() -> None:
        up(state)
        people.pop(i)
        toast(state, "Contact deleted")

    v.row("phone", p["phone"] or "No number", "Phone", glyph="phone")
    v.row("email", p["email"] or "No address", "Email", glyph="mail")
    v.row("city", p["city"] or "Unknown", "City", glyph="maps")
    if p["birthday"]:
        v.row("birthday", p["birthday"], "Birthday", glyph="calendar")
    v.switch("favorite", "Favorite", p["favorite"], star, glyph="star")
    v.button("edit", "Edit", v.to(f"edit/{i}"))
    v.button("delete", "Delete contact", v.ask("delete"), color=(196, 60, 54))
    v.confirm("delete", "Delete contact?", f"{p['name']} will be removed from this phone.", "Delete", delete)
    return v


def _form(state: State, people: list[State], i: int | None) -> View:
    v = View(state, "New contact" if i is None else "Edit contact", COLOR)
    for name, label in FIELDS.items():
        v.input(name, label, "" if i is None else people[i][name])

    def save() -> None:
        values = {name: v.value(name).strip() for name in FIELDS}
        if not values["name"]:
            toast(state, "A contact needs a name")
            return
        up(state)
        if i is None:
            people.append({**values, "birthday": "", "favorite": False})
            go(state, f"person/{len(people) - 1}")
        else:
            people[i].update(values)
        toast(state, "Contact saved")

    v.tool("save", "save", save)
    return v


APP = app(NAME, GLYPH, COLOR, content, view)
