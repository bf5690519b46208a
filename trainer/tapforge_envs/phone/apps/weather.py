"""Weather: the cities one follows, each with five days; degrees in C or F."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import State, View, toast, up

from .world import CITIES, spoken

NAME, GLYPH, COLOR = "weather", "weather", (58, 134, 206)
SKIES = {"Sunny": "sun", "Cloudy": "cloud", "Rain": "rain", "Snow": "snow", "Windy": "wind"}


def content(rng: Random) -> State:
    forecasts = {
        city: [
            {"sky": rng.choice(list(SKIES)), "high": rng.randint(4, 32), "rain": rng.randint(0, 9) * 10}
            for _ in range(5)
        ]
        for city in CITIES
    }
    return {"forecasts": forecasts, "cities": rng.sample(CITIES, 4), "unit": "C"}


def degrees(own: State, celsius: int) -> str:
    return f"{celsius}°C" if own["unit"] == "C" else f"{round(celsius * 9 / 5 + 32)}°F"


def view(state: State) -> View:
    own = state["apps"][NAME]
    page, _, rest = state["nav"]["page"].partition("/")
    if page == "city":
        return _city(state, own, rest)
    if page == "add":
        v = View(state, "Add city", COLOR)
        v.input("search", "Search city")
        wanted = v.value("search").strip().casefold()
        for city in CITIES:
            if city not in own["cities"] and wanted in city.casefold():
                v.row(f"add:{city}", city, glyph="add", do=lambda city=city: _add(state, own, city))
        return v
    v = View(state, "Weather", COLOR)
    for city in own["cities"]:
        now = own["forecasts"][city][0]
        v.row(
            f"city:{city}",
            city,
            now["sky"],
            glyph=SKIES[now["sky"]],
            trail=degrees(own, now["high"]),
            do=v.to(f"city/{city}"),
        )
    v.switch("unit", "Fahrenheit", own["unit"] == "F", lambda: own.update(unit="C" if own["unit"] == "F" else "F"))
    v.floating("add", "add", v.to("add"))
    return v


def _add(state: State, own: State, city: str) -> None:
    own["cities"].append(city)
    up(state)
    toast(state, f"{city} added")


def _city(state: State, own: State, city: str) -> View:
    v = View(state, city, COLOR)
    day = int(state["now"][8:10])
    for ahead, forecast in enumerate(own["forecasts"][city]):
        name = "Today" if ahead == 0 else "Tomorrow" if ahead == 1 else spoken(f"2026-03-{day + ahead:02d}")
        v.row(
            f"day:{ahead}",
            name,
            f"{forecast['sky']}, {forecast['rain']}% rain",
            glyph=SKIES[forecast["sky"]],
            trail=degrees(own, forecast["high"]),
        )

    def remove() -> None:
        up(state)
        own["cities"].remove(city)
        toast(state, f"{city} removed")

    if city in own["cities"]:
        v.button("remove", "Remove city", remove, color=(196, 60, 54))
    return v


APP = app(NAME, GLYPH, COLOR, content, view)
