"""What each library wrote, read back; over two sessions of a run, the second of which repeats a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tapforge_trainer.loggers.channel import LOG, Channel
from tapforge_trainer.loggers.registry import Chosen

FOLDERS: dict[str, dict[str, Any]] = {
    "tensorboard": {"directory": None},
    "wandb": {"project": "phones", "entity": None, "group": None, "mode": "offline"},
    "swanlab": {"project": "phones", "workspace": None, "mode": "offline"},
    "mlflow": {"tracking_uri": None, "experiment": "phones"},
}
#: a figure's points: (step, value)
Points = list[tuple[int, float]]


def _session(folder: Path, name: str, points: Points, status: Any) -> None:
    reports: list[str] = []
    config = {"model": {"dtype": "bfloat16"}, "seed": 3}
    channel = Channel([Chosen(name, FOLDERS[name])], name="desk", folder=folder, config=config, report=reports.append)
    for step, value in points:
        channel.log(step, {"learner/loss": value, "time/sync": 1.0})
    channel.finish(status, 60.0)
    assert reports == [], (folder / LOG).read_text()[-2000:]


@pytest.mark.parametrize(
    "name", [name if name == "tensorboard" else pytest.param(name, marks=pytest.mark.long) for name in FOLDERS]
)
def test_every_step_is_there_once_after_a_resume(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    _session(tmp_path, name, [(0, 0.5), (1, 0.25)], "stopped")
    _session(tmp_path, name, [(1, 0.75), (2, 0.125)], "complete")
    read = {"tensorboard": _tensorboard, "wandb": _wandb, "swanlab": _swanlab, "mlflow": _mlflow}[name]
    assert read(tmp_path) == [(0, 0.5), (1, 0.25), (2, 0.125)]


def _tensorboard(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    assert b'"dtype": "bfloat16"' in found.Tensors("config")[0].tensor_proto.string_val[0]
    return [(event.step, event.value) for event in found.Scalars("learner/loss")]


def _wandb(folder: Path) -> Points:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto import wandb_internal_pb2

    sessions = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.name for path in sessions}) == 1, "the second session goes on with the first one's run"
    points: Points = []
    for path in sessions:
        with WBDataStoreReader() as reader:
            reader.open(path)
            while (data := reader.scan()) is not None:
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                if record.HasField("run"):
                    config = {item.key: item.value_json for item in record.run.config.update}
                    assert json.loads(config["model"]) == {"dtype": "bfloat16"} and record.run.project == "phones"
                row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                if "learner/loss" in row:
                    points.append((int(row["update"]), float(row["learner/loss"])))
    return points


def _swanlab(folder: Path) -> Points:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    points: Points = []
    runs = sorted((folder / "swanlab").glob("run-*/*.swanlab"))
    assert len({path.name for path in runs}) == 1, "the second session goes on with the first one's run"
    for path in runs:
        reader = DataStoreReader()
        reader.open(path)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            assert not record.HasField("log"), "what is printed is not logged"
            if record.scalar.key == "learner/loss":
                points.append((record.scalar.step, record.scalar.value.number))
        reader.close()
    return points


def _mlflow(folder: Path) -> Points:
    import os

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("phones")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("desk", "FINISHED")
    assert run.data.params == {"model.dtype": "bfloat16", "seed": "3"}
    history = client.get_metric_history(run.info.run_id, "learner/loss")
    return sorted((metric.step, metric.value) for metric in history)
