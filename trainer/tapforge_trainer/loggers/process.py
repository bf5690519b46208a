"""The process in which loggers run: `python -m tapforge_trainer.loggers.process`, started by `channel.py`.

Lines of JSON come in: first the run and its loggers, then figures and the groups of updates, at last how the session
ended; the end of the input without that is a driver that died. Lines go out: {"logger": name, "error": why}, once for
each logger that fails, and {"logger": name, "note": what} for one that shows no episodes.

- Each logger has a thread and a bounded queue, so that one that hangs delays no other one.
- `<folder>/loggers/<name>.json` keeps the tracker's id of the run, the last step of each figure, and that of episodes.
  It is written before they are logged: what a crash cuts off is lost rather than logged twice.
- Episodes are read and drawn once for all loggers, on the thread of the first one that comes to them. Those of few
  updates wait for a logger: pictures are large.
- No logger is waited for longer than the deadline that comes with the end.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO

from .episodes import EpisodeReader, UpdateEpisodes
from .logger import EpisodeLogger, Logger, RunInfo, Status
from .registry import Chosen, make

#: lines that wait for a logger; more are dropped
_QUEUE: Final = 1000
#: updates whose episodes wait for a logger; of more the episodes are dropped
_UPDATES: Final = 4
#: among the names of figures, all of which have a slash
_EPISODES: Final = "episodes"
#: for which loggers are waited when the driver died, seconds
_ORPHANED: Final = 20.0


@dataclass(frozen=True, slots=True)
class _End:
    status: Status


#: figures of a step, episodes of an update, or the end
_Line = tuple[int, dict[str, float]] | UpdateEpisodes | _End


class _Worker:
    """One logger on its thread."""

    def __init__(self, chosen: Chosen, run: RunInfo, out: TextIO, shows: bool):
        """`shows`: episodes are asked for."""
        self.name = chosen.name
        self._shows = shows
        self._chosen, self._run, self._out = chosen, run, out
        self._state = run.folder / "loggers" / f"{chosen.name}.json"
        self._lines: queue.Queue[_Line] = queue.Queue(_QUEUE)
        self._reported = False
        self._room = threading.Semaphore(_UPDATES)
        self._thread = threading.Thread(target=self._work, name=chosen.name, daemon=True)
        self._thread.start()

    def put(self, line: _Line) -> None:
        if isinstance(line, UpdateEpisodes) and not self._room.acquire(blocking=False):
            self._report(f"it does not keep up: episodes are dropped beyond {_UPDATES} updates")
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._report(f"it does not keep up: figures are dropped beyond {_QUEUE} updates")
            if isinstance(line, UpdateEpisodes):
                self._room.release()

    def join(self, end: float) -> None:
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._report("it did not finish in time; what it had not sent by then may be lost")

    def _work(self) -> None:
        try:
            logger = make(self._chosen)
            state = self._read()
            known = logger.start(replace(self._run, resume=state.get("id", "")))
            steps: dict[str, int] = state.get("steps", {})
            if self._shows and not isinstance(logger, EpisodeLogger):
                self._say(note="it has no log_episodes, and shows no episodes")
            while not isinstance(line := self._lines.get(), _End):
                if isinstance(line, UpdateEpisodes):
                    self._log_episodes(logger, known, steps, line)
                    self._room.release()
                else:
                    self._log(logger, known, steps, *line)
            logger.finish(line.status)
        except BaseException as error:  # noqa: BLE001 - libraries raise what they like, and SystemExit
            self._report(f"{type(error).__name__}: {error}")

    def _log(self, logger: Logger, known: str, steps: dict[str, int], step: int, figures: dict[str, float]) -> None:
        new = {name: value for name, value in figures.items() if step > steps.get(name, -1)}
        if not new:
            return
        steps |= dict.fromkeys(new, step)
        self._keep(known, steps)
        try:
            logger.log(step, new)
        except Exception as error:  # noqa: BLE001 - a server that is away may come back
            self._report(f"{type(error).__name__}: {error}")

    def _log_episodes(self, logger: Logger, known: str, steps: dict[str, int], update: UpdateEpisodes) -> None:
        if not isinstance(logger, EpisodeLogger) or update.step <= steps.get(_EPISODES, -1):
            return
        steps[_EPISODES] = update.step
        self._keep(known, steps)
        try:
            if rows := update.rows():
                logger.log_episodes(update.step, rows)
        except Exception as error:  # noqa: BLE001 - of the library, its server, or the recording
            self._report(f"episodes of update {update.step}: {type(error).__name__}: {error}")

    def _keep(self, known: str, steps: dict[str, int]) -> None:
        beside = self._state.with_suffix(".new")
        beside.write_text(json.dumps({"id": known, "steps": steps}))
        beside.replace(self._state)

    def _read(self) -> dict[str, Any]:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        try:
            return json.loads(self._state.read_text())
        except (FileNotFoundError, ValueError):  # the first session, or a crash of the machine
            return {}

    def _report(self, error: str) -> None:
        if not self._reported:
            self._reported = True
            self._say(error=error)

    def _say(self, **what: str) -> None:
        print(json.dumps({"logger": self.name, **what}), file=self._out, flush=True)


def serve(lines: Iterator[str], out: TextIO) -> None:
    """Until the session has ended."""
    first = json.loads(next(lines))
    run = RunInfo(first["name"], Path(first["folder"]), first["config"])
    reader = EpisodeReader(run.folder, first["episodes"])
    workers = [_Worker(Chosen(**one), run, out, first["episodes"] > 0) for one in first["loggers"]]
    end, seconds = _End("failed"), _ORPHANED
    for text in lines:
        line = json.loads(text)
        if "status" in line:
            end, seconds = _End(line["status"]), line["seconds"]
            break
        found: _Line = (
            UpdateEpisodes(reader, line["step"], line["groups"])
            if "groups" in line
            else (line["step"], line["figures"])
        )
        for worker in workers:
            worker.put(found)
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.put(end)
    for worker in workers:
        worker.join(deadline)


def main() -> None:
    # Libraries print what they like: only our lines go out.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        serve(iter(sys.stdin), out)
    finally:
        out.flush()
        sys.stderr.flush()
        os._exit(0)  # whatever libraries would still do at the end of an interpreter


if __name__ == "__main__":
    main()
