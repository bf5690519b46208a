"""A sentence for a difference. Each change has words of its own, and none has those of another, so that a reader of
the sentence on the phone where it begins knows the difference.

Changes that have no words (`WordError`) make no task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .. import quickstart
from ..apps.settings import SWITCHES
from ..difference import Change


class WordError(ValueError):
    """A change that there are no words for."""


def sentence(suite: str, changes: Sequence[Change]) -> str:
    """Raises WordError."""
    return _small(changes) if suite == "quickstart" else _standard(changes)


# --- quickstart: its suite's own words --------------------------------------------------------------------------------


def _small(changes: Sequence[Change]) -> str:
    parts: list[str] = []
    on_off: Mapping[tuple[str, bool], list[str]] = defaultdict(list)
    for change in changes:
        app = change.at[0]
        if app in quickstart.PANELS and change.at[1:2] == ("stored",):
            on_off[app, bool(change.becomes)].append(change.at[2])
        elif app in quickstart.COUNTERS and change.at[1:] == ("count",):
            parts.append(f"add {change.becomes} in {app}")
        else:
            raise WordError(f"there are no words for a change of {'.'.join(change.at)}")
    switched = [f"turn {'on' if on else 'off'} {' and '.join(names)} in {app}" for (app, on), names in on_off.items()]
    return " and ".join((*switched, *parts))


# --- standard ---------------------------------------------------------------------------------------------------------


def _standard(changes: Sequence[Change]) -> str:
    said = [words for change in changes for words in _words(change)]
    if len(said) == 1:
        return f"{said[0]}."
    later = [one[0].lower() + one[1:] for one in said[1:]]
    return f"{', '.join([said[0], *later[:-1]])} and {later[-1]}."


def _words(change: Change) -> list[str]:
    name = ".".join(change.at)
    if change.at[0] == "settings":
        return _setting(change)
    if name in _ITEMS:
        return _items(change, *_ITEMS[name])
    if name == "music.liked":
        return [f"Like the song {song} in Music" for song in change.plus] + [
            f"Take the song {song} out of the favorites in Music" for song in change.minus
        ]
    raise WordError(f"there are no words for a change of {name}")


def _setting(change: Change) -> list[str]:
    name = change.at[1]
    if name in SWITCHES:
        return [f"Turn {'on' if change.becomes else 'off'} {SWITCHES[name][0]} in Settings"]
    if name == "muted":
        return [f"Mute the notifications of {app.capitalize()} in Settings" for app in change.plus] + [
            f"Unmute the notifications of {app.capitalize()} in Settings" for app in change.minus
        ]
    if name in ("brightness", "volume"):
        return [f"Set the {name} to {change.becomes} in Settings"]
    raise WordError(f"there are no words for a change of settings.{name}")


#: place -> (what tells an item, field -> words for its change, words for a new item, words for one that is gone)
_Fields = Mapping[str, Callable[[Any, Any], str]]
_ITEMS: Final[Mapping[str, tuple[str, _Fields, Callable[[Any], str] | None, Callable[[Any], str] | None]]] = {
    "todo.items": (
        "text",
        {"done": lambda i, done: f"Mark {i['text']} as {'done' if done else 'not done'} in Todo"},
        lambda i: f"Add {i['text']} to the list {i['list']} in Todo",
        lambda i: f"Remove {i['text']} from Todo",
    ),
    "clock.alarms": (
        "time",
        {"on": lambda i, on: f"Turn {'on' if on else 'off'} the {i['time']} alarm in Clock"},
        None,
        None,
    ),
    "photos.photos": (
        "title",
        {
            "favorite": lambda i, on: f"{'Mark' if on else 'Unmark'} the photo {i['title']} as favorite in Photos",
            "album": lambda i, album: f"Move the photo {i['title']} to the album {album} in Photos",
        },
        None,
        None,
    ),
    "notes.notes": (
        "title",
        {"pinned": lambda i, on: f"{'Pin' if on else 'Unpin'} the note {i['title']} in Notes"},
        None,
        lambda i: f"Delete the note {i['title']} in Notes",
    ),
    "contacts.people": (
        "name",
        {"favorite": lambda i, on: f"{'Add' if on else 'Remove'} {i['name']} as a favorite in Contacts"},
        None,
        None,
    ),
}


def _items(
    change: Change,
    key: str,
    fields: _Fields,
    new: Callable[[Any], str] | None,
    gone: Callable[[Any], str] | None,
) -> list[str]:
    """Items that are in both lists by their key were changed."""
    minus, plus = ({item[key]: item for item in items} for items in (change.minus, change.plus))
    if len(minus) < len(change.minus) or len(plus) < len(change.plus):
        raise WordError(f"several items of {'.'.join(change.at)} have the same {key}")
    said = []
    for name in dict.fromkeys((*minus, *plus)):
        before, after = minus.get(name), plus.get(name)
        if before is not None and after is not None:
            for field in after:
                if before.get(field) != after[field]:
                    if field not in fields:
                        raise WordError(f"there are no words for a change of {'.'.join(change.at)}.{field}")
                    said.append(fields[field](after, after[field]))
        else:
            say = new if before is None else gone
            if say is None:
                raise WordError(f"there are no words for an item more or less of {'.'.join(change.at)}")
            said.append(say(after if before is None else before))
    return said
