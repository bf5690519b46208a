"""What an update of an object may not do: the same verdicts as the API server's, from the same definitions."""

from __future__ import annotations

from collections.abc import Iterator

from .base import Spec
from .errors import Problem
from .shapes import Path


def forbidden_changes(old: Spec, new: Spec) -> tuple[Problem, ...]:
    """Everything in an update from `old` to `new` that is refused; both are valid objects of one kind."""
    return tuple(_forbidden(old, new, ()))


def _forbidden(old: Spec, new: Spec, path: Path) -> Iterator[Problem]:
    for change in type(new).changes:
        if not change.holds(old, new):
            yield Problem(change.message, (*path, *filter(None, change.at.split("."))))
    for name, field in type(new).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, Spec) and isinstance(after, Spec):
            yield from _forbidden(before, after, (*path, field.alias or name))
