"""The folder of a run: what an earlier version wrote is read, and no two runs are mixed."""

import json
from contextlib import closing
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tapforge_api import dump_set, load
from tapforge_trainer import session
from tapforge_trainer.run.assembly import ConfigurationError
from tapforge_trainer.run.folder import CURVE, SPEC, check_same, read_events, read_spec, write_spec
from tapforge_trainer.run.report import write_report
from tapforge_trainer.telemetry.telemetry import EVENTS, ProgressView, Telemetry

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "quickstart.yaml"
#: of a version before errorRate and baselines had these names
EARLIER = """\
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: earlier, annotations: {tapforge.dev/schema-revision: "1"}}
spec:
  warmStart: {steps: 5, carelessness: 0.5}
  evaluation: {episodes: 4, floors: false}
"""


def _events(folder: Path, *events: dict) -> None:
    (folder / EVENTS).write_text("".join(json.dumps({"at": 0.0, **event}) + "\n" for event in events))


def test_the_spec_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / SPEC).write_text(EARLIER)
    run = read_spec(tmp_path)
    assert run.spec.warm_start is not None
    assert run.spec.warm_start.error_rate == 0.5
    assert not run.spec.evaluation.baselines
    assert run.spec.evaluation.episodes == 4


def test_a_run_of_an_earlier_version_is_resumed_and_its_curve_drawn(tmp_path: Path) -> None:
    (tmp_path / SPEC).write_text(EARLIER)
    point = {"event": "evaluation", "update": 0, "mode": "greedy", "success": 0.5, "interval": [0.1, 0.9]}
    _events(tmp_path, {"event": "checkpoint", "update": 0}, point, {"event": "floor", "policy": "random", "success": 0})
    assert [event["event"] for event in read_events(tmp_path)] == ["checkpoint", "evaluation", "baseline"]
    write_spec(tmp_path, read_spec(tmp_path))
    assert "errorRate: 0.5" in (tmp_path / SPEC).read_text()
    assert "baselines: false" in (tmp_path / SPEC).read_text()
    assert read_spec(tmp_path) == load(tmp_path / SPEC)
    write_report(tmp_path)
    assert (tmp_path / CURVE).stat().st_size > 0


async def test_pictures_that_fail_do_not_fail_a_run_that_is_over(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    write_spec(folder, load(SAMPLE))
    _events(folder, {"event": "evaluation", "update": 0, "mode": "greedy", "success": 0.5, "interval": [0.1, 0.9]})
    (folder / CURVE).mkdir()  # as where a disk is full or matplotlib is away
    view, said = ProgressView("over", 0), StringIO()
    with closing(Telemetry(folder, view, Console(file=said))) as telemetry:
        await session._drawn(folder, telemetry)
        telemetry.note("503: <s>[INST] no [/INST]")
    assert f"tapforge view '{folder}'" in view.notes[-2] and CURVE in view.notes[-2]
    assert "503: <s>[INST] no [/INST]\n" in said.getvalue(), "words of others are no markup"


def test_a_folder_with_a_checkpoint_takes_no_other_run(tmp_path: Path) -> None:
    write_spec(tmp_path, load(SAMPLE))
    write_spec(tmp_path, load(SAMPLE, overrides=["spec.seed=7"]))
    _events(tmp_path, {"event": "checkpoint", "update": 0})
    write_spec(tmp_path, load(SAMPLE, overrides=["spec.seed=7", "spec.evaluation.baselines=false"]))
    with pytest.raises(ConfigurationError, match=r"spec\.seed: 7 there, 8 here"):
        write_spec(tmp_path, load(SAMPLE, overrides=["spec.seed=8"]))


def test_a_checkpoint_is_resumed_from_by_no_other_run(tmp_path: Path) -> None:
    """Also where the run's folder is gone, and only the bucket knows what it was."""
    kept = json.loads(json.dumps(dump_set(load(SAMPLE, overrides=["spec.seed=7"]))))
    check_same({}, load(SAMPLE), "s3://lab/runs/x")
    check_same(kept, load(SAMPLE, overrides=["spec.seed=7", "spec.stop.maxUpdates=9"]), "s3://lab/runs/x")
    with pytest.raises(ConfigurationError, match=r"s3://lab/runs/x holds a run that differs(.|\n)*spec\.seed: 7 there"):
        check_same(kept, load(SAMPLE, overrides=["spec.seed=8"]), "s3://lab/runs/x")


def test_a_default_that_an_earlier_version_wrote_out_is_the_same_run() -> None:
    cap = "spec.algorithm.loss.importanceCap"
    kept = dump_set(load(SAMPLE, overrides=[f"{cap}=2"]))
    check_same(kept, load(SAMPLE), "s3://lab/runs/x")
    with pytest.raises(ConfigurationError, match=rf"{cap}: 2.0 there, 3.0 here"):
        check_same(kept, load(SAMPLE, overrides=[f"{cap}=3"]), "s3://lab/runs/x")
    with pytest.raises(ConfigurationError, match=rf"{cap}: 2.0 there, None here"):
        check_same(kept, load(SAMPLE, overrides=["spec.algorithm.loss.anchor=behavior"]), "s3://lab/runs/x")


def test_a_line_that_was_cut_off_is_no_event(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text('{"at": 0.0, "event": "update"}\n{"at": 1.0, "ev')
    assert [event["event"] for event in read_events(tmp_path)] == ["update"]
