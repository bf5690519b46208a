"""The file of an index: its tables, where it is kept, and who may write it.

- An index is a copy of what a recording says, in the user's cache folder, never in the run's: a run is only read. It
  can be deleted at any time, and only its owner may read it: recordings hold what was on screens.
- One process keeps an index (a lock beside it); another one that serves the same run, and one that may not write there,
  makes one of its own, which is gone when it ends.
- An index of another release is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from ..model_source.tiny_base import cache_root

#: raised when tables or their meaning change
_FORMAT: Final = 2
#: pages that a connection keeps in memory, KiB
_CACHE_KIB: Final = 16 * 1024
_TABLES: Final = """
create table recordings (id integer primary key, name text unique);
create table segments (recording integer, number integer, head text, consumed integer,
    primary key (recording, number)) without rowid;
create table episodes (
    id integer primary key, recording integer, segment integer, offset integer, length integer,
    name text, grp text, task text, template text, goal text, outcome text, reason text, score real, message text,
    steps integer, tokens integer, parse_errors integer, environment real, phone text, attempt integer,
    oldest integer, newest integer, started real, seconds real,
    "update" integer, staleness integer, reward real, advantage real, streams text);
create unique index episodes_by_name on episodes (recording, name);
create index episodes_by_group on episodes (recording, grp);
create index episodes_by_start on episodes (started);
create index episodes_by_update on episodes ("update", started);
create table rewards (episode integer primary key, rewards text);
create table groups (recording integer, name text, place integer, version integer, dropped text, at integer,
    members text, "update" integer, primary key (recording, name)) without rowid;
create table credits (episode integer primary key, steps blob);
create table credited (recording integer, "update" integer, names text, primary key (recording, "update"))
    without rowid;
create virtual table words using fts5(text, content='', detail=none);
"""


class Database:
    """A file and two connections: one that writes, of one thread; one that reads, of whichever thread has its lock."""

    def __init__(self, run: Path):
        folder = cache_root() / "view"
        name = hashlib.sha256(os.fsencode(run.absolute())).hexdigest()[:24]
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._lock: IO[str] | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (folder / f"{name}.lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another's, or a folder that may not be written, or has no locks
            self._temporary = tempfile.TemporaryDirectory(prefix="tapforge-view-")
            folder = Path(self._temporary.name)
        self.path = folder / f"{name}.sqlite"
        self.writer = self._open()
        if self.writer.execute("pragma user_version").fetchone()[0] != _FORMAT:
            self._begin()
        self.reader = self._connect()

    def begin_again(self) -> None:
        """Drops what is there: it is of another recording."""
        self.reader.close()
        self._begin()
        self.reader = self._connect()

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        if self._lock is not None:
            self._lock.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _begin(self) -> None:
        self.writer.close()
        for ending in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self.path}{ending}")
        self.writer = self._connect()
        self.writer.executescript(_TABLES)
        self.writer.execute(f"pragma user_version = {_FORMAT}")
        self.writer.commit()

    def _open(self) -> sqlite3.Connection:
        """Of a file that may be damaged: it is made anew then."""
        try:
            connection = self._connect()
            connection.execute("pragma user_version").fetchone()
        except sqlite3.DatabaseError:
            for ending in ("", "-wal", "-shm"):
                Path(f"{self.path}{ending}").unlink(missing_ok=True)
            connection = self._connect()
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=30, check_same_thread=False)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = off")  # a copy: what a power failure takes is read again
        connection.execute(f"pragma cache_size = -{_CACHE_KIB}")
        return connection
