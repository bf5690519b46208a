"""Rewards and advantages of recorded episodes, computed again by the update's own function (`batch.build_batch`).

Promises: they are the ones that the update used, as `viewer/recorded.py` has them. Where the learner had to read the
answers first (a critic, a term of the reference), or this machine lacks a plugin, there are none, and `why` says so.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, Final

from tapforge_api import TrainingRun

from .. import recording
from ..batch import BatchRules, Credit, build_batch
from ..recording.reader import RecordingError
from ..records import GroupRecord
from ..tasks.stages import stages_of
from .index import Index
from .stored import NotThere, read_episodes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepCredit:
    """Of a step, as `batch.Credit` has it, in single precision."""

    step: int
    reward: float
    advantage: float
    episode_advantage: float
    step_advantage: float
    state_group_size: int


_KEPT: Final = tuple(field.name for field in fields(StepCredit))


@dataclass(frozen=True, slots=True)
class Rules:
    """Of a run and its later stages. `why`: why there are no advantages, "" where there are."""

    first: BatchRules | None
    later: tuple[BatchRules, ...] = ()
    why: str = ""

    @staticmethod
    def of(run: TrainingRun) -> Rules:
        try:
            first, *later = (
                BatchRules.of(one.spec.algorithm, one.spec.rewards, min_valid=one.spec.rollout.min_valid)
                for one in stages_of(run)
            )
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            return Rules(None, why=f"this machine can't compute its advantages: {error}")
        if any(rules.reads for rules in (first, *later)):
            why = "the learner read the answers before it computed advantages, and no recording has what it read"
            return Rules(first, tuple(later), f"{why}; `tapforge relearn --gradients` reads them again")
        return Rules(first, tuple(later))

    def at(self, order: int, begins: Mapping[int, int]) -> BatchRules | None:
        """Of the group at this place. `begins`: by number of a later stage, from 2 on, the order of its first group."""
        stage = max((number for number, begin in begins.items() if begin <= order), default=1)
        return self.first if stage == 1 else self.later[stage - 2]


class Crediting:
    """`begins` may change while a run is going on."""

    def __init__(self, index: Index, rules: Rules):
        self._index, self.rules = index, rules
        self.begins: Mapping[int, int] = {}

    def of_episodes(self, ids: Sequence[int]) -> dict[int, list[StepCredit]]:
        """By id in the index, of those whose update is computed."""
        marks = ", ".join("?" * len(ids))
        found = self._index.select(f"select episode, steps from credits where episode in ({marks})", ids)
        return {row["episode"]: _unpacked(row["steps"]) for row in found}

    def write_next(self, last_update: int, per_update: int) -> bool:
        """Of the next update that is whole and has none in the index. False: there is none left."""
        if self.rules.why or self.rules.first is None:
            return False
        sql = (
            'select g."update", group_concat(g.name) as names, count(*) as count from groups g '
            'where g."update" <= ? group by g."update" having count >= ? and names is not (select c.names from '
            'credited c where c."update" = g."update") order by g."update" limit 1'
        )
        found = self._index.select(sql, (last_update, per_update))
        if not found:
            return False
        update, names = found[0]["update"], found[0]["names"]
        try:
            credits = self._compute(self._groups(update))
        except (NotThere, RecordingError) as error:  # part of it was removed, or is damaged: it has none
            log.warning("update %d has no advantages: %s", update, error)
            credits = []
        by_episode: dict[str, list[Credit]] = {}
        for credit in credits:
            by_episode.setdefault(credit.episode, []).append(credit)
        sums = [
            (sum(one.reward for one in some), sum(one.advantage for one in some) / len(some), name)
            for name, some in by_episode.items()
        ]
        own = f"recording = (select id from recordings where name = '{recording.ROLLOUT}')"
        self._index.write(
            [
                (f"update episodes set reward = ?, advantage = ? where name = ? and {own}", sums),
                (
                    f"insert or replace into credits select id, ? from episodes where name = ? and {own}",
                    [(_packed(some), name) for name, some in by_episode.items()],
                ),
                (
                    'insert or replace into credited (recording, "update", names) values (0, ?, ?)',
                    [(update, names)],
                ),
            ]
        )
        return True

    def _groups(self, update: int) -> list[Any]:
        sql = 'select name, place, version, members from groups where "update" = ? order by place'
        return self._index.select(sql, (update,))

    def _compute(self, groups: list[Any]) -> list[Credit]:
        found: list[Credit] = []
        records: list[tuple[BatchRules, GroupRecord]] = []
        for row in groups:
            episodes = read_episodes(self._index, recording.ROLLOUT, json.loads(row["members"]))
            rules = self.rules.at(row["place"], self.begins)
            if rules is not None and episodes:
                group = GroupRecord(row["name"], row["place"], episodes[0].task, row["version"], tuple(episodes))
                records.append((rules, group))
        for _, together in groupby(records, key=lambda pair: id(pair[0])):
            some = list(together)
            try:
                batch = build_batch([group for _, group in some], some[0][0])
            except ValueError as error:
                raise RecordingError(f"advantages can't be computed: {error}") from error
            found += batch.credits
        return found


def _packed(credits: Sequence[Credit]) -> bytes:
    return array("f", [float(getattr(one, name)) for one in credits for name in _KEPT]).tobytes()


def _unpacked(data: bytes) -> list[StepCredit]:
    numbers = array("f", data)
    rows = (numbers[start : start + len(_KEPT)] for start in range(0, len(numbers), len(_KEPT)))
    return [
        StepCredit(int(step), r, total, of_episode, of_step, int(n)) for step, r, total, of_episode, of_step, n in rows
    ]
