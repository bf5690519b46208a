"""What a run reports while it works: one line of JSON per event on disk, and a live view for a person.

`events.jsonl` is append-only; each line has `at` (unix seconds) and `event`. A run that is resumed appends to the same
file; an event that can't be written is a `RecordingError`. On a terminal the view is redrawn in place; elsewhere each
finished update is one line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from tapforge_envs.slots.source import SlotSource

from ..batch import BatchStatistics
from ..recording.reader import RecordingError
from ..rollout.stats import RolloutStats
from .alarms import AlarmMonitor
from .progress import Progress as RunProgress
from .progress import Saved
from .throughput import shares

EVENTS = "events.jsonl"
#: updates whose mean success is shown
_WINDOW = 5
#: fields of a view that an update's event carries as they are
_SO_FAR = ("version", "episodes", "invalid", "dropped", "episodes_per_hour", "env_steps_per_second", "busy_share")
_SPARKS = " ▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class ProgressView:
    """What the live view shows and the status report says. Rates are shares from 0 to 1; None is not known
    yet."""

    name: str
    max_updates: int
    max_seconds: float | None = None
    phase: str = "starting"
    #: the phase as one word
    stage: str = "Loading"
    update: int = 0
    version: int = 0
    saved: Saved | None = None
    #: where phones come from, once they do; and how many the run asks for, where it asks for a number
    slots: SlotSource | None = None
    slots_wanted: int | None = None
    #: what phones there are, in words, where there is no source of them at hand
    phones: str = ""
    #: over all valid attempts; and in the groups that the last update learned from
    success: float | None = None
    success_learned: float | None = None
    #: what judges have used
    judge_tokens: int = 0
    judge_money: float = 0.0
    success_before: str = ""
    success_after: str = ""
    episodes: int = 0
    invalid: int = 0
    episodes_per_hour: float = 0.0
    env_steps_per_second: float = 0.0
    valid_actions: float | None = None
    group_size: float | None = None
    state_group_size: float | None = None
    zero_variance_groups: str = ""
    #: groups that no update learned from, in this session
    dropped: int = 0
    busy_share: float = 0.0
    sample_age: float = 0.0
    gap: float | None = None
    #: of the learner, in its last update; share of what its GPUs can do
    tokens_per_second: float | None = None
    mfu: float | None = None
    #: where the last update's time went
    time_spent: str = ""
    seconds_rl: float = 0.0
    #: seconds to the end, where another process has estimated them
    left: float | None = None
    curve: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def resume(self, progress: RunProgress, saved: Saved | None) -> None:
        """Shows a run where its newest checkpoint left it."""
        self.update, self.version, self.success = progress.update, progress.version, progress.success
        self.episodes, self.invalid, self.seconds_rl = progress.episodes, progress.invalid, progress.seconds_rl
        self.judge_tokens, self.judge_money = progress.judge_tokens, progress.judge_money
        self.saved, self.curve = saved, []

    def updated(self, event: Mapping[str, Any]) -> None:
        """Shows a run after an update. `event`: of that name, as events.jsonl has it."""
        if event["success_rate_all"] is not None:
            self.curve.append(event["success_rate_all"])
        recent = self.curve[-_WINDOW:]
        self.update, self.seconds_rl = event["update"], event["seconds"]
        self.success = sum(recent) / len(recent) if recent else None
        self.success_learned = event["success_rate"]
        self.valid_actions = event["valid_action_ratio"]
        self.group_size = event["group_size_mean"]
        self.state_group_size = event["state_group_size_mean"]
        self.zero_variance_groups = f"{event['groups_zero_variance']} of {event['groups']}"
        self.sample_age = event["sample_age"]
        so_far = event.get("so_far", {})  # an earlier release's has none
        for name in _SO_FAR:
            setattr(self, name, so_far.get(name, getattr(self, name)))
        metrics = event["learner"]
        self.gap = metrics.get("gap", self.gap)
        self.tokens_per_second = metrics.get("tokens_per_second", self.tokens_per_second)
        self.mfu, self.time_spent = metrics.get("mfu"), shares(metrics)

    def seconds_left(self) -> float | None:
        """Of the reinforcement phase, by the time per update so far."""
        if self.left is not None or not self.update:
            return self.left
        left = self.seconds_rl / self.update * (self.max_updates - self.update)
        return left if self.max_seconds is None else max(0.0, min(left, self.max_seconds - self.seconds_rl))


class Telemetry:
    def __init__(self, folder: Path, view: ProgressView, console: Console | None = None):
        self.view = view
        self.console = console or Console()
        self.started = time.monotonic()
        self.alarms = AlarmMonitor()
        self._path = folder / EVENTS
        self._live: Live | None = None
        self._followers: list[Callable[[Mapping[str, Any]], None]] = []
        with self._written():
            folder.mkdir(parents=True, exist_ok=True)
            # Not buffered: a line that could not be written must not be tried again when the file is closed.
            self._file = self._path.open("ab", buffering=0)
            if self._cut_off():
                self._file.write(b"\n")

    def event(self, event: str, **fields: Any) -> None:
        line = json.dumps({"at": round(time.time(), 3), "event": event, **fields}, default=_plain)
        with self._written():
            left = line.encode() + b"\n"
            while left:
                left = left[self._file.write(left) :]
        for follower in self._followers:
            follower({"event": event, **fields})

    def follow(self, follower: Callable[[Mapping[str, Any]], None]) -> None:
        """It is called with each event, once that is written; it must not wait."""
        self._followers.append(follower)

    def unfollow(self, follower: Callable[[Mapping[str, Any]], None]) -> None:
        self._followers.remove(follower)

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecordingError(
                f"{self._path} can't be written: {error.strerror}; make room and start again"
            ) from error

    def _cut_off(self) -> bool:
        """Whether a crash left half a line."""
        with self._path.open("rb") as file:
            return file.seek(0, 2) > 0 and (file.seek(-1, 2), file.read(1))[1] != b"\n"

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draws the view until the block ends; the last state stays on the screen."""
        if not self.console.is_terminal:
            yield
            return
        with Live(get_renderable=self._draw, console=self.console, refresh_per_second=2) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def phase(self, text: str, stage: str = "") -> None:
        """Reports what begins now. `stage` is the same as one word; without it the stage stays."""
        self.view.phase = text
        self.view.stage = stage or self.view.stage
        self.event("phase", text=text)
        if self._live is None:
            self._line(text)

    def note(self, text: str) -> None:
        """Something a person should not miss."""
        self._said(text, "note")

    def _said(self, text: str, event: str, **fields: Any) -> None:
        self.view.notes = [*self.view.notes[-4:], text]
        self.event(event, text=text, **fields)
        self._line(text)

    def updated(
        self,
        progress: RunProgress,
        statistics: BatchStatistics,
        stats: RolloutStats,
        attempts: Mapping[str, int],
        metrics: Mapping[str, Any],
        **further: Any,
    ) -> None:
        """An update is finished. `attempts`: all that were played for it, by outcome; `metrics`: of learner and sync;
        `further`: fields of the event."""
        fields = {
            "update": progress.update,
            "seconds": progress.seconds_rl,
            **{name: getattr(statistics, name) for name in BatchStatistics.__slots__},
            "success_rate_all": progress.success,
            "attempts": dict(attempts),
            "sample_age": stats.mean_sample_age,
            "members": progress.members,
            "so_far": {
                "version": progress.version,
                "episodes": progress.episodes,
                "invalid": progress.invalid,
                "dropped": sum(stats.dropped.values()),
                "episodes_per_hour": stats.episodes_per_hour,
                "env_steps_per_second": stats.env_steps_per_second,
                "busy_share": stats.busy_share,
            },
            **further,
            "learner": metrics,
        }
        self.view.updated(fields)
        fired, cleared = self.alarms.update(fields)
        self.event("update", **fields, alarms=sorted(self.alarms.active))
        for name, text in fired.items():
            self._said(f"update {progress.update}: {text}", "alarm", update=progress.update, alarm=name)
        for name in cleared:
            self._said(
                f"update {progress.update}: {name} has cleared", "alarm_cleared", update=progress.update, alarm=name
            )
        if metrics.get("gap_alarm"):
            self.note(
                f"update {progress.update}: engine and learner differ by {metrics['gap_mean']:.2g} per token "
                "right after new weights; the importance weights can't be trusted"
            )
        if metrics.get("sync_resends"):
            self.note(
                f"update {progress.update}: the proof of a sync failed, and held after a full set of weights was sent "
                "once more; if it happens again, look at the network between learner and engines"
            )
        if self._live is None:
            self._line(update_line(self.view))

    def close(self) -> None:
        self._file.close()

    def _line(self, text: str) -> None:
        # No markup: text has words of endpoints, models and paths, in which "[/INST]" is no tag.
        line = Text.assemble((f"{time.monotonic() - self.started:6.1f} s", "dim"), f"  {text}")
        self.console.print(line, soft_wrap=True)

    def _draw(self) -> Group:
        return draw(self.view, time.monotonic() - self.started)


