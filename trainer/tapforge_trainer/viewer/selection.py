"""Which episodes a replay shows, out of many more than a page can hold. Pure and deterministic; no luck, no flattery.

Pairs of before and after are taken in turn from their kinds (learned, kept, never, lost, unclear), so that a run's
regressions are on the page beside its gains; the number of each kind in all is shown next to them (`kinds`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from tapforge_envs.protocol import Outcome

from ..records import EpisodeRecord, GroupRecord

Kind = Literal["learned", "kept", "never", "lost", "unclear"]
KINDS: tuple[Kind, ...] = ("learned", "kept", "never", "lost", "unclear")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two attempts at the same task, before and after training."""

    before: EpisodeRecord
    after: EpisodeRecord

    @property
    def kind(self) -> Kind:
        if not (self.before.valid and self.after.valid):
            return "unclear"
        won = Outcome.SUCCESS
        if self.after.outcome is won:
            return "kept" if self.before.outcome is won else "learned"
        return "lost" if self.before.outcome is won else "never"


def pairs_of(before: Sequence[EpisodeRecord], after: Sequence[EpisodeRecord]) -> list[Pair]:
    """The n-th attempt at a task before goes with the n-th after, in order of their seeds."""

    def by_task(episodes: Sequence[EpisodeRecord]) -> dict[str, list[EpisodeRecord]]:
        tasks: dict[str, list[EpisodeRecord]] = {}
        for episode in sorted(episodes, key=lambda e: (e.task.key, e.seed, e.attempt, e.id)):
            tasks.setdefault(episode.task.key, []).append(episode)
        return tasks

    later = by_task(after)
    return [
        Pair(*two) for key, earlier in by_task(before).items() for two in zip(earlier, later.get(key, ()), strict=False)
    ]


def kinds(pairs: Sequence[Pair]) -> dict[Kind, int]:
    count = Counter(pair.kind for pair in pairs)
    return {kind: count[kind] for kind in KINDS if count[kind]}


def pick_pairs(pairs: Sequence[Pair], limit: int) -> list[Pair]:
    """Kinds in turn, and inside a kind templates in turn. The order of the page is that of `KINDS`."""
    spread = [
        pair
        for kind in KINDS
        for pair in in_turn([p for p in pairs if p.kind == kind], lambda p: p.after.task.template)
    ]
    return sorted(in_turn(spread, lambda p: p.kind)[:limit], key=lambda p: KINDS.index(p.kind))


def pick_groups(groups: Sequence[GroupRecord], limit: int) -> list[GroupRecord]:
    """Those with successes and failures first, templates in turn, spread over the run; in the order of the run."""
    ordered = sorted(groups, key=lambda group: group.order)
    mixed = [g for g in ordered if {Outcome.SUCCESS, Outcome.FAILURE} <= {e.outcome for e in g.episodes}]
    alike = [g for g in ordered if g not in mixed]
    chosen: list[GroupRecord] = []
    for pool in (mixed, alike):
        left = limit - len(chosen)
        if left <= 0:
            break
        # Equal stretches of the run; out of each, the first of a template that was shown the least so far.
        for stretch in range(min(left, len(pool))):
            size = min(left, len(pool))
            part = pool[stretch * len(pool) // size : (stretch + 1) * len(pool) // size]
            shown = Counter(group.task.template for group in chosen)
            chosen.append(min(part, key=lambda group: shown[group.task.template]))
    return sorted(chosen, key=lambda group: group.order)


def in_turn(items: Sequence[T], key: Callable[[T], Hashable]) -> list[T]:
    """One of each key, then the second of each, and so on; keys in order of appearance."""
    seen: Counter[Hashable] = Counter()
    first: dict[Hashable, int] = {}
    ranked = []
    for item in items:
        name = key(item)
        ranked.append((seen[name], first.setdefault(name, len(first)), item))
        seen[name] += 1
    return [item for _, _, item in sorted(ranked, key=lambda entry: entry[:2])]
