"""Objects in a store that is named by a URI: s3://, gs://, file://, memory://, and to read whatever fsspec knows.

Rules:
1. Every call has a deadline and a bounded number of retries, and fails with a `StorageError` that names the URI, the
   cause and the remedy. Calls block: an event loop makes them in a thread.
2. A write is whole or not there. A conditional one happens only while the object is as the caller knows it (`Conflict`
   otherwise), also when its answer was lost on the way: then the object is read back.
3. A reader sees what was written last; nothing is cached here.

Credentials and endpoints are found by the libraries underneath, as everywhere: AWS_* (AWS_ENDPOINT_URL for servers of
others), GOOGLE_APPLICATION_CREDENTIALS, a role of the machine or of the Pod's service account; further options of a
library by FSSPEC_S3_*, FSSPEC_GS_*. Paths are relative to the store's URI, and have no leading slash. An etag is
opaque: it changes whenever an object is written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tapforge_api.installing import install_extra

from .errors import Conflict, StorageError, code_of, explained, refused, scheme_of

__all__ = ["Conflict", "StorageError", "Store", "StoredObject", "is_uri", "open_store", "storage_options", "uri_error"]

#: for one small request with its retries, seconds
_SECONDS: Final = 60.0
#: bytes per second that a transfer may fall to
_SLOWEST: Final = 1_000_000
#: of a conditional write that met another one under way
_TRIES: Final = 3
#: objects that one request removes
_REMOVED: Final = 500
#: what makes libraries give up in time
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {
            "connect_timeout": 10,
            "read_timeout": 60,
            "retries": {"total_max_attempts": 3, "mode": "standard"},
        },
    },
    "gs": {"use_listings_cache": False, "requests_timeout": 60},
}
_CONDITIONAL: Final = ("s3", "gs", "file", "memory")
#: whose libraries the extra `storage` brings
_OF_THE_EXTRA: Final = ("s3", "gs")
_URI: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII)
_MEMORY: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class StoredObject:
    path: str
    #: bytes
    size: int
    etag: str


def is_uri(text: str | Path) -> bool:
    """Whether it names a store rather than a folder of this machine."""
    return _URI.match(str(text)) is not None


def uri_error(uri: str, *, writable: bool = False) -> str | None:
    """What is wrong with a URI that can be known without asking its server; None: nothing."""
    scheme = scheme_of(uri)
    if not is_uri(uri):
        return f"{uri} is not a URI; write s3://BUCKET/FOLDER or gs://BUCKET/FOLDER"
    if scheme in ("s3", "gs") and not urlsplit(uri).netloc:
        return f"{uri} names no bucket; write {scheme}://BUCKET/FOLDER"
    if writable and scheme not in _CONDITIONAL:
        return (
            f"{uri}: checkpoints need conditional writes, and of stores only s3://, gs:// and file:// have them here; "
            "use one of these, or mount the storage and name its folder"
        )
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        return f"{uri}: {error}" + (f" ({install_extra('storage')})" if scheme in _OF_THE_EXTRA else "")
    except ValueError:
        return f"{uri}: no library here knows {scheme}://; s3://, gs:// and file:// work"
    return None


def storage_options(uri: str) -> dict[str, Any]:
    """By which fsspec opens it with deadlines: for libraries that open a URI themselves."""
    return dict(_OPTIONS.get(scheme_of(uri), {}))


def open_store(uri: str) -> Store:
    """Opens no connection. Raises StorageError for a URI that can't work."""
    if why := uri_error(uri):
        raise StorageError(why)
    return Store(uri)


