"""The local files that a TrainingRun names: where they are, what they hold, and what is wrong with them, in words.

Nothing is started and no connection is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tapforge_api import TrainingRun
from tapforge_api.pool import Protocol

from ..data.episodes import DataError
from ..data.folder import DataFolder
from ..data.recorded_tasks import recorded_tasks
from ..data.sets import repeated
from ..learner.families import FolderError
from ..learner.families.check import check_folder
from ..model_source.folder import folder_faults, quantization_fault
from ..model_source.hub import cached_snapshot
from ..model_source.ref import POLICY, TEACHER
from ..storage.object_storage import is_uri, uri_error
from ..tasks.contamination import Contamination
from ..tasks.files import read_tasks
from ..tasks.source import TaskError
from .feasibility import ModelFacts

RUNS = Path("runs")  #: folder of all runs, below the working directory
#: measured tasks, and practised ones, that are compared before a run; its summary compares all
COMPARED = 10_000


def folder_of(run: TrainingRun, runs: Path = RUNS) -> Path:
    return runs / run.metadata.name


def checkpoints_of(run: TrainingRun, folder: Path) -> Path:
    """Where the run of this folder keeps its checkpoints; where they are in object storage, what the driver knows of
    them."""
    given = run.spec.checkpoints.directory
    return folder / "checkpoints" if given is None else Path(given)


def checkpoint_uri(run: TrainingRun) -> str | None:
    """Where in object storage; None: they are in a folder."""
    uri = run.spec.checkpoints.uri
    return None if uri is None else f"{uri.rstrip('/')}/{run.metadata.name}"


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """What the files that a run names hold. `errors` are complete sentences; with one of them the run can't start."""

    errors: tuple[str, ...] = ()
    #: addresses in the URL file
    urls: int | None = None
    #: tasks in the task file
    tasks: int | None = None
    #: what the measured tasks share with those that would be practised
    contamination: Contamination | None = None
    #: and with what stages practise without reading verifiers and labels; None: nothing
    on_purpose: Contamination | None = None
    #: what is known of the model without a download
    model: ModelFacts | None = None
    #: what the held-out steps of a warm start share with those that are imitated, in words; "": nothing
    repeated: str = ""


#: of a run that names none, or whose files have not been read
NO_FILES = LocalFiles()


def inspect_files(run: TrainingRun, runs: Path = RUNS) -> LocalFiles:
    """Looks at the model folder, the URL file, the task file, the checkpoint to resume from and the places to write."""
    spec, errors = run.spec, []
    protocol = spec.environment.protocol
    if (folder := spec.model.source.path) is not None:
        errors += model_folder_errors(Path(folder.folder))
    if (taught := spec.algorithm.distillation) is not None and (folder := taught.teacher.path) is not None:
        errors += model_folder_errors(Path(folder.folder), f"{TEACHER}.path.folder")
    if (repository := spec.model.source.hugging_face) is not None:
        errors += _cached_model_errors(repository.repo, repository.revision)
    urls, tasks, both = None, None, ""
    if (source := spec.environment.source.urls) is not None and source.file is not None:
        listed = Path(source.file)
        urls, error = _counted(lambda: _count_urls(listed, protocol), "spec.environment.source.urls.file")
        errors += error
    if (practised := spec.tasks.file) is not None:
        judged = spec.rewards.verifier == "ignored"
        listing = partial(read_tasks, Path(practised), protocol, judged=judged)
        tasks, error = _counted(lambda: len(listing().tasks), "spec.tasks.file")
        errors += error
    if (measured := spec.evaluation.tasks.file) is not None:
        held_out = partial(read_tasks, Path(measured), protocol, judged=spec.evaluation.judged)
        errors += _counted(lambda: len(held_out().tasks), "spec.evaluation.tasks.file")[1]
    if spec.warm_start is not None and (shown := spec.warm_start.data) is not None:
        for field, named in (("path", shown.path), ("heldOut", shown.held_out)):
            try:
                if named is not None:
                    DataFolder(Path(named))
            except DataError as error:
                errors.append(f"spec.warmStart.data.{field}: {error}")
        try:
            if shown.held_out is not None and not errors:
                both = repeated(Path(shown.path), Path(shown.held_out))
        except DataError as error:
            errors.append(f"spec.warmStart.data: {error}")
    if (recorded := spec.environment.source.dataset) is not None:
        for field, named in (("path", recorded.path), ("heldOut", recorded.held_out)):
            try:
                if named is not None:
                    recorded_tasks(Path(named), recorded.outcomes)
            except DataError as error:
                errors.append(f"spec.environment.source.dataset.{field}: {error}")
    kept = checkpoints_of(run, folder_of(run, runs))
    if (resume := spec.checkpoints.resume_from) is not None:
        if is_uri(resume):
            errors += _uri_errors("spec.checkpoints.resumeFrom", resume)
        elif not Path(resume).is_dir() and not _saved_since_resuming(kept, resume):
            errors.append(f"spec.checkpoints.resumeFrom: {_why_no_folder(Path(resume))}")
    if spec.checkpoints.uri is not None:
        errors += _uri_errors("spec.checkpoints.uri", spec.checkpoints.uri, writable=True)
    places = {"--runs": folder_of(run, runs), "spec.checkpoints.directory": kept}
    for name, place in places.items():
        if why := _why_not_writable(place):
            errors.append(f"{name}: {why}")
    return LocalFiles(tuple(errors), urls, tasks, repeated=both)


