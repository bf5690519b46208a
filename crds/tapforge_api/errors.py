"""What is wrong with a file, said so that its author can mend it.

Every problem names the place (line and path), the value and, where there is one, the nearest valid name. All problems
of a file come in one `SpecError`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .base import OneOf
from .shapes import Path, aliases, all_paths, model_at
from .wording import number_meant, rule_of


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `place` is a line ("line 12") or an override ("--set spec.seed=x")."""

    message: str
    path: Path = ()
    place: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, render_path(self.path), self.message) if part)


class SpecError(Exception):
    """A file, or what was set on top of it, is not a valid object. `problems` holds everything that was found."""

    def __init__(self, source: str, problems: Sequence[Problem]):
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))


def render_path(path: Path) -> str:
    """('spec', 'urls', 0, 'a.b/c') -> 'spec.urls[0]["a.b/c"]'."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.replace("_", "").replace("-", "").isalnum():
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part, ensure_ascii=False)}]"
    return text


def shorten(value: Any) -> str:
    """The value on one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def suggest(root: type[BaseModel], path: Path) -> str:
    """What was probably meant by the unknown field at `path`: a name of the same struct, or the place where that name
    exists."""
    name, parent = str(path[-1]), model_at(root, path[:-1])
    if parent is None:
        return ""
    names = aliases(parent)
    folded = {n.lower(): n for n in names}
    folded_name = name.replace("_", "").lower()
    if near := difflib.get_close_matches(folded_name, folded, n=1, cutoff=0.75):
        return f"did you mean {folded[near[0]]}?"
    elsewhere = [
        render_path(p) for p in all_paths(root) if str(p[-1]).lower() == folded_name and p[0] in ("spec", "metadata")
    ]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    if near := difflib.get_close_matches(folded_name, folded, n=1, cutoff=0.5):
        return f"did you mean {folded[near[0]]}? Valid here: {', '.join(names)}"
    return f"valid here: {', '.join(names)}" if names else "no fields are valid here"


def problems_of(
    error: ValidationError, root: type[BaseModel], places: Mapping[Path, str], most: int | None = None
) -> list[Problem]:
    """pydantic's findings in our words, in the order of the file's lines; `most` of them at most, the first ones."""
    found = [_problem(details, root, places) for details in error.errors(include_url=False)[:most]]
    unique = dict.fromkeys(found)  # a union's members may say the same thing twice
    return sorted(unique, key=lambda p: int(p.place[5:]) if p.place.startswith("line ") else 0)


def place_of(path: Path, places: Mapping[Path, str]) -> str:
    """Where the path, or the nearest thing around it, was written."""
    for end in range(len(path), -1, -1):
        if path[:end] in places:
            return places[path[:end]]
    return ""


def _problem(details: ErrorDetails, root: type[BaseModel], places: Mapping[Path, str]) -> Problem:
    path, value, kind = tuple(details["loc"]), details["input"], details["type"]
    message = details["msg"]
    if kind == "extra_forbidden":
        hint = suggest(root, path)
        message = f"unknown field (value {shorten(value)})" + (f"; {hint}" if hint else "")
    elif kind == "missing":
        message = "is required and missing"
    elif kind == "value_error":
        message = str(details["ctx"]["error"])
        owner = model_at(root, path)
        if owner is not None and issubclass(owner, OneOf) and isinstance(value, dict):
            written = ", ".join(map(str, value)) or "nothing"
            message += f"; written: {written}" + ("" if any(v is not None for v in value.values()) else _EMPTY_MEMBER)
    elif value is None:
        message = "is empty; remove the line or give a value"
    elif kind == "string_pattern_mismatch":
        pattern = details["ctx"]["pattern"]
        message = f"should be {rule_of(pattern, value if isinstance(value, str) else '')}, not {shorten(value)}"
    else:
        message = f"{message[0].lower()}{message[1:]}, not {shorten(value)}"
        if kind == "literal_error" and isinstance(value, str):
            choices = [part.strip("'") for part in details["ctx"]["expected"].replace(" or ", ", ").split(", ")]
            if near := difflib.get_close_matches(value, choices, n=1):
                message += f"; did you mean {near[0]}?"
        if kind in _NUMBERS and isinstance(value, str) and (meant := number_meant(_last_name(path), value)):
            message += f"; write it {meant}"
    return Problem(message.replace("input should", "should"), path, place_of(path, places))


def _last_name(path: Path) -> str:
    return next((part for part in reversed(path) if isinstance(part, str)), "")


#: pydantic's names of values that should have been numbers
_NUMBERS = ("int_type", "int_parsing", "int_from_float", "float_type", "float_parsing")
_EMPTY_MEMBER = " (an empty member is written with braces, as in `tiny: {}`)"
