"""What the operator knows of runs, as OpenTelemetry instruments: read when somebody asks, from the status of each run.

- A run's series begin with its first `saw` and end with `forget`.
- What drivers say is told while they run: a driver that fell silent, and one that has ended, are not the same.
- The label `run` is "namespace/name", `phase` is one of `PHASES`; every phase is told, also one that no run is in.

`saw` and `forget` belong to the event loop, reading may happen in any thread. Times are seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from tapforge_api.run_status import TrainingRunStatus

#: starting: on its way, and what it waits for will come; stalled: a person is needed
PHASES: Final = ("starting", "running", "queued", "suspended", "stalled", "complete", "failed")


def phase_of(status: TrainingRunStatus) -> str:
    """By its conditions."""
    true = {c.type: c.reason for c in status.conditions if c.status == "True"}
    if "Complete" in true or "Failed" in true:
        return "complete" if "Complete" in true else "failed"
    if "Stalled" in true:
        return "stalled"
    if "Suspended" in true:
        return "suspended" if "Ready" in true else "queued"
    return "running" if "Ready" in true else "starting"


@dataclass(frozen=True, slots=True)
class _Run:
    key: str
    phase: str
    status: TrainingRunStatus
    #: when its driver was heard last, by the clock; None: not yet
    heard: float | None


class RunTelemetry:
    def __init__(self, meter: Meter, clock: Callable[[], float]):
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        meter.create_observable_gauge("tapforge_runs", [self._phases], description="runs by phase")
        meter.create_observable_counter(
            "tapforge_run_attempts",
            [self._each(lambda run: run.status.attempts)],
            description="attempts that were begun",
        )
        meter.create_observable_counter(
            "tapforge_run_lost_clusters",
            [self._each(lambda run: run.status.lost_clusters)],
            description="attempts that ended with the loss of their Ray cluster",
        )
        meter.create_observable_counter(
            "tapforge_run_disruptions",
            [self._each(lambda run: run.status.disruptions)],
            description="attempts that the cluster ended: eviction, drain, preemption, lost node",
        )
        meter.create_observable_gauge(
            "tapforge_run_driver_restarts",
            [self._each(lambda run: run.status.progress.restarts)],
            description="how often the driver was started again within the attempt",
        )
        meter.create_observable_gauge(
            "tapforge_run_updates",
            [self._each(lambda run: run.status.progress.update)],
            description="updates that are done",
        )
        meter.create_observable_gauge(
            "tapforge_run_success_ratio",
            [self._each(lambda run: run.status.progress.success)],
            description="success rate in training episodes of the last update",
        )
        meter.create_observable_gauge(
            "tapforge_run_left_seconds",
            [self._each(lambda run: run.status.progress.seconds_left if run.phase == "running" else None)],
            unit="s",
            description="estimate of the time to the end",
        )
        meter.create_observable_gauge(
            "tapforge_run_progress_age_seconds",
            [self._each(self._age)],
            unit="s",
            description="since the driver of a run that runs was heard last",
        )

    def saw(self, uid: str, key: str, status: TrainingRunStatus, heard: float | None) -> None:
        """The run is so; its driver was heard so many seconds ago."""
        then = None if heard is None else self._clock() - heard
        self._runs[uid] = _Run(key, phase_of(status), status, then)

    def forget(self, uid: str) -> None:
        """The run is gone, or somebody else's business."""
        self._runs.pop(uid, None)

    def _age(self, run: _Run) -> float | None:
        return None if run.heard is None or run.phase != "running" else self._clock() - run.heard

    def _phases(self, _: CallbackOptions) -> Iterable[Observation]:
        counts = Counter(run.phase for run in list(self._runs.values()))
        return [Observation(counts[phase], {"phase": phase}) for phase in PHASES]

    def _each(self, figure: Callable[[_Run], float | None]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterator[Observation]:
            for run in list(self._runs.values()):
                if (value := figure(run)) is not None:
                    yield Observation(value, {"run": run.key})

        return observe
