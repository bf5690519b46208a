"""How an action looks on the screen it was made on: shapes in pixels of the picture, and words in those of the frame.

Pure; reads the wire form of an action (`StepRecord.action`). An action of a kind that isn't known here has words and no
shapes. Coordinates become the pixel that the phone was touched at (`protocol.pixel`), drawn at the pixel's centre.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from tapforge_envs.protocol import pixel

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class GestureShape:
    """A stroke or a filled polygon or circle, to be drawn with a contrasting outline."""

    kind: Literal["dot", "ring", "dashed", "line", "head"]
    #: centre for circles, the ends of a line, the corners of an arrow's head
    points: tuple[Point, ...]
    radius: float = 0.0

    @property
    def path(self) -> str:
        """The points as SVG writes them."""
        return " ".join(f"{x:.2f},{y:.2f}" for x, y in self.points)


@dataclass(frozen=True, slots=True)
class Gesture:
    words: str
    shapes: tuple[GestureShape, ...] = ()
    #: what was typed, said or pressed: shown on the screen as a label
    label: str = ""


def gesture_of(action: dict[str, Any], width: int, height: int, frame: tuple[int, int] | None = None) -> Gesture:
    """For a picture of that size. `frame`: width and height of the recorded frame that it shows; None: its own."""
    kind = str(action.get("type", "?"))
    unit = min(width, height) / 100

    def point(x: str = "x", y: str = "y") -> Point:
        return pixel(float(action[x]), width) + 0.5, pixel(float(action[y]), height) + 0.5

    def place(x: str = "x", y: str = "y") -> str:
        wide, high = frame or (width, height)
        return f"({pixel(float(action[x]), wide)}, {pixel(float(action[y]), high)})"

    match kind:
        case "tap" | "right_click" | "middle_click" | "triple_click" | "move":
            at = point()
            name = "move to" if kind == "move" else kind.replace("_", " ")
            return Gesture(
                f"{name} {place()}", (GestureShape("ring", (at,), 7 * unit), GestureShape("dot", (at,), 2.6 * unit))
            )
        case "double_tap":
            at = point()
            rings = tuple(GestureShape("ring", (at,), r * unit) for r in (10, 6))
            return Gesture(f"double tap {place()}", (*rings, GestureShape("dot", (at,), 2.4 * unit)))
        case "long_press":
            at = point()
            held = (GestureShape("dashed", (at,), 10 * unit), GestureShape("dot", (at,), 4 * unit))
            return Gesture(f"long press {place()}, {float(action.get('seconds', 1)):g} s", held)
        case "swipe" | "drag":
            start, end = point(), point("x2", "y2")
            shapes = (
                GestureShape("dot" if kind == "swipe" else "ring", (start,), 3.4 * unit),
                *_arrow(start, end, unit),
            )
            return Gesture(f"{kind} {place()} to {place('x2', 'y2')}", shapes)
        case "scroll":
            at, way = point(), str(action.get("direction"))
            dx, dy = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}.get(way, (0, 0))
            end = (at[0] + dx * 24 * unit, at[1] + dy * 24 * unit)
            notches = f" by {n} notches" if (n := action.get("notches")) else ""
            return Gesture(f"scroll {way}{notches}", _arrow(at, end, unit))
        case "type":
            return Gesture("type", label=f"⌨ {action.get('text', '')}")
        case "answer":
            return Gesture("answer", label=f"“{action.get('text', '')}”")
        case "ask_user":
            return Gesture("ask the user", label=f"? {action.get('text', '')}")
        case "open_app":
            return Gesture(f"open {action.get('name', '')}", label=f"▢ {action.get('name', '')}")
        case "key":
            return Gesture(f"key {action.get('name', '')}", label=f"⌨ {action.get('name', '')}")
        case "hotkey":
            keys = "+".join(str(key) for key in action.get("keys", ()))
            return Gesture(f"hotkey {keys}", label=f"⌨ {keys}")
        case "wait":
            return Gesture(f"wait {float(action.get('seconds', 1)):g} s", label="⏱ wait")
        case "terminate":
            status = str(action.get("status"))
            sign = {"success": "✓ done", "failure": "✗ give up", "infeasible": "∅ infeasible"}.get(status, status)
            return Gesture(f"terminate: {status}", label=sign)
        case "home" | "back" | "app_switch" | "enter":
            sign = {"home": "⌂ home", "back": "◁ back", "app_switch": "▣ apps", "enter": "⏎ enter"}[kind]
            return Gesture(kind.replace("_", " "), label=sign)
    return Gesture(kind, label=kind)


def _arrow(start: Point, end: Point, unit: float) -> tuple[GestureShape, ...]:
    length = math.dist(start, end)
    if length < unit:
        return (GestureShape("dot", (end,), 2.6 * unit),)
    dx, dy = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    size = min(9 * unit, length)
    neck = (end[0] - dx * size, end[1] - dy * size)
    side = 0.55 * size
    head = (end, (neck[0] - dy * side, neck[1] + dx * side), (neck[0] + dy * side, neck[1] - dx * side))
    return GestureShape("line", (start, neck)), GestureShape("head", head)
