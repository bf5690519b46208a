"""The index of one run's episodes: made once, then only what was written since is read. One thread refreshes it.

- `refresh` reads each segment from where it had got to, never again from the beginning; half an episode waits for its
  end. A recording that is another one than the index knows (other first bytes, or shorter) begins a new index.
- Episodes whose segment the run has removed (`recording.maxGiB`) leave the index.
- Queries never wait for a refresh: they see what was committed last.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .. import recording
from ..recording.reader import RECORDS, RecordingError
from .database import Database
from .scan import EpisodeRow, GroupRow, RewardsRow, Row, rows, searchable, storable, streams_of

#: rows between two commits
_BATCH: Final = 2000
#: first bytes of a segment by which it is known again
_HEAD: Final = 4096
#: seconds that others get after each batch of lines: queries share this process
_YIELD: Final = 0.002
#: for which a folder may be away while it is replaced
_REPLACED: Final = 0.5

EVALUATION: Final = "evaluation"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an episode is, and its rewards if they came after it."""

    id: int
    recording: str
    segment: int
    offset: int
    length: int
    rewards: dict[str, Any] | None


def recordings_of(run: Path) -> dict[str, Path]:
    """By name: `rollout`, and `evaluation/NAME` for every measurement."""
    found = {recording.ROLLOUT: run / recording.ROLLOUT}
    measured = run / EVALUATION
    if measured.is_dir():
        found |= {f"{EVALUATION}/{path.name}": path for path in sorted(measured.iterdir()) if path.is_dir()}
    return {name: path for name, path in found.items() if RECORDS.numbers(path)}


