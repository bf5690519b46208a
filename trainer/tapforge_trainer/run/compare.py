"""`tapforge compare`: two measurements, task by task: which run is better, by how much, and where.

- Compared are tasks with a valid episode in both measurements, by their keys: two runs that measure on the same split
  with the same `evaluation.seed` share all of them. Others are counted and left out.
- A task counts once, with the mean of its episodes. The difference is paired, its 95 % interval resamples whole
  templates (`statistics.py:gain`).
- pass@k: whether at least one of k episodes of a task succeeds, without bias from n >= k of them
  (1 - C(n - c, k) / C(n, k), arXiv:2107.03374); all-pass@k: whether all k do (C(c, k) / C(n, k)). k is the least number
  of valid episodes that any common task has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapforge_envs.protocol import Outcome

from ..recording.reader import Recording
from ..records import EpisodeRecord
from ..statistics import Gain, gain
from .assembly import ConfigurationError
from .columns import columns
from .folder import EVALUATION

#: (template, task)
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Side:
    """A measurement, over the common tasks. Rates are shares of tasks."""

    folder: str
    success: float
    pass_at_k: float
    all_pass_at_k: float
    #: answers of an episode, mean
    steps: float
    step_limit: float
    invalid: int
    #: by a judge, and not by the environment
    judged: bool


@dataclass(frozen=True, slots=True)
class Compared:
    before: Side
    after: Side
    k: int
    #: `after` minus `before`
    difference: Gain
    by_template: Mapping[str, tuple[float, float, int]]
    #: tasks that failed always before and succeeded always after, and the other way round
    gained: tuple[str, ...]
    lost: tuple[str, ...]
    #: tasks that only one of them has
    only_one: int


def measurements(folder: Path) -> list[str]:
    """Names of what a run has measured."""
    return sorted(path.name for path in (folder / EVALUATION).glob("*") if path.is_dir())


def compare(first: Path, second: Path, *, name: str, other: str, seed: int = 0) -> Compared:
    """`name` of the first's measurement and `other` of the second's, such as after-sampled. Raises ConfigurationError
    and RecordingError."""
    sides = [(first, name), (second, other)]
    played = [_episodes(folder, measured) for folder, measured in sides]
    by_task = [_by_task(episodes) for episodes in played]
    common = sorted(by_task[0].keys() & by_task[1].keys())
    if not common:
        raise ConfigurationError(
            f"{first} ({name}) and {second} ({other}) measured no task in common: give both the same evaluation.tasks "
            "and evaluation.seed"
        )
    won = [{key: [one.outcome is Outcome.SUCCESS for one in side[key]] for key in common} for side in by_task]
    found = gain(won[0], won[1], seed=seed)
    assert found is not None, "there are common tasks"
    k = min(len(side[key]) for side in won for key in common)
    shares: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for key in common:
        shares[key[0]].append((_mean(won[0][key]), _mean(won[1][key])))
    return Compared(
        before=_side(sides[0], by_task[0], won[0], played[0], k),
        after=_side(sides[1], by_task[1], won[1], played[1], k),
        k=k,
        difference=found,
        by_template={
            template: (_mean([a for a, _ in both]), _mean([b for _, b in both]), len(both))
            for template, both in sorted(shares.items())
        },
        gained=tuple(key[1] for key in common if not any(won[0][key]) and all(won[1][key])),
        lost=tuple(key[1] for key in common if all(won[0][key]) and not any(won[1][key])),
        only_one=len(by_task[0].keys() ^ by_task[1].keys()),
    )


def pass_at(k: int, tries: int, successes: int) -> float:
    """At least one of k, drawn from so many tries."""
    return 1 - math.comb(tries - successes, k) / math.comb(tries, k)


def all_pass_at(k: int, tries: int, successes: int) -> float:
    return math.comb(successes, k) / math.comb(tries, k)


def _episodes(folder: Path, name: str) -> list[EpisodeRecord]:
    recording = Recording(folder / EVALUATION / name)
    if not recording.exists:
        has = ", ".join(measurements(folder)) or "none"
        raise ConfigurationError(f"{folder} has no measurement {name}; it has: {has}")
    # A place that was played again is there with its last record too: valid ones count, and those are there once.
    return list(recording.episodes())


def _by_task(episodes: Sequence[EpisodeRecord]) -> dict[Key, list[EpisodeRecord]]:
    found: dict[Key, list[EpisodeRecord]] = defaultdict(list)
    for one in episodes:
        if one.valid:
            found[one.task.template, one.task.key].append(one)
    return dict(found)


def _side(
    side: tuple[Path, str],
    by_task: Mapping[Key, Sequence[EpisodeRecord]],
    won: Mapping[Key, Sequence[bool]],
    played: Sequence[EpisodeRecord],
    k: int,
) -> Side:
    episodes = [one for key in won for one in by_task[key]]
    return Side(
        folder=f"{side[0]} ({side[1]})",
        success=_mean([_mean(one) for one in won.values()]),
        pass_at_k=_mean([pass_at(k, len(one), sum(one)) for one in won.values()]),
        all_pass_at_k=_mean([all_pass_at(k, len(one), sum(one)) for one in won.values()]),
        steps=_mean([len(one.steps) for one in episodes]),
        step_limit=_mean([one.out_of_steps for one in episodes]),
        invalid=sum(one.outcome is Outcome.INVALID for one in played),
        judged=any(one.rewards is not None for one in episodes),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- as text ----------------------------------------------------------------------------------------------------------


def lines(found: Compared, names: int = 10) -> Iterator[str]:
    """`names`: tasks that are named at most."""
    a, b, difference = found.before, found.after, found.difference
    yield f"{difference.tasks:,} tasks in common" + (f"; {found.only_one:,} in one only" if found.only_one else "")
    rows = [("", a.folder, b.folder)]
    rows.append(("success", _percent(a.success), _percent(b.success)))
    if found.k > 1:
        rows.append((f"pass@{found.k}", _percent(a.pass_at_k), _percent(b.pass_at_k)))
        rows.append((f"all-pass@{found.k}", _percent(a.all_pass_at_k), _percent(b.all_pass_at_k)))
    rows.append(("steps", f"{a.steps:.1f}", f"{b.steps:.1f}"))
    rows.append(("at the step limit", _percent(a.step_limit), _percent(b.step_limit)))
    rows.append(("invalid episodes", f"{a.invalid:,}", f"{b.invalid:,}"))
    yield from columns(rows)
    interval = difference.interval
    reach = (
        "; with fewer than two templates there is no interval"
        if interval is None
        else f", 95 % interval {100 * interval.low:+.1f} to {100 * interval.high:+.1f}"
    )
    sure = "" if interval is None or interval.low <= 0 <= interval.high else ": a difference"
    if interval is not None and not sure:
        sure = ": none that this many tasks show"
    yield f"second less first: {100 * difference.difference:+.1f} points{reach}{sure}"
    if a.judged != b.judged:
        yield "note: one of them was judged, and the other verified by its environment"
    templates = [(name, _percent(x), _percent(y), f"{count:,}") for name, (x, y, count) in found.by_template.items()]
    yield from columns([("by template", "first", "second", "tasks"), *templates])
    for what, tasks in (("gained", found.gained), ("lost", found.lost)):
        if tasks:
            more = f" and {len(tasks) - names:,} more" if len(tasks) > names else ""
            yield f"{what}, {len(tasks):,}: {', '.join(tasks[:names])}{more}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
