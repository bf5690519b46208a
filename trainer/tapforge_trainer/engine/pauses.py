"""How long an engine has stood still for new weights: counted where it stands still, and read by its clients, whose
deadlines stand still with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class PauseMeter:
    """The engine's side."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._before = 0.0
        self._since: float | None = None

    @property
    def paused(self) -> bool:
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Up to now."""
        return self._before + (self._clock() - self._since if self._since is not None else 0.0)

    def pause(self) -> None:
        if self._since is None:
            self._since = self._clock()

    def proceed(self) -> None:
        self._before, self._since = self.seconds, None


@dataclass(slots=True)
class PauseReading:
    """The client's side: what the engine said last, carried forward by the client's own clock. What was before the
    first reading counts as nothing."""

    paused: bool = False
    _seconds: float = 0.0
    _at: float = 0.0
    #: of the engine's count at the first reading
    _start: float | None = None

    def read(self, paused: bool, seconds: float, now: float) -> None:
        if self._start is None:
            self._start = seconds
        self.paused, self._seconds, self._at = paused, seconds - self._start, now

    def until(self, now: float) -> float:
        """Seconds."""
        return self._seconds + (now - self._at if self.paused else 0.0)


@dataclass(slots=True)
class Deadline:
    """What is left of the time of one request. It runs from the start, on whichever engine, but not while that engine
    stands still or there is none, up to `pause_seconds` of that: one that is started again gets its weights after the
    update under way, which may take longer than any answer."""

    seconds: float
    pause_seconds: float
    started: float
    #: credited for pauses of engines that the request has left
    _paused: float = 0.0
    _reading: PauseReading | None = None
    _paused_before: float = 0.0

    def move(self, reading: PauseReading | None, now: float) -> None:
        """The request is with another engine from here on; None: with none."""
        self._paused = self._credit(now)
        self._reading = reading if reading is not None else PauseReading(True, 0.0, now, 0.0)
        self._paused_before = self._reading.until(now)

    def renew(self, now: float) -> None:
        """What was answered counts for nothing: the request is asked again, with all of its time."""
        self.started, self._paused = now, 0.0
        self._paused_before = self._reading.until(now) if self._reading is not None else 0.0

    def left(self, now: float) -> float:
        return self.seconds - (now - self.started) + min(self._credit(now), self.pause_seconds)

    def _credit(self, now: float) -> float:
        here = max(0.0, self._reading.until(now) - self._paused_before) if self._reading is not None else 0.0
        return self._paused + here
