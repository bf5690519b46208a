"""The mobile_use tool: how Qwen's phone agents write an action, and what it means here.

Its fields and names are Qwen's; the words that describe them are ours. `infeasible`, `double_tap` and `ask_user` are
more than Qwen's own tool has: a task may be impossible, and an agent may ask.
"""

from __future__ import annotations

from collections.abc import Mapping

from tapforge_envs.protocol import (
    Action,
    Answer,
    AppSwitch,
    AskUser,
    Back,
    DoubleTap,
    Enter,
    Home,
    Key,
    LongPress,
    OpenApp,
    Swipe,
    Tap,
    Terminate,
    Type,
    Wait,
)

from .coordinates import Grid, Plane
from .tools import MAX_SECONDS, Arguments, Form, Tool, seconds

FORMS: dict[str, Form] = {
    "click": Form(("coordinate",), "tap the point"),
    "long_press": Form(("coordinate", "time"), "hold the point for some seconds"),
    "double_tap": Form(("coordinate",), "tap the point twice"),
    "swipe": Form(("coordinate", "coordinate2"), "stroke from the first point to the second"),
    "type": Form(("text",), "type the text into the focused field"),
    "key": Form(("text",), "press a hardware key, such as VOLUME_UP or DEL"),
    "open": Form(("text",), "open the app of this name"),
    "system_button": Form(("button",), "press a system button"),
    "wait": Form(("time",), "do nothing for some seconds"),
    "answer": Form(("text",), "tell the user the answer that was asked for; ends the task"),
    "ask_user": Form(("text",), "ask the user for something that only the user knows"),
    "terminate": Form(("status",), "end the task and say how it went"),
}

BUTTONS: dict[str, Action] = {"Back": Back(), "Home": Home(), "Menu": AppSwitch(), "Enter": Enter()}
STATUSES: dict[str, Action] = {
    "success": Terminate(status="success"),
    "failure": Terminate(status="failure"),
    "infeasible": Terminate(status="infeasible"),
}


def place_words(plane: Plane) -> str:
    """What a coordinate is, for a tool's schema."""
    if isinstance(plane.coordinates, Grid):
        most = plane.coordinates.largest
        return f"[x, y]; x from 0 (left edge) to {most} (right edge), y from 0 (top) to {most} (bottom)"
    return f"[x, y]; {plane.words()}"


def screen_words(plane: Plane) -> str:
    """What the numbers count, for a tool's description."""
    if isinstance(plane.coordinates, Grid):
        most = plane.coordinates.largest
        return f"Positions are given on a grid of {most} by {most}, whatever the size of the picture. "
    return f"Positions are pixels of the picture, which is {plane.width} pixels wide and {plane.height} high. "


def description(plane: Plane) -> str:
    return (
        f"Operates a phone by touch. You see a picture of its screen. {screen_words(plane)}"
        "An app may need a moment to open or to load; wait then. Aim at the middle of what you want to touch."
    )


def fields(plane: Plane) -> Mapping[str, dict]:
    return {
        "coordinate": {"type": "array", "description": place_words(plane)},
        "coordinate2": {"type": "array", "description": "[x, y] of the point where the stroke ends"},
        "text": {"type": "string", "description": "what to type, open, press, answer or ask"},
        "time": {"type": "number", "description": f"seconds, at most {MAX_SECONDS}"},
        "button": {"type": "string", "enum": list(BUTTONS)},
        "status": {"type": "string", "enum": list(STATUSES)},
    }


def build(name: str, given: Arguments) -> Action:
    match name:
        case "click":
            x, y = given.point()
            return Tap(x=x, y=y)
        case "long_press":
            x, y = given.point()
            return LongPress(x=x, y=y, seconds=given.number("time"))
        case "double_tap":
            x, y = given.point()
            return DoubleTap(x=x, y=y)
        case "swipe":
            x, y = given.point()
            x2, y2 = given.point("coordinate2")
            return Swipe(x=x, y=y, x2=x2, y2=y2)
        case "type":
            return Type(text=given.text())
        case "key":
            return Key(name=given.text())
        case "open":
            return OpenApp(name=given.text())
        case "wait":
            return Wait(seconds=given.number("time"))
        case "answer":
            return Answer(text=given.text())
        case "ask_user":
            return AskUser(text=given.text())
        case "system_button":
            return given.choice("button", BUTTONS)
        case "terminate":
            return given.choice("status", STATUSES)
    raise AssertionError(f"action {name} is in FORMS and not read here")


def arguments(action: Action, plane: Plane) -> dict[str, object] | None:
    match action:
        case Tap():
            return {"action": "click", "coordinate": plane.at(action.x, action.y)}
        case LongPress():
            point = plane.at(action.x, action.y)
            return {"action": "long_press", "coordinate": point, "time": seconds(action.seconds)}
        case DoubleTap():
            return {"action": "double_tap", "coordinate": plane.at(action.x, action.y)}
        case Swipe():
            start, end = plane.at(action.x, action.y), plane.at(action.x2, action.y2)
            return {"action": "swipe", "coordinate": start, "coordinate2": end}
        case Type():
            return {"action": "type", "text": action.text}
        case Key():
            return {"action": "key", "text": action.name}
        case OpenApp():
            return {"action": "open", "text": action.name}
        case Wait():
            return {"action": "wait", "time": seconds(action.seconds)}
        case Answer():
            return {"action": "answer", "text": action.text}
        case AskUser():
            return {"action": "ask_user", "text": action.text}
        case Terminate():
            return {"action": "terminate", "status": action.status}
        case Back():
            return {"action": "system_button", "button": "Back"}
        case Home():
            return {"action": "system_button", "button": "Home"}
        case AppSwitch():
            return {"action": "system_button", "button": "Menu"}
        case Enter():
            return {"action": "system_button", "button": "Enter"}
    return None


MOBILE_USE = Tool("mobile_use", FORMS, build, arguments, description, fields)
