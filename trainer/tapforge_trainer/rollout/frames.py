"""Frames on disk, named by their content: `frames/ab/abcdef....png`, each written once.

A frame appears under its name complete (written beside it, then renamed); reading checks the hash, so a damaged file is
an error and never a picture.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from tapforge_envs.protocol import Frame

_ENDINGS = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp"}


class FrameError(Exception):
    """A frame is not there or not what its name says."""


class FrameStore:
    def __init__(self, folder: Path):
        self._folder = folder
        self._known: set[str] = set()
        self._unsynced: list[Path] = []

    def path(self, sha256: str, ending: str = "png") -> Path:
        return self._folder / sha256[:2] / f"{sha256}.{ending}"

    def put(self, frame: Frame) -> None:
        if frame.sha256 in self._known:
            return
        path = self.path(frame.sha256, _ending(frame.media_type))
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
        self._known.add(frame.sha256)

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

    def get(self, sha256: str) -> bytes:
        """The encoded image."""
        for ending in _ENDINGS.values():
            path = self.path(sha256, ending)
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            if hashlib.sha256(data).hexdigest() != sha256:
                raise FrameError(f"{path} is damaged: its content has another hash than its name")
            return data
        raise FrameError(f"frame {sha256} is not in {self._folder}")

    def frame(self, sha256: str) -> Frame:
        """The image with its size and type, as its own header says."""
        data = self.get(sha256)
        try:
            with Image.open(io.BytesIO(data)) as image:
                return Frame(data, sha256, image.width, image.height, Image.MIME[image.format or "PNG"])
        except UnidentifiedImageError as error:
            raise FrameError(f"frame {sha256} of {self._folder} is no image: {error}") from error


def _ending(media_type: str) -> str:
    if media_type not in _ENDINGS:
        raise FrameError(f"frames of type {media_type!r} can't be recorded; known are {', '.join(_ENDINGS)}")
    return _ENDINGS[media_type]
