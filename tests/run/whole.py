"""The `tapforge` command as its users have it: a process of its own, with real Ray, vLLM, FSDP2 ranks and phones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.run.folder import read_events

#: seconds that a whole session may take on a machine that does other things as well; reached only when something hangs
PATIENCE = 600.0
#: what is wrong with the first phones of the session `resumed`; the others are well
SICK = ("half", "wrong_size", "corrupt", "lying_health")
PHONES = 12
_MARK = "TAPFORGE_TEST_COMMAND"

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: tiny}
spec:
  seed: 3
  model: {contextTokens: 256, adapter: {prompt: compact, historySteps: 8}}
  environment:
    source: {processes: {count: 12}}
    deadlines: {episodeSeconds: 600, acquireSeconds: 600, resetSeconds: 120, stepSeconds: 120, evaluateSeconds: 120}
  warmStart: {demonstrations: 100, steps: 30, batchSize: 32, errorRate: 0.5}
  rollout: {groupSize: 4, groupsPerUpdate: 4, responseTokens: 24, groupDeadlineSeconds: 600}
  algorithm: {kl: {coefficient: 0.05}}
  learner: {ranks: 2, learningRate: 1e-4}
  engine: {maxConcurrentSequences: 16, kvCacheMiB: 64}
  evaluation: {episodes: 16, everyUpdates: 1}
  checkpoints: {everyUpdates: 1}
  logging: {tensorboard: {}, episodes: {perUpdate: 2}}
  stop: {maxUpdates: 2}
"""


class Command:
    """A `tapforge` process with a process group of its own, like one that is started in a terminal."""

    def __init__(self, *words: str | Path, place: Path, environment: Mapping[str, str] | None = None):
        self.mark = uuid.uuid4().hex
        self._out, self._err = (place / f"{words[0]}-{self.mark[:8]}.{name}" for name in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tapforge_trainer.cli.main", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=place,
                env={**os.environ, **(environment or {}), _MARK: self.mark},
                start_new_session=True,
            )

    def wait(self, grace: float = 60.0) -> Finished:
        """`grace`: seconds after which a process that is still there counts as left behind."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return Finished(code, self._out.read_text(), self._err.read_text(), self._left_behind(grace))

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """As Ctrl-C does: to every process of the terminal's group."""
        os.killpg(self.process.pid, number)

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something is so, or fails with what the command said."""
        end = time.monotonic() + PATIENCE
        while not holds():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"it ended too soon, or hangs: {self._out.read_text()}\n{self._err.read_text()}")
            time.sleep(0.1)

    def kill(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)

    def kill_one(self, words: str, of: int = 1) -> None:
        """One of so many processes with these words in their command line."""
        found = [pid for pid, line in self.processes().items() if words in line]
        assert len(found) == of
        os.kill(found[-1], signal.SIGKILL)

    def _left_behind(self, grace: float) -> list[str]:
        """Command lines of processes that this command started and that outlive it."""
        end = time.monotonic() + grace
        while (alive := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        self.kill()
        return list(alive.values())

    def processes(self) -> dict[int, str]:
        """Everything that inherited the mark, however far down, with its command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it ended meanwhile, or is somebody else's
                continue
        return found


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str
    left_behind: list[str]

    @property
    def said(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


@dataclass(frozen=True)
class Run:
    """A run's folder, as it was after a command."""

    folder: Path
    file: Path
    finished: Finished

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def state(self) -> dict[str, Any]:
        """The driver's part of the newest checkpoint."""
        newest = (self.folder / "checkpoints" / "latest").read_text().strip()
        return json.loads((self.folder / "checkpoints" / newest / "state.json").read_text())["driver"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder) if event["event"] == kind]

    def recording(self, *place: str) -> Recording:
        return Recording(self.folder.joinpath(*place))

    def copied(self, place: Path) -> Run:
        """The same in another folder of runs, so that a test may go on with it."""
        shutil.copytree(self.folder, place / self.folder.name)
        return Run(place / self.folder.name, self.file, self.finished)


def tapforge(*words: str | Path, place: Path) -> Finished:
    return Command(*words, place=place).wait()


def restarts(update: dict[str, Any]) -> int:
    """How often the session had started an engine again when it reported this update."""
    return int(update["learner"].get("engine_restarts", 0))
