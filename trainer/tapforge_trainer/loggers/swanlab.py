"""SwanLab."""

from __future__ import annotations

import io
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .logger import EpisodeRow, RunInfo, Status


class SwanLabLogger:
    def __init__(self, project: str, workspace: str | None, mode: Literal["cloud", "offline"]):
        self._project, self._workspace, self._mode = project, workspace, mode
        self._run: Any = None

    def start(self, run: RunInfo) -> str:
        import swanlab

        folder = run.folder / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        known = run.resume or uuid.uuid4().hex[:12]
        # Private: what it would find out by itself of the machine, the code and the console.
        probes = ("hardware", "runtime", "requirements", "conda", "git", "monitor")
        quiet = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}, probe=dict.fromkeys(probes, False))
        self._run = swanlab.init(
            project=self._project,
            workspace=self._workspace,
            mode="offline" if self._mode == "offline" else "online",
            log_dir=str(folder),
            name=run.name,
            id=known,
            resume="allow",
            config=dict(run.config),
            settings=quiet,
        )
        return known

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def log_episodes(self, step: int, episodes: Sequence[EpisodeRow]) -> None:
        """Pictures with their facts as captions, and the answers as texts."""
        import swanlab
        from PIL import Image

        shown: dict[str, list[Any]] = {"answers": [swanlab.Text(row.answers, caption=row.caption) for row in episodes]}
        if pictures := [
            swanlab.Image(Image.open(io.BytesIO(row.picture)), caption=row.caption, file_type="jpg")
            for row in episodes
            if row.picture is not None
        ]:
            shown["screens"] = pictures
        self._run.log({f"episodes/{name}": media for name, media in shown.items()}, step=step)

    def finish(self, status: Status) -> None:
        import swanlab

        swanlab.finish(state="crashed" if status == "failed" else "success")