class Store:
    """The objects below a URI."""

    def __init__(self, uri: str):
        from fsspec.core import url_to_fs

        self.uri = uri.rstrip("/")
        self.scheme = scheme_of(uri)
        self._fs, root = url_to_fs(self.uri, **storage_options(uri))
        self._root = root.rstrip("/")

    def uri_of(self, path: str) -> str:
        return f"{self.uri}/{path}"

    # --- reading ------------------------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Sequence[StoredObject]:
        """All objects below a folder, by path. None there is no error; a bucket that is not there is one."""
        place = self._place(prefix) if prefix else self._root
        with self._explained(prefix):
            try:
                found = self._call("find", place, withdirs=False, detail=True)
            except FileNotFoundError:
                found = {}
            if not found and self.scheme == "s3":  # s3fs finds nothing in a bucket that is not there either
                bucket, *_ = self._fs.split_path(place)
                self._s3("head_bucket", Bucket=bucket)
        skip = len(self._root) + 1
        objects = [
            StoredObject(name[skip:], int(info["size"]), self._etag(name, info))
            for name, info in found.items()
            if info["type"] == "file" and len(name) > skip
        ]
        return sorted(objects, key=lambda one: one.path)

    def folders(self) -> Sequence[str]:
        """Names of the folders right below the store's URI."""
        with self._explained(""):
            try:
                found = self._call("ls", self._root, detail=True)
            except FileNotFoundError:
                return []
        skip = len(self._root) + 1
        return sorted(one["name"].rstrip("/")[skip:] for one in found if one["type"] == "directory")

    def etag(self, path: str) -> str | None:
        """None: there is no such object."""
        with self._explained(path):
            try:
                info = self._call("info", self._place(path))
            except FileNotFoundError as error:
                if code_of(error) == "NoSuchBucket":
                    raise
                return None
            return self._etag(self._place(path), info)

    def read(self, path: str) -> tuple[bytes, str] | None:
        """A small object and its etag, which belong together. None: there is no such object."""
        place = self._place(path)
        with self._explained(path):
            try:
                if self.scheme == "s3":
                    bucket, key, _ = self._fs.split_path(place)
                    return self._await(self._read_s3, bucket, key)
                if self.scheme == "gs":
                    headers, data = self._call("call", "GET", self._fs.url(place))
                    return data, str(headers["X-Goog-Generation"])
                if self.scheme == "file":
                    with open(place, "rb") as file:
                        return file.read(), _of_file(os.fstat(file.fileno()))
                data = self._call("cat_file", place)
                return data, _digest(data)
            except FileNotFoundError as error:
                if code_of(error) == "NoSuchBucket":
                    raise
                return None

    def get(self, path: str, target: Path) -> None:
        """An object as a file, which appears whole. Raises StorageError, also when there is no such object."""
        place, partial = self._place(path), target.with_name(f".{target.name}.partial-{os.getpid()}")
        with self._explained(path):
            try:
                size = int(self._call("info", place)["size"])
                self._call("get_file", place, str(partial), seconds=_SECONDS + size / _SLOWEST)
                if (found := partial.stat().st_size) != size:
                    raise StorageError(f"{self.uri_of(path)} has {size} bytes, and {found} came; try again")
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        """Writes a small object; returns its etag. `if_none_match`: only if there is none yet; `if_match`: only if it
        has this etag. Raises Conflict."""
        with self._explained(path):
            for tries_left in reversed(range(_TRIES)):
                try:
                    return self._write(self._place(path), data, if_none_match, if_match)
                except (OSError, ValueError, RuntimeError) as error:
                    if not (if_none_match or if_match is not None) or not refused(error):
                        raise
                    found = self.read(path)
                    if found is not None and found[0] == data:
                        return found[1]  # it had been written, and the answer was lost
                    if tries_left and code_of(error) == "ConditionalRequestConflict":
                        continue
                    raise Conflict(f"{self.uri_of(path)} has been written by another process meanwhile") from error
        raise AssertionError("the last try returns or raises")

    def upload(self, path: str, source: Path) -> None:
        """A file as a new object. Raises Conflict where there is one."""
        place, size = self._place(path), source.stat().st_size
        with self._explained(path):
            try:
                if self.scheme == "file":
                    _write_file(Path(place), source, True, None)
                else:
                    self._call("put_file", str(source), place, mode="create", seconds=_SECONDS + size / _SLOWEST)
            except (OSError, ValueError, RuntimeError) as error:
                if refused(error):
                    raise Conflict(f"{self.uri_of(path)} has been written by another process") from error
                raise

    def delete(self, paths: Iterable[str]) -> None:
        """What is not there is no error."""
        left = [self._place(path) for path in paths]
        while left:
            now, left = left[:_REMOVED], left[_REMOVED:]
            with self._explained(""):
                if self._fs.async_impl:
                    self._call("rm", now)
                    continue
                for place in now:
                    try:
                        self._fs.rm_file(place)
                    except FileNotFoundError:
                        continue

    def delete_folder(self, prefix: str) -> None:
        self.delete(one.path for one in self.list(prefix))
        if not self._fs.async_impl:  # folders are more than parts of names there
            with self._explained(prefix), suppress(FileNotFoundError):
                self._fs.rm(self._place(prefix), recursive=True)

    def check_conditions(self, path: str) -> None:
        """Raises StorageError where a conditional write to `path`, which is used for nothing else, is not refused
        though it has to be."""
        first = self.put(path, b"1")
        self.put(path, b"2")
        try:
            self.put(path, b"3", if_match=first)
        except Conflict:
            self.delete([path])
            return
        raise StorageError(
            f"{self.uri}: its server ignores conditional writes (If-Match), by which attempts of a run are kept apart; "
            "use a newer version of it, or a volume"
        )

    # --- what differs between stores ----------------------------------------------------------------------------------

    def _write(self, place: str, data: bytes, if_none_match: bool, if_match: str | None) -> str:
        if self.scheme == "s3":
            bucket, key, _ = self._fs.split_path(place)
            condition = {"IfNoneMatch": "*"} if if_none_match else {"IfMatch": if_match} if if_match else {}
            return str(self._s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)["ETag"])
        if self.scheme == "gs":
            bucket, key, _ = self._fs.split_path(place)
            url = f"{self._fs._location}/upload/storage/v1/b/{bucket}/o"
            generation = {"ifGenerationMatch": "0" if if_none_match else if_match}
            options = {"uploadType": "media", "name": key, **generation}
            return str(self._call("call", "POST", url, data=data, json_out=True, **options)["generation"])
        if self.scheme == "file":
            return _write_file(Path(place), data, if_none_match, if_match)
        if self.scheme == "memory":
            with _MEMORY:
                there = self._fs.cat_file(place) if self._fs.exists(place) else None
                if (if_none_match and there is not None) or (
                    if_match is not None and (there is None or _digest(there) != if_match)
                ):
                    raise FileExistsError(place)
                self._fs.pipe_file(place, data)
                return _digest(data)
        raise StorageError(uri_error(self.uri, writable=True) or f"{self.uri} can't be written")

    def _etag(self, name: str, info: dict[str, Any]) -> str:
        if self.scheme == "memory":
            return _digest(self._fs.cat_file(name))
        if self.scheme == "file":
            return _of_file(os.stat(name))
        found = info.get("ETag") or info.get("generation") or info.get("etag")
        return str(found or f"{info.get('mtime') or info.get('LastModified')}-{info['size']}")

    async def _read_s3(self, bucket: str, key: str) -> tuple[bytes, str]:
        answer = await self._fs._call_s3("get_object", Bucket=bucket, Key=key)
        async with answer["Body"] as body:
            return await body.read(), str(answer["ETag"])

    def _s3(self, method: str, **arguments: Any) -> Any:
        return self._call("call_s3", method, **arguments)

    def _place(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _call(self, method: str, *arguments: Any, seconds: float = _SECONDS, **named: Any) -> Any:
        if not self._fs.async_impl:
            return getattr(self._fs, method)(*arguments, **named)
        return self._await(getattr(self._fs, f"_{method}"), *arguments, seconds=seconds, **named)

    def _await(self, function: Callable[..., Any], *arguments: Any, seconds: float = _SECONDS, **named: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self._fs.loop, function, *arguments, timeout=seconds, **named)

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # each library has errors of its own
            type(self._fs).clear_instance_cache()  # the next one that opens it looks for credentials anew
            raise explained(error, self.uri_of(path) if path else self.uri) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _of_file(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"


def _write_file(path: Path, data: bytes | Path, if_none_match: bool, if_match: str | None) -> str:
    """The folder's lock makes of comparing and renaming one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with beside.open("wb") as file, BytesIO(data) if isinstance(data, bytes) else data.open("rb") as source:
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            there = _of_file(path.stat()) if path.exists() else None
            if (if_none_match and there is not None) or (if_match is not None and there != if_match):
                raise FileExistsError(path)
            beside.replace(path)
            os.fsync(folder)
            return _of_file(path.stat())
        finally:
            os.close(folder)
    finally:
        beside.unlink(missing_ok=True)
