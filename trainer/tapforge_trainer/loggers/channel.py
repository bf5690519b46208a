"""The driver's end of the process in which loggers run.

`log` never waits: lines go into a bounded queue and from there by a thread into the process's input. `finish` waits for
a bounded time, then kills. What fails is reported once by `report`, which is called on a thread of this module.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from .logger import Status
from .registry import Chosen

#: what libraries print
LOG: Final = "loggers.log"
#: for the end of a session: for the loggers, and then for their process, seconds
FINISH_SECONDS: Final = 20.0
_KILL_SECONDS: Final = 5.0
_QUEUE: Final = 1000


class Channel:
    def __init__(
        self,
        loggers: Sequence[Chosen],
        *,
        name: str,
        folder: Path,
        config: Mapping[str, Any],
        episodes: int = 0,
        report: Callable[[str], None],
        command: Sequence[str] = (sys.executable, "-m", "tapforge_trainer.loggers.process"),
    ):
        self._report = report
        self._reported = False
        with (folder / LOG).open("ab") as log:
            # A session of its own: Ctrl-C is for the driver, which says how the run ended.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        self._lines: queue.Queue[bytes | None] = queue.Queue(_QUEUE)
        first = {
            "name": name,
            "folder": str(folder.absolute()),
            "config": config,
            "episodes": episodes,
            "loggers": [asdict(one) for one in loggers],
        }
        self._put(first)
        self._threads = [
            threading.Thread(target=work, name=f"loggers-{work.__name__}", daemon=True)
            for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._put({"step": step, "figures": dict(figures)})

    def log_episodes(self, step: int, groups: Sequence[str]) -> None:
        """Of the groups that update `step` took, in its order: their process reads them from the recording."""
        self._put({"step": step, "groups": list(groups)})

    def finish(self, status: Status, seconds: float = FINISH_SECONDS) -> None:
        """Waits `seconds` for the loggers, and a little longer for their process."""
        self._put({"status": status, "seconds": seconds})
        try:
            self._process.wait(seconds + _KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._once("their process did not end in time and was killed")
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(_KILL_SECONDS)

    def _put(self, line: Mapping[str, Any]) -> None:
        try:
            self._lines.put_nowait(json.dumps(line).encode() + b"\n")
        except queue.Full:
            self._once("their process does not read: figures are dropped")

    def _once(self, what: str) -> None:
        if not self._reported:
            self._reported = True
            self._report(f"loggers: {what}; the run goes on without ({LOG} has what they printed)")

    def _write(self) -> None:
        assert self._process.stdin is not None
        while True:
            line = self._lines.get()
            assert line is not None
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):
                self._once("their process has ended")
                return
            if b'"status"' in line[:12]:
                return

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            said = json.loads(text)
            goes_on = "; the run goes on without" if "error" in said else ""
            self._report(f"logger {said['logger']}: {said.get('error') or said['note']}{goes_on}")
