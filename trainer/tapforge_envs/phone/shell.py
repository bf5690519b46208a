"""What the standard phone does around its apps: back, gestures, typing, scrolling, and what interrupts.

The part of the state outside the apps' content:

    now                   date and time at the start, "2026-03-05T09:41"
    ui.frames             the memory of each page on the back stack of the app in front (`view.blank_frame`)
    ui.interrupt          a banner or a question of the system that lies over everything, or None
    ui.pending            interrupts that come when an app is opened: {"when": app, ...}
    ui.toast, ui.ticks    words that are gone with the next action; actions so far
    traces                what reading leaves behind (mails that were opened, ...): no judge looks at it
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from . import keyboard
from .device import App, Event, Shell
from .layout import compose, dialog_handlers, handlers, shown
from .screen import Color
from .view import State, View, blank_frame, frame_of, up

#: actions after which a banner goes by itself
_BANNER_STAYS = 4
#: longest text of a field, in characters
_FIELD_LIMIT = 500
_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


def _fresh(state: State, rng: Random) -> None:
    state["now"] = f"2026-03-{rng.randint(2, 9):02d}T{rng.randint(8, 19):02d}:{rng.randint(0, 59):02d}"
    state["ui"] = {"frames": [blank_frame()], "interrupt": None, "pending": [], "toast": "", "ticks": 0}
    state["traces"] = {}


def _opened(state: State, name: str) -> None:
    ui = state["ui"]
    ui["frames"] = [blank_frame()]
    if ui["interrupt"] is None:
        due = next((p for p in ui["pending"] if p["when"] == name), None)
        if due is not None:
            ui["pending"].remove(due)
            ui["interrupt"] = {**due, "left": _BANNER_STAYS}


def _tick(state: State) -> None:
    ui = state["ui"]
    ui["ticks"] += 1
    ui["toast"] = ""
    interrupt = ui["interrupt"]
    if interrupt and interrupt["kind"] == "banner":
        interrupt["left"] -= 1
        if interrupt["left"] <= 0:
            ui["interrupt"] = None


def _back(state: State) -> bool:
    """The nearest thing that Back closes; False leaves the app."""
    ui, frame = state["ui"], frame_of(state)
    if ui["interrupt"]:
        ui["interrupt"] = None
    elif frame["focus"]:
        frame["focus"] = None
    elif frame["ask"]:
        frame["ask"] = None
    elif state["nav"]["stack"]:
        up(state)
    else:
        return False
    return True


def _hidden(state: State) -> Any:
    """What can't be seen but changes what the next actions do."""
    ui = state["ui"]
    return [state["nav"]["stack"], ui["frames"], ui["interrupt"], [p["when"] for p in ui["pending"]]]


SHELL = Shell(fresh=_fresh, opened=_opened, tick=_tick, back=_back, hidden=_hidden, switcher="recents")


def app(name: str, glyph: str, color: Color, content: Callable[[Random], State], view: Callable[[State], View]) -> App:
    """An app of the standard phone from its fresh content and its pages."""
    return App(
        name,
        glyph,
        color,
        content,
        lambda state: compose(view(state)),
        lambda state, event: act(state, view(state), event),
    )


def system(state: State, event: Event) -> bool | None:
    """What the navigation bar and whatever lies over the app do with a gesture; None when it is the app's."""
    if event.target.startswith("nav:"):
        return _navigate(state, event)
    interrupt = state["ui"]["interrupt"]
    if interrupt and (event.target.startswith("interrupt:") or interrupt["kind"] != "banner"):
        return _answer_interrupt(state, event)
    return None


def act(state: State, view: View, event: Event) -> bool:
    """What a gesture does; False where it has no effect."""
    done = system(state, event)
    if done is not None:
        return done
    if view.dialog is not None:
        return _answer_dialog(state, view, event)
    match event.kind:
        case "tap" | "double_tap":
            return _tap(state, view, event.target)
        case "long_press":
            item = handlers(view).get(event.target)
            return _run(item.hold if item else None)
        case "type":
            return _type(state, view, event.text)
        case "enter":
            return _enter(state, view)
        case "key":
            return _key(state, view, event.text)
        case "scroll":
            return _scroll(state, view, event.direction)
        case "swipe" | "drag":
            # the finger goes up, the content that lies below comes into view
            return _scroll(state, view, _OPPOSITE[event.direction])


