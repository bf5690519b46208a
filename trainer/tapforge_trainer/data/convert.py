"""From a source's rows to a data set: checked, counted, and stopped where too much is wrong.

A source yields `Row`s and `Bad`s, in its order, and never raises for what a row holds; what can't be mapped is a `Bad`
with a reason from its own short list. Here each row becomes an episode, or one more rejection:

    image         no image, or bytes that are none
    coordinates   outside the screen; the message names the convention that the numbers look like
    row           another shape than an episode's
    duplicate     says what an earlier one says

Shares that are read as pixels, or as numbers of a grid, are none of these: each is a place in the first pixels of its
screen. Where every place is one, nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from tapforge_envs.protocol import Action, LongPress, Swipe, Tap, Task

from .episodes import Box, DataError, Episode, Outcome, Provenance, Step, wrong
from .folder import DataWriter, Rejected

#: no convention has such numbers; larger integers are not floats, and NaN is not below it
_FAR: Final = 1e9
#: share of a screen in which shares that are read as pixels lie, and places from which on that is no chance
_CORNER: Final = 0.01
_PLACES: Final = 20


@dataclass(frozen=True, slots=True)
class RowStep:
    """A step as a source has it; `screen`: the bytes of an image."""

    screen: bytes
    action: Action | None = None
    answer: str | None = None
    ids: Sequence[int] = ()
    target: Box | None = None
    ui_tree: str = ""
    app: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    #: file and row, for messages and provenance
    name: str
    goal: str
    steps: Sequence[RowStep]
    outcome: Outcome = "unknown"
    before: Sequence[str] = ()
    last_screen: bytes | None = None
    #: where the source has one of its own
    task: Task | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class Bad:
    """A row that can't be mapped. `numbers`: those of its coordinates, where these are what is wrong."""

    name: str
    reason: str
    detail: str
    numbers: Sequence[float] = ()


#: Rows of what lies at a path; options are keyword-only arguments. Raises DataError where nothing can be read at all
Source: TypeAlias = Callable[..., Iterator[Row | Bad]]


@dataclass(frozen=True, slots=True)
class Converted:
    episodes: int
    steps: int
    rejected: Rejected


def convert(
    rows: Iterator[Row | Bad], name: str, folder: Path, made_of: Mapping[str, Any], max_bad: float
) -> Converted:
    """Makes a data set in `folder`. Raises DataError where more than `max_bad` of the rows are rejected for another
    reason than being there twice, or none is left; the folder is not finished then."""
    rejected, seen, numbers = Rejected(), set[str](), list[float]()
    places = cornered = 0
    with DataWriter(folder) as writer:
        for count, row in enumerate(rows, start=1):
            if isinstance(row, Bad):
                rejected.add(row.reason, row.name, row.detail)
                numbers += [abs(one) for one in row.numbers if abs(one) < _FAR][: max(0, 10_000 - len(numbers))]
                continue
            try:
                episode = _episode(writer, row, name, count)
            except ValidationError as error:
                rejected.add("row", row.name, wrong(error))
                continue
            except DataError as error:
                rejected.add("image", row.name, str(error))
                continue
            if (content := episode.content) in seen:
                rejected.add("duplicate", row.name, "says what an earlier row says")
                continue
            try:
                writer.episode(episode)
            except PydanticSerializationError:
                rejected.add("row", row.name, "a text with half a character (a lone surrogate)")
                continue
            seen.add(content)
            found = list(_places(episode))
            places, cornered = places + len(found), cornered + sum(max(place) <= _CORNER for place in found)
        bad = rejected.total - rejected.counts.get("duplicate", 0)
        rows_read = writer.episodes + rejected.total
        if not rows_read:
            raise DataError("there are no rows to convert")
        if not writer.episodes or bad > max_bad * rows_read:
            raise DataError(
                f"{bad:,} of {rows_read:,} rows can't be used"
                + (f", more than {100 * max_bad:g} % (--max-bad)" if writer.episodes else ", so nothing is left")
                + "".join(f"\n  {line}" for line in rejected.lines())
                + _hint(numbers)
            )
        if places >= _PLACES and cornered == places and max_bad < 1:
            raise DataError(
                f"all of {places:,} places are in the first {100 * _CORNER:g} % of their screens, from the top left: "
                "numbers from 0 to 1 look like shares of the screen, --option coordinates=fraction (--max-bad 1 takes "
                "them as they are)"
            )
        writer.finish(made_of, rejected)
        return Converted(writer.episodes, writer.steps, rejected)


def _hint(numbers: Sequence[float]) -> str:
    """Which convention coordinates look like that are outside the stated one."""
    if not numbers:
        return ""
    most = max(numbers)
    return (
        f"\ncoordinates that can't be read go up to {most:g}, which looks like --option coordinates={looks_like(most)}"
    )


def looks_like(most: float) -> str:
    """The convention of numbers up to this one."""
    return "fraction" if most <= 1 else "grid" if most <= 999 else "grid1000" if most <= 1000 else "pixels"


def _places(episode: Episode) -> Iterator[tuple[float, float]]:
    """That its actions touch."""
    for step in episode.steps:
        if isinstance(step.action, Tap | LongPress | Swipe):
            yield step.action.x, step.action.y
        if isinstance(step.action, Swipe):
            yield step.action.x2, step.action.y2


def _episode(writer: DataWriter, row: Row, source: str, count: int) -> Episode:
    steps = tuple(
        Step(
            screen=writer.screen(step.screen),
            action=step.action,
            answer=step.answer,
            ids=tuple(step.ids),
            target=step.target,
            ui_tree=step.ui_tree,
            app=step.app,
            rewards=dict(step.rewards),
        )
        for step in row.steps
    )
    task = row.task or Task(suite=source, template=source, params={"goal": row.goal}, goal=row.goal)
    return Episode(
        id=f"{source}-{count:07d}",
        task=task,
        steps=steps,
        outcome=row.outcome,
        before=tuple(row.before),
        last_screen=None if row.last_screen is None else writer.screen(row.last_screen),
        provenance=Provenance(source=source, row=row.name, model=row.model),
    )
