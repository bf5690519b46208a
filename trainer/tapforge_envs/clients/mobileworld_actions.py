"""What is sent to a MobileWorld server for an action: pixels, and only what it takes.

Strokes are sent as `drag`, which every variant carries out as it is: `swipe` and `scroll` have lengths and directions
that differ from server to server. The server types by ADBKeyboard, for which a line end is a character: a text is sent
in pieces, with `keyboard_enter` for its line ends.
"""

from __future__ import annotations

from typing import Any, Final

from .. import protocol as p
from ..protocol import UnsupportedAction

_KEYS: Final = {"ENTER": "keyboard_enter", "BACK": "navigate_back", "HOME": "navigate_home"}


#: line ends in one text: each piece between them is a request of its own, and a step has a deadline
MAX_ENTERS: Final = 24


def device_actions(action: p.Action, width: int, height: int) -> list[dict[str, Any]]:
    """What is sent, one after another, for a screen of that size in pixels. Raises UnsupportedAction."""
    parts = p.keystrokes(action.text) if isinstance(action, p.Type) and action.text else [action]
    if (enters := sum(isinstance(part, p.Enter) for part in parts)) > MAX_ENTERS:
        raise UnsupportedAction(f"type: {enters} line ends; at most {MAX_ENTERS} are pressed in one step on a phone")
    return [device_action(part, width, height) for part in parts]


def device_action(action: p.Action, width: int, height: int) -> dict[str, Any]:
    """One request, of an action without line ends. Raises UnsupportedAction for what the server lacks or refuses."""

    def at(x: float, y: float, names: tuple[str, str] = ("x", "y")) -> dict[str, int]:
        return {names[0]: p.pixel(x, width), names[1]: p.pixel(y, height)}

    def stroke(x: float, y: float, x2: float, y2: float) -> dict[str, Any]:
        return {"action_type": "drag", **at(x, y, ("start_x", "start_y")), **at(x2, y2, ("end_x", "end_y"))}

    match action:
        case p.Tap():
            return {"action_type": "click", **at(action.x, action.y)}
        case p.DoubleTap():
            return {"action_type": "double_tap", **at(action.x, action.y)}
        case p.LongPress():
            return {"action_type": "long_press", **at(action.x, action.y)}
        case p.Swipe() | p.Drag():
            return stroke(action.x, action.y, action.x2, action.y2)
        case p.Scroll():
            return stroke(*_scroll(action))
        case p.Type():
            return {"action_type": "input_text", "text": _text(action.text, "type")}
        case p.OpenApp():
            return {"action_type": "open_app", "app_name": _text(action.name, "open_app")}
        case p.Answer():
            return {"action_type": "answer", "text": action.text}
        case p.AskUser():
            return {"action_type": "ask_user", "text": _text(action.text, "ask_user")}
        case p.Terminate():
            return {"action_type": "status", "goal_status": {"success": "complete"}.get(action.status, action.status)}
        case p.Home():
            return {"action_type": "navigate_home"}
        case p.Back():
            return {"action_type": "navigate_back"}
        case p.Enter():
            return {"action_type": "keyboard_enter"}
        case p.Wait():
            return {"action_type": "wait"}
        case p.Key() if name := _KEYS.get(action.name.upper().removeprefix("KEYCODE_")):
            return {"action_type": name}
        case p.Key():
            raise UnsupportedAction(f"a MobileWorld server has no key {action.name!r}; it has {', '.join(_KEYS)}")
    raise UnsupportedAction(f"a MobileWorld server has no action {action.type!r}")


def _scroll(action: p.Scroll) -> tuple[float, float, float, float]:
    """The finger's way, 40 % of the screen and against the direction that is asked for, with its middle at the place as
    far as the screen reaches."""
    across, down = {"up": (0.0, 1.0), "down": (0.0, -1.0), "left": (1.0, 0.0), "right": (-1.0, 0.0)}[action.direction]
    x = min(max(action.x, 0.2), 0.8) if across else action.x
    y = min(max(action.y, 0.2), 0.8) if down else action.y
    return x - 0.2 * across, y - 0.2 * down, x + 0.2 * across, y + 0.2 * down


def _text(text: str, action: str) -> str:
    if not text.strip() and not (action == "type" and text):
        raise UnsupportedAction(f"a MobileWorld server takes no empty text for {action!r}")
    return text