class Index:
    def __init__(self, run: Path):
        self.run = run
        self._database = Database(run)
        self._reading = threading.Lock()
        self._closed = False
        #: bytes that are read, and that there are
        self.read_bytes = self.all_bytes = 0
        #: changes with every commit
        self.changes = 0
        self.closing = self._damaged = False

    def close(self) -> None:
        with self._reading:
            self._closed = True
            self._database.close()

    def select(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        """Raises RecordingError where the index's file can't be read."""
        try:
            with self._reading:
                if self._closed:
                    raise RecordingError("the server is ending")
                cursor = self._database.reader.execute(sql, values)
                cursor.row_factory = sqlite3.Row
                return cursor.fetchall()
        except sqlite3.Error as error:
            self._damaged |= type(error) is sqlite3.DatabaseError
            raise RecordingError(f"the index {self._database.path} can't be read: {error}") from error

    # --- what is written ---

    def refresh(self, per_update: int, version_before: Callable[[int], int | None], *, again: bool = False) -> bool:
        """Reads what is new. `per_update`: groups of an update. `version_before`: the policy's when an update began.
        True: something was."""
        found = recordings_of(self.run)
        segments = [(name, folder, number) for name, folder in found.items() for number in RECORDS.numbers(folder)]
        sizes = {(name, number): _size(RECORDS.path(folder, number)) for name, folder, number in segments}
        known = {} if self._damaged else self._known()
        if any(_is_another(found, name, number, *known[name, number], sizes) for name, number in known):
            if not again:  # a folder that is just being replaced (`remote/target.py`) is seen without its files
                time.sleep(_REPLACED)
                return self.refresh(per_update, version_before, again=True)
            self._damaged = True
        if self._damaged:
            with self._reading:
                self._database.begin_again()
            known, self._damaged = {}, False
        self.all_bytes = sum(sizes.values())
        self.read_bytes = sum(known[key][1] for key in known if key in sizes)
        changed = self._forget([key for key in known if key not in sizes])
        broken: RecordingError | None = None
        for name, folder, number in segments:
            start = known.get((name, number), ("", 0))[1]
            if sizes[name, number] > start and not self.closing:
                before = self.changes
                try:
                    changed |= self._read(name, RECORDS.path(folder, number), number, start)
                except RecordingError as error:  # what lies behind it in this segment is lost, and nothing else
                    broken, changed = broken or error, changed or self.changes > before
        if changed and not self.closing:
            self._number(per_update, version_before)
        if broken is not None:
            raise broken
        return changed

    def write(self, statements: Sequence[tuple[str, Sequence[Sequence[Any]]]]) -> None:
        """In one commit, by the thread that refreshes."""
        for sql, values in statements:
            self._database.writer.executemany(sql, values)
        self._commit()

    def failed(self, error: Exception) -> None:
        """What is not committed is left out. The next refresh makes a damaged file anew."""
        self._damaged |= type(error) is sqlite3.DatabaseError
        with suppress(sqlite3.Error):
            self._database.writer.rollback()

    def _commit(self) -> None:
        self._database.writer.commit()
        self.changes += 1

    def _known(self) -> dict[tuple[str, int], tuple[str, int]]:
        """By recording and segment: digest of its first bytes, and how far it was read."""
        sql = "select name, number, head, consumed from segments join recordings on recordings.id = recording"
        return {(name, number): (head, consumed) for name, number, head, consumed in self.select(sql)}

    def _forget(self, gone: Sequence[tuple[str, int]]) -> bool:
        writer = self._database.writer
        for name, number in gone:
            place = (self._recording(name), number)
            writer.execute("delete from episodes where recording = ? and segment = ?", place)
            writer.execute("delete from segments where recording = ? and number = ?", place)
        if gone:
            self._commit()
        return bool(gone)

    def _recording(self, name: str) -> int:
        writer = self._database.writer
        writer.execute("insert or ignore into recordings (name) values (?)", (name,))
        return int(writer.execute("select id from recordings where name = ?", (name,)).fetchone()[0])

    def _read(self, name: str, path: Path, number: int, start: int) -> bool:
        own, end, count = self._recording(name), start, 0
        try:
            for row, end in rows(path, start):
                self._take(own, number, row)
                count += 1
                if count % _BATCH == 0:
                    self._reached(own, number, path, end)
                    if self.closing:
                        return True
                if count % 20 == 0:
                    time.sleep(_YIELD if count % 200 == 0 else 0)
                self.read_bytes += end - start
                start = end
        except RecordingError:
            if count:  # what stands before the broken line is there
                self._reached(own, number, path, end)
            raise
        if count:
            self._reached(own, number, path, end)
        return bool(count)

    def _reached(self, own: int, number: int, path: Path, end: int) -> None:
        head = _head(path, end)
        self._database.writer.execute("insert or replace into segments values (?, ?, ?, ?)", (own, number, head, end))
        self._commit()

    def _take(self, own: int, number: int, row: Row) -> None:
        writer = self._database.writer
        if isinstance(row, EpisodeRow):
            writer.execute("delete from episodes where recording = ? and name = ?", (own, row.name))
            made = writer.execute(
                "insert into episodes (recording, segment, offset, length, name, grp, task, template, goal, outcome, "
                "reason, score, message, steps, tokens, parse_errors, environment, phone, attempt, oldest, newest, "
                "started, seconds) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(own, number, row.offset, row.length, row.name, row.group, row.task, row.template, row.goal),
                    *(row.outcome, row.reason, row.score, row.message, row.steps, row.tokens, row.parse_errors),
                    *(row.environment, row.phone, row.attempt, row.oldest, row.newest, row.started, row.seconds),
                ),
            ).lastrowid
            writer.execute("insert into words (rowid, text) values (?, ?)", (made, row.words))
            if row.rewards is not None:
                self._take(own, number, RewardsRow(row.name, row.rewards))
        elif isinstance(row, RewardsRow):
            sql = "select id from episodes where recording = ? and name = ?"
            if (there := writer.execute(sql, (own, row.name)).fetchone()) is None:
                return  # its segment was removed
            writer.execute("insert or replace into rewards values (?, ?)", (there[0], json.dumps(row.rewards)))
            writer.execute(
                "update episodes set outcome = ?, reason = ?, message = ?, streams = ? where id = ?",
                (
                    *(row.rewards["outcome"], row.rewards["reason"], storable(row.rewards["message"])),
                    *(json.dumps(streams_of(row.rewards)), there[0]),
                ),
            )
            said = " ".join(words for of_stream in row.rewards["words"].values() for words in of_stream)
            if said:  # a second entry of the same row: either is found
                writer.execute("insert into words (rowid, text) values (?, ?)", (-there[0], searchable(said)))
        else:
            self._take_group(own, row)

    def _take_group(self, own: int, row: GroupRow) -> None:
        at = self._database.writer.execute("select coalesce(max(at), 0) + 1 from groups").fetchone()[0]
        self._database.writer.execute(
            "insert or replace into groups values (?, ?, ?, ?, ?, ?, ?, null)",
            (own, row.name, row.order, row.version, row.dropped, at, json.dumps(row.episodes)),
        )

    def _number(self, per_update: int, version_before: Callable[[int], int | None]) -> None:
        """Which update learned from which group, as `Recording.settled` and `batch.batches_of` have it: of each place
        in the order the group that was settled there last."""
        writer, own = self._database.writer, self._recording(recording.ROLLOUT)
        last: dict[int, tuple[str, str | None]] = {}
        before: dict[str, int | None] = {}
        sql = 'select name, place, dropped, "update" from groups where recording = ? order by at'
        for name, place, dropped, update in writer.execute(sql, (own,)):
            last[place], before[name] = (name, dropped), update
        settled = [name for _, (name, dropped) in sorted(last.items()) if dropped is None]
        now = {name: number // per_update + 1 for number, name in enumerate(settled)}
        changed = [(now.get(name), own, name) for name, update in before.items() if now.get(name) != update]
        writer.executemany('update groups set "update" = ? where recording = ? and name = ?', changed)
        writer.executemany('update episodes set "update" = ? where recording = ? and grp = ?', changed)
        writer.execute(
            'update episodes set "update" = (select g."update" from groups g where g.recording = episodes.recording '
            'and g.name = episodes.grp) where recording = ? and "update" is null',
            (own,),
        )
        sql = (
            'select distinct "update" from episodes where recording = ? and "update" is not null and staleness is null'
        )
        for (update,) in writer.execute(sql, (own,)).fetchall():
            if (version := version_before(update)) is not None:
                sql = 'update episodes set staleness = max(0, ? - oldest) where recording = ? and "update" = ?'
                writer.execute(sql, (version, own, update))
        self._commit()

    # --- where something is ---

    def places(self, recording_name: str, names: Sequence[str]) -> dict[str, Place]:
        """Of the episodes of these names that are there."""
        found: dict[str, Place] = {}
        for start in range(0, len(names), 500):
            some = names[start : start + 500]
            marks = ", ".join("?" * len(some))
            sql = (
                "select e.id, e.name, r.name as recording, segment, offset, length, w.rewards from episodes e "
                "join recordings r on r.id = e.recording left join rewards w on w.episode = e.id "
                f"where r.name = ? and e.name in ({marks})"
            )
            for row in self.select(sql, (recording_name, *some)):
                rewards = json.loads(row["rewards"]) if row["rewards"] else None
                where = row["segment"], row["offset"], row["length"]
                found[row["name"]] = Place(row["id"], row["recording"], *where, rewards)
        return found

    def members(self, recording_name: str, group: str) -> list[str]:
        """Names of a group's episodes."""
        sql = "select e.name from episodes e join recordings r on r.id = e.recording where r.name = ? and grp = ?"
        return [row["name"] for row in self.select(f"{sql} order by e.name", (recording_name, group))]


def _is_another(
    found: Mapping[str, Path],
    name: str,
    number: int,
    head: str,
    consumed: int,
    sizes: Mapping[tuple[str, int], int],
) -> bool:
    if (name, number) not in sizes:  # removed, which a run does from the oldest on; or all of it
        return name not in found
    path = RECORDS.path(found[name], number)
    return sizes[name, number] < consumed or _head(path, consumed) != head


def _head(path: Path, consumed: int) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(min(_HEAD, consumed))).hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