def update_line(v: ProgressView) -> str:
    """An update that is finished, where there is no terminal."""
    return (
        f"update {v.update}/{v.max_updates}  success {_percent(v.success)}  "
        f"learned from {_percent(v.success_learned)}  "
        f"episodes/h {v.episodes_per_hour:,.0f}  valid actions {_percent(v.valid_actions)}  "
        f"tokens/s {_whole(v.tokens_per_second)}  group {v.group_size or 0:.1f}  "
        f"same-state {v.state_group_size or 0:.1f}  "
        f"left {_clock(v.seconds_left())}"
    )


def draw(v: ProgressView, seconds: float) -> Group:
    """The live view, after so many seconds."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(40), TextColumn("{task.completed}/{task.total}"))
    bar.add_task("updates", total=v.max_updates, completed=v.update)
    table = Table.grid(padding=(0, 3))
    rows = (
        ("success, all attempts", _percent(v.success), "episodes per hour", f"{v.episodes_per_hour:,.0f}"),
        ("in groups learned from", _percent(v.success_learned), "groups dropped", f"{v.dropped:,}"),
        ("held out, before", v.success_before or "-", "environment steps/s", f"{v.env_steps_per_second:,.0f}"),
        ("held out, after", v.success_after or "-", "slots busy", _percent(v.busy_share)),
        ("valid actions", _percent(v.valid_actions), "episodes", f"{v.episodes:,} ({v.invalid} invalid)"),
        ("group size", _figure(v.group_size), "zero-variance groups", v.zero_variance_groups or "-"),
        ("same-state steps", _figure(v.state_group_size), "sample age (versions)", f"{v.sample_age:.2f}"),
        ("time left", _clock(v.seconds_left()), "engine-learner gap", "-" if v.gap is None else f"{v.gap:.1e}"),
        ("learner tokens/s", _whole(v.tokens_per_second), "MFU", _percent(v.mfu)),
        ("phones", v.phones or _phones(v.slots), "time", v.time_spent or "-"),
    )
    for left, one, right, two in rows:
        table.add_row(Text(left, style="dim"), one, Text(right, style="dim"), two)
    head = Text.assemble((f"{v.name}  ", "bold"), (v.phase, "cyan"), f"  {_clock(seconds)}")
    return Group(head, bar, table, Text("success  " + _spark(v.curve[-60:]), style="green"))


def _phones(slots: SlotSource | None) -> str:
    """How many serve, and what is wrong with the others."""
    if slots is None:
        return "-"
    c = slots.counts()
    ill = ((c.sick, "sick"), (c.quarantined, "in quarantine"), (c.probation, "on probation"))
    return ", ".join([f"{c.leased + c.free} well", *(f"{number} {state}" for number, state in ill if number)])


def _spark(values: list[float]) -> str:
    return "".join(_SPARKS[min(8, max(0, round(value * 8)))] for value in values)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _clock(seconds: float | None) -> str:
    return "-" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _plain(value: Any) -> Any:
    """numpy and torch scalars, paths."""
    return value.item() if hasattr(value, "item") else str(value)
