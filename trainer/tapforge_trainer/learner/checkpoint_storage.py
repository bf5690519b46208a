"""Where the checkpoints of a run are: a folder, or object storage.

    root/
      update-00000012/       in a store update-00000012-HOLDER-TIME/
        *.distcp, .metadata  by the ranks
        state.json           by the driver; in a store it is written last, and what has none is not complete
      latest                 the newest complete one's name; in a store the holder's as well, as JSON

Rules:
1. A checkpoint appears after everything in it was written and flushed, or, in a store, after every object was found
   there with the size that was written. Then `latest` moves, in one step. A crash or a full disk at any moment leaves
   the one before untouched, and `latest` never names an incomplete one.
2. The newest `keep` stay; what `latest` names is never deleted. What a crash left incomplete goes with the next save.
3. A store belongs to the latest holder that began (`take_over`): `latest` moves by conditional writes, so that an older
   one can neither move it nor delete what it names, whenever it wakes up (`FencedOut`). A folder is fenced by its name
   (cluster/storage.py).

Everything here blocks: an event loop calls it in a thread.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from ..storage.object_storage import Conflict, StorageError, Store, is_uri, open_store, uri_error

LATEST: Final = "latest"
STATE: Final = "state.json"
_PREFIX: Final = "update-"
_PARTIAL: Final = ".partial-"
_REPLACED: Final = ".replaced-"
#: of state.json that is written; and those that are read. A checkpoint of another one is refused
FORMAT: Final = 3
_READ: Final = (2, FORMAT)
#: update, holder, milliseconds since the epoch
_STORED: Final = re.compile(r"update-\d{8}-(?P<holder>\d{8}-\d{13})-\d{13}", re.ASCII)
#: letters of a name up to its update
_UPDATE: Final = len("update-00000000")
#: that no holder has it yet
_NOBODY: Final = ""
#: of a conditional write that was overtaken
_TRIES: Final = 5

#: sizes in bytes, by name
Files = Mapping[str, int]


class Holder(NamedTuple):
    """The writer of a run's files: an attempt of a cluster, or 0, and when it was started. The larger one counts."""

    attempt: int
    #: milliseconds since the epoch
    started: int = 0

    def __str__(self) -> str:
        return f"{self.attempt:08d}-{self.started:013d}"


class FencedOut(Exception):
    """A later holder has resumed the run: this one may not write any more."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the message names it and what is left."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written. `target`: the URI or the absolute path of the folder that the ranks write to,
    which may be started elsewhere; `place`: what it will be called."""

    update: int
    target: str
    place: str


class CheckpointBackend(Protocol):
    """The checkpoints of one run. Raises OSError or StorageError, and CheckpointError for what is damaged."""

    @property
    def root(self) -> str: ...

    def draft(self, update: int) -> Draft:
        """What the next checkpoint will be called. Nothing is written."""
        ...

    def begin(self, draft: Draft, document: Mapping[str, Any]) -> None:
        """Makes room for it. `document`: what is known of its state.json by now."""
        ...

    def publish(self, draft: Draft, document: Mapping[str, Any], files: Files, keep: int) -> None:
        """Makes it the newest one. `files`: what the ranks have written."""
        ...

    def discard(self, draft: Draft) -> None:
        """Removes what was written of it, as far as that works."""
        ...

    def latest(self) -> str | None:
        """Folder or URI of the newest complete checkpoint."""
        ...

    def take_over(self) -> None:
        """From here on only this holder writes, where others could. Raises FencedOut."""
        ...


def place_of(folder: Path, uri: str | None, holder: Holder | None = None) -> CheckpointBackend:
    """In the store of `uri`, if there is one, else in the folder. `holder`: the writer; None: this only reads."""
    return CheckpointFolder(folder) if uri is None else CheckpointStore(uri, holder, folder)


def read_state(where: str | Path) -> dict[str, Any]:
    """The JSON document of a checkpoint: format, update, counters, driver, and more. Raises CheckpointError, or
    StorageError for a store that can't be read."""
    path = f"{where}/{STATE}"
    try:
        if is_uri(where):
            found = open_store(str(where)).read(STATE)
            if found is None:
                raise FileNotFoundError(path)
            document = json.loads(found[0])
        else:
            document = json.loads(Path(path).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} is not a checkpoint: it has no {STATE}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if document.get("format") not in _READ:
        raise CheckpointError(
            f"{where} has format {document.get('format')}; this version reads format {_READ[0]} and {_READ[-1]}: "
            "resume with the version that wrote it, or begin anew from its export"
        )
    return document


