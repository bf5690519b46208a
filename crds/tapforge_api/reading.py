"""What the operator makes of an object that is stored in the cluster: whatever is there, it goes on.

An object may have been written under an older or a newer schema than this release's, so:
1. A field that isn't known here is left out and named in `unknown`: a newer release wrote it, and it means nothing to
   this one.
2. A value that can't be (a number out of its bounds, an unknown word, a broken rule between fields) is not guessed:
   there is no spec then, and `problems` says why, in words for a condition.
3. Reading a spec never raises.

The same of what is stored or sent between releases besides specs. There fields that aren't known mean nothing here
either, and a new word of a closed list counts as `Otherwise` says:

4. Of a status (`read_status`) the known fields count. One that can't be read even so raises `UnreadableStatus`: it is
   not an empty one, and a reader that takes it for that begins anew what was done long ago.
5. Messages and records (`read_json`, `read_record`) raise ValidationError for what can't be.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from .base import API_VERSION, LENIENT
from .errors import Problem, problems_of
from .pool import EmulatorPool, EmulatorPoolSpec, EmulatorPoolStatus
from .run_status import TrainingRunStatus
from .shapes import Path
from .training_run import TrainingRun, TrainingRunSpec

#: characters of a condition's message
MAX_MESSAGE = 4096
#: problems of a status that its condition names
_PROBLEMS = 5

S = TypeVar("S", EmulatorPoolSpec, TrainingRunSpec)


@dataclass(frozen=True, slots=True)
class Reading(Generic[S]):
    """The spec of a stored object, or why there is none."""

    spec: S | None
    #: fields that were left out
    unknown: tuple[Problem, ...] = ()
    #: what keeps the object from being used; empty exactly when there is a spec
    problems: tuple[Problem, ...] = ()

    @property
    def message(self) -> str:
        """Everything that is worth saying, short enough for a condition; "" when there is nothing."""
        text = "; ".join(map(str, (*self.problems, *self.unknown)))
        return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."


def read_pool(data: Mapping[str, Any]) -> Reading[EmulatorPoolSpec]:
    """The spec of an EmulatorPool as the API server gave it."""
    pool, unknown, problems = _read(EmulatorPool, data)
    return Reading(pool.spec if pool else None, unknown, problems)


def read_run(data: Mapping[str, Any]) -> Reading[TrainingRunSpec]:
    """The spec of a TrainingRun as the API server gave it."""
    run, unknown, problems = _read(TrainingRun, data)
    return Reading(run.spec if run else None, unknown, problems)


class UnreadableStatus(ValueError):
    """A stored status does not say to this release how its object is."""


Status = TypeVar("Status", EmulatorPoolStatus, TrainingRunStatus)


def read_status(model: type[Status], written: Any) -> Status:
    """A status as the API server gave it; an empty one only where there is none. Raises UnreadableStatus."""
    try:
        return model.model_validate({} if written is None else written, extra="ignore", context=LENIENT)
    except ValidationError as error:
        raise UnreadableStatus(
            f"{_named(problems_of(error, model, {}, _PROBLEMS))}. Another release of the operator may be able to read "
            "it; otherwise put it right with `kubectl edit --subresource=status`. Until then nothing is done about the "
            "object"
        ) from error


def _named(problems: Iterable[Problem]) -> str:
    return "; ".join(str(Problem(problem.message, ("status", *problem.path))) for problem in problems)


T = TypeVar("T", bound=BaseModel)


def read_json(model: type[T], text: bytes) -> T:
    """A message of another process. Raises ValidationError."""
    return model.model_validate_json(text, strict=True, extra="ignore", context=LENIENT)


def read_record(model: type[T], data: Any) -> T:
    """Plain JSON data that another process has kept. Raises ValidationError."""
    return model.model_validate(data, extra="ignore", context=LENIENT)


M = TypeVar("M", EmulatorPool, TrainingRun)


def _read(model: type[M], data: Mapping[str, Any]) -> tuple[M | None, tuple[Problem, ...], tuple[Problem, ...]]:
    metadata = data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    # the rest of metadata belongs to the API server, and status what we wrote ourselves
    bare = {
        "apiVersion": API_VERSION,
        "kind": model.__name__,
        "metadata": {} if name is None else {"name": name},
        **({"spec": data["spec"]} if "spec" in data else {}),
    }
    found, errors = _validated(model, bare)
    paths = _unknown_in(errors)
    if not paths:
        return found, (), _problems(errors, model)
    unknown = tuple(Problem("is not known to this release and left out", path) for path in paths)
    found, errors = _validated(model, _without(bare, paths))
    return found, unknown, _problems(errors, model)


def _validated(model: type[M], data: Any) -> tuple[M | None, ValidationError | None]:
    try:
        return model.model_validate_json(json.dumps(data), strict=True, by_alias=True, by_name=False), None
    except ValidationError as error:
        return None, error


def _unknown_in(error: ValidationError | None) -> list[Path]:
    details = error.errors(include_url=False, include_input=False) if error else []
    return [tuple(d["loc"]) for d in details if d["type"] == "extra_forbidden"]


def _problems(error: ValidationError | None, model: type[BaseModel]) -> tuple[Problem, ...]:
    return tuple(problems_of(error, model, {})) if error else ()


def _without(value: Any, paths: Iterable[Path]) -> Any:
    """A copy of plain data without what lies at the paths."""
    below: dict[str | int, list[Path]] = {}
    for head, *rest in paths:
        below.setdefault(head, []).append(tuple(rest))
    if isinstance(value, Mapping):
        return {k: _without(v, below.get(k, ())) for k, v in value.items() if () not in below.get(k, ())}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without(v, below.get(i, ())) for i, v in enumerate(value)]
    return value
