"""An episode as data: one JSON line. Screens are named by the sha256 of their bytes and lie beside (`folder.py`).

Coordinates are relative, as everywhere (`tapforge_envs.protocol`). What a data set doesn't say is None or unknown and
never made up: a step without an action can be looked at and not learned from.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from tapforge_envs.protocol import Action, Relative, Task

#: of the line's form
VERSION: Final = 1
#: how an episode ended; unknown: the source doesn't say, as most data sets
Outcome = Literal["success", "failure", "unknown"]

Name = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="sha256 of a screen")]


class DataError(ValueError):
    """Data that can't be read or written. The message names file, row and remedy."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Box(_Record):
    """A part of the screen, relative; its sides count as inside."""

    left: Relative
    top: Relative
    right: Relative
    bottom: Relative

    @model_validator(mode="after")
    def _has_sides(self) -> Box:
        if self.left > self.right or self.top > self.bottom:
            raise ValueError(f"the box {self.left}, {self.top} to {self.right}, {self.bottom} is reversed")
        return self

    def holds(self, x: float, y: float) -> bool:
        return self.left <= x <= self.right and self.top <= y <= self.bottom


class Step(_Record):
    """A screen, and what was said and done on it."""

    screen: Name
    #: the UI tree, as the environment or the data set writes it
    ui_tree: str = ""
    app: str | None = None
    #: in words, also where it is not an action
    answer: str | None = None
    #: of the answer, by the tokenizer of the model that gave it
    ids: tuple[int, ...] = ()
    action: Annotated[Action, Field(discriminator="type")] | None = None
    #: where a tap is right, if the source knows
    target: Box | None = None
    #: by stream
    rewards: dict[str, FiniteFloat] = Field(default_factory=dict)


class Provenance(_Record):
    """Where an episode is from."""

    #: the converter's name, or recording
    source: str
    #: file and row, or run and episode
    row: str
    model: str = Field("", description="whose answers these are; empty: people's, or not known")


class Episode(_Record):
    version: Literal[1] = VERSION
    id: str = Field(min_length=1, max_length=300)
    task: Task
    steps: tuple[Step, ...] = Field(min_length=1)
    outcome: Outcome = "unknown"
    #: what had been done before the first step, in words, where the source has no screens of it
    before: tuple[str, ...] = ()
    #: after the last action
    last_screen: Name | None = None
    provenance: Provenance

    @property
    def screens(self) -> tuple[str, ...]:
        """Names, each once, in order."""
        last = () if self.last_screen is None else (self.last_screen,)
        return tuple(dict.fromkeys([*(step.screen for step in self.steps), *last]))

    @property
    def asked(self) -> str:
        """The goal, with what had been done before the first screen that there is."""
        return "\n".join([self.task.goal, *(f"Before: {words}" for words in self.before)])

    @property
    def content(self) -> str:
        """Equal for episodes that say the same, whatever they are called."""
        steps = [(step.screen, None if step.action is None else step.action.model_dump_json()) for step in self.steps]
        return hashlib.sha256(repr((self.task.goal, self.before, steps)).encode()).hexdigest()

    def line(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


def read_line(line: bytes) -> Episode:
    """Raises DataError: what is wrong with it, in one line."""
    try:
        return Episode.model_validate_json(line)
    except ValidationError as error:
        raise DataError(wrong(error)) from error


def wrong(error: ValidationError) -> str:
    """The first thing that is wrong, with its place."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where + ': ' if where else ''}{first['msg']}"[:300]
