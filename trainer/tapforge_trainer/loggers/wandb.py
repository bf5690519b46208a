"""Weights & Biases. Steps are a figure of their own, `update`, by which the others are drawn: W&B's own steps would
refuse what comes after a resume."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any, Literal

from .logger import EpisodeRow, RunInfo, Status


class WandbLogger:
    def __init__(self, project: str, entity: str | None, group: str | None, mode: Literal["online", "offline"]):
        self._project, self._entity, self._group, self._mode = project, entity, group, mode
        self._run: Any = None

    def start(self, run: RunInfo) -> str:
        # Where it keeps the pictures of tables until they are sent: in the run's folder, as all else that it writes.
        os.environ.setdefault("WANDB_DATA_DIR", str((run.folder / "wandb").absolute()))
        import wandb

        # Private: what it would find out by itself of the machine, the code and the console.
        quiet = wandb.Settings(
            console="off",
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
        )
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            mode=self._mode,
            dir=str(run.folder),
            id=run.resume or uuid.uuid4().hex[:12],
            resume="allow",
            name=run.name,
            config=dict(run.config),
            settings=quiet,
        )
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")
        return self._run.id

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"update": step, **figures})

    def log_episodes(self, step: int, episodes: Sequence[EpisodeRow]) -> None:
        """A table of its own for each update, a picture in its last column."""
        import wandb
        from PIL import Image

        table = wandb.Table(columns=["update", *(field.name for field in fields(EpisodeRow))])
        for row in episodes:
            *values, data = astuple(row)
            picture = None if data is None else wandb.Image(Image.open(io.BytesIO(data)), file_type="jpg")
            table.add_data(step, *values, picture)
        self._run.log({"update": step, "episodes": table})

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)
