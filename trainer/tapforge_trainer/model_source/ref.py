"""What travels to a node instead of a path, and why a model can't be had."""

from __future__ import annotations

import errno
import fcntl
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal

#: what a model needs of a repository or a bucket: nothing of its subfolders, and no weights in other formats
WEIGHTS: Final = "*.safetensors"
TEXTS: Final = ("*.json", "*.jinja", "*.txt", "*.model")
#: of the spec, that name a model
POLICY: Final = "spec.model.source"
TEACHER: Final = "spec.algorithm.distillation.teacher"
#: between two looks at whether another process has fetched the model
_POLL: Final = 0.2


class ModelError(Exception):
    """The model can't be had now. The message names the field, the place, the reason and the remedy."""


class ModelRefused(ModelError):
    """It can't be had, or not be used, until the run's file, the model or the credentials are changed."""


class CredentialsRefused(ModelRefused):
    """The caller may not read it: no credentials, wrong ones, or some that have expired."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    name: str
    size: int
    #: of object storage, where it has some
    etag: str = ""


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Where each node gets the model from, pinned."""

    #: a reference of the KL term has files in object storage as a model has, and so has a data set, in subfolders too
    kind: Literal["tiny", "folder", "hub", "storage", "reference", "data"]
    #: folder, OWNER/NAME or URI
    place: str = ""
    #: commit of a repository
    commit: str = ""
    #: of a repository or a bucket; empty: not known, because no server could be asked
    files: tuple[ModelFile, ...] = ()
    #: of the hub; a node that has none of its own uses the driver's
    endpoint: str = ""
    token: str = field(default="", repr=False)
    #: of the spec, that names it
    source: str = POLICY

    @property
    def named(self) -> str:
        """Its field of the spec."""
        if self.kind == "data":
            return self.source
        names = {"tiny": "tiny", "folder": "path.folder", "hub": "huggingFace", "storage": "objectStorage.uri"}
        return "the KL term's reference" if self.kind == "reference" else f"{self.source}.{names[self.kind]}"

    @property
    def shown(self) -> str:
        """Field of the spec and place, as errors begin."""
        return f"{self.named}: {self.place}@{self.commit}" if self.kind == "hub" else f"{self.named}: {self.place}"

    @property
    def pinned(self) -> dict[str, Any]:
        """As JSON, without credentials."""
        files = [[file.name, file.size, file.etag] for file in self.files]
        return {"kind": self.kind, "place": self.place, "commit": self.commit, "files": files}

    @staticmethod
    def of_folder(folder: Path) -> ModelRef:
        return ModelRef("folder", str(folder.absolute()))


def wanted(name: str, weights: bool = True) -> bool:
    """Whether a file of a repository or a bucket is needed. `name` is relative to its root."""
    patterns = (*TEXTS, WEIGHTS) if weights else TEXTS
    return "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)


def enough_room(ref: ModelRef, missing: int, cache: Path, variable: str) -> None:
    """Before `missing` bytes are written. Raises ModelError."""
    exists = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if (free := shutil.disk_usage(exists).free) < missing:
        raise ModelError(
            f"{ref.shown}: {missing / 2**30:.1f} GiB are still to be fetched into {cache} on {socket.gethostname()}, "
            f"where {free / 2**30:.1f} GiB are free: make room, or name a folder of a larger disk in {variable}"
        )


def of_disk(ref: ModelRef, error: OSError) -> ModelError:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(f"{ref.shown}: the disk of {socket.gethostname()} is full{where}: make room and start again")
    return ModelError(f"{ref.shown}: {line_of(error)}{where} on {socket.gethostname()}")


def line_of(error: BaseException) -> str:
    """Type and last line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


@contextmanager
def one_process(path: Path, ref: ModelRef, seconds: float) -> Iterator[None]:
    """Holds a lock until the block ends. Raises ModelError when another process holds it all the time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+")
    except OSError as error:
        raise ModelError(
            f"{ref.shown} is to be fetched, but {path.parent} can't be written ({error.strerror}): mount a cache that "
            "can be, or one that holds the whole model"
        ) from error
    end = time.monotonic() + seconds
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ModelError(
                        f"{ref.shown}: another process of {socket.gethostname()} has been fetching it for "
                        f"{seconds:g} s (it holds {path}): raise spec.deadlines.startSeconds, or look at the network"
                    ) from None
                time.sleep(_POLL)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                break  # a volume without locks: each process fetches for itself, and files still appear by a rename
        yield
