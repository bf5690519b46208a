"""Tasks in notes, todo, files and photos."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tapforge_envs.phone.apps.files import FOLDERS, size_of
from tapforge_envs.phone.apps.photos import ALBUMS, MOTIFS
from tapforge_envs.phone.apps.todo import LISTS
from tapforge_envs.phone.apps.world import CHORES, FILES, NOTE_LINES, NOTE_TITLES
from tapforge_envs.phone.device import State
from tapforge_envs.phone.judge import Apps
from tapforge_envs.phone.tasks import Do, Errs, Params

from .making import Plan, chore, combine, drop, fill, find, has, impossible, question, taps, unless

_NOTES, _TODO, _FILES, _PHOTOS = ("notes",), ("todo",), ("files",), ("photos",)
_NAMES = tuple(name for names in FILES.values() for name in names)


# --- notes ------------------------------------------------------------------------------------------------------------


def note(apps: Apps, title: str) -> State:
    found: State = find(apps["notes"]["notes"], title=title)
    return found


def noted(apps: Apps, title: str, rng: Random) -> None:
    notes = apps["notes"]["notes"]
    if not has(notes, title=title):
        notes[rng.randrange(len(notes))]["title"] = title
    note(apps, title)["pinned"] = False


def to_note(title: str) -> Iterator[Do]:
    yield Do(app="notes")
    yield Do(tap=f"note:{title}")


def new_note(title: str, text: str, errs: Errs) -> Iterator[Do]:
    yield Do(app="notes")
    yield Do(tap="add")
    yield fill("title", title)
    yield fill("body", text)
    yield from unless(errs, "save")


def _new_wish(params: Params, apps: Apps) -> None:
    apps["notes"]["notes"].append({"title": params["title"], "body": params["text"], "pinned": False})


def _delete_note_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_note(params["title"])
    yield Do(tap="delete")
    yield from unless(errs, "dialog:yes")


def _longer(params: Params, apps: Apps) -> str:
    return f"{note(apps, params['title'])['body']}\n{params['text']}"


def _extend_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_note(params["title"])
    yield Do(tap="edit")
    yield Do(late=lambda state: fill("body", _longer(params, state["apps"])))
    yield from unless(errs, "save")


# --- todo -------------------------------------------------------------------------------------------------------------


def task(apps: Apps, text: str) -> State:
    found: State = find(apps["todo"]["items"], text=text)
    return found


def open_task(apps: Apps, text: str, rng: Random) -> None:
    items = apps["todo"]["items"]
    if not has(items, text=text):
        items[rng.randrange(len(items))]["text"] = text
    task(apps, text)["done"] = False


def to_list(name: str) -> Iterator[Do]:
    yield Do(app="todo")
    yield Do(tap=f"list:{name}")


def to_task(text: str) -> Iterator[Do]:
    yield Do(app="todo")
    yield Do(late=lambda state: Do(tap=f"list:{task(state['apps'], text)['list']}"))


def _add_task_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_list(params["list"])
    yield fill("new", params["text"])
    yield from unless(errs, "add")


def _tick_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_task(params["text"])
    yield Do(tap=f"item:{params['text']}")


def _remove_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_task(params["text"])
    yield Do(tap=f"item:{params['text']}", hold=True)
    yield from unless(errs, "dialog:yes")


def _clear_setup(apps: Apps, params: Params, rng: Random) -> None:
    items = apps["todo"]["items"]
    for number, item in enumerate(items[:4]):
        item.update(list=params["list"], done=number < 2)


def _clear_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_list(params["list"])
    yield Do(tap="clear")
    yield from unless(errs, "dialog:yes")


def _still_open(params: Params, apps: Apps) -> list[str]:
    return [str(sum(i["list"] == params["list"] and not i["done"] for i in apps["todo"]["items"]))]


# --- files ------------------------------------------------------------------------------------------------------------


def stored(apps: Apps, name: str, away_from: str = "") -> None:
    """Sees to one file with this name, not in `away_from`."""
    files = apps["files"]["files"]
    if not has(files, name=name):
        files.append({"folder": next(f for f, names in FILES.items() if name in names), "name": name, "size": 4200})
    found = find(files, name=name)
    if found["folder"] == away_from:
        found["folder"] = next(folder for folder in FOLDERS if folder != away_from)


def _to_file(name: str) -> Iterator[Do]:
    yield Do(app="files")
    yield Do(late=lambda state: Do(tap=f"folder:{find(state['apps']['files']['files'], name=name)['folder']}"))
    yield Do(tap=f"file:{name}")


def _move_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from _to_file(params["file"])
    yield Do(tap="move")
    yield from unless(errs, f"dialog:{params['folder']}")


def _rename_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from _to_file(params["file"])
    yield Do(tap="rename")
    yield fill("name", params["name"])
    yield from unless(errs, "save")


def _delete_file_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from _to_file(params["file"])
    yield Do(tap="delete")
    yield from unless(errs, "dialog:yes")


def _different_sizes(apps: Apps, params: Params, rng: Random) -> None:
    sizes = rng.sample(range(11, 99), len(apps["files"]["files"]))
    for file, size in zip(apps["files"]["files"], sizes, strict=True):
        file["size"] = size * 10


def _biggest(params: Params, apps: Apps) -> list[str]:
    here = [f for f in apps["files"]["files"] if f["folder"] == params["folder"]]
    return [max(here, key=lambda f: f["size"])["name"]]


def _others_here(params: Params, apps: Apps) -> list[str]:
    return [f["name"] for f in apps["files"]["files"]]


# --- photos -----------------------------------------------------------------------------------------------------------


def shot(apps: Apps, title: str, rng: Random, away_from: str = "") -> None:
    """Sees to one photo with this title, no favorite, not in `away_from`."""
    photos = apps["photos"]["photos"]
    if not has(photos, title=title):
        photos[rng.randrange(len(photos))]["title"] = title
    found = find(photos, title=title)
    found["favorite"] = False
    if found["album"] == away_from:
        found["album"] = next(album for album in ALBUMS if album != away_from)


def _to_photo(title: str) -> Iterator[Do]:
    yield Do(app="photos")
    yield Do(tap=f"photo:{title}")


def _photo_plan(*ids: str) -> Plan:
    def plan(params: Params, errs: Errs) -> Iterator[Do]:
        yield from _to_photo(params["photo"])
        yield from taps(*(id.format(**params) for id in ids[:-1]))
        yield from unless(errs, ids[-1].format(**params))

    return plan


TEMPLATES = (
    chore(
        "write_note",
        combine(title=("Ideas", "Shopping", "Phone call"), text=NOTE_LINES[:5]),
        lambda q: f'Write a note with the title "{q["title"]}" and the text "{q["text"]}".',
        _NOTES,
        lambda q, errs: new_note(q["title"], q["text"], errs),
        _new_wish,
        steps=14,
    ),
    chore(
        "delete_note",
        combine(title=NOTE_TITLES),
        lambda q: f'Delete the note "{q["title"]}".',
        _NOTES,
        _delete_note_plan,
        lambda q, apps: drop(apps["notes"]["notes"], title=q["title"]),
        setup=lambda apps, q, rng: noted(apps, q["title"], rng),
    ),
    chore(
        "pin_note",
        combine(title=NOTE_TITLES),
        lambda q: f'Pin the note "{q["title"]}".',
        _NOTES,
        lambda q, errs: iter((*to_note(q["title"]), Do(tap="pin"))),
        lambda q, apps: note(apps, q["title"]).update(pinned=True),
        setup=lambda apps, q, rng: noted(apps, q["title"], rng),
        steps=10,
    ),
    chore(
        "extend_note",
        combine(title=NOTE_TITLES[:4], text=("Ask Nora", "Before noon", "Number seven")),
        lambda q: f'Add the line "{q["text"]}" to the end of the note "{q["title"]}".',
        _NOTES,
        _extend_plan,
        lambda q, apps: note(apps, q["title"]).update(body=_longer(q, apps)),
        setup=lambda apps, q, rng: noted(apps, q["title"], rng),
        only="test",
    ),
    chore(
        "add_task",
        combine(text=("Sharpen knives", "Order stamps", "Sweep the yard", "Print the form"), list=LISTS),
        lambda q: f'Add the task "{q["text"]}" to the list {q["list"]} in Todo.',
        _TODO,
        _add_task_plan,
        lambda q, apps: apps["todo"]["items"].append({"text": q["text"], "list": q["list"], "done": False}),
        steps=10,
    ),
    chore(
        "tick_task",
        combine(text=CHORES),
        lambda q: f'Mark the task "{q["text"]}" as done in Todo.',
        _TODO,
        _tick_plan,
        lambda q, apps: task(apps, q["text"]).update(done=True),
        setup=lambda apps, q, rng: open_task(apps, q["text"], rng),
        steps=10,
    ),
    impossible(
        "tick_missing_task",
        combine(text=CHORES),
        lambda q: f'Mark the task "{q["text"]}" as done in Todo.',
        _TODO,
        lambda q, errs: iter((*to_list("Work"), *taps("list:Home"))),
        setup=lambda apps, q, rng: drop(apps["todo"]["items"], text=q["text"]),
    ),
    chore(
        "remove_task",
        combine(text=CHORES),
        lambda q: f'Remove the task "{q["text"]}" from Todo.',
        _TODO,
        _remove_plan,
        lambda q, apps: drop(apps["todo"]["items"], text=q["text"]),
        setup=lambda apps, q, rng: open_task(apps, q["text"], rng),
        steps=10,
        only="validation",
    ),
    chore(
        "clear_done_tasks",
        combine(list=LISTS),
        lambda q: f"Clear the done tasks of the list {q['list']} in Todo.",
        _TODO,
        _clear_plan,
        lambda q, apps: drop(apps["todo"]["items"], list=q["list"], done=True),
        setup=_clear_setup,
        steps=10,
        only="test",
    ),
    question(
        "count_open_tasks",
        combine(list=LISTS),
        lambda q: f"How many tasks are still open in the list {q['list']} of Todo?",
        _TODO,
        lambda q, errs: to_list(q["list"]),
        _still_open,
        steps=8,
    ),
    chore(
        "move_file",
        combine(file=_NAMES[:8], folder=FOLDERS),
        lambda q: f"Move the file {q['file']} to the folder {q['folder']}.",
        _FILES,
        _move_plan,
        lambda q, apps: find(apps["files"]["files"], name=q["file"]).update(folder=q["folder"]),
        setup=lambda apps, q, rng: stored(apps, q["file"], q["folder"]),
    ),
    chore(
        "rename_file",
        combine(file=_NAMES, name=("final.pdf", "old.bak")),
        lambda q: f"Rename the file {q['file']} to {q['name']}.",
        _FILES,
        _rename_plan,
        lambda q, apps: find(apps["files"]["files"], name=q["file"]).update(name=q["name"]),
        setup=lambda apps, q, rng: stored(apps, q["file"]),
    ),
    chore(
        "delete_file",
        combine(file=_NAMES),
        lambda q: f"Delete the file {q['file']}.",
        _FILES,
        _delete_file_plan,
        lambda q, apps: drop(apps["files"]["files"], name=q["file"]),
        setup=lambda apps, q, rng: stored(apps, q["file"]),
    ),
    question(
        "ask_file_size",
        combine(file=_NAMES),
        lambda q: f"How big is the file {q['file']}?",
        _FILES,
        lambda q, errs: _to_file(q["file"]),
        lambda q, apps: [size_of(find(apps["files"]["files"], name=q["file"]))],
        setup=lambda apps, q, rng: stored(apps, q["file"]),
    ),
    question(
        "find_biggest_file",
        combine(folder=FOLDERS),
        lambda q: f"Which is the biggest file in the folder {q['folder']}?",
        _FILES,
        lambda q, errs: iter((Do(app="files"), Do(tap=f"folder:{q['folder']}"))),
        _biggest,
        others=_others_here,
        setup=_different_sizes,
        only="test",
    ),
    chore(
        "favorite_photo",
        combine(photo=MOTIFS),
        lambda q: f'Mark the photo "{q["photo"]}" as a favorite.',
        _PHOTOS,
        _photo_plan("favorite"),
        lambda q, apps: find(apps["photos"]["photos"], title=q["photo"]).update(favorite=True),
        setup=lambda apps, q, rng: shot(apps, q["photo"], rng),
        steps=10,
    ),
    chore(
        "move_photo",
        combine(photo=MOTIFS, album=ALBUMS),
        lambda q: f'Move the photo "{q["photo"]}" to the album {q["album"]}.',
        _PHOTOS,
        _photo_plan("album", "dialog:{album}"),
        lambda q, apps: find(apps["photos"]["photos"], title=q["photo"]).update(album=q["album"]),
        setup=lambda apps, q, rng: shot(apps, q["photo"], rng, q["album"]),
        steps=12,
    ),
    chore(
        "delete_photo",
        combine(photo=MOTIFS),
        lambda q: f'Delete the photo "{q["photo"]}".',
        _PHOTOS,
        _photo_plan("delete", "dialog:yes"),
        lambda q, apps: drop(apps["photos"]["photos"], title=q["photo"]),
        setup=lambda apps, q, rng: shot(apps, q["photo"], rng),
        steps=12,
    ),
    impossible(
        "delete_missing_photo",
        combine(photo=MOTIFS),
        lambda q: f'Delete the photo "{q["photo"]}".',
        _PHOTOS,
        lambda q, errs: iter((Do(app="photos"),)),
        setup=lambda apps, q, rng: drop(apps["photos"]["photos"], title=q["photo"]),
        steps=8,
    ),
)
