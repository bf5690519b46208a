"""Music: songs with search, a player, favorites, playlists."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import Do, Item, State, View, frame_of, toast

from .world import SONGS

NAME, GLYPH, COLOR = "music", "music", (214, 62, 130)
PLAYLISTS = ("Morning", "Running", "Party")


def content(rng: Random) -> State:
    return {
        "playing": None,
        "liked": rng.sample(list(SONGS), 2),
        "playlists": {name: rng.sample(list(SONGS), 2) for name in PLAYLISTS},
    }


def view(state: State) -> View:
    own = state["apps"][NAME]
    page, _, rest = state["nav"]["page"].partition("/")
    if page == "song":
        return _song(state, own, rest)
    if page == "list":
        v = View(state, rest, COLOR)
        _songs(v, own, own["liked"] if rest == "Favorites" else own["playlists"][rest])
        return v
    frame = frame_of(state)
    shown = frame.get("tab", "Songs")
    v = View(state, "Music", COLOR)
    v.line(
        "tabs",
        [Item(f"tab:{t}", "chip", t, on=t == shown, color=COLOR, do=_show(frame, t)) for t in ("Songs", "Playlists")],
    )
    if shown == "Playlists":
        for name in ("Favorites", *PLAYLISTS):
            songs = own["liked"] if name == "Favorites" else own["playlists"][name]
            v.row(f"list:{name}", name, f"{len(songs)} songs", glyph="menu", do=v.to(f"list/{name}"))
    else:
        v.input("search", "Search songs and artists")
        wanted = v.value("search").strip().casefold()
        _songs(v, own, [s for s in SONGS if wanted in f"{s} {SONGS[s]}".casefold()])
    if own["playing"]:
        v.footer.append(
            Item(
                "playing",
                text=own["playing"],
                detail=SONGS[own["playing"]],
                glyph="play",
                color=COLOR,
                height=0.084,
                do=v.to(f"song/{own['playing']}"),
            )
        )
    return v


def _show(frame: State, tab: str) -> Do:
    return lambda: frame.update(tab=tab, scroll=None, focus=None)


def _songs(v: View, own: State, songs: list[str]) -> None:
    for song in songs:
        trail = "playing" if own["playing"] == song else ""
        v.row(f"song:{song}", song, SONGS[song], glyph="music", trail=trail, do=v.to(f"song/{song}"))
    if not songs:
        v.prose("empty", "No songs.")


def _song(state: State, own: State, song: str) -> View:
    v = View(state, song, COLOR)
    playing = own["playing"] == song
    v.items.append(Item("cover", "picture", SONGS[song], glyph="music", color=(128, 60, 96), height=0.36))
    v.row("artist", SONGS[song], "Artist", glyph="contacts")
    v.button("play", "Pause" if playing else "Play", lambda: own.update(playing=None if playing else song))
    v.button("add", "Add to playlist", v.ask("add"), color=(88, 98, 116))

    def add(name: str) -> None:
        if song in own["playlists"][name]:
            toast(state, "It is in there already")
        else:
            own["playlists"][name].append(song)
            toast(state, f"Added to {name}")

    def like() -> None:
        own["liked"] = [s for s in own["liked"] if s != song] if song in own["liked"] else [*own["liked"], song]

    v.choose("add", "Add to playlist", PLAYLISTS, add)
    v.tool("like", "heart" if song in own["liked"] else "heart_line", like)
    return v


APP = app(NAME, GLYPH, COLOR, content, view)
