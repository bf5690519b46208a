"""Todo: open and done tasks in two lists (Home, Work), a field to add one."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import Do, Item, State, View, frame_of, toast

from .world import CHORES

NAME, GLYPH, COLOR = "todo", "todo", (22, 140, 140)
LISTS = ("Home", "Work")


def content(rng: Random) -> State:
    return {
        "items": [{"text": t, "list": rng.choice(LISTS), "done": rng.random() < 0.3} for t in rng.sample(CHORES, 7)]
    }


def view(state: State) -> View:
    own = state["apps"][NAME]
    frame = frame_of(state)
    shown = frame.get("list", LISTS[0])
    v = View(state, "Todo", COLOR)
    v.line(
        "lists",
        [Item(f"list:{name}", "chip", name, on=name == shown, color=COLOR, do=_show(frame, name)) for name in LISTS],
    )
    mine = [item for item in own["items"] if item["list"] == shown]
    for item in sorted(mine, key=lambda item: item["done"]):
        v.row(
            f"item:{item['text']}",
            item["text"],
            glyph="box_on" if item["done"] else "box",
            trail="done" if item["done"] else "",
            do=_tick(item),
            hold=v.ask(f"remove:{item['text']}"),
        )
        v.confirm(f"remove:{item['text']}", "Remove task?", item["text"], "Remove", _remove(state, own, item))
    if not mine:
        v.prose("empty", "Nothing to do here.")

    def add() -> None:
        text = v.value("new").strip()
        if text:
            own["items"].append({"text": text, "list": shown, "done": False})
            v.clear("new")

    def clear() -> None:
        own["items"] = [item for item in own["items"] if item["list"] != shown or not item["done"]]

    field = v.input("new", "New task", enter=add, footer=True)
    button = Item("add", "action", glyph="add", color=COLOR, do=add)
    v.footer.append(Item("write", height=0.08, parts=(field, button), shares=(0.8, 0.2)))
    v.tool("clear", "delete", v.ask("clear"))
    v.confirm("clear", "Clear done tasks?", f"Done tasks of {shown} go.", "Clear", clear)
    return v


def _show(frame: State, name: str) -> Do:
    return lambda: frame.update(list=name, scroll=None)


def _tick(item: State) -> Do:
    return lambda: item.update(done=not item["done"])


def _remove(state: State, own: State, item: State) -> Do:
    def do() -> None:
        own["items"].remove(item)
        toast(state, "Task removed")

    return do


APP = app(NAME, GLYPH, COLOR, content, view)
