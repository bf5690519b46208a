"""What is measured of runs: as their statuses say, while there is somebody who knows."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tapforge_api.run_status import TrainingRunStatus
from tapforge_operator.observability.metrics import PHASES, Telemetry, phase_of
from tapforge_operator.trainingrun.status import Situation, conditions

RUNNING = Situation("good", "Running", "the driver runs")


def status(situation: Situation = RUNNING, **fields: Any) -> TrainingRunStatus:
    told = TrainingRunStatus.model_validate(fields)
    return told.model_copy(update={"conditions": conditions(situation, told, 1, 0.0)})


def told(telemetry: Telemetry, run: str) -> dict[str, float]:
    families = text_string_to_metric_families(telemetry.render().decode())
    return {s.name: s.value for family in families for s in family.samples if s.labels.get("run") == run}


def phases(telemetry: Telemetry) -> dict[str, float]:
    families = text_string_to_metric_families(telemetry.render().decode())
    return {s.labels["phase"]: s.value for f in families for s in f.samples if s.name == "tapforge_runs"}


@pytest.mark.parametrize(
    ("situation", "phase"),
    [
        (Situation("busy", "WaitingForPhones", ""), "starting"),
        (Situation("busy", "Stopping", ""), "starting"),
        (RUNNING, "running"),
        (Situation("busy", "Queued", "", suspended=True), "queued"),
        (Situation("good", "Suspended", "", suspended=True), "suspended"),
        (Situation("stalled", "PoolNotFound", ""), "stalled"),
        (Situation("good", "Complete", "", complete=True), "complete"),
        (Situation("stalled", "DriverFailed", "", failed=True), "failed"),
    ],
)
def test_a_run_is_in_one_phase(situation: Situation, phase: str) -> None:
    assert phase_of(status(situation)) == phase
    telemetry = Telemetry()
    telemetry.runs.observe("uid", "a/run", status(situation), None)
    assert phases(telemetry) == {**dict.fromkeys(PHASES, 0), phase: 1}


def test_a_run_that_nothing_was_said_of_yet_is_starting() -> None:
    assert phase_of(TrainingRunStatus()) == "starting"


def test_figures_are_those_of_the_status() -> None:
    telemetry = Telemetry(clock=lambda: 1000.0)
    progress = {"update": 7, "success": 0.25, "secondsLeft": 90.0, "restarts": 2}
    telemetry.runs.observe("uid", "a/run", status(attempts=3, lostClusters=1, disruptions=2, progress=progress), 4.0)
    assert told(telemetry, "a/run") == {
        "tapforge_run_condition": 1,
        "tapforge_run_attempts_total": 3,
        "tapforge_run_lost_clusters_total": 1,
        "tapforge_run_disruptions_total": 2,
        "tapforge_run_driver_restarts": 2,
        "tapforge_run_updates": 7,
        "tapforge_run_success_ratio": 0.25,
        "tapforge_run_left_seconds": 90,
        "tapforge_run_progress_age_seconds": 4,
    }


def test_what_is_not_known_is_not_told() -> None:
    telemetry = Telemetry()
    telemetry.runs.observe("uid", "a/run", status(), None)
    unknown = {f"tapforge_run_{name}" for name in ("success_ratio", "left_seconds", "progress_age_seconds")}
    assert not unknown & set(told(telemetry, "a/run"))


def test_a_driver_that_has_ended_is_not_silent() -> None:
    now = [1000.0]
    telemetry = Telemetry(clock=lambda: now[0])
    telemetry.runs.observe("uid", "a/run", status(progress={"secondsLeft": 5.0}), 4.0)
    now[0] += 60
    assert told(telemetry, "a/run")["tapforge_run_progress_age_seconds"] == 64
    over = Situation("good", "Complete", "", complete=True)
    telemetry.runs.observe("uid", "a/run", status(over, progress={"update": 9, "secondsLeft": 5.0}), 64.0)
    left = told(telemetry, "a/run")
    assert left["tapforge_run_updates"] == 9
    assert not {"tapforge_run_progress_age_seconds", "tapforge_run_left_seconds"} & set(left)


def test_a_run_that_is_gone_leaves_nothing_and_its_namesake_has_its_own() -> None:
    telemetry = Telemetry()
    telemetry.runs.observe("one", "a/run", status(attempts=5), 1.0)
    telemetry.runs.observe("other", "a/run", status(attempts=1), 1.0)
    telemetry.runs.forget("one")
    assert told(telemetry, "a/run")["tapforge_run_attempts_total"] == 1 and phases(telemetry)["running"] == 1
    telemetry.runs.forget("other")
    telemetry.runs.forget("never")
    assert told(telemetry, "a/run") == {} and set(phases(telemetry).values()) == {0}
