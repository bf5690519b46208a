"""The journal of verdicts: what was decided stays decided, also after a kill.

- A line of `verdicts.jsonl` is one verdict with its two keys: `key` names the question, the judge, the episode and the
  step, `content` the question and the judge alone.
- `put` keeps a verdict in memory. When `flush` has returned it is on the disk: call it before anything is made of the
  verdict. Both may be called from any thread.
- A last line that was cut off is removed and said (`dropped`); a broken line elsewhere is an error with its number.
- In memory are the latest `KEPT` verdicts: those of episodes under way, and of questions that come again.
- One writer at a time: the folder belongs to one run, which is locked.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any, Final

from .verdicts import Verdict

VERDICTS: Final = "verdicts.jsonl"
KEPT: Final = 50_000


class JournalError(Exception):
    """The journal can't be read or written. The message names the file and the remedy."""


class VerdictCache:
    """Verdicts by key, the latest used ones, at most `limit`."""

    def __init__(self, limit: int = KEPT):
        self._limit = limit
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()

    def get(self, key: str) -> Verdict | None:
        found = self._verdicts.get(key)
        if found is not None:
            self._verdicts.move_to_end(key)
        return found

    def put(self, key: str, verdict: Verdict) -> None:
        self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > self._limit:
            self._verdicts.popitem(last=False)


class VerdictJournal:
    """Reads what is there and appends to it. Raises JournalError. Close it."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._verdicts = VerdictCache()
        self._count = 0
        self._waiting: list[bytes] = []
        #: by content, for judges that are given this journal
        self.cache = VerdictCache()
        #: what was cut off when it was opened
        self.dropped: str | None = None
        try:
            self._read()
            self._file: IO[bytes] | None = path.open("ab")
        except OSError as error:
            raise JournalError(f"the journal of verdicts {path} can't be opened: {error}") from error

    def __len__(self) -> int:
        """Verdicts in the file and on their way there."""
        return self._count

    def get(self, key: str) -> Verdict | None:
        with self._lock:
            return self._verdicts.get(key)

    def put(self, key: str, content: str, verdict: Verdict, episode: str, step: int | None) -> None:
        """A key that is there keeps its verdict."""
        line = {"key": key, "content": content, "episode": episode, "step": step, **verdict.as_json()}
        with self._lock:
            if self._verdicts.get(key) is not None:
                return
            self._verdicts.put(key, verdict)
            self._count += 1
            self._waiting.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self.cache.put(content, verdict)

    def flush(self) -> None:
        """Waits until every verdict put so far would survive a power failure. Raises JournalError."""
        with self._lock:
            if self._file is None:
                raise JournalError(f"the journal of verdicts {self._path} is closed")
            if not self._waiting:
                return
            try:
                self._file.write(b"".join(self._waiting))
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise JournalError(f"the journal of verdicts {self._path} can't be written: {error}") from error
            self._waiting.clear()

    def close(self) -> None:
        """Writes what waits."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def _read(self) -> None:
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return
        good, broken = 0, ""
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if broken:
                    raise JournalError(f"{broken}; remove the line, and its verdict is asked for again")
                try:
                    if not raw.endswith(b"\n"):
                        raise ValueError("it was cut off")
                    line: dict[str, Any] = json.loads(raw)
                    verdict = Verdict.of(line)
                    key, content = str(line["key"]), str(line["content"])
                except (KeyError, TypeError, ValueError) as error:
                    broken = f"{self._path}:{number}: broken verdict ({error!r})"
                    continue
                good += len(raw)
                if self._verdicts.get(key) is None:
                    self._verdicts.put(key, verdict)
                    self._count += 1
                self.cache.put(content, verdict)
        if broken:
            self.dropped = f"{broken}: it was the last line, and was removed"
            with self._path.open("r+b") as file:
                file.truncate(good)
                file.flush()
                os.fsync(file.fileno())