def _run(do: Callable[[], None] | None) -> bool:
    if do is None:
        return False
    do()
    return True


def _navigate(state: State, event: Event) -> bool:
    """The buttons at the bottom do what the keys do."""
    if event.kind != "tap":
        return False
    state["nav"]["press"] = event.target.removeprefix("nav:")
    return True


def _answer_interrupt(state: State, event: Event) -> bool:
    ui = state["ui"]
    interrupt = ui["interrupt"]
    choice = event.target.removeprefix("interrupt:")
    if event.kind in ("swipe", "drag") and interrupt["kind"] == "banner":
        choice = "dismiss"
    elif event.kind != "tap" or choice not in ("open", "accept", "dismiss"):
        return False
    ui["interrupt"] = None
    if choice == "open":
        state["nav"]["open"] = interrupt["app"]
    elif choice == "accept":
        app, field, value = interrupt["effect"]
        state["apps"][app][field] = value
    return True


def _answer_dialog(state: State, view: View, event: Event) -> bool:
    assert view.dialog is not None
    if event.kind != "tap":
        return False
    if event.target == "dialog:around":
        frame_of(state)["ask"] = None
        return True
    choices = dialog_handlers(view.dialog)
    if event.target not in choices:
        return False
    frame_of(state)["ask"] = None
    _run(choices[event.target])
    return True


def _tap(state: State, view: View, target: str) -> bool:
    if target == "bar:back":
        return _back(state)
    if target.startswith("clear:"):
        view.clear(target.removeprefix("clear:"))
        return True
    if target.startswith("key:"):
        return _press(state, view, target.removeprefix("key:"))
    item = handlers(view).get(target)
    if item is None:
        frame = frame_of(state)
        if frame["focus"] and target in ("", "bar"):
            frame["focus"] = None  # a tap beside the field puts the keyboard away
            return True
        return False
    return _run(item.do)


def _focused(state: State, view: View) -> str | None:
    focus: str | None = frame_of(state)["focus"]
    return focus if focus in view.starts else None


def _type(state: State, view: View, text: str) -> bool:
    name = _focused(state, view)
    if name is None:
        return False
    if name not in view.long_fields:
        text = text.replace("\n", " ")
    frame_of(state)["fields"][name] = (view.value(name) + text)[:_FIELD_LIMIT]
    return bool(text)


def _press(state: State, view: View, key: str) -> bool:
    if key == "enter":
        return _enter(state, view)
    name = _focused(state, view)
    if name is None:
        return False
    frame = frame_of(state)
    before = frame.get("keys", "abc"), view.value(name)
    frame["keys"], text = keyboard.press(key, *before)
    frame["fields"][name] = text[:_FIELD_LIMIT]
    return (frame["keys"], text) != before


def _enter(state: State, view: View) -> bool:
    name = _focused(state, view)
    if name is None:
        return False
    if name in view.long_fields:
        return _type(state, view, "\n")
    frame = frame_of(state)
    do = view.enter.get(name)
    if do is not None:
        do()
        return True
    names = list(view.starts)
    after = names.index(name) + 1
    frame["focus"] = names[after] if after < len(names) else None
    return True


def _key(state: State, view: View, key: str) -> bool:
    name = key.upper().removeprefix("KEYCODE_")
    settings = state["apps"]["settings"]
    if name in ("DEL", "BACKSPACE", "DELETE"):
        return _press(state, view, "del")
    if name == "ENTER":
        return _enter(state, view)
    if name == "SPACE":
        return _press(state, view, "space")
    if name in ("BACK", "HOME", "APP_SWITCH"):
        state["nav"]["press"] = {"APP_SWITCH": "recents"}.get(name, name.lower())
        return True
    if name in ("VOLUME_UP", "VOLUME_DOWN"):
        level = settings["volume"] + (1 if name == "VOLUME_UP" else -1)
        if not 0 <= level <= 10:
            return False
        settings["volume"] = level
        return True
    return False


def _scroll(state: State, view: View, direction: str) -> bool:
    if direction in ("left", "right"):
        return view.swiped(direction) if view.swiped is not None else False
    at = shown(view)
    page = max(1, at.end - at.first - 1)
    first = min(at.furthest, at.first + page) if direction == "down" else max(0, at.first - page)
    if first == at.first:
        return False
    frame_of(state)["scroll"] = first
    return True
