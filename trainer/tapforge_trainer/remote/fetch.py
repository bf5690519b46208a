"""The files of a run, from a Pod that has them (`cluster/files.py`) or from object storage, to a `target.Target`.

1. What came before a connection broke, or before an earlier fetch was given up, is not sent again.
2. From a Pod: every file is compared by its SHA-256, and of one that was fetched earlier only what has been appended
   is sent. From object storage: every file is compared by its size, and one that was fetched earlier is fetched again
   unless it is the same object with the same etag.
3. No name of a file is trusted, and no answer that was not asked for.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..cluster.files import WHAT
from .api import ClusterError, Exec, NotReached
from .target import Target, checked, hash_of

if TYPE_CHECKING:
    from ..storage.object_storage import Store

_PART: Final = 1 << 20
#: how often in a row nothing may come, and the pause between, seconds
_TRIES: Final = 5
_PAUSE: Final = 2.0
#: of a disk that takes no more
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

#: (bytes that are there, bytes in all)
Report = Callable[[int, int], None]
#: runs `python3 -m tapforge_trainer.cluster.files WORDS` in the Pod
Run = Callable[[Sequence[str]], AbstractContextManager[Exec]]


@dataclass(frozen=True, slots=True)
class Fetched:
    folder: Path
    files: int
    bytes: int
    #: update of the checkpoint that is there; None: there is none
    checkpoint: int | None
    #: parts that the run has nothing of by now
    missing: tuple[str, ...] = ()


def chosen(what: Sequence[str]) -> tuple[str, ...]:
    """Everything, if nothing is named."""
    for one in what:
        if one not in WHAT:
            raise ClusterError(f"a run has no part {one}; there is {', '.join(WHAT)}")
    return tuple(dict.fromkeys(what)) or tuple(WHAT)


def fetch_files(run: Run, target: Target, what: Sequence[str], report: Report) -> set[str]:
    """Brings what there is into the partial folder; returns the paths. Raises ClusterError."""
    done: dict[str, int] = {}
    folder, idle = "", 0
    while True:
        before = len(done), sum(done.values()), _waiting(target.partial)
        try:
            with run(("list", *what)) as answer:
                listing = json.loads(answer.readline())
            files = {path: size for path, size in listing["files"] if not target.drawn(path)}
            checked(files)
            target.refuse_changed(files)
            # Another attempt's file may have the same size.
            done = {
                path: size for path, size in done.items() if files.get(path) == size and listing["folder"] == folder
            }
            folder = listing["folder"]
            left = [path for path in files if path not in done]
            if not left:
                return set(files)
            offsets = {path: base.stat().st_size if (base := target.base(path, files[path])) else 0 for path in left}
            wanted = [(path, offsets[path], files[path]) for path in left]
            total = sum(files.values())
            with run(("send",)) as answer:
                answer.write(json.dumps({"folder": folder, "files": wanted}).encode() + b"\n")
                for path in _received(answer, target, offsets, files):
                    done[path] = files[path]
                    report(sum(done.values()), total)
        except NotReached:
            if idle >= _TRIES:
                raise
            time.sleep(_PAUSE)
        now = len(done), sum(done.values()), _waiting(target.partial)
        idle = 0 if now != before else idle + 1
        if idle > _TRIES:
            changing = ", ".join(sorted(set(files) - set(done))[:3])
            raise ClusterError(f"{changing} changed each time they were read; try again")


def _received(answer: Exec, target: Target, offsets: Mapping[str, int], sizes: Mapping[str, int]) -> Iterator[str]:
    """Paths of the files that came whole."""
    while "end" not in (head := json.loads(answer.readline())):
        if "gone" in head or "hashing" in head:
            continue
        path = head["path"]
        if path not in offsets or head["size"] != sizes[path]:
            raise ClusterError(f"the run's Pod sent {head['size']} bytes of {path!r}, which was not asked for")
        file = target.partial / path
        part = file.with_name(f"{file.name}.part")
        offset, size = offsets[path], head["size"]
        digest = _begin(target.base(path, size) if offset else None, part)
        with part.open("ab") as out:
            left = size - offset
            while left:
                data = answer.read(min(_PART, left))
                out.write(data)
                digest.update(data)
                left -= len(data)
        if json.loads(answer.readline())["sha256"] != digest.hexdigest():
            part.unlink()  # what was there before is not the beginning of what is there now
            file.unlink(missing_ok=True)
            target.differ.add(path)
            continue
        part.replace(file)
        target.took(path, digest.hexdigest())
        yield path


def _begin(base: Path | None, part: Path) -> Any:
    """Makes `part` hold what is there already; returns its hash."""
    part.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    if base is None:
        part.unlink(missing_ok=True)
        return digest
    if base != part:
        shutil.copyfile(base, part)
    with part.open("rb") as file:
        while data := file.read(_PART):
            digest.update(data)
    return digest


def fetch_checkpoint(uri: str, target: Target, report: Report) -> set[str]:
    """The newest checkpoint and the model of a run that keeps them in object storage; returns the paths. Raises
    StorageError, CheckpointError."""
    from ..learner.checkpoint_storage import LATEST, CheckpointStore, read_state
    from ..storage.object_storage import open_store

    newest = CheckpointStore(uri).latest()
    if newest is None:
        return set()
    sizes = read_state(newest)["files"]
    name = newest.rstrip("/").rpartition("/")[2]
    local = f"checkpoints/{name[: len('update-00000000')]}"
    store = open_store(uri)
    wanted = [(one, f"{local}/{one.path.removeprefix(f'{name}/')}") for one in store.list(name)]
    wanted += [(one, one.path) for prefix in ("export", "reference") for one in store.list(prefix)]
    wanted = [(one, path) for one, path in wanted if one.size or not one.path.endswith("/")]  # a console's empty folder
    paths = {path: one.size for one, path in wanted}
    checked({*paths, f"checkpoints/{LATEST}"})
    target.refuse_changed({*paths, f"checkpoints/{LATEST}"})
    for file, size in sizes.items():
        if (found := paths.get(f"{local}/{file}")) != size:
            there = "is not there" if found is None else f"has {found} bytes"
            raise ClusterError(f"{store.uri_of(f'{name}/{file}')} {there}, and its checkpoint was written with {size}")
    total, come = sum(paths.values()), 0
    for one, path in wanted:
        source = f"{one.path} {one.etag}"
        if not target.has(path, source):
            place = target.partial / path
            place.parent.mkdir(parents=True, exist_ok=True)
            _get(store, one.path, place)
            target.took(path, hash_of(place), source)
        target.save()
        come += one.size
        report(come, total)
    target.write(f"checkpoints/{LATEST}", local.rpartition("/")[2])
    return {*paths, f"checkpoints/{LATEST}"}


def _get(store: Store, path: str, place: Path) -> None:
    """The store explains errors as its server's, and a full disk is none of them."""
    from ..storage.object_storage import StorageError

    try:
        store.get(path, place)
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _FULL:
            raise cause from None
        raise


def fetched(folder: Path, paths: set[str], what: Sequence[str]) -> Fetched:
    """What is in the folder, once it is published."""
    latest = folder / "checkpoints" / "latest"
    proof = {"summary": "summary.json", "replay": "rollout", "checkpoint": "checkpoints/latest"}
    return Fetched(
        folder,
        len(paths),
        sum((folder / path).stat().st_size for path in paths),
        int(latest.read_text().rpartition("-")[2]) if latest.is_file() else None,
        tuple(one for one in what if not (folder / proof[one]).exists()),
    )


def _waiting(folder: Path) -> int:
    """Bytes of files that are not whole yet."""
    return sum(path.stat().st_size for path in folder.rglob("*.part"))
