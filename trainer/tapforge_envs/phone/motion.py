"""A screen that moves: what the simulated phone shows between an action and the screen that stays. Off by default.

How the change goes is drawn from (seed, episode, step), what is shown is a function of the time since the action:

    still        the action changed nothing but the clock
    transition   after a moment the new screen slides or fades in
    slow         nothing happens for up to a second, then as `transition`
    late         the new screen comes without its content, which is there up to 2.5 seconds after the action; nothing
                 moves meanwhile
    loading      as `late`, with a spinner where the content will be
    endless      as `transition`, and a small spinner turns in a corner for ever

The caret of a field that has the focus blinks in all of them. A screen is settled when nothing but caret and endless
spinner changes any more; whether the last screenshot was of a settled screen is known exactly. Times are seconds.
"""

from __future__ import annotations

import asyncio
import io
import math
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from PIL import Image, ImageDraw
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from .device import Phone
from .draw import picture

Kind = Literal["still", "transition", "slow", "late", "loading", "endless"]

#: from the action to the first change, and how long the change then takes
RESPONSE, SLOW_RESPONSE, TRANSITION = (0.03, 0.15), (0.4, 0.9), (0.15, 0.4)
#: from the action to the content
LATE = (0.6, 2.5)
#: a caret shows for so long, and then not for as long
BLINK = 0.53
#: turns of a spinner per second
_TURNS = 0.75
#: what is there before the content: the top, as a share of the height
_HEAD = 0.12


class Motion(BaseModel):
    """How a phone's screens move. Shares are of the actions that change something; the rest are plain transitions."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    seed: int = 0
    slow: float = Field(0.15, ge=0, le=1, description="share of slow responses")
    late: float = Field(0.08, ge=0, le=1, description="share of screens with late content and nothing that says so")
    loading: float = Field(0.12, ge=0, le=1, description="share of screens with a spinner until the content is there")
    endless: float = Field(0.1, ge=0, le=1, description="share of screens with a spinner that never stops")
    capture_seconds: float = Field(0.0, ge=0, le=60, description="that a screenshot takes; it shows its beginning")


@dataclass(frozen=True, slots=True)
class Course:
    """How one change goes."""

    kind: Kind
    response: float = 0.0
    transition: float = 0.0
    #: from the action on
    content: float = 0.0
    slides: bool = False


def course(motion: Motion, episode: str, index: int, changed: bool) -> Course:
    if not changed:
        return Course("still")
    rng = Random(f"motion:{motion.seed}:{episode}:{index}")
    draw, slides = rng.random(), rng.random() < 0.5
    response, slow, transition, late = (rng.uniform(*span) for span in (RESPONSE, SLOW_RESPONSE, TRANSITION, LATE))
    shares: tuple[tuple[Kind, float], ...] = (
        ("slow", motion.slow),
        ("late", motion.late),
        ("loading", motion.loading),
        ("endless", motion.endless),
    )
    kind: Kind = "transition"
    for name, share in shares:
        if 0 <= draw < share:
            kind = name
        draw -= share
    response = slow if kind == "slow" else response
    ends = response + transition
    return Course(kind, response, transition, max(late, ends) if kind in ("late", "loading") else ends, slides)


def shown(how: Course, before: Image.Image, after: Image.Image, elapsed: float) -> Image.Image:
    """The screen so long after the action."""
    if how.kind == "still" or elapsed < how.response:
        return before
    new = after
    if elapsed < how.content and how.kind in ("late", "loading"):
        new = _without_content(after)
        if how.kind == "loading":
            _spin(new, (0.5, 0.5), 0.05, elapsed)
    elif how.kind == "endless":
        new = after.copy()
        _spin(new, (0.92, 0.09), 0.035, elapsed)
    progress = min(1.0, (elapsed - how.response) / how.transition)
    if progress >= 1.0:
        return new
    if not how.slides:
        return Image.blend(before, new, progress)
    left = round(before.width * (1 - progress) ** 2)
    moving = before.copy()
    moving.paste(new, (left, 0))
    return moving


def _without_content(screen: Image.Image) -> Image.Image:
    blank = screen.copy()
    ImageDraw.Draw(blank).rectangle((0, round(screen.height * _HEAD), *screen.size), fill=(238, 238, 240))
    return blank


def _spin(screen: Image.Image, middle: tuple[float, float], radius: float, elapsed: float) -> None:
    x, y, r = middle[0] * screen.width, middle[1] * screen.height, radius * screen.width
    angle = 360 * _TURNS * elapsed
    sweep = 200 + 100 * math.sin(3 * elapsed)
    width = max(1, round(r / 4))
    ImageDraw.Draw(screen).arc((x - r, y - r, x + r, y + r), angle, angle + sweep, fill=(60, 110, 220), width=width)


class MovingScreen:
    """What one phone shows. Drawing takes place in threads: several phones share a loop."""

    def __init__(self, motion: Motion, phone: Phone):
        self._motion = motion
        self._phone = phone
        self._kind: Kind = "still"
        #: of the last change
        self._course = Course("still")
        self._begun = 0.0
        #: the screen before the action; the one that stays, with the caret and without
        screen, size = phone.screen(), (phone.width, phone.height)
        self._identity = screen.identity()
        self._before = self._after = picture(replace(screen, caret=True), *size)
        self._after_dark = picture(replace(screen, caret=False), *size)
        #: of the last screenshot
        self._settled = True

    async def acted(self, episode: str, index: int) -> None:
        """The phone has carried out an action."""
        now = asyncio.get_running_loop().time()
        await asyncio.to_thread(self._change, now, episode, index)

    def _change(self, now: float, episode: str, index: int) -> None:
        screen = self._phone.screen()
        size = self._phone.width, self._phone.height
        # The clock goes on with every action: it changes at once, and is not a change of the screen.
        changed = screen.identity() != self._identity
        how = course(self._motion, episode, index, changed)
        self._kind, self._identity = how.kind, screen.identity()
        if changed:  # or else what is under way goes on
            self._before, self._course, self._begun = self._shown(now), how, now
        self._after = picture(replace(screen, caret=True), *size)
        self._after_dark = picture(replace(screen, caret=False), *size)

    def _shown(self, now: float) -> Image.Image:
        elapsed = now - self._begun
        after = self._after if int(now / BLINK) % 2 == 0 else self._after_dark
        return shown(self._course, after if self._course.kind == "still" else self._before, after, elapsed)

    async def screenshot(self) -> bytes:
        """A PNG of what is shown at the call's beginning."""
        now = asyncio.get_running_loop().time()
        self._settled = now - self._begun >= self._course.content
        data = await asyncio.to_thread(self._encoded, now)
        spent = asyncio.get_running_loop().time() - now
        await asyncio.sleep(max(0.0, self._motion.capture_seconds - spent))
        return data

    def _encoded(self, now: float) -> bytes:
        out = io.BytesIO()
        self._shown(now).save(out, "PNG", compress_level=1)
        return out.getvalue()

    def told(self) -> dict[str, object]:
        """How the last action's change goes, and whether the last screenshot is of the screen that stays."""
        return {"kind": self._kind, "settled": self._settled}
