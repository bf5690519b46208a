"""In which pixels a phone counts touches, where `wm size` was set to another size than its display has. Pure.

On some phones `screencap` goes on writing pictures of the display's own pixels then, while `input` counts in those of
the size that was set: a tap by the picture would land elsewhere, and be learned from. A size of another shape is
refused, because what the picture shows of it is not known.
"""

from __future__ import annotations

import re
from typing import Final

from ...protocol import Frame

_OVERRIDE: Final = re.compile(r"^\s*Override size: ([1-9][0-9]{0,4})x([1-9][0-9]{0,4})\s*$", re.MULTILINE | re.ASCII)
#: between two shapes that are one, of the ratio of the sides: sizes are whole pixels
_SAME_SHAPE: Final = 0.01


def override_size(said: str) -> tuple[int, int] | None:
    """The size that was set, width and height in pixels, in what `wm size` writes; None where none was."""
    found = _OVERRIDE.search(said)
    return (int(found[1]), int(found[2])) if found else None


def touched_size(frame: Frame, override: tuple[int, int] | None) -> tuple[int, int]:
    """Width and height of the whole screen in the pixels of `input`, as the frame lies. Raises ValueError for a size
    that was set in another shape than the frame's."""
    seen = (frame.width, frame.height)
    if override is None or sorted(override) == sorted(seen):
        return seen
    short, long = sorted(override)
    size = (long, short) if frame.width > frame.height else (short, long)
    if abs(size[0] * frame.height - size[1] * frame.width) > _SAME_SHAPE * size[0] * frame.height:
        raise ValueError(
            f"its size is set to {override[0]}x{override[1]} and its pictures have {frame.width}x{frame.height} "
            "pixels, which is another shape: where a touch would land is not known; `adb shell wm size reset` ends that"
        )
    return size
