"""In which pixels a phone counts touches, where that is another size than its pictures have. Pure.

After `wm size`, or a screen resolution that was chosen in its settings, some phones go on writing pictures of the
display's own pixels, while `input` counts in those of the size that was set: a tap by the picture would land elsewhere,
and be learned from. A size of another shape is refused, because what the picture shows of it is not known.
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


def touched_size(frame: Frame, counted: tuple[int, int] | None) -> tuple[int, int]:
    """Width and height of the whole screen in the pixels of `input`, as the frame lies. `counted`: that size, lying
    either way; None where it isn't known, and is the frame's then. Raises ValueError for another shape than the
    frame's."""
    seen = (frame.width, frame.height)
    if counted is None or sorted(counted) == sorted(seen):
        return seen
    short, long = sorted(counted)
    size = (long, short) if frame.width > frame.height else (short, long)
    if abs(size[0] * frame.height - size[1] * frame.width) > _SAME_SHAPE * size[0] * frame.height:
        raise ValueError(
            f"its screen counts {counted[0]}x{counted[1]} and its pictures have {frame.width}x{frame.height} pixels, "
            "which is another shape: where a touch would land is not known; where a size was set, `adb shell wm size "
            "reset` ends that"
        )
    return size
