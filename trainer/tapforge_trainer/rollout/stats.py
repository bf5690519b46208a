"""What a rollout did, in numbers: totals since its start; `since` gives those of a span. Seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from statistics import median

from tapforge_envs.protocol import Outcome

from ..attempt import EpisodeResult
from ..records import EpisodeRecord, GroupRecord

#: actions that show a phone's pace
_PACED = 4

#: what members came to -> class of length (`length_class`) -> members
MembersByLength = dict[str, dict[str, int]]


def length_class(answers: int) -> str:
    """0, 1, 2-3, 4-7, 8-15, ...: episodes of about the same length."""
    low = 1 << (answers.bit_length() - 1) if answers else 0
    return f"{low}-{2 * low - 1}" if low > 1 else str(low)


def by_length(members: Mapping[tuple[str, str], int], *earlier: Mapping[str, Mapping[str, int]]) -> MembersByLength:
    """What members came to -> class of length -> how many; the shortest first. With those that were counted before."""
    total = Counter(members)
    for table in earlier:
        total.update({(why, length): n for why, row in table.items() for length, n in row.items()})
    result: MembersByLength = {}
    for (why, length), number in sorted(total.items(), key=lambda item: (item[0][0], int(item[0][1].split("-")[0]))):
        result.setdefault(why, {})[length] = number
    return result


@dataclass(slots=True)
class RolloutStats:
    #: seconds of the clock that the totals cover
    elapsed: float = 0.0
    #: attempts that ended, those that we stopped ourselves not counted
    episodes: int = 0
    successes: int = 0
    failures: int = 0
    #: reason -> attempts
    invalid: Counter[str] = field(default_factory=Counter)
    #: reason -> attempts that we stopped
    stopped: Counter[str] = field(default_factory=Counter)
    reruns: int = 0
    answers: int = 0
    parse_failures: int = 0
    env_steps: int = 0
    #: leases x seconds, and slots x seconds
    busy_seconds: float = 0.0
    slot_seconds: float = 0.0
    #: members -> accepted groups
    group_sizes: Counter[int] = field(default_factory=Counter)
    #: why -> groups
    dropped: Counter[str] = field(default_factory=Counter)
    #: as `GroupCounts.members`
    members: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: policy versions between a group's admission and its update -> groups
    sample_age: Counter[int] = field(default_factory=Counter)
    #: outcome -> attempts in all groups up to the last one that an update took, in issue order: also in those that were
    #: dropped on the way, which is where attempts that all ended alike go with dynamic sampling
    drawn: Counter[str] = field(default_factory=Counter)
    #: issue order of the last group that an update took
    last_order: int = -1
    #: (issue order of the group, outcome) -> attempts, of later groups
    ahead: Counter[tuple[int, str]] = field(default_factory=Counter)

    @property
    def busy_share(self) -> float:
        return self.busy_seconds / self.slot_seconds if self.slot_seconds else 0.0

    @property
    def episodes_per_hour(self) -> float:
        return 3600 * (self.successes + self.failures) / self.elapsed if self.elapsed else 0.0

    @property
    def env_steps_per_second(self) -> float:
        return self.env_steps / self.elapsed if self.elapsed else 0.0

    @property
    def valid_answers(self) -> float:
        """Share of answers that were an action."""
        return 1 - self.parse_failures / self.answers if self.answers else 0.0

    @property
    def mean_sample_age(self) -> float:
        groups = sum(self.sample_age.values())
        return sum(age * n for age, n in self.sample_age.items()) / groups if groups else 0.0

    def episode(self, result: EpisodeResult) -> None:
        record = result.record
        steps = record.steps
        self.answers += len(steps)
        self.parse_failures += sum(s.parse_error is not None for s in steps)
        self.env_steps += sum(s.action is not None for s in steps)
        if record.outcome is None:
            self.stopped[record.reason.value] += 1
            return
        self.ahead[result.attempt.order, record.outcome.value] += 1
        self.episodes += 1
        self.successes += record.outcome is Outcome.SUCCESS
        self.failures += record.outcome is Outcome.FAILURE
        if record.outcome is Outcome.INVALID:
            self.invalid[record.reason.value] += 1

    def consumed(self, groups: list[GroupRecord], version: int) -> None:
        """A batch that was put back comes again, and counts once; what was played again for it counts, too."""
        last = max(group.order for group in groups)
        groups = [group for group in groups if group.order > self.last_order]
        taken, self.last_order = {group.order for group in groups}, last
        for order, outcome in [key for key in self.ahead if key[0] <= last]:
            attempts = self.ahead.pop((order, outcome))
            # Valid episodes of a group that was taken are in its record, also those that an earlier session played.
            if order not in taken or outcome == Outcome.INVALID.value:
                self.drawn[outcome] += attempts
        for group in groups:
            self.drawn.update(e.outcome.value for e in group.episodes if e.outcome is not None)
            self.group_sizes[len(group.episodes)] += 1
            self.sample_age[version - group.version] += 1

    def copy(self) -> RolloutStats:
        return deepcopy(self)

    def since(self, earlier: RolloutStats) -> RolloutStats:
        span = RolloutStats()
        for f in fields(self):
            now, before = getattr(self, f.name), getattr(earlier, f.name)
            setattr(span, f.name, now - before)
        return span


def rate_of(attempts: Mapping[str, int]) -> float | None:
    """Successes over valid attempts, by outcome; None: there is none."""
    won, lost = attempts.get(Outcome.SUCCESS.value, 0), attempts.get(Outcome.FAILURE.value, 0)
    return won / (won + lost) if won + lost else None


def pace_of(episode: EpisodeRecord) -> float | None:
    """Seconds in which the phone carried out an action, in the middle; None: the episode has too few to tell. How long
    it was asked to wait says nothing about it."""
    seconds = [
        step.seconds_environment
        for step in episode.steps
        if step.action is not None and step.action["type"] != "wait" and step.seconds_environment > 0
    ]
    return median(seconds) if len(seconds) >= _PACED else None


class BusyMeter:
    """Integrates leases and slots over time. Times come from outside."""

    def __init__(self, stats: RolloutStats, now: float, slots: int):
        self._stats = stats
        self._at = now
        self._slots = slots
        self._leases = 0

    def skip(self, now: float) -> None:
        """The time since the last note counts for nothing."""
        self._at = now

    def note(self, now: float, slots: int, leases: int) -> None:
        """From now on there are this many slots and leases."""
        passed = now - self._at
        self._stats.elapsed += passed
        # A phone that is lost is none of the slots at once; its lease ends a moment later.
        self._stats.busy_seconds += passed * min(self._leases, self._slots)
        self._stats.slot_seconds += passed * self._slots
        self._at, self._slots, self._leases = now, slots, leases
