"""Rare successes that are learned from again: AdaGRPO's replay (MobileRL, arXiv:2509.18119), by groups.

- Kept are groups of which few succeeded, after their own update: at most `groups`, the newest, none older than
  `max_age` policy versions.
- Each update draws successful episodes of them, seeded by its number: at most `share` of what an update plays, groups
  in a random order, and of a group all or as many as still fit. A group is in one update at most once, and never beside
  its own update.
- An episode's advantages are those it had in its own group, failures included (`batch.replayed_samples`); of the group
  only the successes are learned from.

What comes again is older than the staleness bound on purpose: it is outside the group buffer. Pure; where the frames
are is the caller's business.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

from tapforge_envs.protocol import Outcome

from ..records import EpisodeRecord, GroupRecord


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """`share`: of the episodes of an update; `max_success`: of a group's valid episodes; `max_age`: policy versions."""

    share: float = 0.1
    max_success: float = 0.25
    groups: int = 64
    max_age: int = 20


@dataclass(frozen=True, slots=True)
class Replayed:
    """A group with those of its episodes that are learned from again."""

    group: GroupRecord
    episodes: frozenset[str]


class SuccessReplay:
    def __init__(self, limits: ReplayLimits | None, seed: int, groups: Sequence[GroupRecord] = ()):
        """`limits` None: nothing comes again. `groups`: kept by an earlier session."""
        self.limits = limits
        self._seed = seed
        self._groups = {group.id: group for group in groups}
        #: update that goes without
        self._skipped: int | None = None

    @property
    def groups(self) -> list[GroupRecord]:
        """Those that are kept, the oldest first."""
        return list(self._groups.values())

    @property
    def episodes(self) -> frozenset[str]:
        """Those that may come again."""
        return frozenset(episode.id for group in self._groups.values() for episode in _successes(group))

    def keep(self, groups: Sequence[GroupRecord], version: int) -> None:
        """After the update of these groups; `version` is the one that it led to."""
        if self.limits is None:
            return
        for group in sorted(groups, key=lambda one: one.order):
            won, valid = len(_successes(group)), sum(episode.valid for episode in group.episodes)
            if 0 < won <= self.limits.max_success * valid:
                self._groups[group.id] = group
        young = {name: one for name, one in self._groups.items() if version - one.version <= self.limits.max_age}
        self._groups = dict(list(young.items())[-self.limits.groups :])

    def draw(self, update: int, episodes: int) -> list[Replayed]:
        """For update number `update`, which plays so many episodes."""
        if self.limits is None or update == self._skipped:
            return []
        left, drawn = int(self.limits.share * episodes), []
        candidates = self.groups
        Random(f"replay/{self._seed}/{update}").shuffle(candidates)
        for group in candidates:
            won = _successes(group)[:left]
            if not won:
                break
            left -= len(won)
            drawn.append(Replayed(group, frozenset(episode.id for episode in won)))
        return drawn

    def discard(self, episodes: Collection[str], update: int) -> None:
        """The frames of these episodes are lost: their groups come no more, and this update goes without any, so that
        it doesn't find the next ones lost as well."""
        gone, self._skipped = set(episodes), update
        self._groups = {
            name: group
            for name, group in self._groups.items()
            if gone.isdisjoint(episode.id for episode in group.episodes)
        }


def _successes(group: GroupRecord) -> list[EpisodeRecord]:
    won = [episode for episode in group.episodes if episode.outcome is Outcome.SUCCESS and episode.steps]
    return sorted(won, key=lambda episode: episode.id)
