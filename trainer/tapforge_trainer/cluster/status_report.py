"""The status report of a run: its view as a `tapforge_api.progress.Progress`. Pure.

A figure that is not finite, or out of the bounds of a report, is left out or clipped: no report is refused for it.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Literal

from tapforge_api.base import INT32
from tapforge_api.progress import (
    EXIT_COMPLETE,
    EXIT_CONFIGURATION,
    EXIT_STOPPED,
    JUDGE_BUDGET_SPENT,
    Advance,
    Checkpoint,
    Leases,
    Progress,
)

from ..run.shutdown import EXIT_INTERRUPTED, StopReason, StopSignal
from ..telemetry.telemetry import ProgressView
from .attempt import RunAttempt

Final = Literal["", "complete", "failed", "configuration", "stopped"]

_MESSAGE = 4096
_LARGE = 1e9


def report_of(
    attempt: RunAttempt,
    sequence: int,
    view: ProgressView,
    final: Final = "",
    message: str = "",
    stopped_by: StopReason | None = None,
) -> Progress:
    held = view.slots.size if view.slots is not None else 0
    saved = view.saved
    return Progress(
        attempt=attempt.number,
        sequence=sequence,
        restarts=attempt.restarts,
        cluster=attempt.cluster[:253],
        phase=view.stage,
        advance=Advance(
            update=min(view.update, INT32),
            max_updates=view.max_updates,
            episodes=view.episodes,
            success=_share(view.curve[-1] if view.curve else view.success),
            episodes_per_hour=_figure(view.episodes_per_hour) or 0.0,
            policy_version=min(view.version, INT32),
            seconds_left=_figure(view.seconds_left()),
            judge_tokens=view.judge_tokens,
            judge_money=_figure(view.judge_money) or 0.0,
        ),
        leases=Leases(wanted=held if view.slots_wanted is None else view.slots_wanted, held=held),
        checkpoint=None
        if saved is None
        else Checkpoint(update=saved.update, time=_timestamp(saved.time), path=saved.path),
        final=final,
        reason=JUDGE_BUDGET_SPENT if final == "stopped" and stopped_by is StopReason.JUDGE_BUDGET else "",
        message=_shortened(message),
    )


def ending(code: int, stop: StopSignal, view: ProgressView, restarts_left: int) -> tuple[Final, str]:
    """The last report of a driver that is about to exit with `code`: how it ended, and why if it was stopped."""
    if code == EXIT_COMPLETE:
        return "complete", ""
    if code == EXIT_CONFIGURATION:
        return "configuration", ""
    if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        return "stopped", _stopped(stop, view)
    return ("" if restarts_left else "failed"), ""


def _stopped(stop: StopSignal, view: ProgressView) -> str:
    why = stop.remedy or {
        StopReason.TERMINATE: "its process received SIGTERM",
        StopReason.SUSPEND: "the run is suspended",
        StopReason.DEADLINE: "the run's deadline has passed",
    }.get(stop.reason or StopReason.INTERRUPT, "Ctrl-C was pressed")
    if view.saved is None:
        return f"{why}; there was no checkpoint yet: the run starts from the beginning"
    lost = view.update - view.saved.update
    left = f", without {lost} update{'s' * (lost != 1)} that there was no time to save" if lost > 0 else ""
    return f"{why}; the run resumes after update {view.saved.update}{left}"


def _share(value: float | None) -> float | None:
    return None if value is None or not 0.0 <= value <= 1.0 else float(value)


def _figure(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(min(max(value, 0.0), _LARGE))


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _shortened(text: str) -> str:
    """Both ends of a long message: what failed comes first, the remedy last."""
    if len(text) <= _MESSAGE:
        return text
    half = (_MESSAGE - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