def _saved_since_resuming(checkpoints: Path, resume: str) -> bool:
    from ..learner.checkpoint_storage import CheckpointFolder
    from ..telemetry.progress import saved_since_resuming  # pays for images, which other commands don't need

    return saved_since_resuming(CheckpointFolder(checkpoints), resume)


def model_folder_errors(folder: Path, here: str = f"{POLICY}.path.folder") -> list[str]:
    """Why a folder is not a model that can be trained; empty: it looks like one. `here`: the field that names it."""
    if not folder.is_dir():
        return [f"{here}: {_why_no_folder(folder)}"]
    if faults := folder_faults(folder):
        return [f"{here}: the folder {folder} {fault}" for fault in faults]
    try:
        check_folder(folder)
    except FolderError as error:
        return [f"{here}: {error}"]
    return []


def _cached_model_errors(repo: str, revision: str) -> list[str]:
    """Why a repository's model can't be trained, as far as this machine's cache holds its texts. Asks no network."""
    folder = cached_snapshot(repo, revision)
    fault = quantization_fault(folder, weights=False) if folder is not None else None
    return [] if fault is None else [f"spec.model.source.huggingFace: {repo} {fault}"]


def _count_urls(path: Path, protocol: Protocol) -> int | None:
    from tapforge_envs.slots.urls import read_urls  # pays for aiohttp, which other commands don't need

    return number_of([address.url for address in read_urls(path, protocol)])


#: of a manager, that makes so many workers
_WORKERS: Final = re.compile(r"\?workers=([0-9]{1,2})", re.ASCII)


def number_of(addresses: Sequence[str]) -> int | None:
    """Slots that addresses are. None with `auto`: as many phones as adb has at the start."""
    if "auto" in addresses:
        return None
    return sum(sum(map(int, _WORKERS.findall(address))) or 1 for address in addresses)


def _counted(count: Callable[[], int | None], field: str) -> tuple[int | None, list[str]]:
    from tapforge_envs.slots.source import SlotError

    try:
        return count(), []
    except (TaskError, SlotError) as error:
        return None, [f"{field}: {error}"]


def _uri_errors(field: str, uri: str, *, writable: bool = False) -> list[str]:
    return [f"{field}: {why}"] if (why := uri_error(uri, writable=writable)) else []


def _why_no_folder(path: Path) -> str:
    if path.exists():
        return f"{path} is a file, expected a folder"
    parent = next(p for p in (*path.absolute().parents, Path("/")) if p.exists())
    return f"the folder {path} doesn't exist (what exists of it: {parent})"


def _why_not_writable(path: Path) -> str | None:
    """None: the folder is there and can be written, or could be made."""
    nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        return f"{path} can't be a folder: {nearest} is a file"
    if os.access(nearest, os.W_OK | os.X_OK):
        return None
    if os.statvfs(nearest).f_flag & os.ST_RDONLY:
        return f"{path} can't be written: {nearest} is on a read-only file system; name a folder of another one"
    return f"{path} can't be written: no permission in {nearest}; name another folder, or change its owner or mode"