def checkpoint_at(where: str) -> str:
    """The checkpoint that a folder or URI names: itself, or the newest one where it has a `latest`."""
    if is_uri(where):
        store = open_store(where)
        if store.etag(STATE) is None and store.etag(LATEST) is not None:
            return CheckpointStore(where).latest() or where
        return where.rstrip("/")
    folder = Path(where)
    if not (folder / STATE).exists() and (folder / LATEST).exists():
        return CheckpointFolder(folder).latest() or where
    return where


def missing_files(where: str, files: Files) -> list[str]:
    """What a checkpoint lacks of its files, or has of another size, in words."""
    if is_uri(where):
        there = {one.path: one.size for one in open_store(where).list()}
    else:
        there = {path.name: path.stat().st_size for path in Path(where).iterdir() if path.is_file()}
    return [
        f"{name} is not there" if name not in there else f"{name} has {there[name]} bytes instead of {size}"
        for name, size in files.items()
        if there.get(name) != size
    ]


# --- a folder ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The folder that it is in has to be there."""

    folder: Path

    @property
    def root(self) -> str:
        return str(self.folder)

    def take_over(self) -> None:
        return

    def draft(self, update: int) -> Draft:
        name = f"{_PREFIX}{update:08d}"
        return Draft(update, str((self.folder / f"{_PARTIAL}{name}").absolute()), str(self.folder / name))

    def begin(self, draft: Draft, document: Mapping[str, Any]) -> None:
        partial = Path(draft.target)
        self.folder.mkdir(exist_ok=True)
        for left in self.folder.glob(f"{_PARTIAL}*"):  # of a run that was killed while it wrote
            shutil.rmtree(left)
        for left in self.folder.glob(f"{_REPLACED}*"):
            whole = self.folder / left.name.removeprefix(_REPLACED)
            if whole.exists():
                shutil.rmtree(left)
            else:
                left.rename(whole)
        partial.mkdir()
        # From now on the recording keeps what this checkpoint needs (`telemetry/progress.py`).
        (partial / STATE).write_text(_text(document))

    def publish(self, draft: Draft, document: Mapping[str, Any], files: Files, keep: int) -> None:
        partial, place = Path(draft.target), Path(draft.place)
        (partial / STATE).write_text(_text(document))
        for path in partial.rglob("*"):
            if path.is_file():
                flush(path)
        flush(partial)
        if place.exists():
            replaced = self.folder / f"{_REPLACED}{place.name}"
            place.rename(replaced)
            partial.rename(place)
            shutil.rmtree(replaced)
        else:
            partial.rename(place)
        pointer = self.folder / f".{LATEST}.new"
        pointer.write_text(place.name + "\n")
        flush(pointer)
        pointer.rename(self.folder / LATEST)
        flush(self.folder)
        complete = sorted(path for path in self.folder.glob(f"{_PREFIX}*") if path != place)
        for old in complete[: max(0, len(complete) - (keep - 1))]:
            shutil.rmtree(old)

    def discard(self, draft: Draft) -> None:
        shutil.rmtree(draft.target, ignore_errors=True)

    def latest(self) -> str | None:
        try:
            name = (self.folder / LATEST).read_text().strip()
        except FileNotFoundError:
            return None
        place = self.folder / name
        replaced = self.folder / f"{_REPLACED}{name}"
        if not place.exists() and (replaced / STATE).is_file():
            return str(replaced)  # killed between the two renames of `publish`: the one before is still whole
        if not (place / STATE).is_file():
            raise CheckpointError(_gone(str(self.folder / LATEST), name))
        return str(place)


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- object storage ---------------------------------------------------------------------------------------------------


