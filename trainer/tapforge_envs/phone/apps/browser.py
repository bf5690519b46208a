"""Browser: an address field, a few sites with articles, bookmarks."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import State, View, frame_of, go, toast

from .world import CITIES

NAME, GLYPH, COLOR = "browser", "browser", (40, 128, 196)
#: address -> (title, what its pages are about)
SITES = {
    "fern.news": "Fern News",
    "rails.example": "Rails and timetables",
    "kitchen.example": "The small kitchen",
    "atlas.example": "Atlas of cities",
}
DISHES = ("Lentil soup", "Apple cake", "Rice salad", "Tomato pie", "Corn bread")
HEADLINES = ("Bridge reopens", "New park planned", "Choir wins prize", "Market moves", "Library extends hours")
ROUTES = ("Vienna", "Berlin", "Prague", "Milan", "Lyon")


def content(rng: Random) -> State:
    pages: dict[str, dict[str, str]] = {
        "fern.news": {},
        "rails.example": {},
        "kitchen.example": {},
        "atlas.example": {},
    }
    for title in HEADLINES:
        pages["fern.news"][title] = (
            f"{rng.choice(CITIES)}. {title}, {rng.randint(3, 28)} days earlier than expected. "
            f"The work cost {rng.randint(2, 90)} million euros, as the council said on Monday."
        )
    for city in ROUTES:
        pages["rails.example"][f"Trains to {city}"] = (
            f"The fast train to {city} leaves at {rng.randint(6, 21):02d}:{rng.randint(10, 59)} "
            f"from platform {rng.randint(1, 14)}. A ticket costs {rng.randint(19, 140)} euros."
        )
    for dish in DISHES:
        pages["kitchen.example"][dish] = (
            f"{dish} for {rng.randint(2, 6)} people. Bake or cook it for {rng.randint(4, 18) * 5} minutes at a medium "
            f"heat, and let it rest for {rng.randint(2, 9)} minutes. Serve it warm."
        )
    for city in rng.sample(CITIES, 6):
        pages["atlas.example"][city] = (
            f"{city} has {rng.randint(2, 90) * 100} thousand people and {rng.randint(3, 40)} museums. "
            f"The oldest bridge is from {rng.randint(1210, 1890)}."
        )
    return {"pages": pages, "bookmarks": [f"fern.news/{rng.choice(HEADLINES)}"]}


def view(state: State) -> View:
    own = state["apps"][NAME]
    page = state["nav"]["page"]
    if page == "bookmarks":
        v = View(state, "Bookmarks", COLOR)
        for address in own["bookmarks"]:
            site, _, title = address.partition("/")
            v.row(f"bookmark:{address}", title or SITES[site], site, glyph="star", do=v.to(f"at/{address}"))
        if not own["bookmarks"]:
            v.prose("empty", "No bookmarks.")
        return v
    if page.startswith("at/"):
        site, _, title = page.removeprefix("at/").partition("/")
        return _article(state, own, site, title) if title else _site(state, own, site)
    return _start(state)


def _start(state: State) -> View:
    v = View(state, "Browser", COLOR)
    frame = frame_of(state)

    def visit() -> None:
        address = v.value("address").strip().casefold()
        found = next((site for site, name in SITES.items() if address and address in (site, name.casefold())), None)
        if found is None:
            toast(state, "This site can't be reached")
            return
        frame["focus"] = None
        go(state, f"at/{found}")

    v.input("address", "Address", enter=visit)
    v.heading("Suggested")
    for site, name in SITES.items():
        v.row(f"site:{site}", name, site, glyph="browser", do=v.to(f"at/{site}"))
    v.row("bookmarks", "Bookmarks", glyph="star", do=v.to("bookmarks"))
    return v


def _site(state: State, own: State, site: str) -> View:
    v = View(state, SITES[site], COLOR)
    for title in own["pages"][site]:
        v.row(f"page:{title}", title, glyph="notes", do=v.to(f"at/{site}/{title}"))
    _bookmark(state, v, own, site)
    return v


def _article(state: State, own: State, site: str, title: str) -> View:
    v = View(state, title, COLOR)
    v.heading(SITES[site])
    v.prose("article", own["pages"][site][title])
    _bookmark(state, v, own, f"{site}/{title}")
    return v


def _bookmark(state: State, v: View, own: State, address: str) -> None:
    marked = address in own["bookmarks"]

    def do() -> None:
        if marked:
            own["bookmarks"].remove(address)
        else:
            own["bookmarks"].append(address)
        toast(state, "Bookmark removed" if marked else "Bookmark added")

    v.tool("bookmark", "star" if marked else "star_line", do)


APP = app(NAME, GLYPH, COLOR, content, view)
