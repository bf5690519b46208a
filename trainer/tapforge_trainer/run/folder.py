"""The folder of a run: what is in it, who may write to it, and how what is there is read.

- It belongs to one process at a time (a lock file); a second one is refused with the id of the process that has it.
- `spec.yaml` is the run. Once there is a checkpoint, a file that differs in what is learned or how it is measured is
  refused: results of two specs are never mixed.
- Files are replaced as a whole or not at all.
- Folders of earlier versions stay readable: names that have changed since are translated here and nowhere else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from tapforge_api import SpecError, TrainingRun, dump_set, load, to_yaml

from .. import recording
from ..data.remote import identity
from ..telemetry.telemetry import EVENTS
from .assembly import ConfigurationError, SetupError
from .named_paths import as_written_down

SPEC, SUMMARY, CURVE, REPLAY = "spec.yaml", "summary.json", "curve.png", "replay.html"
ROLLOUT, EVALUATION, EXPORT, REFERENCE = recording.ROLLOUT, "evaluation", "export", "reference"

#: in a folder that a process has
LOCK: Final = ".lock"

#: members of the spec that may differ when a run is resumed, because they are not about what is learned; and members
#: of the others that may
_MAY_CHANGE: Final = (
    "stop",
    "checkpoints",
    "engine",
    "cluster",
    "suspend",
    "deadlines",
    "device",
    "recording",
    "logging",
    "placement",
)
_MAY_CHANGE_IN: Final = {
    "environment": ("source", "deadlines"),
    "rollout": ("concurrency", "phonesPerWorker", "framesGiB"),
    "learner": ("ranks", "threads", "tokensPerMicroBatch"),
    "evaluation": ("baselines", "everyUpdates"),
    "sync": ("tolerance", "gapAlarm"),
}
#: what earlier versions wrote: (member of the spec, its field) -> the field now; and events
_RENAMED_FIELDS: Final = {("warmStart", "carelessness"): "errorRate", ("evaluation", "floors"): "baselines"}
_RENAMED_EVENTS: Final = {"floor": "baseline"}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder and holds its lock until the block ends. Raises SetupError with the process that has it."""
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+")
    except OSError as error:
        raise SetupError(f"the run's folder {folder} can't be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise SetupError(
                f"{folder} is in use by process {lock.read().strip() or '?'}; wait for it or give the run another name"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


# --- spec.yaml --------------------------------------------------------------------------------------------------------


def read_spec(folder: Path) -> TrainingRun:
    """The run whose folder it is. Raises OSError or SpecError."""
    path = folder / SPEC
    text = path.read_text(encoding="utf-8")
    if not any(old in text for _, old in _RENAMED_FIELDS):
        return as_written_down(load(path), str(path))
    return as_written_down(load(to_yaml(_renamed(yaml.safe_load(text)))), str(path))


def run_of(folder: Path) -> TrainingRun:
    """The run of a folder that a person named. Raises ConfigurationError that says what the folder is instead."""
    if (folder / SPEC).is_file():
        try:
            return read_spec(folder)
        except (OSError, SpecError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigurationError(f"{folder} is not a run's folder: {error}") from error
    if not folder.exists():
        where = "" if folder.is_absolute() else f" (looked for in {Path.cwd()})"
        raise ConfigurationError(
            f"{folder} is not a run's folder: it doesn't exist{where}; name the folder of a run, such as runs/NAME"
        )
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a run's folder: it is a file; name the folder, such as runs/NAME")
    runs = sorted(path.parent.name for path in folder.glob(f"*/{SPEC}"))
    if runs:
        more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
        remedy = f"it holds the runs {', '.join(runs[:5])}{more}: name one of them, such as {folder / runs[0]}"
    else:
        remedy = f"it has no {SPEC}; name the folder of a run, such as runs/NAME"
    raise ConfigurationError(f"{folder} is not a run's folder: {remedy}")


def _renamed(data: dict[str, Any]) -> dict[str, Any]:
    """A run's file, by the names that its fields have now."""
    spec = dict(data["spec"])
    for (member, old), new in _RENAMED_FIELDS.items():
        there = spec.get(member) or {}
        if old in there:
            spec[member] = {new if name == old else name: value for name, value in there.items()}
    return {**data, "spec": spec}


def write_spec(folder: Path, run: TrainingRun) -> None:
    """Raises ConfigurationError when the folder has a checkpoint of a run that differs in what is learned."""
    if (folder / SPEC).is_file() and any(event["event"] == "checkpoint" for event in read_events(folder)):
        _refuse_other(read_spec(folder), run, str(folder))
    write_atomically(folder / SPEC, to_yaml(dump_set(run)))


def check_same(spec: dict[str, Any], run: TrainingRun, place: str) -> None:
    """`spec`: what a checkpoint in `place` keeps of the run's file (`dump_set`); {}: nothing. Raises ConfigurationError
    when that differs in what is learned."""
    if spec:
        _refuse_other(as_written_down(load(to_yaml(_renamed(spec))), place), run, place)


def _refuse_other(there: TrainingRun, run: TrainingRun, place: str) -> None:
    earlier, now = _learned(there), _learned(run)
    if changed := sorted(name for name in {*earlier, *now} if earlier.get(name) != now.get(name)):
        values = "".join(f"\n  {name}: {earlier.get(name)} there, {now.get(name)} here" for name in changed)
        raise ConfigurationError(
            f"{place} holds a run that differs in what is learned or how it is measured:{values}\n"
            "give this one another metadata.name, or delete what is there to start from the beginning"
        )


def _learned(run: TrainingRun) -> dict[str, Any]:
    """Every field that has to stay the same over a run's sessions, by its path."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, member in value.items():
                walk(member, f"{path}.{name}")
        else:
            found[path] = value

    for name, member in run.spec.model_dump(mode="json", by_alias=True).items():
        if name in _MAY_CHANGE_IN:
            member = {k: v for k, v in member.items() if k not in _MAY_CHANGE_IN[name]}
        if name not in _MAY_CHANGE:
            walk(member, f"spec.{name}")
    if (recorded := run.spec.environment.source.dataset) is not None:  # which is its tasks and rewards, and no phones
        walk(recorded.model_dump(mode="json", by_alias=True), "spec.environment.source.dataset")
        for name in ("path", "heldOut"):
            place = found.get(f"spec.environment.source.dataset.{name}")
            found[f"spec.environment.source.dataset.{name}"] = None if place is None else identity(place)
    # Earlier versions wrote its default, 2, into what a cluster carries out; now it depends on other fields.
    found["spec.algorithm.loss.importanceCap"] = run.spec.algorithm.loss.weight_cap
    return found


# --- the other files --------------------------------------------------------------------------------------------------


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """The run's events in order; a line that was cut off by a crash is left out."""
    path = folder / EVENTS
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield event | {"event": _RENAMED_EVENTS.get(event["event"], event["event"])}


def write_atomically(path: Path, text: str) -> None:
    """Raises SetupError with the room that is left."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        free = shutil.disk_usage(path.parent).free // 2**20
        raise SetupError(
            f"{path} can't be written ({error.strerror}; {free} MiB free): make room and start again"
        ) from error
