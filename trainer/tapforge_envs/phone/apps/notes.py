"""Notes: a list with pinned ones first, a page for each note, a form to write."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import State, View, toast, up

from .world import NOTE_LINES, NOTE_TITLES

NAME, GLYPH, COLOR = "notes", "notes", (214, 158, 20)


def content(rng: Random) -> State:
    titles = rng.sample(NOTE_TITLES, 5)
    return {"notes": [{"title": t, "body": "\n".join(rng.sample(NOTE_LINES, 2)), "pinned": False} for t in titles]}


def view(state: State) -> View:
    notes = state["apps"][NAME]["notes"]
    page, _, rest = state["nav"]["page"].partition("/")
    if page == "note":
        return _note(state, notes, int(rest))
    if page in ("new", "edit"):
        return _form(state, notes, int(rest) if page == "edit" else None)
    v = View(state, "Notes", COLOR)
    v.input("search", "Search notes")
    wanted = v.value("search").strip().casefold()
    for i in sorted(range(len(notes)), key=lambda i: not notes[i]["pinned"]):
        n = notes[i]
        if wanted in f"{n['title']} {n['body']}".casefold():
            first = n["body"].split("\n")[0]
            v.row(
                f"note:{n['title']}",
                n["title"],
                first,
                glyph="notes",
                trail="pinned" if n["pinned"] else "",
                do=v.to(f"note/{i}"),
            )
    v.floating("add", "add", v.to("new"))
    return v


def _note(state: State, notes: list[State], i: int) -> View:
    n = notes[i]
    v = View(state, n["title"], COLOR)
    v.prose("body", n["body"] or "This note is empty.")

    def pin() -> None:
        n["pinned"] = not n["pinned"]
        toast(state, "Pinned" if n["pinned"] else "No longer pinned")

    def delete() -> None:
        up(state)
        notes.pop(i)
        toast(state, "Note deleted")

    v.tool("pin", "pin" if n["pinned"] else "pin_line", pin)
    v.tool("edit", "edit", v.to(f"edit/{i}"))
    v.tool("delete", "delete", v.ask("delete"))
    v.confirm("delete", "Delete note?", n["title"], "Delete", delete)
    return v


def _form(state: State, notes: list[State], i: int | None) -> View:
    v = View(state, "New note" if i is None else "Edit note", COLOR)
    old: State = notes[i] if i is not None else {"title": "", "body": "", "pinned": False}
    v.input("title", "Title", old["title"])
    v.input("body", "Write a note", old["body"], lines=8)

    def save() -> None:
        title = v.value("title").strip()
        if not title:
            toast(state, "A note needs a title")
            return
        new = {"title": title, "body": v.value("body").strip(), "pinned": old["pinned"]}
        up(state)
        if i is None:
            notes.append(new)
        else:
            notes[i].update(new)
        toast(state, "Note saved")

    v.tool("save", "save", save)
    return v


APP = app(NAME, GLYPH, COLOR, content, view)
