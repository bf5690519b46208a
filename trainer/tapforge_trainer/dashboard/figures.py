"""A run's events as columns of figures, read on while the run writes them. One reader; not for several threads at once.

Promises: every figure that loggers get (`loggers/figures.py`) is here, by update; what was done again after a crash
counts as it was done last; only what was appended since is read.
"""

from __future__ import annotations

import json
import math
from array import array
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ..loggers.figures import figures_of, meaning
from ..telemetry.telemetry import EVENTS

_CHUNK: Final = 4 << 20
_KEPT_NOTES: Final = 500
_RENAMED: Final = {"floor": "baseline"}
_NAN: Final = float("nan")


class RunEvents:
    def __init__(self, folder: Path):
        self._path = folder / EVENTS
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self.updates = array("q")
        #: policy version after each update
        self.versions = array("q")
        self.columns: dict[str, array[float]] = {}
        #: of measurements and baselines, the newest of each
        self.evaluations: dict[tuple[str, str, int], dict[str, Any]] = {}
        self.baselines: dict[str, dict[str, Any]] = {}
        self.notes: list[dict[str, Any]] = []
        self.stages: dict[int, tuple[int, int]] = {}
        self.last_update: dict[str, Any] = {}
        self.phase = ""
        self.began: float | None = None
        self.last: float | None = None
        self.first_version: int | None = None
        self.software: dict[str, Any] = {}
        self.base_model: dict[str, Any] = {}

    def refresh(self) -> bool:
        """Reads what is new. True: something was."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return False
        if size < self._offset:  # of another run
            self._offset = 0
            self._clear()
        changed = False
        with self._path.open("rb") as file:
            while data := self._next(file):
                for line in data.splitlines():
                    try:
                        event = json.loads(line)
                    except ValueError:
                        continue  # cut off by a crash, and gone on behind
                    if isinstance(event, dict) and "event" in event:
                        try:
                            self._take(event)
                        except (KeyError, TypeError, ValueError, AttributeError):
                            continue  # of another release, or another program's
                        changed = True
        return changed

    def _next(self, file: Any) -> bytes:
        file.seek(self._offset)
        data: bytes = file.read(_CHUNK)
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == _CHUNK:  # a line longer than this is none
            whole = data
        self._offset += len(whole)
        return whole

    def _take(self, event: dict[str, Any]) -> None:
        self.last = event.get("at", self.last)
        self.began = self.began if self.began is not None else self.last
        match _RENAMED.get(event["event"], event["event"]):
            case "update":
                self._back_to(event["update"] - 1)
                self._update(event)
            case "evaluation":
                self.evaluations[event["name"], event["mode"], event["update"]] = event
            case "baseline":
                self.baselines[event["policy"]] = event
            case "note" | "alarm":
                self.notes = [*self.notes, {**event, "after": self.update}][-_KEPT_NOTES:]
            case "phase":
                self.phase = event["text"]
            case "stage":
                self.stages[event["stage"]] = event["order"], event["update"]
            case "reinforcement":
                self._back_to(event["update"])
                self.stages = {stage: begun for stage, begun in self.stages.items() if begun[1] <= event["update"]}
                self.first_version = event["version"] if self.first_version is None else self.first_version
            case "started":
                self.software = event.get("software") or self.software
            case "base_model":
                self.base_model = event

    @property
    def update(self) -> int:
        return self.updates[-1] if self.updates else 0

    def _back_to(self, update: int) -> None:
        """Updates after this one were lost with a crash."""
        while self.updates and self.updates[-1] > update:
            self.updates.pop()
            self.versions.pop()
            for column in self.columns.values():
                column.pop()

    def _update(self, event: dict[str, Any]) -> None:
        found, update = figures_of(event), int(event["update"])
        version = int((event.get("so_far") or {}).get("version") or 0)
        self.updates.append(update)
        self.versions.append(version)
        for name in found.keys() - self.columns.keys():
            self.columns[name] = array("d", [_NAN] * (len(self.updates) - 1))
        for name, column in self.columns.items():
            column.append(found.get(name, _NAN))
        self.last_update = event

    def version_before(self, update: int) -> int | None:
        """The policy's when this update began; None: not known yet."""
        place = next((n for n, number in enumerate(self.updates) if number == update), None)
        if place is None:
            return None
        return self.first_version if place == 0 else self.versions[place - 1] or None

    def begins(self) -> dict[int, int]:
        """By number of a stage: the order of its first group."""
        return {stage: order for stage, (order, _) in self.stages.items()}

    def names(self) -> list[dict[str, Any]]:
        """Of all figures, with what they mean and their last value."""
        return [
            {"name": name, "meaning": meaning(name) or "", "last": self.value(name)} for name in sorted(self.columns)
        ]

    def series(self, names: list[str]) -> dict[str, Any]:
        """Columns beside the updates' numbers; None where an update has none."""
        return {
            "updates": list(self.updates),
            "figures": {name: [_finite(value) for value in self.columns.get(name, ())] for name in names},
        }

    def value(self, name: str, last: int = 1) -> float | None:
        """Mean of a figure over the last updates that have it."""
        column = self.columns.get(name, ())
        known = list(islice((value for value in reversed(column) if math.isfinite(value)), last))
        return sum(known) / len(known) if known else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
