"""The live view of a run on a cluster, until the run ends: the one that `tapforge run` shows.

1. What is shown comes from the run's status, and where commands may be run in the driver's Pod, from its events: curve,
   groups, gap, throughput. Without them the status alone is shown, and a note says why.
2. An API server that doesn't answer, or refuses by now, is shown as such, and asked again (`patience`).
3. Watching changes nothing: the run goes on when a watch stops.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from ..telemetry.telemetry import ProgressView, draw, update_line
from .api import ClusterError
from .events import START, EventOffset
from .patience import next_status
from .status import RunStatus

#: between two requests for the status, and for events, seconds
_POLL: Final = 2.0
_EVENTS: Final = 5.0
_FORBIDDEN: Final = 403


class Source(Protocol):
    def status(self) -> RunStatus: ...

    def events(self, place: EventOffset) -> tuple[Sequence[Mapping[str, Any]], EventOffset]:
        """Those that were written from a place on, and where they end."""
        ...


def watch(source: Source, console: Console) -> RunStatus:
    """Returns the status that the run ended with. Raises ClusterError: it is gone, or can't be watched any more."""
    status = source.status()
    screen = _Screen(console, ProgressView(status.name, status.max_updates))
    detailed, place, asked = True, START, 0.0

    def away(error: ClusterError) -> None:
        screen.phase(f"the cluster doesn't answer, the run goes on: {error}")

    with screen.shown():
        while True:
            screen.status(status)
            if detailed and (status.finished or time.monotonic() - asked >= _EVENTS):
                asked = time.monotonic()
                try:
                    events, place = source.events(place)
                    screen.events(events)
                except ClusterError as error:  # mostly the driver's Pod is not there yet, or not any more
                    if error.code == _FORBIDDEN:
                        detailed = False
                        screen.note(f"only the run's status is shown: {error}")
            if status.exit_code is not None:
                return status
            time.sleep(_POLL)
            status = next_status(source.status, status, told=away)


# --- what is shown ----------------------------------------------------------------------------------------------------


class _Screen:
    """On a terminal the view, redrawn in place; elsewhere a line for each turn and update."""

    def __init__(self, console: Console, view: ProgressView):
        self._console = console
        self._view = view
        self._began = time.monotonic()
        self._live: Live | None = None
        self._turn = ("", "")
        #: whether events have come, which know more of updates than the status
        self._detailed = False
        #: before, after -> mode -> success
        self._measured: dict[str, dict[str, float]] = {"before": {}, "after": {}}

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        view = self._view
        with Live(
            get_renderable=lambda: draw(view, time.monotonic() - self._began),
            console=self._console,
            refresh_per_second=2,
        ) as self._live:
            yield

    def status(self, status: RunStatus) -> None:
        view = self._view
        show_status(view, status)
        if (turn := (status.word, status.message)) != self._turn:
            self._turn = turn
            self._line(": ".join(filter(None, turn)))
        if not self._detailed and status.update != view.update:
            view.update, view.success = status.update, status.success
            if status.success is not None:
                view.curve.append(status.success)
            self._line(update_line(view))

    def events(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            match event["event"]:
                case "update":
                    self._detailed = True
                    self._view.updated(event)
                    self._line(update_line(self._view))
                case "note" | "alarm" | "alarm_cleared":
                    self.note(event["text"])
                case "evaluation" if event["name"] in self._measured and event["success"] is not None:
                    found = self._measured[event["name"]]
                    found[event["mode"]] = event["success"]
                    shown = "  ".join(f"{mode} {100 * success:.1f} %" for mode, success in found.items())
                    setattr(self._view, f"success_{event['name']}", shown)
                    self._line(f"held out, {event['name']}: {shown}")

    def phase(self, text: str) -> None:
        if text != self._view.phase:
            self._view.phase = text
            self._line(text)

    def note(self, text: str) -> None:
        self._console.print(f"[dim]{self._seconds():6.1f} s[/dim]  {escape(text)}", highlight=False, soft_wrap=True)

    def _line(self, text: str) -> None:
        if self._live is None and text:
            self.note(text)

    def _seconds(self) -> float:
        return time.monotonic() - self._began


def show_status(view: ProgressView, status: RunStatus) -> None:
    """What the status alone knows."""
    view.max_updates = status.max_updates
    view.version = max(view.version, status.policy_version)
    view.episodes = max(view.episodes, status.episodes)
    view.episodes_per_hour = status.episodes_per_hour or view.episodes_per_hour
    view.phones = f"{status.phones_held} of {status.phones_wanted} held" if status.phones_wanted else "-"
    view.left = status.seconds_left
    view.phase = "  ".join(filter(None, [status.word, status.phase, status.message]))
