"""Mail: inbox, starred, archive, sent and trash; a page for each mail; a form to write and reply."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import Do, State, View, go, toast, up

from .world import LINES, PEOPLE, TOPICS, email, full_name

NAME, GLYPH, COLOR = "mail", "mail", (206, 66, 56)
FOLDERS = {"inbox": "Inbox", "archive": "Archive", "sent": "Sent", "trash": "Trash"}
_GLYPHS = {"inbox": "mail", "archive": "files", "sent": "send", "trash": "delete"}


def letter(first: str, subject: str, rng: Random) -> State:
    said = " ".join(line if line.endswith("?") else f"{line}." for line in rng.sample(LINES, 2))
    body = f"Hello,\n{said}\nBest wishes, {first}"
    return {
        "folder": "inbox",
        "from": full_name(first),
        "address": email(first),
        "subject": subject,
        "body": body,
        "starred": False,
    }


def content(rng: Random) -> State:
    senders, subjects = rng.sample(list(PEOPLE), 7), rng.sample(TOPICS, 7)
    mails = [letter(first, subject, rng) for first, subject in zip(senders, subjects, strict=True)]
    mails[-1]["folder"] = "archive"
    mails[0]["starred"] = True
    return {"mails": mails, "signature": "Sent from my phone"}


def view(state: State) -> View:
    page, _, rest = state["nav"]["page"].partition("/")
    if page == "mail":
        return _mail(state, int(rest))
    if page in ("write", "reply"):
        return _write(state, int(rest) if page == "reply" else None)
    if page == "folders":
        v = View(state, "Folders", COLOR)
        for name, title in FOLDERS.items():
            count = sum(m["folder"] == name for m in state["apps"][NAME]["mails"])
            v.row(f"folder:{name}", title, glyph=_GLYPHS[name], trail=str(count), do=v.to(f"folder/{name}"))
        starred = sum(m["starred"] for m in state["apps"][NAME]["mails"])
        v.row("folder:starred", "Starred", glyph="star", trail=str(starred), do=v.to("folder/starred"))
        return v
    return _folder(state, rest or "inbox", first=not page)


def _folder(state: State, folder: str, first: bool) -> View:
    v = View(state, FOLDERS.get(folder, "Starred"), COLOR)
    mails = state["apps"][NAME]["mails"]
    read = state["traces"].get(NAME, [])
    for i in reversed(range(len(mails))):
        m = mails[i]
        if m["folder"] == folder or (folder == "starred" and m["starred"] and m["folder"] != "trash"):
            initials = "".join(word[:1] for word in m["from"].split()[:2]) or "?"
            signs = [word for word, on in (("starred", m["starred"]), ("new", m["subject"] not in read)) if on]
            v.row(
                f"mail:{m['subject']}",
                m["from"],
                m["subject"],
                badge=initials,
                trail=signs[0] if signs else "",
                do=_open(state, m, i),
            )
    if not v.items:
        v.prose("empty", "Nothing in this folder.")
    if first:
        v.tool("folders", "menu", v.to("folders"))
    v.floating("write", "edit", v.to("write"))
    return v


def _mail(state: State, i: int) -> View:
    own = state["apps"][NAME]
    m = own["mails"][i]
    v = View(state, m["subject"], COLOR)
    v.row("from", m["from"], m["address"], badge="".join(word[:1] for word in m["from"].split()[:2]) or "?")
    v.prose("body", m["body"])

    def move(folder: str) -> None:
        up(state)
        m["folder"] = folder
        toast(state, f"Moved to {FOLDERS[folder]}")

    def star() -> None:
        m["starred"] = not m["starred"]

    v.button("reply", "Reply", v.to(f"reply/{i}"))
    if m["folder"] == "archive":
        v.button("inbox", "Move to inbox", lambda: move("inbox"), color=(88, 98, 116))
    v.tool("star", "star" if m["starred"] else "star_line", star)
    if m["folder"] != "archive":
        v.tool("archive", "files", lambda: move("archive"))
    if m["folder"] != "trash":
        v.tool("delete", "delete", lambda: move("trash"))
    return v


def _open(state: State, m: State, i: int) -> Do:
    def do() -> None:
        read = state["traces"].setdefault(NAME, [])
        if m["subject"] not in read:
            read.append(m["subject"])
        go(state, f"mail/{i}")

    return do


def _write(state: State, i: int | None) -> View:
    own = state["apps"][NAME]
    v = View(state, "New mail" if i is None else "Reply", COLOR)
    m = own["mails"][i] if i is not None else None
    v.input("to", "To", m["address"] if m else "")
    v.input("subject", "Subject", f"Re: {m['subject']}" if m else "")
    v.input("body", "Write a mail", lines=5)

    def send() -> None:
        to, subject, body = (v.value(name).strip() for name in ("to", "subject", "body"))
        if "@" not in to:
            toast(state, "Not a mail address")
            return
        up(state)
        own["mails"].append(
            {"folder": "sent", "from": "Me", "address": to, "subject": subject, "body": body, "starred": False}
        )
        toast(state, "Mail sent")

    v.tool("send", "send", send)
    return v


APP = app(NAME, GLYPH, COLOR, content, view)
