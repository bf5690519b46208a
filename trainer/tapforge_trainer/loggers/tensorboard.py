"""Event files of TensorBoard, written by its own package; without torch and TensorFlow."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .logger import RunInfo, Status


class TensorBoardLogger:
    def __init__(self, directory: str | None = None):
        self._directory = directory
        self._writer: Any = None

    def start(self, run: RunInfo) -> str:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(self._directory) / run.name if self._directory else run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        text = TensorProto(dtype=DT_STRING, string_val=[f"```\n{json.dumps(run.config, indent=2)}\n```".encode()])
        text.tensor_shape.dim.add(size=1)
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        if not run.resume:
            self._write(0, Summary(value=[Summary.Value(tag="config", tensor=text, metadata=metadata)]))
        return str(folder)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(step, Summary(value=values))

    def finish(self, status: Status) -> None:
        self._writer.close()

    def _write(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
