"""How far a run is by its newest checkpoint: what can be said of it before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from .progress import Progress
from .telemetry import Saved, View


def newest(checkpoints: Path) -> Saved | None:
    """The newest checkpoint in a folder of checkpoints. Raises CheckpointError for one that can't be read."""
    from .policy.checkpoints import latest, read_state

    folder = latest(checkpoints)
    if folder is None:
        return None
    return Saved(read_state(folder)["update"], folder.stat().st_mtime, str(folder))


def progress_of(saved: Saved) -> Progress:
    """What the driver kept in it. Raises CheckpointError."""
    from .policy.checkpoints import read_state

    return Progress(**read_state(Path(saved.path))["driver"])


def show(view: View, progress: Progress, saved: Saved | None) -> None:
    """A run that goes on stands where it stopped."""
    view.update, view.version, view.success = progress.update, progress.version, progress.success
    view.episodes, view.invalid, view.seconds_rl = progress.episodes, progress.invalid, progress.seconds_rl
    view.saved = saved