class CheckpointStore:
    """Below a URI. `holder`: the writer; None: this only reads. `mirror`: a folder of this machine for the driver's
    part of each checkpoint that is kept, by which the recording knows what it has to keep; None: there is none."""

    def __init__(self, uri: str, holder: Holder | None = None, mirror: Path | None = None):
        if why := uri_error(uri, writable=True):
            raise StorageError(why)
        self._uri, self._holder, self._mirror = uri.rstrip("/"), str(holder or ""), mirror

    @property
    def root(self) -> str:
        return self._uri

    def take_over(self) -> None:
        store = open_store(self._uri)
        for _ in range(_TRIES):
            document, etag = self._pointer(store)
            if document.get("holder") == self._holder:
                store.check_conditions(".probe")
                return
            self._refuse_later(document)
            try:
                self._point(store, str(document.get("checkpoint", _NOBODY)), etag)
            except Conflict:
                continue
        raise StorageError(f"{self._uri} was taken over by others {_TRIES} times in a row; are there two operators?")

    def check(self) -> None:
        """Raises FencedOut."""
        self._refuse_later(self._pointer(open_store(self._uri))[0])

    def draft(self, update: int) -> Draft:
        place = f"{self._uri}/{_PREFIX}{update:08d}-{self._holder}-{int(time.time() * 1000):013d}"
        return Draft(update, place, place)

    def begin(self, draft: Draft, document: Mapping[str, Any]) -> None:
        if self._mirror is not None:
            folder = self._mirror / _name(draft)
            self._mirror.mkdir(exist_ok=True)
            folder.mkdir()
            (folder / STATE).write_text(_text(document))

    def publish(self, draft: Draft, document: Mapping[str, Any], files: Files, keep: int) -> None:
        store, name = open_store(self._uri), _name(draft)
        self.check()
        if wrong := missing_files(draft.target, files):
            raise StorageError(f"{draft.target} did not arrive whole: {'; '.join(wrong[:3])}")
        store.put(f"{name}/{STATE}", _text(document).encode())
        for _ in range(_TRIES):
            known, etag = self._pointer(store)
            self._refuse_later(known)
            try:
                self._point(store, name, etag)
            except Conflict:
                continue
            self._prune(store, name, keep)
            return
        raise StorageError(f"{self._uri}/{LATEST} was written by others {_TRIES} times in a row")

    def discard(self, draft: Draft) -> None:
        if self._mirror is not None:
            shutil.rmtree(self._mirror / _name(draft), ignore_errors=True)
        try:
            open_store(self._uri).delete_folder(_name(draft))
        except StorageError:
            return  # goes with the next save

    def latest(self) -> str | None:
        store = open_store(self._uri)
        name = self._pointer(store)[0].get("checkpoint", _NOBODY)
        if name == _NOBODY:
            return None
        if store.etag(f"{name}/{STATE}") is None:
            raise CheckpointError(_gone(store.uri_of(LATEST), str(name)))
        return store.uri_of(str(name))

    def _pointer(self, store: Store) -> tuple[dict[str, Any], str | None]:
        found = store.read(LATEST)
        if found is None:
            return {}, None
        try:
            document = json.loads(found[0])
            return {"holder": str(document["holder"]), "checkpoint": str(document["checkpoint"])}, found[1]
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{store.uri_of(LATEST)} can't be read ({error}); delete it and name a checkpoint by resumeFrom"
            ) from error

    def _point(self, store: Store, name: str, etag: str | None) -> None:
        # Never the same text twice: an etag that is made of it changes with each write.
        document = {"checkpoint": name, "holder": self._holder, "nonce": os.urandom(8).hex()}
        store.put(LATEST, json.dumps(document).encode(), if_none_match=etag is None, if_match=etag)

    def _refuse_later(self, document: Mapping[str, Any]) -> None:
        later = str(document.get("holder", ""))
        if later > self._holder:
            raise FencedOut(
                f"the run's checkpoints in {self._uri} belong to attempt {later} now, which began later than this one "
                f"({self._holder})"
            )

    def _prune(self, store: Store, newest: str, keep: int) -> None:
        """Deletes, of this and earlier holders, complete ones beyond `keep`, earlier ones of the same update, and what
        is incomplete. A later holder prunes for itself: this one may have slept since it moved `latest`."""
        names = [name for name in store.folders() if self._may_delete(name) and name != newest]
        complete = [name for name in names if store.etag(f"{name}/{STATE}") is not None]
        again = [name for name in complete if name[:_UPDATE] == newest[:_UPDATE]]
        others = [name for name in complete if name not in again]
        old = [*again, *others[: max(0, len(others) - (keep - 1))]]
        left = [name for name in names if name not in complete]
        for name in (*old, *left):
            pointer = self._pointer(store)[0]
            if pointer.get("holder", "") > self._holder:
                return
            if name == pointer.get("checkpoint"):
                continue
            store.delete([f"{name}/{STATE}"])  # first: half of a checkpoint is none
            store.delete_folder(name)
        if self._mirror is not None:
            kept = {newest, *complete} - set(old)
            for folder in self._mirror.glob(f"{_PREFIX}*"):
                if folder.name not in kept and self._may_delete(folder.name):
                    shutil.rmtree(folder)

    def _may_delete(self, name: str) -> bool:
        match = _STORED.fullmatch(name)
        return match is not None and match["holder"] <= self._holder


def _name(draft: Draft) -> str:
    return draft.place.rpartition("/")[2]


def _gone(pointer: str, name: str) -> str:
    return f"{pointer} names {name!r}, which is not there; name another one by resumeFrom"


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"
