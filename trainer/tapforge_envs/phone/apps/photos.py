"""Photos: a grid of pictures by album, a page for each picture."""

from __future__ import annotations

import colorsys
from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import Do, Item, State, View, frame_of, toast, up

NAME, GLYPH, COLOR = "photos", "photos", (150, 84, 180)
ALBUMS = ("Camera", "Travel", "Family")
MOTIFS = ("Beach", "Forest", "Snow", "Harbour", "Birthday", "Garden", "Kitten", "Bridge", "Market", "Sunset", "Boat",
          "Picnic")  # fmt: skip


def content(rng: Random) -> State:
    return {
        "photos": [
            {"title": title, "album": rng.choice(ALBUMS), "favorite": rng.random() < 0.2}
            for title in rng.sample(MOTIFS, 9)
        ]
    }


def view(state: State) -> View:
    photos = state["apps"][NAME]["photos"]
    page, _, rest = state["nav"]["page"].partition("/")
    if page == "photo":
        return _photo(state, photos, int(rest))
    frame = frame_of(state)
    shown = frame.get("album", "All")
    v = View(state, "Photos", COLOR)
    v.line(
        "albums",
        [Item(f"album:{a}", "chip", a, on=a == shown, color=COLOR, do=_show(frame, a)) for a in ("All", *ALBUMS)],
    )
    mine = [i for i, p in enumerate(photos) if shown in ("All", p["album"])]
    for start in range(0, len(mine), 3):
        row = [
            Item(
                f"photo:{photos[i]['title']}",
                "picture",
                photos[i]["title"],
                color=_color(photos[i]["title"]),
                glyph="star" if photos[i]["favorite"] else None,
                do=v.to(f"photo/{i}"),
            )
            for i in mine[start : start + 3]
        ]
        row += [Item(f"blank:{start}:{k}", "panel", color=(90, 90, 90)) for k in range(3 - len(row))]
        v.line(f"photos:{start}", row, height=0.17)
    if not mine:
        v.prose("empty", "No photos in this album.")
    return v


def _color(title: str) -> tuple[int, int, int]:
    r, g, b = colorsys.hls_to_rgb(MOTIFS.index(title) / len(MOTIFS), 0.45, 0.38)
    return round(r * 255), round(g * 255), round(b * 255)


def _show(frame: State, album: str) -> Do:
    return lambda: frame.update(album=album, scroll=None)


def _photo(state: State, photos: list[State], i: int) -> View:
    p = photos[i]
    v = View(state, p["title"], COLOR)

    def star() -> None:
        p["favorite"] = not p["favorite"]

    def delete() -> None:
        up(state)
        photos.pop(i)
        toast(state, "Photo deleted")

    def move(album: str) -> None:
        p["album"] = album
        toast(state, f"Moved to {album}")

    def turn(direction: str) -> bool:
        after = i + (1 if direction == "right" else -1)
        if not 0 <= after < len(photos):
            return False
        state["nav"]["page"] = f"photo/{after}"
        return True

    v.swiped = turn
    v.items.append(Item("picture", "picture", color=_color(p["title"]), height=0.5))
    v.row("album", p["album"], "Album", glyph="files", do=v.ask("album"))
    v.choose("album", "Move to album", ALBUMS, move, p["album"])
    v.tool("favorite", "star" if p["favorite"] else "star_line", star)
    v.tool("delete", "delete", v.ask("delete"))
    v.confirm("delete", "Delete photo?", p["title"], "Delete", delete)
    return v


APP = app(NAME, GLYPH, COLOR, content, view)
