"""A file, and what is set on top of it, becomes an object; and an object becomes a file again.

- `load` and `load_pool` collect every problem of a file in one `SpecError`.
- Values have the types that the API server would accept: `"3"` is not a number.
- `dump_set` writes only what was set, with the schema revision, and is read back to an equal object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeVar

from pydantic import ValidationError

from .base import API_VERSION, GROUP, Metadata
from .document import Document, parse
from .errors import Problem, SpecError, place_of, problems_of
from .overrides import apply_override, unless_said
from .pool import EmulatorPool
from .shapes import Path, aliases, model_at
from .training_run import TrainingRun

KINDS: Mapping[str, type[TrainingRun | EmulatorPool]] = {"TrainingRun": TrainingRun, "EmulatorPool": EmulatorPool}

#: grows with every release that adds a field or changes a default
SCHEMA_REVISION = 1
REVISION_ANNOTATION = f"{GROUP}/schema-revision"

M = TypeVar("M", TrainingRun, EmulatorPool)


@dataclass(frozen=True, slots=True)
class Text:
    """YAML that comes from no file, whatever is in it. `source` is what errors call it."""

    text: str
    source: str = "text"

    def __str__(self) -> str:
        return self.source


#: a file (a Path, or a str without line break), or YAML text (a Text, or a str with one)
Source = str | FilePath | Text


def load(path_or_text: Source, overrides: Sequence[str] = ()) -> TrainingRun:
    """The TrainingRun of a file or of YAML text."""
    return _load(TrainingRun, path_or_text, overrides)


def load_pool(path_or_text: Source, overrides: Sequence[str] = ()) -> EmulatorPool:
    """The EmulatorPool of a file or text; otherwise as `load`."""
    return _load(EmulatorPool, path_or_text, overrides)


def load_bundle(path_or_text: Source, overrides: Sequence[str] = ()) -> tuple[TrainingRun, list[dict[str, Any]]]:
    """The only TrainingRun of a file, as `load` reads it; and all objects of the file as they are written, with the
    overrides, the run last. Its EmulatorPools are checked as by `load_pool`, other kinds are passed through."""
    text, source = _read(path_or_text)
    documents = parse(text, source)
    chosen = _choose(documents, TrainingRun, source)
    run = _checked(TrainingRun, chosen, source, overrides)
    others = [document for document in documents if document is not chosen]
    for document in others:
        if not isinstance(document.data, dict):
            line = document.lines.get((), 1)
            raise SpecError(
                source, [Problem(f"holds no object but {type(document.data).__name__}", (), f"line {line}")]
            )
        if document.data.get("kind") == EmulatorPool.__name__:
            _checked(EmulatorPool, document, source, ())
    return run, [*(document.data for document in others), chosen.data]


def from_object(model: type[M], data: Mapping[str, Any]) -> M:
    """An object as the API server gives it: metadata of Kubernetes' own is left out."""
    known = set(aliases(model_at(model, ("metadata",)) or Metadata))
    metadata = {k: v for k, v in (data.get("metadata") or {}).items() if k in known}
    source = f"{data.get('kind', model.__name__)} {metadata.get('namespace', '')}/{metadata.get('name', '')}"
    return _validate(model, {**data, "metadata": metadata}, source, {})


# --- reading ----------------------------------------------------------------------------------------------------------


def _load(model: type[M], path_or_text: Source, overrides: Sequence[str]) -> M:
    text, source = _read(path_or_text)
    return _checked(model, _choose(parse(text, source), model, source), source, overrides)


def _checked(model: type[M], document: Document, source: str, overrides: Sequence[str]) -> M:
    """Carries the overrides out on the document."""
    data: dict[str, Any] = document.data
    places = {path: f"line {line}" for path, line in document.lines.items()}
    problems: list[Problem] = []
    filled: dict[Path, str] = {}
    for override in overrides:
        try:
            if (path := apply_override(model, data, override)) is None:
                continue
            if unless_said(override):
                filled[path] = override.replace("?=", " ", 1)
            places = {p: where for p, where in places.items() if p[: len(path)] != path}
            places[path] = f"--set {override}"
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(source, problems)
    try:
        return _validate(model, data, source, places)
    except SpecError as error:  # about values, maybe, that its author has never seen
        near = [one for at, one in filled.items() if any(at[: len(p.path)] == p.path for p in error.problems)]
        if near:
            error.add_note(
                f"set there because the file says nothing (--preset, PATH?=VALUE): {', '.join(near)}; say in the file "
                "what shall be instead"
            )
        raise


