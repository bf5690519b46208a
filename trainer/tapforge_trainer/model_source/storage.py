"""A model's folder in object storage, and its copy on a node.

The folder is listed once, by the driver. A node fetches exactly those files into a folder beside the final one, which
appears by one rename: complete or not at all. Files that had come before an interruption are kept. A file that has
changed since the listing is refused: nodes of a run never have different weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..storage.object_storage import StorageError, Store, open_store
from .folder import complete
from .ref import POLICY, ModelError, ModelFile, ModelRef, ModelRefused, enough_room, of_disk, one_process, wanted

#: fetched at the same time
_FILES: Final = 8


def pinned(uri: str, earlier: dict[str, Any] | None, field: str = POLICY) -> ModelRef:
    """The files that a model needs of a folder, as they are now or were then. Raises ModelError."""
    ref = ModelRef("storage", uri.rstrip("/"), source=field)
    if earlier is not None and (earlier["kind"], earlier["place"]) == ("storage", ref.place):
        return replace(ref, files=tuple(ModelFile(*file) for file in earlier["files"]))
    with storage_said(ref):
        found = open_store(ref.place).list()
    files = tuple(ModelFile(one.path, one.size, one.etag) for one in found if wanted(one.path))
    if not found:
        raise ModelRefused(f"{ref.shown}: there is no such folder, or it is empty")
    return complete(replace(ref, files=files))


def fetched(ref: ModelRef, root: Path, weights: bool, seconds: float) -> Path:
    """The folder on this node, below `root`. Raises ModelError."""
    files = [file for file in ref.files if ref.kind == "data" or wanted(file.name, weights)]
    identity = json.dumps([ref.place, [[file.name, file.size, file.etag] for file in files]])
    name = f"{ref.place.rsplit('/', 1)[-1]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    folder, growing = root / name, root / f"{name}.partial"
    if not _missing(folder, files):
        return folder
    with one_process(root / f"{name}.lock", ref, seconds):
        if not _missing(folder, files):
            return folder
        with storage_said(ref):
            if folder.exists():  # files have been taken out of it
                folder.rename(growing)
            growing.mkdir(exist_ok=True)
            for path in _files(growing):
                if str(path.relative_to(growing)) not in {file.name for file in files}:
                    path.unlink()  # of a transfer that was killed
            missing = _missing(growing, files)
            enough_room(ref, sum(file.size for file in missing), root, "TAPFORGE_CACHE")
            _fetch(ref, missing, growing)
            growing.rename(folder)
    return folder


def _missing(folder: Path, files: Sequence[ModelFile]) -> list[ModelFile]:
    there = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
    return [file for file in files if there.get(file.name) != file.size]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _fetch(ref: ModelRef, missing: Sequence[ModelFile], folder: Path) -> None:
    store = open_store(ref.place)
    _unchanged(ref, store, missing)
    for file in missing:
        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_FILES, "fetch") as threads:
        for work in [threads.submit(store.get, file.name, folder / file.name) for file in missing]:
            work.result()
    try:
        _unchanged(ref, store, missing)  # what came is what was listed
    except ModelRefused:
        for file in missing:
            (folder / file.name).unlink()
        raise


def _unchanged(ref: ModelRef, store: Store, files: Sequence[ModelFile]) -> None:
    """By a listing, whose refusals say more than those of a request about one object."""
    now = {one.path: one.etag for one in store.list()}
    if changed := [file.name for file in files if now.get(file.name) != file.etag]:
        raise ModelRefused(
            f"{ref.shown}: {', '.join(changed[:4])} has changed since the run began: put the new one into another "
            "folder, and give its run another name"
        )


@contextmanager
def storage_said(ref: ModelRef) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        full = error.__cause__
        if isinstance(full, OSError) and full.errno is not None and full.filename is not None:
            raise of_disk(ref, full) from error
        raise ModelError(f"{ref.named}: {error}") from error
    except OSError as error:
        raise of_disk(ref, error) from error
