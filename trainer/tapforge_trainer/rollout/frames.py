"""Frames on disk, by name: `frames/ab/abcdef....png`, each written once.

A frame appears under its name complete (written beside it, then renamed); reading checks that it is the one of its
name, so a damaged file is an error and never a picture.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..frames import FittedFrame, FrameError, checked

#: recordings of earlier versions have the other two, too
_ENDINGS = ("png", "jpg", "webp")


class FrameStore:
    def __init__(self, folder: Path):
        self._folder = folder
        self._known: set[str] = set()
        self._unsynced: list[Path] = []

    def path(self, name: str, ending: str = "png") -> Path:
        return self._folder / name[:2] / f"{name}.{ending}"

    def put(self, frame: FittedFrame) -> None:
        if frame.name in self._known:
            return
        path = self.path(frame.name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                unfinished.write_bytes(frame.data)
                unfinished.rename(path)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
            self._unsynced.append(path)
        self._known.add(frame.name)

    def sync(self) -> None:
        """Waits until every frame put so far would survive a power failure."""
        folders = {path.parent for path in self._unsynced}
        for path in (*self._unsynced, *sorted(folders)):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        self._unsynced.clear()

    def get(self, name: str) -> bytes:
        """The encoded image. Raises FrameError for one that is missing or damaged."""
        return self.frame(name).data

    def frame(self, name: str) -> FittedFrame:
        """Raises FrameError for one that is missing or damaged."""
        for ending in _ENDINGS:
            path = self.path(name, ending)
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            try:
                return checked(name, data)
            except FrameError as error:
                raise FrameError(f"{path}: {error}") from error
        raise FrameError(f"frame {name} is not in {self._folder}")
