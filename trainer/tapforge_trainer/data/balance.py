"""Which of many episodes are imitated, so that neither easy templates nor short episodes crowd out the others.

Rejection sampling keeps what succeeded: most of it is of templates that succeed anyway, and of their shortest ways. Of
each template at most as many episodes are kept as the template in the middle has; of a template's lengths each has its
turn, the shortest first, the earliest episode of each. Pure, and without chance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_high


@dataclass(frozen=True, slots=True)
class Candidate:
    id: str
    template: str
    #: steps
    length: int


def balanced(candidates: Iterable[Candidate]) -> frozenset[str]:
    """Ids of those that are kept."""
    templates: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in candidates:
        templates[one.template][one.length].append(one.id)
    if not templates:
        return frozenset()
    most = median_high(sum(map(len, lengths.values())) for lengths in templates.values())
    return frozenset(one for lengths in templates.values() for one in _in_turns(lengths, most))


def _in_turns(lengths: dict[int, list[str]], most: int) -> list[str]:
    kept: list[str] = []
    for turn in range(max(map(len, lengths.values()))):
        kept += [lengths[length][turn] for length in sorted(lengths) if turn < len(lengths[length])]
    return kept[:most]
