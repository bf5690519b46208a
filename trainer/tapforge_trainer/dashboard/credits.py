"""Rewards and advantages of recorded episodes, computed again by the update's own function (`batch.build_batch`).

Promises: they are the ones that the update used, as `viewer/recorded.py` has them. Where the learner had to read the
answers first (a critic, a term of the reference), or this machine lacks a plugin, there are none, and `why` says so.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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

#: updates whose credits are held
_HELD: Final = 8

Credits = Mapping[tuple[str, int], Credit]


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
        self._held: OrderedDict[tuple[str, ...], dict[tuple[str, int], Credit]] = OrderedDict()
        self._lock = threading.Lock()

    def of_update(self, update: int) -> Credits:
        """By episode and step; {} where there are none. Raises RecordingError."""
        if self.rules.why or self.rules.first is None:
            return {}
        groups = self._groups(update)
        key = tuple(row["name"] for row in groups)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        found = self._compute(groups)
        with self._lock:
            self._held[key] = found
            while len(self._held) > _HELD:
                self._held.popitem(last=False)
        return found

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
            credits = {}
        sums: dict[str, tuple[float, float, int]] = {}
        for (episode, _), credit in credits.items():
            reward, advantage, count = sums.get(episode, (0.0, 0.0, 0))
            sums[episode] = reward + credit.reward, advantage + credit.advantage, count + 1
        values = [(reward, advantage / count, name) for name, (reward, advantage, count) in sums.items()]
        of_rollout = f"(select id from recordings where name = '{recording.ROLLOUT}')"
        written = f"update episodes set reward = ?, advantage = ? where name = ? and recording = {of_rollout}"
        noted = 'insert or replace into credited (recording, "update", names) values (0, ?, ?)'
        self._index.write([(written, values), (noted, [(update, names)])])
        return True

    def _groups(self, update: int) -> list[Any]:
        sql = 'select name, place, version, members from groups where "update" = ? order by place'
        return self._index.select(sql, (update,))

    def _compute(self, groups: list[Any]) -> dict[tuple[str, int], Credit]:
        found: dict[tuple[str, int], Credit] = {}
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
            found |= {(credit.episode, credit.step): credit for credit in batch.credits}
        return found


def as_json(credit: Credit | None) -> dict[str, Any] | None:
    return None if credit is None else asdict(credit)
