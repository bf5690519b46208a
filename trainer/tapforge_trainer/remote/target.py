"""The folder that a run's files are brought to.

1. It appears whole, by a rename; until then everything is in `.NAME.partial` beside it. A fetch that was killed between
   the two renames leaves the folder as `.NAME.old`, and the next one puts it back.
2. One fetch at a time, by the lock `.NAME.lock`.
3. What was changed or added there stays: `.fetched.json` says what was fetched, and a fetch that would replace another
   file is refused. A picture that was drawn there is kept instead of the run's. A folder that is not that run's, or was
   not made by this, is never touched.
4. Nothing is written outside of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from ..cluster.files import belongs
from .api import ClusterError, Refused

MARKER: Final = ".fetched.json"
#: what `tapforge view` draws
_DRAWN: Final = ("curve.png", "replay.html")
#: files that an error names
_NAMED: Final = 3
#: that the lock may be removed by the one before, while it is taken
_TRIES: Final = 10


@dataclass(frozen=True, slots=True)
class File:
    """One as it was fetched."""

    sha256: str
    #: bytes
    size: int
    #: nanoseconds, of this machine's file
    modified: int
    #: an object's name and etag; "": it came from a Pod
    source: str


#: a later release may keep more of a file
_FILE: Final = tuple(member.name for member in fields(File))


@dataclass(frozen=True, slots=True)
class _Marker:
    uid: str
    files: dict[str, File]


def checked(paths: Collection[str]) -> None:
    """Raises ClusterError for names that no file of a run has, or that lead out of its folder."""
    for path in paths:
        parts = path.split("/")
        if {"", ".", ".."} & set(parts) or "\0" in path or parts[0] == MARKER:
            raise ClusterError(f"the run's storage has a file of the name {path!r}, which can't be written to a folder")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in paths:
                raise ClusterError(f"the run's storage has a file {'/'.join(parts[:end])} and also {path}")


@contextmanager
def opened(folder: Path, uid: str) -> Iterator[Target]:
    """For the run of that UID, and for no other one until the block ends. Raises ClusterError, also for what the file
    system refuses meanwhile."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            yield Target(folder, uid)
    except OSError as error:
        raise ClusterError(f"files can't be brought to {folder}: {error}") from error


