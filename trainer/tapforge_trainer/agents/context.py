"""What an installed package adds to each prompt: `spec.model.adapter.context` names an entry point of the group
`tapforge.contexts`.

An entry point is a pure function (`Context`): equal arguments, equal answer. It sees what the adapter sees, and gives
text, images, or another history than the episode's own. What it adds counts like the rest: its images are among the
`historyImages` of a prompt, and they and its text are never dropped when a prompt is too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from tapforge_envs.protocol import Frame

from .. import plugins
from ..frames.frame import FittedFrame
from .agent import Prepared, Turn

ENTRY_POINTS = "tapforge.contexts"


@dataclass(frozen=True, slots=True)
class Added:
    """What a prompt gets besides the task and the episode's history."""

    #: after the task and its earlier steps, before the screen
    text: str = ""
    #: before everything else: encoded images, or frames of the history
    images: Sequence[Frame | FittedFrame] = ()
    #: earlier steps instead of the episode's own, oldest first
    history: Sequence[Turn] | None = None


class Context(Protocol):
    def __call__(self, goal: str, history: Sequence[Turn], seen: Prepared) -> Added: ...


class ContextError(ValueError):
    """A context that can't be found, or that doesn't do what it should. The message names it."""


def context_names() -> tuple[str, ...]:
    return tuple(plugins.names(ENTRY_POINTS))


def context_of(name: str) -> Context:
    """Raises ContextError for an unknown name, with the nearest one, for one that is offered twice, and for an entry
    point that can't be imported or is not a function."""
    try:
        point = plugins.find(ENTRY_POINTS, name)
    except ValueError as error:
        raise ContextError(str(error)) from error
    if point is not None:
        try:
            found = point.load()
        except Exception as error:  # whatever other people's modules raise when they are imported
            raise ContextError(f"the context {name!r} ({point.value}) can't be loaded: {error}") from error
        if not callable(found):
            raise ContextError(f"the context {name!r} ({point.value}) is not a function")
        return found
    known = context_names()
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(known) or "none is installed"
    raise ContextError(f"unknown context {name!r}{hint} (entry points of {ENTRY_POINTS}: {listed})")


def added_by(name: str, context: Context, goal: str, history: Sequence[Turn], seen: Prepared, images: int) -> Added:
    """What the context adds. `images`: how many it may. Raises ContextError."""
    try:
        added = context(goal, history, seen)
    except Exception as error:  # whatever other people's code raises
        raise ContextError(f"the context {name!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(added, Added):
        raise ContextError(f"the context {name!r} gave a {type(added).__name__} instead of an Added")
    if len(added.images) > images:
        raise ContextError(
            f"the context {name!r} adds {len(added.images)} images where {images} have room beside the screen: raise "
            "model.adapter.historyImages"
        )
    return added
