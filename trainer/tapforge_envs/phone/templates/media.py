"""Tasks in shop, browser, calculator, music and weather."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

from tapforge_envs.phone.apps.browser import DISHES, HEADLINES, ROUTES
from tapforge_envs.phone.apps.calculator import work_out
from tapforge_envs.phone.apps.music import PLAYLISTS
from tapforge_envs.phone.apps.weather import degrees
from tapforge_envs.phone.apps.world import CATEGORIES, CITIES, PRODUCTS, SONGS
from tapforge_envs.phone.judge import Apps
from tapforge_envs.phone.tasks import Do, Errs, Params

from .making import Plan, chore, combine, impossible, question, taps, unless

_SHOP, _BROWSER, _CALCULATOR, _MUSIC, _WEATHER = ("shop",), ("browser",), ("calculator",), ("music",), ("weather",)


# --- shop -------------------------------------------------------------------------------------------------------------


def to_product(name: str) -> Iterator[Do]:
    yield Do(app="shop")
    yield Do(tap=f"category:{PRODUCTS[name][0]}")
    yield Do(tap=f"product:{name}")


def _cart_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_product(params["product"])
    yield from taps(*["add"] * (int(params["count"]) - 1))
    yield from unless(errs, "add")


def _order_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_product(params["product"])
    yield from taps("add", "cart", "order")
    yield from unless(errs, "dialog:yes")


def _order_wish(params: Params, apps: Apps) -> None:
    own, name = apps["shop"], params["product"]
    own["orders"].append({"items": {name: 1}, "total": own["products"][name]["price"]})
    own["products"][name]["stock"] -= 1


def _sold_out(apps: Apps, params: Params, rng: Random) -> None:
    apps["shop"]["products"][params["product"]]["stock"] = 0


def _in_category(category: str) -> list[str]:
    return [name for name, (where, _) in PRODUCTS.items() if where == category]


def _prices_differ(apps: Apps, params: Params, rng: Random) -> None:
    names = _in_category(params["category"])
    for name, price in zip(names, rng.sample(range(11, 99), len(names)), strict=True):
        apps["shop"]["products"][name]["price"] = price


def cheapest(apps: Apps, category: str) -> str:
    return min(_in_category(category), key=lambda name: apps["shop"]["products"][name]["price"])


def _cheapest_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="shop")
    yield Do(tap=f"category:{params['category']}")
    yield Do(late=lambda state: Do(tap=f"product:{cheapest(state['apps'], params['category'])}"))
    yield from unless(errs, "add")


def _count(q: Params) -> str:
    name = q["product"].lower()
    if q["count"] == "1":
        return f"one {name}"
    return f"{q['count']} of the {name}"


# --- browser ----------------------------------------------------------------------------------------------------------


def to_page(site: str, title: str) -> Iterator[Do]:
    yield Do(app="browser")
    yield from taps(f"site:{site}", f"page:{title}")


def _figure(apps: Apps, site: str, title: str, pattern: str) -> str:
    found = re.search(pattern, apps["browser"]["pages"][site][title])
    if found is None:
        raise LookupError(f"{pattern!r} isn't in the page {site}/{title}")
    return found.group(1)


def _without_bookmark(apps: Apps, params: Params, rng: Random) -> None:
    apps["browser"]["bookmarks"] = []


# --- calculator -------------------------------------------------------------------------------------------------------


def _sum(q: Params) -> str:
    return f"{q['a']}{q['sign']}{q['b']}"


def _press_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="calculator")
    yield from taps(*(f"press:{key}" for key in _sum(params)), "press:=")


# --- music and weather ------------------------------------------------------------------------------------------------


def _song_plan(*ids: str) -> Plan:
    def plan(params: Params, errs: Errs) -> Iterator[Do]:
        yield Do(app="music")
        yield Do(tap=f"song:{params['song']}")
        yield from taps(*(id.format(**params) for id in ids[:-1]))
        yield from unless(errs, ids[-1].format(**params))

    return plan


def _not_liked(apps: Apps, params: Params, rng: Random) -> None:
    apps["music"]["liked"] = [song for song in apps["music"]["liked"] if song != params["song"]]


def _not_listed(apps: Apps, params: Params, rng: Random) -> None:
    songs = apps["music"]["playlists"][params["playlist"]]
    songs[:] = [song for song in songs if song != params["song"]]


def followed(apps: Apps, city: str, rng: Random) -> None:
    cities = apps["weather"]["cities"]
    if city not in cities:
        cities[rng.randrange(len(cities))] = city


def _not_followed(apps: Apps, params: Params, rng: Random) -> None:
    apps["weather"]["cities"] = [city for city in apps["weather"]["cities"] if city != params["city"]]


def to_city(city: str) -> Iterator[Do]:
    yield Do(app="weather")
    yield Do(tap=f"city:{city}")


def _follow_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="weather")
    yield Do(tap="add")
    yield Do(fill=("search", params["city"]))
    yield from unless(errs, f"add:{params['city']}")


TEMPLATES = (
    chore(
        "add_to_cart",
        combine(product=tuple(PRODUCTS), count=("1", "2", "3")),
        lambda q: f"Put {_count(q)} into the cart of the shop.",
        _SHOP,
        _cart_plan,
        lambda q, apps: apps["shop"]["cart"].update({q["product"]: int(q["count"])}),
        steps=14,
    ),
    impossible(
        "add_sold_out",
        combine(product=tuple(PRODUCTS), count=("1", "2", "3")),
        lambda q: f"Put {_count(q)} into the cart of the shop.",
        _SHOP,
        lambda q, errs: to_product(q["product"]),
        setup=_sold_out,
    ),
    chore(
        "order_product",
        combine(product=tuple(PRODUCTS)),
        lambda q: f"Order one {q['product'].lower()} in the shop.",
        _SHOP,
        _order_plan,
        _order_wish,
        steps=14,
    ),
    chore(
        "wish_for_product",
        combine(product=tuple(PRODUCTS)),
        lambda q: f"Put the {q['product'].lower()} on the wish list of the shop (the heart).",
        _SHOP,
        lambda q, errs: iter((*to_product(q["product"]), Do(tap="wish"))),
        lambda q, apps: apps["shop"]["wishes"].append(q["product"]),
        only="test",
    ),
    question(
        "ask_price",
        combine(product=tuple(PRODUCTS)),
        lambda q: f"How many euros does the {q['product'].lower()} cost in the shop?",
        _SHOP,
        lambda q, errs: to_product(q["product"]),
        lambda q, apps: [str(apps["shop"]["products"][q["product"]]["price"])],
    ),
    chore(
        "cheapest_to_cart",
        combine(category=CATEGORIES),
        lambda q: f'Put one of the cheapest product of the category "{q["category"]}" into the cart of the shop.',
        _SHOP,
        _cheapest_plan,
        lambda q, apps: apps["shop"]["cart"].update({cheapest(apps, q["category"]): 1}),
        setup=_prices_differ,
        steps=12,
    ),
    chore(
        "bookmark_page",
        combine(page=(*(f"fern.news/{h}" for h in HEADLINES), *(f"kitchen.example/{d}" for d in DISHES))),
        lambda q: f'Bookmark the page "{q["page"].partition("/")[2]}" of {q["page"].partition("/")[0]} in the browser.',
        _BROWSER,
        lambda q, errs: iter((*to_page(q["page"].partition("/")[0], q["page"].partition("/")[2]), Do(tap="bookmark"))),
        lambda q, apps: apps["browser"]["bookmarks"].append(q["page"]),
        setup=_without_bookmark,
        steps=12,
    ),
    question(
        "ask_departure",
        combine(city=ROUTES),
        lambda q: f"According to rails.example, when does the fast train to {q['city']} leave?",
        _BROWSER,
        lambda q, errs: to_page("rails.example", f"Trains to {q['city']}"),
        lambda q, apps: [_figure(apps, "rails.example", f"Trains to {q['city']}", r"(\d\d:\d\d)")],
    ),
    question(
        "ask_ticket_price",
        combine(city=ROUTES),
        lambda q: f"According to rails.example, how many euros is a ticket to {q['city']}?",
        _BROWSER,
        lambda q, errs: to_page("rails.example", f"Trains to {q['city']}"),
        lambda q, apps: [_figure(apps, "rails.example", f"Trains to {q['city']}", r"(\d+) euros")],
        only="test",
    ),
    question(
        "ask_cooking_time",
        combine(dish=DISHES),
        lambda q: f"For how many minutes does the small kitchen (kitchen.example) cook {q['dish'].lower()}?",
        _BROWSER,
        lambda q, errs: to_page("kitchen.example", q["dish"]),
        lambda q, apps: [_figure(apps, "kitchen.example", q["dish"], r"for (\d+) minutes")],
    ),
    question(
        "calculate",
        combine(a=("17", "46", "238", "905"), sign=("+", "-", "*"), b=("8", "39", "124")),
        lambda q: f"Work out {q['a']} {q['sign']} {q['b']} with the calculator.",
        _CALCULATOR,
        _press_plan,
        lambda q, apps: [work_out(_sum(q))],
        steps=18,
    ),
    chore(
        "play_song",
        combine(song=tuple(SONGS)),
        lambda q: f'Play the song "{q["song"]}".',
        _MUSIC,
        _song_plan("play"),
        lambda q, apps: apps["music"].update(playing=q["song"]),
        steps=12,
    ),
    chore(
        "like_song",
        combine(song=tuple(SONGS)),
        lambda q: f'Add the song "{q["song"]}" to the favorites in Music.',
        _MUSIC,
        _song_plan("like"),
        lambda q, apps: apps["music"]["liked"].append(q["song"]),
        setup=_not_liked,
        steps=12,
    ),
    chore(
        "add_to_playlist",
        combine(song=tuple(SONGS), playlist=PLAYLISTS),
        lambda q: f'Add the song "{q["song"]}" to the playlist {q["playlist"]}.',
        _MUSIC,
        _song_plan("add", "dialog:{playlist}"),
        lambda q, apps: apps["music"]["playlists"][q["playlist"]].append(q["song"]),
        setup=_not_listed,
        steps=14,
    ),
    question(
        "ask_temperature",
        combine(city=CITIES),
        lambda q: f"How many degrees does the weather app say for {q['city']} tomorrow?",
        _WEATHER,
        lambda q, errs: to_city(q["city"]),
        lambda q, apps: [
            re.sub(r"\D", "", degrees(apps["weather"], apps["weather"]["forecasts"][q["city"]][1]["high"]))
        ],
        setup=lambda apps, q, rng: followed(apps, q["city"], rng),
    ),
    question(
        "ask_sky",
        combine(city=CITIES),
        lambda q: f"Will it be sunny, cloudy, rainy, snowy or windy in {q['city']} tomorrow? Use the app's word.",
        _WEATHER,
        lambda q, errs: to_city(q["city"]),
        lambda q, apps: [apps["weather"]["forecasts"][q["city"]][1]["sky"]],
        others=lambda q, apps: ["Sunny", "Cloudy", "Rain", "Snow", "Windy"],
        setup=lambda apps, q, rng: followed(apps, q["city"], rng),
        only="test",
    ),
    chore(
        "follow_city",
        combine(city=CITIES),
        lambda q: f"Add {q['city']} to the cities of the weather app.",
        _WEATHER,
        _follow_plan,
        lambda q, apps: apps["weather"]["cities"].append(q["city"]),
        setup=_not_followed,
        steps=12,
    ),
)