class Target:
    """The folder, and the partial one beside it."""

    def __init__(self, folder: Path, uid: str):
        self.folder = folder
        self.partial = folder.with_name(f".{folder.name}.partial")
        self._old = folder.with_name(f".{folder.name}.old")
        self._uid = uid
        #: files whose beginning here is not that of the run's
        self.differ: set[str] = set()
        if not folder.exists() and self._old.exists():
            self._old.rename(folder)
        had, begun = _marker(folder), _marker(self.partial)
        if folder.exists() and (had is None or had.uid != uid):
            raise Refused(
                f"{folder} is there already and was not fetched from this run: name another folder (--to), or move it"
            )
        if self._old.exists():
            shutil.rmtree(self._old)
        if self.partial.exists() and (begun is None or begun.uid != uid):
            shutil.rmtree(self.partial)
            begun = None
        self.partial.mkdir(exist_ok=True)
        self._had = had.files if had else {}
        #: those that are whole in the partial folder
        self._files = begun.files if begun else {}
        self.save()

    def save(self) -> None:
        """Lets the next fetch know what has come."""
        _write(self.partial / MARKER, json.dumps(asdict(_Marker(self._uid, self._files))))

    def base(self, path: str, size: int) -> Path | None:
        """What there is of a file by now, from which it can go on."""
        places = (self.partial / f"{path}.part", self.partial / path, self.folder / path)
        if path in self.differ:
            return None
        return next((place for place in places if place.is_file() and place.stat().st_size <= size), None)

    def has(self, path: str, source: str) -> bool:
        """Whether that very object is in the partial folder; the folder's own is brought there."""
        for folder, files in ((self.partial, self._files), (self.folder, self._had)):
            file = files.get(path)
            if file is not None and file.source == source and _unchanged(folder / path, file):
                if folder != self.partial:
                    _link(folder / path, self.partial / path)
                    self.took(path, file.sha256, source)
                return True
        return False

    def took(self, path: str, sha256: str, source: str = "") -> None:
        """It is whole in the partial folder."""
        status = (self.partial / path).stat()
        self._files[path] = File(sha256, status.st_size, status.st_mtime_ns, source)

    def write(self, path: str, text: str) -> None:
        _write(self.partial / path, text)
        self.took(path, hashlib.sha256(text.encode()).hexdigest())

    def drawn(self, path: str) -> bool:
        """Whether it is a picture that was drawn in the folder."""
        place = self.folder / path
        return path in _DRAWN and place.is_file() and not _unchanged(place, self._had.get(path))

    def refuse_changed(self, paths: Collection[str]) -> None:
        """Raises ClusterError where one of them is in the folder, and is not what was fetched."""
        there = [path for path in paths if os.path.lexists(self.folder / path)]
        mine = sorted(path for path in there if not _unchanged(self.folder / path, self._had.get(path)))
        if mine:
            more = f" and {len(mine) - _NAMED} more" if len(mine) > _NAMED else ""
            raise Refused(
                f"{', '.join(mine[:_NAMED])}{more} in {self.folder}: changed or made there since it was fetched, and "
                "would be replaced. Fetch to another folder (--to), or move what you want to keep"
            )

    def discard(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)

    def publish(self, what: Sequence[str], keep: set[str]) -> None:
        """`keep`: the files that were fetched. Of what was there only those files go that were fetched as a part of
        `what`, and that the run has no more."""
        marker = _marker(self.partial)
        if marker is None or marker.uid != self._uid:
            raise ClusterError(f"{self.partial} was removed while files came; fetch again")
        self.refuse_changed(keep)
        for path in _paths(self.partial):
            if path not in {*keep, MARKER}:
                (self.partial / path).unlink()
        self._files = {path: self._files[path] for path in keep}
        for path in _paths(self.folder):
            had = self._had.get(path)
            if path in {*keep, MARKER} or (belongs(path, what) and _unchanged(self.folder / path, had)):
                continue
            _link(self.folder / path, self.partial / path)
            if had is not None:
                self._files[path] = had
        self.save()
        if self.folder.exists():
            self.folder.rename(self._old)
        try:
            self.partial.rename(self.folder)
        except BaseException:
            if self._old.exists() and not self.folder.exists():
                self._old.rename(self.folder)
            raise
        shutil.rmtree(self._old, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder.with_name(f".{folder.name}.lock")
    busy = f"another fetch brings files to {folder}: wait for its end, or name another folder (--to)"
    for _ in range(_TRIES):
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ClusterError(busy) from error
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                continue  # the one before has just removed it
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
    raise ClusterError(busy)


def _marker(folder: Path) -> _Marker | None:
    """None: the folder was not made by this."""
    try:
        found = json.loads((folder / MARKER).read_text())
        files = {path: File(**{name: file[name] for name in _FILE}) for path, file in found["files"].items()}
        return _Marker(str(found["uid"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _unchanged(place: Path, file: File | None) -> bool:
    if file is None or not place.is_file():
        return False
    status = place.stat()
    if status.st_size != file.size:
        return False
    return status.st_mtime_ns == file.modified or hash_of(place) == file.sha256


def hash_of(place: Path) -> str:
    with place.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _paths(folder: Path) -> list[str]:
    """Of everything that is not a folder."""
    found = []
    for place, inner, names in os.walk(folder):
        links = [name for name in inner if Path(place, name).is_symlink()]
        found += [Path(place, name).relative_to(folder).as_posix() for name in [*names, *links]]
    return found


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _write(path: Path, text: str) -> None:
    """As a new file: an old one may be a link to the folder's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)
