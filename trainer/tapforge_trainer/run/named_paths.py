"""The files and folders that a run names, as this machine reads them (`storage/local_path.py`).

Every field that is a `LocalPath` is read here and nowhere else, right after the file is loaded: what comes after takes
it as it stands, and so does a reader of what a run wrote down of itself. A URI is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tapforge_api import Problem, SpecError, TrainingRun
from tapforge_api.base import LocalPath
from tapforge_api.errors import render_path

from ..storage.local_path import PathError, expanded, with_home
from ..storage.object_storage import is_uri

#: names of a field, from the object on
Names = tuple[str | int, ...]


def with_named_paths(run: TrainingRun, source: str, *, elsewhere: bool = False) -> TrainingRun:
    """The run with every path of its spec expanded. `elsewhere`: it is not for this machine alone, so that a variable
    that isn't set here is none of an error. Raises SpecError with all that can't be; `source` is the file."""
    return _with(run, source, partial(expanded, elsewhere=elsewhere))


def as_written_down(run: TrainingRun, source: str) -> TrainingRun:
    """A run as its own folder or a checkpoint has it: its paths were expanded when it began. Earlier releases left
    `~`. Raises SpecError."""
    return _with(run, source, with_home)


def _with(run: TrainingRun, source: str, read: Callable[[str], str]) -> TrainingRun:
    problems: list[Problem] = []
    spec = _expanded(run.spec, ("spec",), read, problems)
    if problems:
        raise SpecError(source, problems)
    return run.model_copy(update={"spec": spec})


def named_paths(run: TrainingRun) -> Iterator[tuple[str, str]]:
    """(field, path) of each path that the spec names."""
    for path, value in _paths(run.spec, ("spec",)):
        if not is_uri(value):
            yield render_path(path), value


def where_relative(run: TrainingRun, errors: Sequence[str], here: Path) -> list[str]:
    """What relative paths are relative to, where an error is about one that isn't there: a sentence, or nothing. `here`
    is the working directory."""
    relative = [
        field for field, path in named_paths(run) if not Path(path).is_absolute() and not (here / path).exists()
    ]
    # An error of a stage names the stage, and then the field as of a run by itself.
    named = [error.replace("]: spec.", "].", 1) if error.startswith("spec.stages[") else error for error in errors]
    if any(error.startswith(field) for error in named for field in relative):
        return [f"relative paths are looked for in the working directory, which is {here}, not beside the run's file"]
    return []


def _expanded(part: BaseModel, path: Names, read: Callable[[str], str], problems: list[Problem]) -> BaseModel:
    changed: dict[str, Any] = {}
    for name, field in type(part).model_fields.items():
        value, here = getattr(part, name), (*path, field.alias or name)
        if isinstance(value, BaseModel):
            found: Any = _expanded(value, here, read, problems)
        elif isinstance(value, tuple):
            found = tuple(
                _expanded(one, (*here, number), read, problems) if isinstance(one, BaseModel) else one
                for number, one in enumerate(value)
            )
        elif isinstance(value, str) and _is_path(field) and not is_uri(value):
            try:
                found = read(value)
            except PathError as error:
                problems.append(Problem(str(error), here))
                continue
        else:
            continue
        if found != value:
            changed[name] = found
    return part.model_copy(update=changed) if changed else part


def _paths(part: BaseModel, path: Names) -> Iterator[tuple[Names, str]]:
    for name, field in type(part).model_fields.items():
        value, here = getattr(part, name), (*path, field.alias or name)
        if isinstance(value, BaseModel):
            yield from _paths(value, here)
        elif isinstance(value, tuple):
            for number, one in enumerate(value):
                if isinstance(one, BaseModel):
                    yield from _paths(one, (*here, number))
        elif isinstance(value, str) and _is_path(field):
            yield here, value


def _is_path(field: FieldInfo) -> bool:
    """`Path` or `Path | None`."""
    inner = [one for part in get_args(field.annotation) for one in getattr(part, "__metadata__", ())]
    return any(isinstance(one, LocalPath) for one in (*field.metadata, *inner))
