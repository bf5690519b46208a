"""The files of a simulated phone: in memory, bounded, with the few folders that adb clients use.

- `/storage/emulated/0`, `/storage/self/primary` and `/mnt/sdcard` are /sdcard. Folders above the writable ones exist
  and take nothing.
- A path is made absolute and free of `.` and `..` before anything else: nothing above / is reached, and nothing here is
  a file of the host.
"""

from __future__ import annotations

import errno
import posixpath
import stat
import uuid
from dataclasses import dataclass
from typing import Final

#: bytes of all files together, and how many files and folders there may be
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_ENTRIES: Final = 1000
MAX_PATH: Final = 1024
_WRITABLE: Final = ("/sdcard", "/data/local/tmp")
_FOLDERS: Final = (
    "/", "/data", "/data/local", "/data/local/tmp", "/sdcard", "/sdcard/Alarms", "/sdcard/Android", "/sdcard/DCIM",
    "/sdcard/Documents", "/sdcard/Download", "/sdcard/Movies", "/sdcard/Music", "/sdcard/Pictures", "/storage",
    "/system", "/system/bin",
)  # fmt: skip
_ALIASES: Final = ("/storage/emulated/0", "/storage/self/primary", "/mnt/sdcard")
#: tells one start of a phone from all others
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
#: seconds since 1970 of a file without a date of its own: 1 March 2026
_THEN: Final = 1772323200


@dataclass(frozen=True, slots=True)
class Entry:
    #: None for a folder
    data: bytes | None
    #: permission bits
    permissions: int
    #: seconds since 1970
    modified: int

    @property
    def size(self) -> int:
        return 4096 if self.data is None else len(self.data)

    @property
    def mode(self) -> int:
        return (stat.S_IFDIR if self.data is None else stat.S_IFREG) | self.permissions


class FileError(OSError):
    """As the system calls of a phone fail: errno and the words that its programs print."""


def fail(number: int, path: str) -> FileError:
    words = {
        errno.ENOENT: "No such file or directory",
        errno.EISDIR: "Is a directory",
        errno.ENOTDIR: "Not a directory",
        errno.EROFS: "Read-only file system",
        errno.ENOSPC: "No space left on device",
        errno.EEXIST: "File exists",
        errno.ENAMETOOLONG: "File name too long",
        errno.EFBIG: "File too large",
    }
    return FileError(number, words[number], path[:MAX_PATH])


def normal(path: str) -> str:
    """Absolute, and /sdcard for its other names. Raises FileError for a path that is too long."""
    if len(path) > MAX_PATH:
        raise fail(errno.ENAMETOOLONG, path)
    found = posixpath.normpath("/" + path).replace("//", "/")
    for alias in _ALIASES:
        if found == alias or found.startswith(alias + "/"):
            return "/sdcard" + found[len(alias) :]
    return found


class Files:
    def __init__(self) -> None:
        self._entries = {path: Entry(None, 0o771, _THEN) for path in _FOLDERS}
        self._entries[_BOOT_ID] = Entry(f"{uuid.uuid4()}\n".encode(), 0o444, _THEN)

    def find(self, path: str) -> Entry:
        """Raises FileError."""
        found = self._entries.get(normal(path))
        if found is None:
            raise fail(errno.ENOENT, path)
        return found

    def read(self, path: str) -> bytes:
        """Raises FileError."""
        data = self.find(path).data
        if data is None:
            raise fail(errno.EISDIR, path)
        return data

    def entries(self, path: str) -> dict[str, Entry]:
        """What a folder holds, by name. Raises FileError."""
        if self.find(path).data is not None:
            raise fail(errno.ENOTDIR, path)
        above = normal(path).rstrip("/") + "/"
        return {
            other[len(above) :]: entry
            for other, entry in sorted(self._entries.items())
            if other.startswith(above) and other != above and "/" not in other[len(above) :]
        }

    def room(self, path: str) -> int:
        """Bytes that a file of this name may have. Raises FileError where none may be."""
        place = self._place(path)
        found = self._entries.get(place)
        if found is not None and found.data is None:
            raise fail(errno.EISDIR, path)
        if found is None and len(self._entries) >= MAX_ENTRIES:
            raise fail(errno.ENOSPC, path)
        others = (e for other, e in self._entries.items() if other != place and other.startswith(_WRITABLE))
        return MAX_BYTES - sum(e.size for e in others if e.data is not None)

    def write(self, path: str, data: bytes, permissions: int = 0o660, modified: int = _THEN) -> None:
        """Makes or replaces a file; its folders are made. Raises FileError, and nothing has changed then."""
        if len(data) > self.room(path):
            raise fail(errno.ENOSPC, path)
        self.make_folder(posixpath.dirname(normal(path)), parents=True)
        self._entries[normal(path)] = Entry(data, permissions & 0o777, modified)

    def make_folder(self, path: str, *, parents: bool = False) -> None:
        """Raises FileError."""
        place = normal(path)
        if (found := self._entries.get(place)) is not None:
            if found.data is not None or not parents:
                raise fail(errno.EEXIST, path)
            return
        self._place(path)
        above = posixpath.dirname(place)
        if above not in self._entries:
            if not parents:
                raise fail(errno.ENOENT, path)
            self.make_folder(above, parents=True)
        elif self._entries[above].data is not None:
            raise fail(errno.ENOTDIR, path)
        if len(self._entries) >= MAX_ENTRIES:
            raise fail(errno.ENOSPC, path)
        self._entries[place] = Entry(None, 0o771, _THEN)

    def remove(self, path: str, *, folders: bool = False) -> None:
        """A file, or with `folders` a folder with everything in it. Raises FileError."""
        entry, place = self.find(path), self._place(path)
        if entry.data is None and not folders:
            raise fail(errno.EISDIR, path)
        for other in [other for other in self._entries if other == place or other.startswith(place + "/")]:
            del self._entries[other]

    def _place(self, path: str) -> str:
        """Where something may be written. Raises FileError."""
        place = normal(path)
        if not any(place.startswith(folder + "/") for folder in _WRITABLE):
            raise fail(errno.EROFS, path)
        return place
