"""The frames of episodes that no update has used yet, as handles, and whether more of them fit. Pure.

- A handle is held from the end of its episode until the version that follows from its update; of an episode that may
  be learned from again, as long as it may.
- What is held and what the episodes under way will bring stays within `max_bytes`, by admitting no new group; but the
  groups that the next update needs are always admitted, else there would be none.
- An episode under way is taken to bring what ended ones brought on average; until one has ended, the first guess.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ..frames.handles import FrameHandle


@dataclass(frozen=True, slots=True)
class FrameBudget:
    """`max_bytes` None: no bound. `first_guess`: bytes of an episode's frames."""

    max_bytes: int | None = None
    first_guess: int = 0


@dataclass(slots=True)
class _Held:
    handles: dict[str, FrameHandle] = field(default_factory=dict)
    #: by episode, as the handles
    sizes: dict[str, int] = field(default_factory=dict)


class HeldFrames:
    def __init__(self, budget: FrameBudget):
        self._budget = budget
        self._groups: dict[str, _Held] = {}
        self._episodes = self._seen_bytes = 0

    @property
    def bytes(self) -> int:
        return sum(sum(held.sizes.values()) for held in self._groups.values())

    def put(self, group: str, episode: str, handle: FrameHandle, size: int) -> None:
        held = self._groups.setdefault(group, _Held())
        held.handles[episode] = handle
        held.sizes[episode] = size
        self._episodes += 1
        self._seen_bytes += size

    def of(self, groups: Iterable[str]) -> dict[str, FrameHandle]:
        """By episode."""
        return {
            episode: handle for g in groups if g in self._groups for episode, handle in self._groups[g].handles.items()
        }

    def forget(self, groups: Iterable[str], episodes: Collection[str]) -> None:
        """The frames of these episodes are lost."""
        for held in (self._groups[g] for g in groups if g in self._groups):
            for episode in set(episodes) & set(held.handles):
                del held.handles[episode], held.sizes[episode]

    def drop(self, group: str) -> None:
        self._groups.pop(group, None)

    def keep(self, holds: Callable[[str], bool], again: Collection[str] = ()) -> None:
        """Drops what is of other groups, but for the episodes `again`."""
        for group in [group for group in self._groups if not holds(group)]:
            held = self._groups.pop(group)
            if rest := {episode: handle for episode, handle in held.handles.items() if episode in again}:
                self._groups[group] = _Held(rest, {episode: held.sizes[episode] for episode in rest})

    def room(self, episodes: int) -> bool:
        """Whether the frames of so many more episodes fit, those under way included."""
        if self._budget.max_bytes is None:
            return True
        each = self._seen_bytes / self._episodes if self._episodes else self._budget.first_guess
        return self.bytes + episodes * each <= self._budget.max_bytes
