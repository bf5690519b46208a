"""The runs that are served: folders of runs, and folders that hold some, in which new ones are found as they begin."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..run.assembly import ConfigurationError
from ..run.folder import SPEC, run_of
from .opened import OpenRun
from .stored import NotThere

log = logging.getLogger(__name__)

#: seconds between two looks at what runs have written
_EVERY: Final = 1.0
#: seconds between two looks for new runs
_NEW: Final = 2.0


class Library:
    """Named by folder; two folders of one name get numbers. `work` belongs to one thread of its own."""

    def __init__(self, folders: Sequence[Path]):
        """Raises ConfigurationError for a folder that is not a run's and holds none."""
        self._alone = [folder for folder in folders if (folder / SPEC).is_file()]
        self._parents = [folder for folder in folders if folder not in self._alone]
        for folder in self._parents:
            if not folder.is_dir() or not list(folder.glob(f"*/{SPEC}")):
                run_of(folder)  # raises with what it is instead
        self._runs: dict[str, OpenRun] = {}
        self._lock = threading.Lock()
        self._looked = 0.0
        self._ending = threading.Event()
        self._look()
        if not self._runs:
            raise ConfigurationError(f"none of the runs in {', '.join(map(str, folders))} can be read")
        self._thread = threading.Thread(target=self._work, name="index", daemon=True)
        self._thread.start()

    def names(self) -> list[str]:
        self._look()
        return list(self._runs)

    def get(self, name: str) -> OpenRun:
        """Raises NotThere."""
        if name not in self._runs:
            self._look()
        if name not in self._runs:
            raise NotThere(f"there is no run {name[:100]!r} here; there is {', '.join(list(self._runs)[:10])}")
        return self._runs[name]

    def close(self) -> None:
        self._ending.set()
        for run in self._runs.values():
            run.stop()
        self._thread.join(60)
        for run in self._runs.values():
            run.close()

    def _look(self) -> None:
        with self._lock:
            if self._runs and time.monotonic() - self._looked < _NEW:
                return
            self._looked = time.monotonic()
            below = [spec.parent for parent in self._parents for spec in sorted(parent.glob(f"*/{SPEC}"))]
            known = {run.folder for run in self._runs.values()}
            for folder in [*self._alone, *below]:
                if folder not in known:
                    try:
                        run = OpenRun(folder)
                    except ConfigurationError as error:
                        log.warning("%s", error)
                        continue
                    name, number = folder.name or "run", 2
                    while name in self._runs:
                        name, number = f"{folder.name}-{number}", number + 1
                    self._runs[name] = run

    def _work(self) -> None:
        while not self._ending.is_set():
            changed = False
            for run in list(self._runs.values()):
                if run.watched and not self._ending.is_set():
                    try:
                        changed |= run.work()
                    except Exception as error:  # noqa: BLE001 - the run says it; the others are read on
                        run.failed(error)
            self._ending.wait(_EVERY / 10 if changed else _EVERY)
