"""Which figures loggers get; that docs/loggers.md lists them; and that no credential is among what is logged."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tapforge_api import load
from tapforge_api.installing import install_extra
from tapforge_api.loggers import Logging
from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.loggers.figures import FIGURES, figures_of, meaning, settings_of
from tapforge_trainer.loggers.registry import chosen, missing
from tapforge_trainer.loggers.session import check_installed, logged
from tapforge_trainer.rollout.stats import RolloutStats
from tapforge_trainer.run.assembly import ConfigurationError
from tapforge_trainer.telemetry.progress import Progress
from tapforge_trainer.telemetry.telemetry import ProgressView, Telemetry

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: desk}
spec:
  model: {source: {tiny: {}}}
  environment: {source: {urls: {list: ["http://user:secret@phone:1/a?token=secret"]}}}
"""


def _run(**spec: Any) -> Any:
    return load(SPEC, overrides=tuple(f"spec.{name}={json.dumps(value)}" for name, value in spec.items()))


def test_an_update_becomes_named_figures() -> None:
    event = {
        "event": "update",
        "update": 7,
        "seconds": 60.0,
        "groups": 4,
        "steps_mean": None,
        "success_rate_all": 0.5,
        "attempts": {"success": 2, "failure": 2},
        "sample_age": 0.5,
        "members": {"1": {"success": 1}},
        "driver_stall_seconds": {"longest": 0.1, "p999": 0.05},
        "rollout_workers": {"workers": 2},
        "phones": {"free": 3},
        "learner": {
            "loss": np.float32(0.25), "seconds": 2.0, "seconds_forward": 0.5, "gap": 1e-5, "entropy": float("nan")
        },
    }  # fmt: skip
    assert figures_of(event) == {
        "time/reinforcement": 60.0,
        "batch/groups": 4.0,
        "rollout/success_rate": 0.5,
        "rollout/attempts_success": 2.0,
        "rollout/attempts_failure": 2.0,
        "rollout/sample_age": 0.5,
        "time/driver_stall_longest": 0.1,
        "time/driver_stall_p999": 0.05,
        "workers/workers": 2.0,
        "phones/free": 3.0,
        "learner/loss": 0.25,
        "time/update": 2.0,
        "time/forward": 0.5,
        "engine/gap": 1e-5,
    }
    assert all(meaning(name) for name in figures_of(event))
    assert figures_of({"event": "phase", "text": "x"}) == {}


def test_a_measurement_becomes_figures_of_its_mode() -> None:
    event = {"event": "evaluation", "name": "before", "mode": "greedy", "update": 0, "success": 0.25, "episodes": 8}
    found = figures_of(event | {"success_attempted": None, "invalid": 0})
    assert found == {"evaluation/greedy/success": 0.25, "evaluation/greedy/episodes": 8, "evaluation/greedy/invalid": 0}


def test_every_figure_of_a_batch_has_a_meaning() -> None:
    names = [f"batch/{name}" for name in type(build_batch([], BatchRules()).statistics).__slots__]
    assert [name for name in names if name not in FIGURES] == []


def test_the_page_lists_the_figures_as_the_code_has_them() -> None:
    page = Path("docs/loggers.md").read_text()
    rows = [f"| `{name}` | {meaning} |" for name, meaning in FIGURES.items()]
    assert "\n".join(rows) in page, "write the table of docs/loggers.md again from FIGURES"


def test_no_credential_is_logged() -> None:
    run = _run(model={"source": {"objectStorage": {"uri": "s3://key:secret@models/a?sig=secret"}}})
    text = json.dumps(settings_of(run))
    assert "secret" not in text and "s3://models/a" in text
    assert "learner" in settings_of(run)


def test_a_library_that_is_not_there_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapforge_trainer.loggers.registry.find_spec", lambda name: None if name == "wandb" else True)
    run = _run(logging={"wandb": {}, "tensorboard": {}, "plugins": [{"name": "note"}]})
    with pytest.raises(ConfigurationError) as refused:
        check_installed(run)
    assert f"spec.logging.wandb: wandb is not installed here: {install_extra('wandb')}" in str(refused.value)
    assert "spec.logging.plugins: no installed package offers the logger note" in str(refused.value)
    assert "tensorboard" not in str(refused.value)
    check_installed(_run())


@pytest.mark.usefixtures("others")
def test_the_nearest_name_of_a_plugin_is_suggested() -> None:
    (wrong,) = missing(chosen(Logging(plugins=[{"name": "note"}])))  # type: ignore[list-item]
    assert "did you mean notes?" in wrong


@pytest.mark.usefixtures("others")
async def test_a_session_s_events_reach_the_logger_and_a_failure_becomes_a_note(tmp_path: Path) -> None:
    run = _run(
        logging={"plugins": [{"name": "notes", "options": [{"name": "team", "value": "a"}]}, {"name": "failing"}]}
    )
    with closing(Telemetry(tmp_path, ProgressView("desk", 10), Console(quiet=True))) as telemetry:
        with pytest.raises(RuntimeError, match="the learner died"):
            async with logged(run, tmp_path, telemetry):
                rules, stats = BatchRules(), RolloutStats()
                telemetry.updated(
                    Progress(update=3, success=0.25), build_batch([], rules).statistics, stats, {}, {"loss": 0.5}
                )
                raise RuntimeError("the learner died")
        telemetry.event("update", update=4, learner={})  # nobody follows any more
        (note,) = telemetry.view.notes
    lines = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    logged_ = next(line for line in lines if "step" in line)
    assert logged_["step"] == 3 and logged_["figures"]["learner/loss"] == 0.5
    assert lines[-1] == {"status": "failed"}
    assert "logger failing: ConnectionError" in note
