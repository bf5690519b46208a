"""What a walk is made of: operations that a phone has in a state, each as steps of a plan.

An operation begins wherever the phone is and ends inside its app. `undo` are the steps that take it back, from wherever
the phone is; it has none where the phone can't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from tapforge_envs.protocol import Home

from .. import quickstart
from ..apps import clock, contacts, music, notes, photos, settings, todo
from ..apps.world import CHORES, SONGS
from ..device import HOME, State
from ..tasks import Do

#: of a counter, at least and at most
_COUNTS: Final = range(2, 5)
#: moves of a level
_MOVES: Final = (-3, -2, -1, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Operation:
    #: such as `count` or `todo-add`: what templates are named by
    kind: str
    app: str
    #: what it is about: a walk has at most one operation on it
    about: str
    steps: tuple[Do, ...]
    undo: tuple[Do, ...] = ()


def _taps(app: str, *targets: str) -> tuple[Do, ...]:
    """From the app's first page."""
    return (Do(action=Home()), Do(app=app), *(Do(tap=target) for target in targets))


def _both(kind: str, app: str, about: str, *targets: str) -> Operation:
    """What is taken back by doing it again."""
    steps = _taps(app, *targets)
    return Operation(kind, app, about, steps, steps)


# --- quickstart -------------------------------------------------------------------------------------------------------


def _small(state: State) -> Iterator[Operation]:
    for app in state["apps"][HOME]["apps"]:
        if app in quickstart.PANELS:
            shown = state["apps"][app]["shown"]
            for count in (1, 2):
                for names in combinations(shown, count):
                    targets = (*(f"switch:{name}" for name in names), "save")
                    yield _both("switch" if count == 1 else "switches", app, app, *targets)
        else:
            for count in _COUNTS:
                yield Operation("count", app, app, _taps(app, *["add"] * count))


# --- standard ---------------------------------------------------------------------------------------------------------


def _settings(own: State) -> Iterator[Operation]:
    for name, (_, page, _) in settings.SWITCHES.items():
        yield _both("setting", settings.NAME, name, f"page:{page}", f"switch:{name}")
    for name in settings.NOTIFIERS:
        yield _both("mute", settings.NAME, f"notify {name}", "page:notifications", f"notify:{name}")
    for name, page in (("brightness", "display"), ("volume", "sound")):
        for by in _MOVES:
            if 0 <= own[name] + by <= 10:
                there, back = ("more", "less") if by > 0 else ("less", "more")
                steps, undo = (
                    _taps(settings.NAME, f"page:{page}", *[f"{name}:{way}"] * abs(by)) for way in (there, back)
                )
                yield Operation("level", settings.NAME, name, steps, undo)


def _todo(own: State) -> Iterator[Operation]:
    texts = [item["text"] for item in own["items"]]
    for item in own["items"]:
        yield _both("todo-tick", todo.NAME, item["text"], f"list:{item['list']}", f"item:{item['text']}")
        remove = (Do(tap=f"item:{item['text']}", hold=True), Do(tap="dialog:yes"))
        yield Operation("todo-remove", todo.NAME, item["text"], (*_taps(todo.NAME, f"list:{item['list']}"), *remove))
    for text in CHORES:
        if text not in texts:
            for name in todo.LISTS:
                start = _taps(todo.NAME, f"list:{name}")
                add = (*start, Do(fill=("new", text)), Do(tap="add"))
                undo = (*start, Do(tap=f"item:{text}", hold=True), Do(tap="dialog:yes"))
                yield Operation("todo-add", todo.NAME, text, add, undo)


def _clock(own: State) -> Iterator[Operation]:
    for alarm in own["alarms"]:
        yield _both("alarm", clock.NAME, alarm["time"], f"switch:{alarm['time']}")


def _photos(own: State) -> Iterator[Operation]:
    for photo in own["photos"]:
        open_it = ("album:All", f"photo:{photo['title']}")
        yield _both("photo-star", photos.NAME, photo["title"], *open_it, "favorite")
        for album in photos.ALBUMS:
            if album != photo["album"]:
                steps, undo = (
                    _taps(photos.NAME, *open_it, "album", f"dialog:{name}") for name in (album, photo["album"])
                )
                yield Operation("photo-move", photos.NAME, photo["title"], steps, undo)


def _notes(own: State) -> Iterator[Operation]:
    for note in own["notes"]:
        yield _both("note-pin", notes.NAME, note["title"], f"note:{note['title']}", "pin")
        delete = _taps(notes.NAME, f"note:{note['title']}", "delete", "dialog:yes")
        yield Operation("note-delete", notes.NAME, note["title"], delete)


def _contacts(own: State) -> Iterator[Operation]:
    for person in own["people"]:
        yield _both("contact-star", contacts.NAME, person["name"], f"person:{person['name']}", "favorite")


def _music(own: State) -> Iterator[Operation]:
    for song in SONGS:
        yield _both("song-like", music.NAME, song, f"song:{song}", "like")


_STANDARD: Final[dict[str, Callable[[State], Iterator[Operation]]]] = {
    settings.NAME: _settings, todo.NAME: _todo, clock.NAME: _clock, photos.NAME: _photos, notes.NAME: _notes,
    contacts.NAME: _contacts, music.NAME: _music,
}  # fmt: skip


def operations(suite: str, state: State) -> list[Operation]:
    """In a fixed order."""
    if suite == "quickstart":
        return list(_small(state))
    return [one for name, of in _STANDARD.items() for one in of(state["apps"][name])]


def apps(suite: str) -> tuple[str, ...]:
    """Those that have operations."""
    return (*quickstart.PANELS, *quickstart.COUNTERS) if suite == "quickstart" else tuple(_STANDARD)
