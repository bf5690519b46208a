"""What objects of every kind share: times, owner references, conditions. Pure.

Times are seconds since the epoch here, RFC 3339 in the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from typing import Any, Final, Literal, ParamSpec, TypeVar

from pydantic import ValidationError

from tapforge_api.base import API_VERSION, Condition
from tapforge_api.reading import read_record

_MAX_MESSAGE: Final = 4096
#: reason of the conditions of an object whose stored status can't be read
UNREADABLE_STATUS: Final = "UnreadableStatus"


P = ParamSpec("P")
T = TypeVar("T")


class Unreadable(ValueError):
    """What an object says can't be understood: the fault of its writer alone."""


def reading(read: Callable[P, T]) -> Callable[P, T]:
    """A function that makes a record of an object. What it breaks on is `Unreadable`, so that a mistake of the record's
    reader is not taken for one of the object's writer."""

    @wraps(read)
    def understood(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except Exception as error:
            raise Unreadable(f"{type(error).__name__}: {error}") from error

    return understood


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A kind of others that can't be read: what is known of its objects may be old, and none is not known not to be."""

    #: as one word
    reason: str
    message: str
    #: only a person can help
    stalls: bool = False


def seconds(text: str) -> float:
    """A time of the cluster; 0 for none and for what is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def timestamp(now: float) -> str:
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def controller_reference(kind: str, name: str, uid: str) -> dict[str, Any]:
    """The owner reference of an object that one of our kinds controls."""
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


class ConditionBuilder:
    """Builds the conditions of an object. A condition's lastTransitionTime changes when its status changes, and never
    else."""

    def __init__(self, before: Iterable[Condition], generation: int, now: float):
        self._before = {condition.type: condition for condition in before}
        self._generation = generation
        self._now = timestamp(now)

    def was_true(self, kind: str) -> bool:
        return kind in self._before and self._before[kind].status == "True"

    def __call__(self, kind: str, status: bool, reason: str, message: str = "") -> Condition:
        word: Literal["True", "False"] = "True" if status else "False"
        before = self._before.get(kind)
        since = before.last_transition_time if before is not None and before.status == word else ""
        return Condition(
            type=kind,
            status=word,
            reason=reason,
            message=message[:_MAX_MESSAGE],
            last_transition_time=since or self._now,
            observed_generation=self._generation,
        )


# --- an object whose stored status can't be read ----------------------------------------------------------------------


def unreadable_status(status: Any, message: str, generation: int, now: float, *also: str) -> list[Any]:
    """The conditions that say so; `also` are True as Stalled is. All others stay as they are stored, so that what could
    not be read still can't when these were written, and a release that can read it finds it."""
    stored = stored_conditions(status)
    condition = ConditionBuilder(readable_conditions(stored), generation, now)
    ours = (
        condition("Ready", False, UNREADABLE_STATUS, message),
        condition("Reconciling", False, "Stalled"),
        *(condition(kind, True, UNREADABLE_STATUS, message) for kind in ("Stalled", *also)),
    )
    written = {c.type: c.model_dump(mode="json", by_alias=True) for c in ours}
    return [*(written.pop(_type(c), c) for c in stored), *written.values()]


def stored_conditions(status: Any) -> list[Any]:
    found = status.get("conditions") if isinstance(status, Mapping) else None
    return list(found) if isinstance(found, list) else []


def readable_conditions(stored: Iterable[Any]) -> tuple[Condition, ...]:
    found = []
    for condition in stored:
        try:
            found.append(read_record(Condition, condition))
        except ValidationError:
            continue  # it stays as it is
    return tuple(found)


def _type(condition: Any) -> str:
    return str(condition.get("type")) if isinstance(condition, Mapping) else ""


def version(text: str) -> int:
    """A resourceVersion as the number that it is, on every API server that stores in etcd."""
    return int(text) if text.isdigit() else 0
