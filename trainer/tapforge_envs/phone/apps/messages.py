"""Messages: threads by person, a chat with a field at the bottom, a form for a new thread."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import LINE, Do, Item, State, View, go, toast, up, wrapped

from .world import LINES, PEOPLE, full_name

NAME, GLYPH, COLOR = "messages", "messages", (34, 150, 84)


def content(rng: Random) -> State:
    threads = []
    for first in rng.sample(list(PEOPLE), 6):
        texts = [{"from": rng.choice(("me", "them")), "text": text} for text in rng.sample(LINES, rng.randint(2, 5))]
        texts[-1]["from"] = "them"
        threads.append({"with": full_name(first), "texts": texts, "muted": False})
    return {"threads": threads}


def view(state: State) -> View:
    threads = state["apps"][NAME]["threads"]
    page, _, number = state["nav"]["page"].partition("/")
    if page == "thread":
        return _chat(state, threads, int(number))
    if page == "new":
        return _new(state, threads)
    v = View(state, "Messages", COLOR)
    for i, thread in enumerate(threads):
        last = thread["texts"][-1] if thread["texts"] else {"from": "them", "text": ""}
        words = ("You: " if last["from"] == "me" else "") + last["text"]
        initials = "".join(word[:1] for word in thread["with"].split()[:2]) or "?"
        v.row(
            f"thread:{thread['with']}",
            thread["with"],
            words,
            badge=initials,
            trail="muted" if thread["muted"] else "",
            do=v.to(f"thread/{i}"),
        )
    if not threads:
        v.prose("empty", "No conversations.")
    v.floating("add", "edit", v.to("new"))
    return v


def _chat(state: State, threads: list[State], i: int) -> View:
    thread = threads[i]
    v = View(state, thread["with"], COLOR, from_end=True)
    for number, message in enumerate(thread["texts"]):
        lines = wrapped(message["text"], 28)
        v.items.append(
            Item(
                f"text:{number}",
                "bubble",
                "\n".join(lines),
                color=COLOR,
                on=message["from"] == "me",
                height=LINE * len(lines) + 0.03,
            )
        )

    def send() -> None:
        text = v.value("text").strip()
        if text:
            thread["texts"].append({"from": "me", "text": text})
            v.clear("text")

    def mute() -> None:
        thread["muted"] = not thread["muted"]
        toast(state, "Muted" if thread["muted"] else "No longer muted")

    def delete() -> None:
        up(state)
        threads.pop(i)
        toast(state, "Conversation deleted")

    field = v.input("text", "Message", enter=send, footer=True)
    button = Item("send", "action", glyph="send", color=COLOR, do=send)
    v.footer.append(Item("write", height=0.08, parts=(field, button), shares=(0.8, 0.2)))
    v.tool("mute", "silent" if thread["muted"] else "bell", mute)
    v.tool("delete", "delete", v.ask("delete"))
    v.confirm("delete", "Delete conversation?", f"All messages with {thread['with']} go.", "Delete", delete)
    return v


def _new(state: State, threads: list[State]) -> View:
    v = View(state, "New message", COLOR)
    v.input("to", "To: name or number")
    wanted = v.value("to").strip()
    v.input("text", "Message", lines=3)

    def send() -> None:
        text = v.value("text").strip()
        if not wanted or not text:
            toast(state, "Say to whom and what")
            return
        known = next((t for t in threads if t["with"].casefold() == wanted.casefold()), None)
        if known is None:
            known = {"with": _as_known(state, wanted), "texts": [], "muted": False}
            threads.append(known)
        known["texts"].append({"from": "me", "text": text})
        up(state)
        go(state, f"thread/{threads.index(known)}")

    v.button("send", "Send", send)
    names = [p["name"] for p in state["apps"]["contacts"]["people"]]
    if wanted:
        for name in names:
            if wanted.casefold() in name.casefold() and wanted.casefold() != name.casefold():
                v.row(f"suggest:{name}", name, glyph="contacts", do=_fill(v, name))
    return v


def _as_known(state: State, wanted: str) -> str:
    """The name as the contacts write it."""
    names = (p["name"] for p in state["apps"]["contacts"]["people"])
    return next((str(name) for name in names if name.casefold() == wanted.casefold()), wanted)


def _fill(v: View, name: str) -> Do:
    def do() -> None:
        frame = v.state["ui"]["frames"][-1]
        frame["fields"]["to"] = name
        frame["focus"] = "text"

    return do


APP = app(NAME, GLYPH, COLOR, content, view)