def _read(path_or_text: Source) -> tuple[str, str]:
    if isinstance(path_or_text, Text):
        return path_or_text.text, path_or_text.source
    if isinstance(path_or_text, str) and "\n" in path_or_text:
        return path_or_text, "text"
    path = FilePath(path_or_text)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except UnicodeDecodeError as error:
        raise SpecError(str(path), [Problem(f"is not UTF-8 text: {error.reason} at byte {error.start}")]) from error
    except OSError as error:
        where = "" if path.is_absolute() else f" (looked for in {FilePath.cwd()})"
        raise SpecError(str(path), [Problem(f"can't be read: {error.strerror}{where}")]) from error
    except ValueError as error:  # a name that no file can have
        raise SpecError(repr(str(path)), [Problem(f"can't be read: {error}")]) from error


def _choose(documents: Sequence[Document], model: type[M], source: str) -> Document:
    """The only document, or the only one of the wanted kind among several."""
    kind = model.__name__
    if not documents:
        raise SpecError(source, [Problem(f"is empty; expected an object of kind {kind}")])
    if len(documents) > 1:
        wanted = [d for d in documents if isinstance(d.data, dict) and d.data.get("kind") == kind]
        if len(wanted) != 1:
            raise SpecError(
                source, [Problem(f"has {len(documents)} documents, {len(wanted)} of kind {kind}; expected exactly one")]
            )
        documents = wanted
    document = documents[0]
    if not isinstance(document.data, dict):
        raise SpecError(source, [Problem(f"holds no object but {type(document.data).__name__}", place="line 1")])
    return document


def _validate(model: type[M], data: Mapping[str, Any], source: str, places: Mapping[Path, str]) -> M:
    problems = _identity_problems(model, data, places)
    if problems:
        raise SpecError(source, problems)
    try:
        # JSON and strict, as the API server: lists are lists, "3" is not a number; names as in YAML only
        return model.model_validate_json(json.dumps(data, default=str), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise SpecError(source, problems_of(error, model, places)) from error


def _identity_problems(model: type[M], data: Mapping[str, Any], places: Mapping[Path, str]) -> list[Problem]:
    """A file of another kind, version or time: that alone is reported, not all that it lacks."""
    problems: list[Problem] = []
    for name, expected in (("apiVersion", API_VERSION), ("kind", model.__name__)):
        if data.get(name) != expected:
            seen = "is missing" if name not in data else f"is {json.dumps(data[name], default=str)}"
            problems.append(Problem(f"{seen}; expected {expected}", (name,), place_of((name,), places)))
    metadata = data.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    revision = annotations.get(REVISION_ANNOTATION) if isinstance(annotations, dict) else None
    if revision is not None and not (isinstance(revision, str) and revision.isdecimal()):
        message = f"is {json.dumps(revision, default=str)}; expected a number as text"
    elif revision is not None and int(revision) > SCHEMA_REVISION:
        message = f"was written for schema revision {revision}, this tapforge reads {SCHEMA_REVISION}: use a newer one"
    else:
        return problems
    path: Path = ("metadata", "annotations", REVISION_ANNOTATION)
    return [*problems, Problem(message, path, place_of(path, places))]


# --- writing ----------------------------------------------------------------------------------------------------------


def resolve(model: M) -> M:
    """The same object with every default written out as if it had been set (None: not set, as before)."""
    data = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return _validate(type(model), data, model.metadata.name, {})


def dump_set(model: M) -> dict[str, Any]:
    """Only what was set, under YAML's names, with the schema revision; `status` is left out. Plain JSON data."""
    data = model.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"status"})
    metadata = dict(data["metadata"])
    metadata["annotations"] = {**metadata.get("annotations", {}), REVISION_ANNOTATION: str(SCHEMA_REVISION)}
    return {"apiVersion": model.api_version, "kind": model.kind, "metadata": metadata, "spec": data.get("spec", {})}
