"""Event files of TensorBoard, written by its own package; without torch and TensorFlow."""

from __future__ import annotations

import html
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .logger import EpisodeRow, RunInfo, Status


class TensorBoardLogger:
    def __init__(self, directory: str | None = None):
        self._directory = directory
        self._writer: Any = None

    def start(self, run: RunInfo) -> str:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(self._directory) / run.name if self._directory else run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if not run.resume:
            self._write_text(0, "config", f"```\n{json.dumps(run.config, indent=2)}\n```")
        return str(folder)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(step, Summary(value=values))

    def log_episodes(self, step: int, episodes: Sequence[EpisodeRow]) -> None:
        """A table as text for the update, and a picture for each place in it."""
        from PIL import Image
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write_text(step, "episodes", _table(episodes))
        for place, row in enumerate(episodes, 1):
            if row.picture is None:
                continue
            width, height = Image.open(io.BytesIO(row.picture)).size
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=row.picture)
            self._write(step, Summary(value=[Summary.Value(tag=f"episodes/{place}", image=image)]))

    def finish(self, status: Status) -> None:
        self._writer.close()

    def _write_text(self, step: int, tag: str, markdown: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        text = TensorProto(dtype=DT_STRING, string_val=[markdown.encode(errors="replace")])
        text.tensor_shape.dim.add(size=1)
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._write(step, Summary(value=[Summary.Value(tag=tag, tensor=text, metadata=metadata)]))

    def _write(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _table(episodes: Sequence[EpisodeRow]) -> str:
    """In Markdown. Words of models and tasks make neither columns nor tags."""
    columns = [field.name for field in fields(EpisodeRow) if field.name != "picture"]
    lines = ["| picture | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for place, row in enumerate(episodes, 1):
        shown = f"episodes/{place}" if row.picture is not None else "none"
        lines.append("| " + " | ".join([shown, *(_cell(getattr(row, name)) for name in columns)]) + " |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    return html.escape(str(value)).replace("|", "&#124;").replace("`", "&#96;").replace("\n", "<br>")
