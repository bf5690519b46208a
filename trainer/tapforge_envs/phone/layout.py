"""From a view to a screen: status bar, app bar, the items that fit, footer, keyboard, dialog, banner. Pure.

All places are relative, so a page looks and works the same at 128x224 and at 1080x2400. Items scroll by whole items:
`scroll` is the index of the first one shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from . import keyboard
from .screen import Box, Color, Screen, Widget
from .view import LINE, Dialog, Do, Item, State, View, frame_of, wrapped

STATUS = 0.036
BAR = 0.075
NAVIGATION = 0.046
KEYBOARD = 0.30
_TOP = STATUS + BAR
_LIGHT: Color = (246, 247, 250)
_DARK: Color = (18, 19, 23)
_GREY: Color = (96, 102, 114)


@dataclass(frozen=True, slots=True)
class Shown:
    """Which items of a view are on the screen."""

    first: int
    #: one past the last item that is wholly visible
    end: int
    #: the furthest that the list can be scrolled
    furthest: int


def bottom(view: View) -> float:
    """Where the scrolled items end."""
    edge = 1 - NAVIGATION - sum(item.height for item in view.footer)
    return edge - KEYBOARD if frame_of(view.state)["focus"] else edge


def shown(view: View) -> Shown:
    frame = frame_of(view.state)
    heights = [item.height for item in view.items]
    room = bottom(view) - _TOP
    furthest = len(heights)
    rest = room
    while furthest > 0 and heights[furthest - 1] <= rest + 1e-9:
        furthest -= 1
        rest -= heights[furthest]
    furthest = min(furthest, max(len(heights) - 1, 0))
    scroll = frame["scroll"]
    first = (furthest if view.from_end else 0) if scroll is None else min(scroll, furthest)
    focus = frame["focus"]
    place = next((i for i, item in enumerate(view.items) if item.id == f"field:{focus}"), None)
    if place is not None:  # the field that is typed into stays in sight
        first = min(first, place)
        while first < place and sum(heights[first : place + 1]) > room + 1e-9:
            first += 1
    end, used = first, 0.0
    while end < len(heights) and used + heights[end] <= room + 1e-9:
        used += heights[end]
        end += 1
    return Shown(first, end, furthest)


def compose(view: View) -> Screen:
    state = view.state
    settings = state["apps"].get("settings", {})
    found: list[Widget] = []
    at = shown(view)
    low = bottom(view)
    y = _TOP
    for item in view.items[at.first :]:
        if y >= low - 0.01:
            break
        found.extend(_placed(item, (0.0, y, 1.0, item.height)))
        y += item.height
    if at.furthest:
        share = at.first / at.furthest
        long = (low - _TOP) * 0.25
        found.append(
            Widget("scrolled", "panel", (0.985, _TOP + share * (low - _TOP - long), 0.01, long), color=_GREY, tap=False)
        )
    found.extend(_app_bar(view))
    y = low
    if view.footer:
        found.append(Widget("footer", "panel", (0.0, y, 1.0, sum(i.height for i in view.footer))))
    for item in view.footer:
        found.extend(_placed(item, (0.0, y, 1.0, item.height)))
        y += item.height
    frame = frame_of(state)
    if view.fab is not None and not frame["focus"]:
        found.append(_widget(view.fab, (0.78, low - 0.105, 0.18, 0.09)))
    if frame["focus"]:
        mode = frame.get("keys", "abc")
        found.extend(keyboard.widgets(mode, (0.0, 1 - NAVIGATION - KEYBOARD, 1.0, KEYBOARD)))
    if view.dialog is not None:
        found.extend(_dialog(view.dialog, view.color))
    found.extend(around(state))
    dark = bool(settings.get("dark"))
    return Screen(_DARK if dark else _LIGHT, tuple(found), dark=dark)


def around(state: State, clear: bool = False) -> Iterator[Widget]:
    """What lies over every page: navigation and status bar, banner or question of the system, toast. `clear`: over a
    wallpaper."""
    kind = "clear" if clear else ""
    yield Widget("navigation", "navigation", (0.0, 1 - NAVIGATION, 1.0, NAVIGATION), text=kind, volatile=True)
    for number, name in enumerate(("back", "home", "recents")):
        box = (number / 3, 1 - NAVIGATION, 1 / 3, NAVIGATION)
        yield Widget(f"nav:{name}", "key", box, volatile=True)
    settings = state["apps"]["settings"]
    signs = [name for name in ("airplane", "bluetooth", "wifi") if settings[name]]
    yield Widget(
        "status", "status", (0.0, 0.0, 1.0, STATUS), clock(state), kind, glyph=" ".join(signs), tap=False, volatile=True
    )
    interrupt = state["ui"]["interrupt"]
    if interrupt and interrupt["kind"] == "banner":
        box = (0.03, STATUS + 0.005, 0.94, 0.105)
        yield Widget("interrupt:open", "banner", box, interrupt["title"], interrupt["text"], interrupt["app"])
        yield Widget("interrupt:dismiss", "glyph", (0.84, STATUS + 0.005, 0.12, 0.05), glyph="close", color=_GREY)
    elif interrupt:
        choices = (("dismiss", interrupt["no"], None), ("accept", interrupt["yes"], None))
        yield from _dialog(Dialog(interrupt["title"], interrupt["text"], choices), (26, 115, 232), "interrupt")
    if state["ui"]["toast"]:
        box = (0.08, 1 - NAVIGATION - 0.085, 0.84, 0.06)
        yield Widget("toast", "toast", box, state["ui"]["toast"], tap=False, volatile=True)


def clock(state: State) -> str:
    """The time of day: twenty seconds for every action."""
    hours, minutes = (int(part) for part in state["now"][11:16].split(":"))
    total = hours * 60 + minutes + state["ui"]["ticks"] // 3
    return f"{total // 60 % 24:02d}:{total % 60:02d}"


def handlers(view: View) -> dict[str, Item]:
    """The items that can be hit, by id."""
    found: dict[str, Item] = {}
    for item in (*view.items, *view.footer, *view.actions, *([view.fab] if view.fab else [])):
        for part in item.parts or (item,):
            found[part.id] = part
    return found


def dialog_handlers(dialog: Dialog) -> dict[str, Do | None]:
    return {f"dialog:{id}": do for id, _, do in dialog.choices}


def _widget(item: Item, box: Box) -> Widget:
    return Widget(
        item.id,
        item.kind,
        box,
        item.text,
        item.detail,
        item.glyph,
        item.color,
        item.on,
        item.do is not None or item.hold is not None,
        trail=item.trail,
        badge=item.badge,
    )


def _placed(item: Item, box: Box) -> Iterator[Widget]:
    if not item.parts:
        yield _widget(item, box)
        if item.kind == "input" and item.on and item.text:
            side = min(0.13, box[2] * 0.25)
            clear = (box[0] + box[2] - side - 0.03, box[1], side, min(box[3], BAR))
            yield Widget(item.id.replace("field:", "clear:"), "glyph", clear, glyph="close", color=_GREY)
        return
    shares = item.shares or (1.0,) * len(item.parts)
    x, width = box[0], box[2]
    for part, share in zip(item.parts, shares, strict=True):
        wide = width * share / sum(shares)
        yield from _placed(part, (x, box[1], wide, box[3]))
        x += wide


def _app_bar(view: View) -> Iterator[Widget]:
    deeper = bool(view.state["nav"]["stack"])
    yield Widget("bar", "title", (0.0, 0.0, 1.0, _TOP), view.title, "back" if deeper else "", color=view.color)
    if deeper:
        yield Widget("bar:back", "glyph", (0.0, STATUS, 0.13, BAR), glyph="back", color=view.color)
    for number, item in enumerate(reversed(view.actions)):
        yield _widget(item, (0.99 - 0.14 * (number + 1), STATUS, 0.14, BAR))


def _dialog(dialog: Dialog, color: Color, name: str = "dialog") -> Iterator[Widget]:
    lines = wrapped(dialog.text, 32) if dialog.text else []
    title = wrapped(dialog.title, 26)
    listed = bool(dialog.chosen)
    text_height = 0.034 * len(title) + LINE * len(lines) + 0.05
    height = text_height + (0.066 * len(dialog.choices) if listed else 0.075) + 0.015
    top = 0.5 - height / 2
    yield Widget(f"{name}:around", "scrim", (0.0, 0.0, 1.0, 1.0), volatile=True)
    yield Widget(f"{name}:box", "dialog", (0.06, top, 0.88, height), "\n".join(title), "\n".join(lines), color=color)
    y = top + text_height
    for number, (id, text, _) in enumerate(dialog.choices):
        if listed:
            box = (0.08, y + 0.066 * number, 0.84, 0.066)
            yield Widget(
                f"{name}:{id}",
                "item",
                box,
                text,
                color=color,
                on=None,
                glyph="radio_on" if text == dialog.chosen else "radio",
            )
        else:
            wide = 0.84 / len(dialog.choices)
            box = (0.08 + wide * number, y, wide, 0.075)
            last = number == len(dialog.choices) - 1
            yield Widget(f"{name}:{id}", "action", box, text, color=color if last else _GREY)
