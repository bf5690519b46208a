"""Which groups are admitted, played, accepted, dropped and consumed: a pure state machine without a clock.

Invariants:
1. Groups under way (admitted, neither dropped nor learned from) are at most `GroupLimits.capacity` =
   (max_staleness + 1) x groups_per_update. A group that was handed out counts until `set_version` says that its update
   is over; so no group is more than max_staleness versions old when it is consumed, and with max_staleness 0 no episode
   begins between a batch and the version that follows from it.
2. Groups are consumed strictly in issue order, each once. A late group holds the later ones back; it is never dropped
   for being late (that would select short tasks). A member that phones kept busy for `deadline_seconds`, re-runs
   included, is given up; the others get their turn.
3. An invalid episode is played again, on another slot, at most `max_reruns` times. One that we stopped ourselves is
   played again and not counted.
4. What every member came to, and after how many answers, is counted: being left out must not depend on length unseen.
5. Dynamic sampling looks at outcomes, not at shaped rewards, and drops a bounded number of groups per update.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from tapforge_envs.protocol import Reason, Task

from ..attempt import Attempt, issue_of, member_of, seed_of
from ..records import EpisodeRecord, GroupRecord
from .group import Group, Place, Resumed
from .stats import length_class

#: times a place may be played, cancelled ones included: an engine that aborts everything must not go on for ever
MAX_ISSUES = 100


@dataclass(frozen=True, slots=True)
class GroupLimits:
    group_size: int = 8
    groups_per_update: int = 16
    #: policy versions that a group may lag behind at its update; 0 is strictly on-policy
    max_staleness: int = 1
    #: times an invalid episode is played again on another slot
    max_reruns: int = 2
    #: valid episodes that a group needs to count
    min_valid: int = 2
    #: that calls to phones may take for a member and its re-runs together, until the group goes on without it; waiting
    #: for a slot and the model's time don't count. None: no deadline
    deadline_seconds: float | None = None
    #: drop groups whose members all have the same outcome and refill with the next task
    dynamic_sampling: bool = False
    #: refills per update: at most `max_rounds * groups_per_update` groups are dropped for it
    max_rounds: int = 4
    #: episodes that ran out of steps are compared with no other, here as in a batch
    mask_step_limit: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.min_valid <= self.group_size:
            raise ValueError(f"min_valid is {self.min_valid}: it must be from 2 to group_size ({self.group_size})")
        if self.groups_per_update < 1 or self.max_staleness < 0 or self.max_reruns < 0 or self.max_rounds < 1:
            raise ValueError(f"negative or zero limits: {self}")

    @property
    def capacity(self) -> int:
        """Groups that may be under way: running, waiting for their update, or being learned from."""
        return (self.max_staleness + 1) * self.groups_per_update


class Dropped(StrEnum):
    TOO_FEW_VALID = "too_few_valid"
    UNIFORM = "uniform"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class CompletedGroup:
    """A group whose fate is decided. `stop`: attempts that still run and are of no use any more."""

    group: GroupRecord
    dropped: Dropped | None
    stop: tuple[Attempt, ...] = ()


@dataclass(slots=True)
class GroupCounts:
    admitted: int = 0
    accepted: int = 0
    consumed: int = 0
    reruns: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    #: (`valid`, or why a member was given up; its answers as in `stats.length_class`) -> members
    members: Counter[tuple[str, str]] = field(default_factory=Counter)


class GroupBuffer:
    def __init__(self, limits: GroupLimits, *, seed: int = 0, version: int = 0, order: int = 0, prefix: str = "g"):
        self.limits = limits
        self.version = version
        self.counts = GroupCounts()
        self._seed = seed
        self._prefix = prefix
        self._order = order
        #: not yet consumed, in issue order
        self._groups: dict[str, Group] = {}
        #: (order, member) of places that no attempt plays
        self._pending: list[tuple[int, int, str]] = []
        #: handed out; their update is not over
        self._learning = 0
        self._uniform_this_update = 0

    # --- admission ---

    @property
    def next_order(self) -> int:
        return self._order

    @property
    def under_way(self) -> int:
        return len(self._groups) + self._learning

    @property
    def waiting(self) -> int:
        """Groups that no batch has taken."""
        return len(self._groups)

    @property
    def unfinished_episodes(self) -> int:
        """Episodes that these groups still wait for."""
        return sum(not place.completed for group in self._groups.values() for place in group.places)

    @property
    def room(self) -> bool:
        """Whether another group may be admitted now."""
        return self.under_way < self.limits.capacity

    def admit(self, task: Task) -> str:
        if not self.room:
            raise ValueError(f"{self.under_way} groups are under way, {self.limits.capacity} may be")
        group = self._new_group(self._order, task, self.version)
        self._order += 1
        for member in range(self.limits.group_size):
            heapq.heappush(self._pending, (group.order, member, group.id))
        return group.id

    def resume(self, groups: list[Resumed]) -> list[CompletedGroup]:
        """Takes up groups of an earlier run, before any is admitted. Their places keep their seeds."""
        settled = []
        for old in sorted(groups, key=lambda g: g.order):
            # The name that its finished episodes bear.
            name = old.played[0].group if old.played else None
            group = self._new_group(old.order, old.task, old.version, name)
            self._order = max(self._order, old.order + 1)
            # Each in its own place: another one would be played with the seed of a finished episode.
            finished = {member_of(episode.id): episode for episode in old.episodes}
            awaiting = {member_of(episode.id): episode for episode in old.awaiting}
            unjudged = {member_of(episode.id): episode for episode in old.unjudged}
            for member, place in enumerate(group.places):
                place.record, place.unjudged = finished.get(member), unjudged.get(member)
                place.lost = place.unjudged is not None
                if place.completed:
                    continue
                if (played := awaiting.get(member)) is not None:
                    place.reruns, place.issue = played.attempt, issue_of(played.id)
                    self.played(self._attempt_at(group, member), played)
                else:
                    heapq.heappush(self._pending, (group.order, member, group.id))
            if result := self._settle_if_complete(group):
                settled.append(result)
        return settled

    def unfinished(self) -> list[Resumed]:
        """What `resume` needs after an interruption: every group that no update has consumed."""
        return [
            Resumed(g.order, g.task, g.version, g.valid(), g.awaiting(), g.unjudged()) for g in self._groups.values()
        ]

    def awaiting(self) -> list[tuple[Attempt, EpisodeRecord]]:
        """Episodes that were played to their end, and await their rewards."""
        places = (place for group in self._groups.values() for place in group.places)
        return [(p.running, p.played) for p in places if p.running is not None and p.played is not None]

    def set_version(self, version: int) -> None:
        """The update is over and the engines have these weights: what it learned from makes room for new groups."""
        if version < self.version:
            raise ValueError(f"policy version {version} is older than the present {self.version}")
        self.version = version
        self._learning = 0

    # --- playing ---

    def next_attempt(self) -> Attempt | None:
        """The next attempt to play, oldest group first. It counts as running until `played`."""
        while self._pending:
            _, member, group_id = heapq.heappop(self._pending)
            group = self._groups.get(group_id)
            if group is None or group.accepted or group.places[member].completed:
                continue
            return self._attempt_at(group, member)
        return None

    def _attempt_at(self, group: Group, member: int) -> Attempt:
        place = group.places[member]
        attempt = Attempt(
            group=group.id,
            order=group.order,
            member=member,
            rerun=place.reruns,
            issue=place.issue,
            task=group.task,
            seed=seed_of(self._seed, "train", group.order, member, place.reruns),
            avoid=place.avoid,
            # Phones on probation have to be tried, also where nothing is played again.
            spare=not place.reruns or (place.reruns < self.limits.max_reruns and not self._urgent(group)),
            session=self._prefix,
            phone_seconds=self._left(place),
        )
        place.issue += 1
        place.running = attempt
        return attempt

    def played(self, attempt: Attempt, record: EpisodeRecord) -> bool:
        """The attempt was played to its end, and awaits its rewards. False: they are of no use any more."""
        group = self._groups.get(attempt.group)
        if group is None or group.accepted:
            return False
        group.places[attempt.member].played = record
        return True

    def ended(self, attempt: Attempt, record: EpisodeRecord, phone_seconds: float = 0.0) -> CompletedGroup | None:
        """Takes in the end of an attempt. Not None when it settles the group; late ones are ignored."""
        group = self._groups.get(attempt.group)
        if group is None or group.accepted:
            return None
        place = group.places[attempt.member]
        if place.running is not attempt:
            raise ValueError(f"episode {attempt.episode} was not running")
        place.running = place.played = None
        if why := self._member_ended(place, record, phone_seconds):
            place.record = record if record.valid else None
            place.lost = not record.valid
            place.unjudged = record if record.reason is Reason.VERDICT_MISSING else None
            self.counts.members[why, length_class(len(record.steps))] += 1
        else:
            heapq.heappush(self._pending, (group.order, attempt.member, group.id))
            return None
        return self._settle_if_complete(group)

    def withdraw(self, attempt: Attempt) -> None:
        """The attempt never got a slot: its place is open again, as if it had never been requested."""
        group = self._groups.get(attempt.group)
        if group is None or group.accepted:
            return
        place = group.places[attempt.member]
        place.running = None
        place.issue -= 1
        heapq.heappush(self._pending, (group.order, attempt.member, group.id))

    def drop_task(self, key: str) -> list[CompletedGroup]:
        """A quarantined task: its groups under way are of no use. Accepted ones stay."""
        hit = [g for g in self._groups.values() if not g.accepted and g.task.key == key]
        return [self._drop(g, Dropped.QUARANTINED) for g in hit]

    # --- consumption ---

    def ready(self) -> bool:
        """Whether the next `groups_per_update` groups in issue order are accepted."""
        n = self.limits.groups_per_update
        first = [g for g, _ in zip(self._groups.values(), range(n), strict=False)]
        return len(first) == n and all(g.accepted for g in first)

    def consume(self) -> list[GroupRecord]:
        if not self.ready():
            raise ValueError("the next batch is not complete")
        batch = [self._groups.pop(i) for i in list(self._groups)[: self.limits.groups_per_update]]
        self._learning += len(batch)
        self._uniform_this_update = 0
        self.counts.consumed += len(batch)
        return [g.as_record() for g in batch]

    def put_back(self, groups: Sequence[GroupRecord], lost: Collection[str]) -> None:
        """A batch that nothing could be learned from, because the frames of its episodes `lost` are gone: it is the
        next one again, as soon as these have been played again."""
        back = {}
        for record in groups:
            group = Group(record.id, record.order, record.task, record.version, [])
            finished = {member_of(episode.id): episode for episode in record.episodes}
            for member in range(self.limits.group_size):
                episode = finished.get(member)
                again = episode is not None and episode.id in lost
                place = Place(record=None if again else episode, lost=episode is None)
                group.places.append(place)
                if again and episode is not None:
                    place.reruns, place.issue = episode.attempt, issue_of(episode.id) + 1
                    heapq.heappush(self._pending, (group.order, member, group.id))
            group.accepted = all(place.completed for place in group.places)
            self.counts.accepted -= not group.accepted
            back[group.id] = group
        self._groups = back | self._groups
        self._learning -= len(back)
        self.counts.consumed -= len(back)

    def holds(self, group: str) -> bool:
        """Whether the group is under way or waits for its update."""
        return group in self._groups

    # --- inside ---

    def _urgent(self, group: Group) -> bool:
        """Whether the next update waits for the group, while there may be later ones."""
        n = self.limits.groups_per_update
        return self.limits.max_staleness > 0 and any(g is group for g in islice(self._groups.values(), n))

    def _member_ended(self, place: Place, record: EpisodeRecord, phone_seconds: float) -> str:
        """What the member came to with this attempt, in a word; "": it is played again."""
        if record.valid:
            return "valid"
        if record.reason is Reason.VERDICT_MISSING:  # the phone did well: playing again would change nothing
            return record.reason.value
        invalid = record.outcome is not None
        late = self._left(place, phone_seconds)
        if invalid:
            place.avoid |= {record.slot}
            if place.reruns >= self.limits.max_reruns:
                return record.reason.value
        if late is not None and late <= 0:
            return "group_deadline"
        if place.issue >= MAX_ISSUES:
            return "stopped_too_often"
        if invalid:
            place.phone_seconds += phone_seconds
            place.reruns += 1
            self.counts.reruns += 1
        return ""

    def _left(self, place: Place, more: float = 0.0) -> float | None:
        """Seconds of calls to phones until the member is given up."""
        seconds = self.limits.deadline_seconds
        # Rounded, so that parts of a deadline add up to it.
        return None if seconds is None else round(seconds - place.phone_seconds - more, 6)

    def _new_group(self, order: int, task: Task, version: int, name: str | None = None) -> Group:
        places = [Place() for _ in range(self.limits.group_size)]
        group = Group(name or f"{self._prefix}{order:06d}", order, task, version, places)
        self._groups[group.id] = group
        self.counts.admitted += 1
        return group

    def _settle_if_complete(self, group: Group) -> CompletedGroup | None:
        return self._settle(group) if all(p.completed for p in group.places) else None

    def _settle(self, group: Group) -> CompletedGroup:
        valid = group.valid()
        if len(valid) < self.limits.min_valid:
            return self._drop(group, Dropped.TOO_FEW_VALID)
        compared = [r.outcome for r in valid if not (self.limits.mask_step_limit and r.out_of_steps)]
        uniform = len(set(compared)) < 2 or len(compared) < self.limits.min_valid
        budget = self.limits.max_rounds * self.limits.groups_per_update
        if self.limits.dynamic_sampling and uniform and self._uniform_this_update < budget:
            self._uniform_this_update += 1
            return self._drop(group, Dropped.UNIFORM)
        group.accepted = True
        self.counts.accepted += 1
        return CompletedGroup(group.as_record(), None, _running(group))

    def _drop(self, group: Group, why: Dropped) -> CompletedGroup:
        del self._groups[group.id]
        self.counts.dropped[why] += 1
        return CompletedGroup(group.as_record(), why, _running(group))


def _running(group: Group) -> tuple[Attempt, ...]:
    return tuple(p.running for p in group.places if p.running is not None)
