"""Plays a template's plan on a phone, one action after another, as a person would who sees the screen.

A plan says what to do ("tap the row of Anna", "write this into that field"); the demonstrator finds it: it leaves an
app and pages through the launcher, scrolls lists, puts the keyboard away, and answers no to whatever interrupts.
"""

from __future__ import annotations

from collections.abc import Iterator

from tapforge_envs.protocol import Action, Back, Home, LongPress, Scroll, Tap, Type

from .device import HOME, Phone
from .screen import Screen, Widget, center
from .tasks import Do, Errs, Params, Template

#: actions that one step of a plan may take
_PATIENCE = 40


def demonstration(phone: Phone, template: Template, params: Params, errs: Errs = lambda: False) -> Iterator[Action]:
    """The actions of a plan. Each must be carried out before the next is asked for. Raises LookupError when something
    that the plan names can't be found."""
    for do in template.plan(params, errs):
        yield from carried_out(phone, do)


def carried_out(phone: Phone, do: Do) -> Iterator[Action]:
    """The actions of one step of a plan, under the same conditions."""
    directions = ["down", "up"]
    for _ in range(_PATIENCE):
        if phone.state.get("ui", {}).get("interrupt") and not do.tap.startswith("interrupt:"):
            yield _tap(phone.screen(), "interrupt:dismiss")
            continue
        if do.late is not None:
            do = do.late(phone.state)
        if do.action is not None:
            yield do.action
            return
        if do.app:
            action, done = _launch(phone, do.app)
        elif do.fill is not None:
            action, done = _fill(phone, do, directions)
        else:
            action, done = _reach(phone, do.tap, directions, do.hold)
        if action is not None:
            before = phone.screen().identity()
            yield action
            if isinstance(action, Scroll) and phone.screen().identity() == before and directions:
                directions.pop(0)
        if done:
            return
    raise LookupError(f"{do} isn't done after {_PATIENCE} actions")


def _launch(phone: Phone, app: str) -> tuple[Action | None, bool]:
    if phone.state["nav"]["app"] != HOME:
        return Home(), False
    screen = phone.screen()
    if screen.find(f"app:{app}") is not None:
        return _tap(screen, f"app:{app}"), True
    if phone.state["nav"]["page"]:
        return Home(), False
    return Scroll(direction="right"), False


def _fill(phone: Phone, do: Do, directions: list[str]) -> tuple[Action | None, bool]:
    assert do.fill is not None
    name, text = do.fill
    field = phone.screen().find(f"field:{name}")
    if field is None or not field.on:
        return _reach(phone, f"field:{name}", directions, False)[0], False
    if field.text == text:
        return None, True
    if field.text:
        return _tap(phone.screen(), f"clear:{name}"), False
    return Type(text=text), True


def _reach(phone: Phone, id: str, directions: list[str], hold: bool) -> tuple[Action | None, bool]:
    screen = phone.screen()
    widget = screen.find(id)
    if widget is not None and _uncovered(screen, widget):
        x, y = center(widget.box)
        return (LongPress(x=x, y=y) if hold else Tap(x=x, y=y)), True
    if screen.find("keyboard") is not None:
        return Back(), False
    if not directions:
        raise LookupError(f"no widget {id!r} in {phone.state['nav']}; there are {[w.id for w in screen.widgets]}")
    return Scroll(direction="down" if directions[0] == "down" else "up"), False


def _tap(screen: Screen, id: str) -> Action:
    widget = screen.find(id)
    if widget is None:
        raise LookupError(f"no widget {id!r} on the screen; there are {[w.id for w in screen.widgets]}")
    x, y = center(widget.box)
    return Tap(x=x, y=y)


def _uncovered(screen: Screen, widget: Widget) -> bool:
    hit = screen.at(*center(widget.box))
    return hit is not None and hit.id == widget.id
