"""When the screen of a phone has settled after an action, for servers that don't wait by themselves.

Rules, in order:
1. It ends: no frame is taken after `max_seconds`; the last one that was taken is the observation.
2. A screen counts as still when every frame of the last `quiet_seconds` was the same picture, byte for byte.
3. A screen that looks as it did before the action counts as unchanged only `unchanged_seconds` after it: what a tap
   changes may come late. A caret that blinks is not a change.
4. A screen of which only a small part moves (a spinner, a video) counts as settled when the same part moved for
   `moving_seconds` and nothing else did.
5. Frames are the expensive part (25 to 300 ms on a phone): none is taken that can't decide anything.

Times are seconds since the action was carried out. `decide` is pure; `settle` is the loop around it. A frame is decoded
in a thread, and only if its bytes weren't seen before.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tapforge_api.environment import Settle

from ..protocol import EnvironmentFault, Frame

Cells = NDArray[np.uint8]
#: of looks that are all the same picture
_NO_CELLS: Cells = np.zeros((0, 0), np.uint8)
#: still, unchanged and moving: the screen has settled; fixed: not observed; bound: it may still change
End = Literal["still", "unchanged", "moving", "fixed", "bound"]

#: of the longer side
_CELLS = 160
#: a cell whose mean brightness (0 to 255) differs by more than this has changed: less is what a JPEG does
_CELL_CHANGED = 6
#: a frame that was due this soon counts as taken then: sums of times are rounded
_NOW = 1e-3
#: share of the screen that a caret takes, or a digit of the clock
_CARET_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class Look:
    """A frame, as far as the decision needs it."""

    #: when it was asked for
    at: float
    #: equal for equal bytes
    digest: str
    #: mean brightness, rows and columns
    cells: Cells = field(compare=False)


@dataclass(frozen=True, slots=True)
class Again:
    """Take another frame at this time."""

    at: float


@dataclass(frozen=True, slots=True)
class Settled:
    """The observation, and how it came about."""

    frame: Frame
    end: End
    #: from the action to the end of the waiting
    seconds: float
    #: that were taken
    frames: int


def decide(settings: Settle, looks: Sequence[Look], now: float, before: Look | None = None) -> Again | End:
    """What to do after `looks`, in order of their time. `before`: the screen before the action, if it is known."""
    if settings.mode != "adaptive":
        return "fixed" if looks else Again(settings.fixed_seconds if settings.mode == "fixed" else 0.0)
    if not looks:
        return Again(settings.min_seconds)
    last = looks[-1]
    unchanged = before is not None and (before.digest == last.digest or _moved(before, last) <= _CARET_SHARE)
    if unchanged and last.at < settings.unchanged_seconds - _NOW:
        left = settings.unchanged_seconds - last.at
        return _again(settings, last.at + (left / 2 if left >= 2 * settings.quiet_seconds else left), now)
    still_since = _still_since(looks if before is None else [before, *looks])
    if last.at - still_since >= settings.quiet_seconds - _NOW:
        return "unchanged" if unchanged else "still"
    moving_since = _moving_since(looks, settings.moving_share)
    if last.at - moving_since >= max(settings.moving_seconds, settings.quiet_seconds) - _NOW:
        return "moving"
    return _again(settings, still_since + settings.quiet_seconds, now)


def _again(settings: Settle, at: float, now: float) -> Again | End:
    return Again(max(at, now)) if max(at, now) <= settings.max_seconds else "bound"


def _still_since(looks: Sequence[Look]) -> float:
    """Since when all looks are the same picture as the last one."""
    since = looks[-1].at
    for look in reversed(looks):
        if look.digest != looks[-1].digest:
            break
        since = look.at
    return since


def _moving_since(looks: Sequence[Look], share: float) -> float:
    """Since when no more than this share of the screen moved, taken together."""
    since, low, high = looks[-1].at, looks[-1].cells, looks[-1].cells
    for look in reversed(looks):
        if look.cells.shape != low.shape:
            break
        low, high = np.minimum(low, look.cells), np.maximum(high, look.cells)
        if _share(high - low) > share:
            break
        since = look.at
    return since


def _moved(one: Look, other: Look) -> float:
    """Share of the screen that is not the same; 1 for screens of two sizes."""
    if one.cells.shape != other.cells.shape:
        return 1.0
    return _share(np.maximum(one.cells, other.cells) - np.minimum(one.cells, other.cells))


def _share(difference: Cells) -> float:
    return float(np.count_nonzero(difference > _CELL_CHANGED) / max(1, difference.size))


def cells_of(data: bytes) -> Cells:
    """An encoded picture as at most `_CELLS` rows and columns. Raises EnvironmentFault for what can't be decoded."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.draft("L", (_CELLS, _CELLS))  # a JPEG is decoded as small as that
            return np.asarray(image.convert("L").reduce(-(-max(image.size) // _CELLS)))
    except Exception as error:
        raise EnvironmentFault(f"frame of {len(data)} bytes can't be decoded: {error!r:.200}") from error


async def settle(
    capture: Callable[[], Awaitable[Frame]],
    settings: Settle,
    *,
    before: Frame | None = None,
    expects_change: bool = True,
) -> Settled:
    """Takes frames with `capture` until the screen has settled. Call it when an action was carried out.

    `before`: the frame before the action; without it (after a reset) every screen counts as changed. `expects_change`:
    False after what waits or does nothing to the screen by itself: then the first frame may be the last one.
    Takes at most `max_seconds` (with fixed its seconds) and the time of one capture. Raises what `capture` raises, and
    EnvironmentFault for a frame that can't be decoded.
    """
    if not expects_change:
        settings = settings.model_copy(update={"min_seconds": 0.0, "unchanged_seconds": 0.0})
    clock = asyncio.get_running_loop().time
    begun = clock()
    #: the frame before the action counts as the first. Of frames that were compared only the cells are kept
    seen: list[tuple[float, str]] = [] if before is None else [(-settings.quiet_seconds, before.sha256)]
    cells: dict[str, Cells] = {}
    frame, frames = before, 0
    while True:
        looks = [Look(at, digest, cells.get(digest, _NO_CELLS)) for at, digest in seen]
        reference = looks.pop(0) if before is not None else None
        what = decide(settings, looks, clock() - begun, reference)
        if not isinstance(what, Again):
            assert frame is not None, "it never ends without a frame"
            return Settled(frame, what, clock() - begun, frames)
        await asyncio.sleep(what.at - (clock() - begun))
        at, last = clock() - begun, frame
        frame = await capture()
        frames += 1
        seen.append((at, frame.sha256))
        if settings.mode == "adaptive" and last is not None and last.sha256 != frame.sha256:
            for one in (last, frame):
                if one.sha256 not in cells:
                    cells[one.sha256] = await asyncio.to_thread(cells_of, one.data)
