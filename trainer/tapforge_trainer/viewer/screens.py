"""The screen of a step as a picture of a given size, with the action's gesture on it.

Promises:
- A screen keeps its proportions and fits into the box: a larger one is scaled down, a small one is enlarged by a whole
  factor.
- A screen that can't be shown is its reason, in words.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Final

from PIL import Image, ImageDraw, UnidentifiedImageError

from ..frames.frame import FrameError
from ..records import StepRecord
from .gesture import Gesture, gesture_of

#: width and height that a screen fits into
Box = tuple[int, int]
MARK: Final = "#ff2d6f"
#: gestures are drawn this much larger, then scaled down, which smooths their edges
_FINE = 3


def step_screen(step: StepRecord, frame: Callable[[str], bytes], box: Box) -> tuple[Image.Image | str, str]:
    """The screen with the gesture on it, and the action in words."""
    found = screen_of(step.frames[-1], frame) if step.frames else "the step has no screen"
    if step.action is None:
        return (found if isinstance(found, str) else fitted(found, box)), "no action"
    text = f": {said}" if (said := step.action.get("text")) else ""
    if isinstance(found, str):  # without its size coordinates are no pixels
        return found, str(step.action.get("type", "?")).replace("_", " ") + text
    shown = fitted(found, box)
    width, height = shown.width * _FINE, shown.height * _FINE
    gesture = gesture_of(step.action, width, height, found.size)
    return _with_gesture(shown, gesture), gesture.words + text


def screen_of(name: str, frame: Callable[[str], bytes]) -> Image.Image | str:
    try:
        return Image.open(io.BytesIO(frame(name))).convert("RGB")
    except (FrameError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        return str(error)


def fitted(screen: Image.Image, box: Box) -> Image.Image:
    fit = min(box[0] / screen.width, box[1] / screen.height)
    if fit >= 1:
        return screen.resize((screen.width * int(fit), screen.height * int(fit)), Image.Resampling.NEAREST)
    size = max(1, round(screen.width * fit)), max(1, round(screen.height * fit))
    return screen.resize(size, Image.Resampling.LANCZOS)


def _with_gesture(screen: Image.Image, gesture: Gesture) -> Image.Image:
    """The colours and widths of `replay.html`: a mark on a white edge."""
    if not gesture.shapes:
        return screen
    layer = Image.new("RGBA", (screen.width * _FINE, screen.height * _FINE), (255, 255, 255, 0))
    draw, unit = ImageDraw.Draw(layer), min(layer.size) / 100
    for color, stroke in (("#ffffff", 4.6 * unit), (MARK, 2.4 * unit)):
        for shape in gesture.shapes:
            if shape.kind == "line":
                draw.line([*shape.points], color, round(stroke), "curve")
            elif shape.kind == "head":
                draw.polygon([*shape.points], color, color, round(stroke) if color != MARK else 1)
            else:
                (x, y), grown = shape.points[0], shape.radius + stroke / 2
                if shape.kind == "dot":
                    grown = shape.radius + (stroke / 2 if color != MARK else 0)
                    draw.ellipse((x - grown, y - grown, x + grown, y + grown), color)
                elif shape.kind == "dashed" and color == MARK:
                    for angle in range(0, 360, 30):
                        draw.arc((x - grown, y - grown, x + grown, y + grown), angle, angle + 16, color, round(stroke))
                else:
                    draw.ellipse((x - grown, y - grown, x + grown, y + grown), None, color, round(stroke))
    shown = screen.copy()
    smooth = layer.resize(screen.size, Image.Resampling.LANCZOS)
    shown.paste(smooth, (0, 0), smooth)
    return shown
