"""Files: folders, a page for each file, and what can be done with it: rename, move, copy, delete."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import State, View, toast, up

from .world import FILES

NAME, GLYPH, COLOR = "files", "files", (230, 140, 40)
FOLDERS = tuple(FILES)


def content(rng: Random) -> State:
    return {
        "files": [
            {"folder": folder, "name": name, "size": rng.randint(11, 990) * 10}
            for folder, names in FILES.items()
            for name in rng.sample(names, min(len(names), 3))
        ]
    }


def view(state: State) -> View:
    files = state["apps"][NAME]["files"]
    page, _, rest = state["nav"]["page"].partition("/")
    if page == "file":
        return _file(state, files, int(rest))
    if page == "rename":
        return _rename(state, files, int(rest))
    if page == "folder":
        v = View(state, rest, COLOR)
        for i in sorted(range(len(files)), key=lambda i: files[i]["name"]):
            if files[i]["folder"] == rest:
                v.row(
                    f"file:{files[i]['name']}", files[i]["name"], size_of(files[i]), glyph="notes", do=v.to(f"file/{i}")
                )
        if not v.items:
            v.prose("empty", "This folder is empty.")
        return v
    v = View(state, "Files", COLOR)
    v.input("search", "Search files")
    wanted = v.value("search").strip().casefold()
    if wanted:
        for i, f in enumerate(files):
            if wanted in f["name"].casefold():
                v.row(
                    f"file:{f['name']}", f["name"], f"{f['folder']}, {size_of(f)}", glyph="notes", do=v.to(f"file/{i}")
                )
        return v
    for folder in FOLDERS:
        count = sum(f["folder"] == folder for f in files)
        v.row(f"folder:{folder}", folder, f"{count} files", glyph="files", do=v.to(f"folder/{folder}"))
    return v


def size_of(file: State) -> str:
    """As the phone shows it: kB, or MB from 1000 kB on."""
    kilobytes = file["size"]
    return f"{kilobytes} kB" if kilobytes < 1000 else f"{kilobytes / 1000:.2f} MB"


def _file(state: State, files: list[State], i: int) -> View:
    f = files[i]
    v = View(state, f["name"], COLOR)

    def move(folder: str) -> None:
        f["folder"] = folder
        toast(state, f"Moved to {folder}")

    def delete() -> None:
        up(state)
        files.pop(i)
        toast(state, "File deleted")

    v.row("folder", f["folder"], "Folder", glyph="files")
    v.row("size", size_of(f), "Size", glyph="info")
    v.button("rename", "Rename", v.to(f"rename/{i}"))
    v.button("move", "Move", v.ask("move"))
    v.button("delete", "Delete", v.ask("delete"), color=(196, 60, 54))
    v.choose("move", "Move to", FOLDERS, move, f["folder"])
    v.confirm("delete", "Delete file?", f"{f['name']} can't be brought back.", "Delete", delete)
    return v


def _rename(state: State, files: list[State], i: int) -> View:
    f = files[i]
    v = View(state, "Rename file", COLOR)
    v.input("name", "Name", f["name"])

    def save() -> None:
        name = v.value("name").strip()
        if not name:
            toast(state, "A file needs a name")
        elif any(g is not f and g["name"] == name and g["folder"] == f["folder"] for g in files):
            toast(state, "That name is taken")
        else:
            up(state)
            f["name"] = name
            toast(state, "Renamed")

    v.button("clear", "Clear", lambda: v.clear("name"), color=(88, 98, 116))
    v.tool("save", "save", save)
    return v


APP = app(NAME, GLYPH, COLOR, content, view)
