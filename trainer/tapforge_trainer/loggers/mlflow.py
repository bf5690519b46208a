"""MLflow, by its client: nothing global, no autologging. Without a server files in the run's folder."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from .logger import EpisodeRow, RunInfo, Status

_STATUS: Final = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
#: what a store takes at a time, and characters of a parameter's value
_METRICS, _PARAMETERS, _CHARACTERS = 1000, 100, 500


class MLflowLogger:
    def __init__(self, tracking_uri: str | None, experiment: str):
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run = ""

    def start(self, run: RunInfo) -> str:
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlflow").absolute().as_uri()
        if uri.startswith("file:"):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=uri)
        if run.resume:
            self._run = run.resume
            self._client.update_run(self._run, status="RUNNING")
            return self._run
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [Param(name, value[:_CHARACTERS]) for name, value in _flat(run.config)]
        for at in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(self._run, params=parameters[at : at + _PARAMETERS])
        return self._run

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        for at in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run, metrics=metrics[at : at + _METRICS])

    def log_episodes(self, step: int, episodes: Sequence[EpisodeRow]) -> None:
        """A table in MLflow's own form, made without pandas, which its slim package leaves out; and a picture for each
        place in it, over the updates."""
        from PIL import Image

        columns = [field.name for field in fields(EpisodeRow) if field.name != "picture"]
        file = f"episodes/update-{step:08d}.json"
        data = [[step, *(getattr(row, name) for name in columns)] for row in episodes]
        self._client.log_dict(self._run, {"columns": ["update", *columns], "data": data}, file)
        for place, row in enumerate(episodes, 1):
            if row.picture is not None:
                picture = Image.open(io.BytesIO(row.picture))
                self._client.log_image(self._run, picture, key=f"episodes/{place}", step=step)

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._run, _STATUS[status])


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, member in value.items():
            yield from _flat(member, f"{path}.{name}" if path else name)
    else:
        yield path, str(value)
