"""Settings: connections, display, sound, notifications, date, and what the phone is."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import Do, Item, State, View, toast

NAME, GLYPH, COLOR = "settings", "settings", (88, 98, 116)
SWITCHES = {
    # field: (label, page, glyph)
    "wifi": ("Wi-Fi", "network", "wifi"), "bluetooth": ("Bluetooth", "network", "bluetooth"),
    "airplane": ("Airplane mode", "network", "airplane"), "hotspot": ("Hotspot", "network", "share"),
    "dark": ("Dark theme", "display", "dark"), "rotate": ("Auto-rotate", "display", "rotate"),
    "adaptive": ("Adaptive brightness", "display", "sun"), "vibrate": ("Vibrate on ring", "sound", "bell"),
    "silent": ("Do not disturb", "sound", "silent"), "location": ("Use location", "privacy", "maps"),
    "lock": ("Screen lock", "privacy", "lock"), "backup": ("Cloud backup", "privacy", "cloud"),
}  # fmt: skip
PAGES = {"network": "Network", "display": "Display", "sound": "Sound", "notifications": "Notifications",
         "privacy": "Privacy", "about": "About phone"}  # fmt: skip
_GLYPHS = {
    "network": "wifi",
    "display": "sun",
    "sound": "sound",
    "notifications": "bell",
    "privacy": "lock",
    "about": "info",
}
NETWORKS = ("Harbour", "Lakeside", "Office 5G", "Cafe Luna", "Library", "Guest 12")
RINGTONES = ("Aurora", "Breeze", "Chimes", "Marimba", "Pulse", "Sonar")
SLEEPS = ("15 seconds", "30 seconds", "1 minute", "2 minutes", "5 minutes", "10 minutes")
TEXT_SIZES = ("Small", "Default", "Large", "Largest")
NOTIFIERS = ("messages", "mail", "calendar", "shop", "music", "weather", "browser", "todo")


def content(rng: Random) -> State:
    in_range = rng.sample(NETWORKS, 4)
    return {
        **{name: rng.random() < 0.5 for name in SWITCHES},
        "airplane": False,
        "dark": rng.random() < 0.3,
        "in_range": in_range,
        "network": in_range[0],
        "brightness": rng.randint(2, 8),
        "volume": rng.randint(2, 8),
        "ringtone": rng.choice(RINGTONES),
        "sleep": rng.choice(SLEEPS),
        "text_size": "Default",
        "muted": [],
        "version": str(rng.randint(12, 17)),
        "model": f"Fern {rng.randint(3, 9)}",
        "storage_used": rng.randint(21, 118),
        "update_scheduled": False,
        "feedback_sent": False,
    }


def view(state: State) -> View:
    own = state["apps"][NAME]
    page = state["nav"]["page"]
    v = View(state, PAGES.get(page, "Settings"), COLOR)
    if not page:
        for name, title in PAGES.items():
            v.row(f"page:{name}", title, _summary(own, name), glyph=_GLYPHS[name], do=v.to(name))
        return v
    for name, (label, place, glyph) in SWITCHES.items():
        if place == page:
            v.switch(f"switch:{name}", label, own[name], _flip(own, name), glyph=glyph)
    if page == "network" and own["wifi"]:
        v.heading("Networks in range")
        for name in own["in_range"]:
            v.row(f"network:{name}", name, glyph="wifi", trail="Connected" if name == own["network"] else "",
                  do=_set(state, own, "network", name))  # fmt: skip
    elif page == "display":
        _level(v, own, "brightness", "Brightness")
        v.row("sleep", "Screen timeout", own["sleep"], glyph="clock", do=v.ask("sleep"))
        v.row("text_size", "Text size", own["text_size"], glyph="notes", do=v.ask("text_size"))
        v.choose("sleep", "Screen timeout", SLEEPS, lambda x: own.update(sleep=x), own["sleep"])
        v.choose("text_size", "Text size", TEXT_SIZES, lambda x: own.update(text_size=x), own["text_size"])
    elif page == "sound":
        _level(v, own, "volume", "Volume")
        v.row("ringtone", "Ringtone", own["ringtone"], glyph="music", do=v.ask("ringtone"))
        v.choose("ringtone", "Ringtone", RINGTONES, lambda x: own.update(ringtone=x), own["ringtone"])
    elif page == "notifications":
        for name in NOTIFIERS:
            v.switch(f"notify:{name}", name.capitalize(), name not in own["muted"], _mute(own, name))
    elif page == "about":
        v.row("model", "Model", own["model"])
        v.row("version", "System version", own["version"])
        v.row("storage", "Storage used", f"{own['storage_used']} GB of 128 GB")
        v.row("serial", "Serial number", f"TF{state['seed'] % 100_000:05d}")
    return v


def _summary(own: State, page: str) -> str:
    return {
        "network": own["network"] if own["wifi"] else "Wi-Fi is off",
        "display": f"Brightness {own['brightness']}, {own['text_size'].lower()} text",
        "sound": f"Volume {own['volume']}, {own['ringtone']}",
        "notifications": f"{len(own['muted'])} apps muted",
        "privacy": "Lock, location, backup",
        "about": own["model"],
    }[page]


def _flip(own: State, name: str) -> Do:
    return lambda: own.update({name: not own[name]})


def _set(state: State, own: State, name: str, value: str) -> Do:
    def do() -> None:
        own[name] = value
        toast(state, f"Connected to {value}")

    return do


def _mute(own: State, name: str) -> Do:
    def do() -> None:
        own["muted"] = [n for n in own["muted"] if n != name] if name in own["muted"] else [*own["muted"], name]

    return do


def _level(v: View, own: State, name: str, label: str) -> None:
    """A value from 0 to 10 with a button on either side."""

    def move(by: int) -> Do:
        return lambda: own.update({name: min(10, max(0, own[name] + by))})

    v.line(
        name,
        (
            Item(f"{name}:value", text=label, trail=str(own[name]), color=COLOR),
            Item(f"{name}:less", "chip", "-", color=COLOR, do=move(-1)),
            Item(f"{name}:more", "chip", "+", color=COLOR, do=move(1)),
        ),
        height=0.084,
        shares=(0.64, 0.18, 0.18),
    )


APP = app(NAME, GLYPH, COLOR, content, view)
