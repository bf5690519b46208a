"""The journal of verdicts: what was decided stays decided, also after a kill.

- A line of `verdicts.jsonl` is one verdict with its two keys: `key` names the question, the judge, the episode and the
  step, `content` the question and the judge alone.
- `put` keeps a verdict in memory. When `flush` has returned it is on the disk: call it before anything is made of the
  verdict. Both may be called from any thread.
- A last line that was cut off is removed and said (`dropped`); a broken line elsewhere is an error with its number.
- In memory are the latest `KEPT` verdicts: those of episodes under way, and of questions that come again.
- One writer at a time: the folder belongs to one run, which is locked. Judges in another process have a
  `VerdictRelay`: what it gets goes to the writer, and it knows what it was given with an episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

from .verdicts import Verdict

VERDICTS: Final = "verdicts.jsonl"
KEPT: Final = 50_000
#: between two writes
_SECONDS: Final = 1.0


class JournalError(Exception):
    """The journal can't be read or written. The message names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class Written:
    """A line of the journal."""

    key: str
    content: str
    episode: str
    #: from 0; None: of a task
    step: int | None
    verdict: Verdict


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


class Verdicts(Protocol):
    """Where a judge finds verdicts and leaves them."""

    cache: VerdictCache

    def get(self, key: str) -> Verdict | None: ...
    def put(self, line: Written) -> None:
        """A key that is there keeps its verdict."""


class VerdictRelay:
    """The journal of judges in another process than its writer. Belongs to one event loop."""

    def __init__(self) -> None:
        self.cache = VerdictCache()
        self._verdicts = VerdictCache()
        self._new: deque[Written] = deque()
        self._taken = 0

    def get(self, key: str) -> Verdict | None:
        return self._verdicts.get(key)

    def put(self, line: Written) -> None:
        if self._verdicts.get(line.key) is None:
            self._verdicts.put(line.key, line.verdict)
            self.cache.put(line.content, line.verdict)
            self._new.append(line)

    def know(self, lines: Iterable[Written]) -> None:
        """The writer has these."""
        for line in lines:
            self._verdicts.put(line.key, line.verdict)
            self.cache.put(line.content, line.verdict)

    def new(self, taken: int) -> tuple[int, tuple[Written, ...]]:
        """How many the writer has taken, which is at least as many as it says here, and those that came since."""
        for _ in range(min(taken - self._taken, len(self._new))):
            self._new.popleft()
            self._taken += 1
        return self._taken, tuple(self._new)


class VerdictJournal:
    """Reads what is there and appends to it. Raises JournalError. Close it."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._verdicts = VerdictCache()
        #: by episode, the latest ones
        self._episodes: OrderedDict[str, list[Written]] = OrderedDict()
        #: what the verdicts in it took
        self.tokens, self.money = 0, 0.0
        self._count = 0
        self._waiting: list[bytes] = []
        self._failure: JournalError | None = None
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

    def of(self, episode: str) -> tuple[Written, ...]:
        with self._lock:
            return tuple(self._episodes.get(episode, ()))

    def put(self, line: Written) -> None:
        """A key that is there keeps its verdict."""
        about = {"key": line.key, "content": line.content, "episode": line.episode, "step": line.step}
        text = json.dumps({**about, **line.verdict.as_json()}, separators=(",", ":"))
        with self._lock:
            if self._keep(line):
                self._waiting.append(text.encode() + b"\n")

    def flush(self) -> None:
        """Waits until every verdict put so far would survive a power failure. Raises JournalError."""
        with self._lock:
            if self._failure is not None:  # what was written of a line would be in the middle of the file
                raise self._failure
            if self._file is None:
                raise JournalError(f"the journal of verdicts {self._path} is closed")
            if not self._waiting:
                return
            try:
                self._file.write(b"".join(self._waiting))
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                self._failure = JournalError(f"the journal of verdicts {self._path} can't be written: {error}")
                raise self._failure from error
            self._waiting.clear()

    def close(self) -> None:
        """Writes what waits."""
        if self._file is not None:
            try:
                self.flush()
            finally:
                self._file.close()
                self._file = None

    def _keep(self, line: Written) -> bool:
        """Whether it is new."""
        if self._verdicts.get(line.key) is not None:
            return False
        self._verdicts.put(line.key, line.verdict)
        self.cache.put(line.content, line.verdict)
        self._episodes.setdefault(line.episode, []).append(line)
        self._episodes.move_to_end(line.episode)
        if len(self._episodes) > KEPT:
            self._episodes.popitem(last=False)
        self.tokens += line.verdict.prompt_tokens + line.verdict.answer_tokens
        self.money += line.verdict.money
        self._count += 1
        return True

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
                    found = _line(json.loads(raw))
                except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                    broken = f"{self._path}:{number}: broken verdict ({error!r})"
                    continue
                good += len(raw)
                self._keep(found)
        if broken:
            self.dropped = f"{broken}: it was the last line, and was removed"
            with self._path.open("r+b") as file:
                file.truncate(good)
                file.flush()
                os.fsync(file.fileno())


@asynccontextmanager
async def written_down(journal: VerdictJournal) -> AsyncIterator[None]:
    """Verdicts are written every second until the block ends: a kill loses no more of them. A failure is raised by the
    next `flush` as well."""

    async def keep() -> None:
        while True:
            await asyncio.sleep(_SECONDS)
            await asyncio.to_thread(journal.flush)

    keeping = asyncio.create_task(keep(), name="verdicts")
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def _line(line: dict[str, Any]) -> Written:
    """Raises KeyError, TypeError and ValueError for what `put` didn't write."""
    step = line["step"]
    where = str(line["episode"]), None if step is None else int(step)
    return Written(str(line["key"]), str(line["content"]), *where, Verdict.of(line))
