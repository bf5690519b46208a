"""The buffer of groups for every order of events: the staleness bound, issue order, bounded re-runs, deadlines, and
zero-variance groups."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.attempt import Attempt
from tapforge_trainer.records import EpisodeRecord
from tapforge_trainer.rollout.evaluation_queue import EvaluationQueue
from tapforge_trainer.rollout.groups import Dropped, GroupBuffer, GroupLimits
from tapforge_trainer.rollout.stats import by_length

ENDS = {
    "success": (Reason.DONE, Outcome.SUCCESS),
    "failure": (Reason.STEP_LIMIT, Outcome.FAILURE),
    "gave_up": (Reason.DONE, Outcome.FAILURE),
    "invalid": (Reason.ENV_ERROR, Outcome.INVALID),
    "stopped": (Reason.CANCELLED, None),
}


def task(number: int = 0) -> Task:
    return Task(suite="s", template="t", seed=number)


def ended(attempt: Attempt, end: str, slot: str = "a") -> EpisodeRecord:
    reason, outcome = ENDS[end]
    score = {"success": 1.0}.get(end)
    place = (attempt.episode, attempt.group, attempt.task, attempt.rerun, slot, attempt.seed)
    return EpisodeRecord(*place, reason, outcome, score, "", (), 0.0, 1.0)


def play(buffer: GroupBuffer, ends: list[str]):
    """Plays the next attempts with these ends; the last settlement, if any."""
    settled = None
    for end in ends:
        attempt = buffer.next_attempt()
        settled = buffer.ended(attempt, ended(attempt, end)) or settled
    return settled


LIMITS = GroupLimits(group_size=3, groups_per_update=2, max_staleness=1, max_reruns=1, deadline_seconds=10.0)


class Buffer(RuleBasedStateMachine):
    @initialize(
        size=st.integers(2, 4),
        per_update=st.integers(1, 3),
        staleness=st.integers(0, 2),
        reruns=st.integers(0, 2),
        dynamic=st.booleans(),
        rounds=st.integers(1, 2),
    )
    def begin(self, size, per_update, staleness, reruns, dynamic, rounds):
        self.limits = GroupLimits(size, per_update, staleness, reruns, 2, 10.0, dynamic, rounds)
        self.buffer = GroupBuffer(self.limits)
        #: that phones were kept busy for each place by invalid episodes
        self.seconds: dict[tuple[int, int], float] = {}
        self.running: list[Attempt] = []
        self.episodes: set[str] = set()
        self.attempts: dict[tuple[str, int], int] = {}
        self.learning = False
        self.consumed: list[int] = []
        self.fate: dict[int, Dropped | None] = {}
        self.uniform = 0
        self.version = 0
        self.tasks = 0

    def settle(self, settled):
        if settled is None:
            return
        group = settled.group
        assert group.order not in self.fate
        self.fate[group.order] = settled.dropped
        assert all(e.valid for e in group.episodes)
        outcomes = {e.outcome for e in group.episodes}
        if settled.dropped is None:
            assert self.limits.min_valid <= len(group.episodes) <= self.limits.group_size
        elif settled.dropped is Dropped.TOO_FEW_VALID:
            assert len(group.episodes) < self.limits.min_valid
        elif settled.dropped is Dropped.UNIFORM:
            self.uniform += 1
            assert self.limits.dynamic_sampling and len(outcomes) == 1
            assert self.uniform <= self.limits.max_rounds * self.limits.groups_per_update
        for attempt in settled.stop:
            assert attempt in self.running

    @precondition(lambda self: self.buffer.room)
    @rule()
    def admit(self):
        self.buffer.admit(task(self.tasks))
        self.tasks += 1

    @rule()
    def start(self):
        attempt = self.buffer.next_attempt()
        if attempt is None:
            return
        assert attempt.episode not in self.episodes
        assert attempt.rerun <= self.limits.max_reruns
        assert attempt.order not in self.fate
        spent = self.seconds.get((attempt.order, attempt.member), 0.0)
        assert 0 < attempt.phone_seconds == pytest.approx(self.limits.deadline_seconds - spent, abs=1e-4)
        self.episodes.add(attempt.episode)
        self.running.append(attempt)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def withdraw(self, data):
        attempt = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.buffer.withdraw(attempt)
        self.episodes.discard(attempt.episode)  # nobody has played it: the next attempt may bear its name

    @precondition(lambda self: self.running)
    @rule(data=st.data(), end=st.sampled_from(sorted(ENDS)), slot=st.sampled_from("ab"), share=st.floats(0.0, 1.0))
    def end(self, data, end, slot, share):
        attempt = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        before, seconds = self.buffer.counts.reruns, share * attempt.phone_seconds
        if end == "invalid":
            self.seconds[attempt.order, attempt.member] = (
                self.seconds.get((attempt.order, attempt.member), 0.0) + seconds
            )
        self.settle(self.buffer.ended(attempt, ended(attempt, end, slot), seconds))
        if end == "stopped":
            assert self.buffer.counts.reruns == before

    @rule(number=st.integers(0, 5))
    def quarantine(self, number):
        for settled in self.buffer.drop_task(task(number).key):
            assert settled.dropped is Dropped.QUARANTINED
            self.settle(settled)

    @precondition(lambda self: self.buffer.ready() and not self.learning)
    @rule()
    def consume(self):
        batch = self.buffer.consume()
        self.uniform = 0
        assert len(batch) == self.limits.groups_per_update
        for group in batch:
            assert self.fate[group.order] is None
            assert 0 <= self.version - group.version <= self.limits.max_staleness
        self.consumed.extend(g.order for g in batch)
        assert self.consumed == sorted(set(self.consumed))
        # Nothing was skipped: every earlier group was consumed or dropped.
        for order in range(self.consumed[-1]):
            assert order in self.consumed or self.fate[order] is not None
        self.learning = True

    @precondition(lambda self: self.learning)
    @rule(weights=st.booleans())
    def update_is_over(self, weights):
        self.version += weights
        self.buffer.set_version(self.version)
        self.learning = False

    @invariant()
    def no_more_under_way_than_the_bound_allows(self):
        if not hasattr(self, "buffer"):
            return
        dropped = sum(f is not None for f in self.fate.values())
        learned = len(self.consumed) - (self.limits.groups_per_update if self.learning else 0)
        assert self.buffer.under_way == self.tasks - dropped - learned <= self.limits.capacity
        if self.limits.max_staleness == 0 and self.learning:
            assert not self.buffer.room


Buffer.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestBuffer = Buffer.TestCase


def test_strictly_on_policy_nothing_is_admitted_between_batch_and_version():
    buffer = GroupBuffer(replace(LIMITS, max_staleness=0))
    for n in range(2):
        buffer.admit(task(n))
    play(buffer, ["success"] * 6)
    assert not buffer.room
    buffer.consume()
    assert not buffer.room and buffer.next_attempt() is None
    with pytest.raises(ValueError, match="under way"):
        buffer.admit(task(2))
    buffer.set_version(1)
    buffer.admit(task(2))
    assert buffer.next_attempt().order == 2


def test_a_late_group_holds_the_later_ones_back_and_is_consumed_first():
    buffer = GroupBuffer(LIMITS)
    for n in range(4):
        buffer.admit(task(n))
    attempts = [buffer.next_attempt() for _ in range(12)]
    for attempt in attempts[3:]:
        buffer.ended(attempt, ended(attempt, "success"))
        assert not buffer.ready()
    for attempt in attempts[:3]:
        buffer.ended(attempt, ended(attempt, "failure"))
    assert [g.order for g in buffer.consume()] == [0, 1]
    assert [g.order for g in buffer.consume()] == [2, 3]


def test_an_invalid_episode_is_played_again_elsewhere_with_another_seed_but_not_for_ever():
    buffer = GroupBuffer(LIMITS)
    buffer.admit(task())
    first = buffer.next_attempt()
    buffer.ended(first, ended(first, "invalid", "bad-phone"))
    again = buffer.next_attempt()
    assert (again.member, again.rerun, again.issue, again.avoid) == (first.member, 1, 1, {"bad-phone"})
    assert again.seed != first.seed and again.task == first.task
    buffer.ended(again, ended(again, "invalid", "other-phone"))
    assert [w.member for w in iter(buffer.next_attempt, None)] == [1, 2]
    assert buffer.counts.reruns == 1


@pytest.mark.parametrize(("staleness", "expected"), [(0, [True, True, False]), (1, [True, False, False])])
def test_only_an_attempt_that_can_be_lost_may_be_spent_on_a_doubtful_phone(staleness, expected):
    """Its last re-run can't, and with later groups to play no re-run that the next update waits for."""
    buffer = GroupBuffer(GroupLimits(group_size=3, groups_per_update=1, max_staleness=staleness, max_reruns=2))
    buffer.admit(task())
    spare = []
    for _ in range(3):
        attempt = buffer.next_attempt()
        spare.append(attempt.spare)
        buffer.ended(attempt, ended(attempt, "invalid"))
    assert (attempt.rerun, spare) == (2, expected)


def test_re_runs_of_later_groups_can_be_lost():
    buffer = GroupBuffer(GroupLimits(group_size=3, groups_per_update=1, max_staleness=1, max_reruns=2))
    buffer.admit(task(0))
    first = [buffer.next_attempt() for _ in range(3)]
    buffer.admit(task(1))
    attempt = buffer.next_attempt()
    buffer.ended(attempt, ended(attempt, "invalid"))
    assert (again := buffer.next_attempt()).rerun == 1 and again.spare
    buffer.ended(first[0], ended(first[0], "invalid"))
    assert (late := buffer.next_attempt()).rerun == 1 and not late.spare


def test_a_measurement_is_not_for_trials():
    queue = EvaluationQueue([task()], 1, max_reruns=2, seed=0, prefix="f")
    assert not queue.next_attempt().spare


def test_what_we_stopped_is_played_again_with_the_same_seed_and_not_counted():
    buffer = GroupBuffer(LIMITS)
    buffer.admit(task())
    first = buffer.next_attempt()
    buffer.ended(first, ended(first, "stopped"))
    again = buffer.next_attempt()
    assert (again.member, again.rerun, again.seed) == (first.member, 0, first.seed)
    assert again.episode != first.episode
    assert buffer.counts.reruns == 0


def test_an_engine_that_stops_everything_comes_to_an_end():
    buffer = GroupBuffer(LIMITS)
    buffer.admit(task())
    attempts = 0
    while attempt := buffer.next_attempt():
        settled = buffer.ended(attempt, ended(attempt, "stopped"))
        attempts += 1
        assert attempts < 1000
    assert settled.dropped is Dropped.TOO_FEW_VALID


def test_a_member_that_keeps_phones_busy_for_the_deadline_is_given_up_and_the_others_get_their_turn():
    buffer = GroupBuffer(replace(LIMITS, max_reruns=9))
    buffer.admit(task())
    slow, good = buffer.next_attempt(), buffer.next_attempt()
    assert slow.phone_seconds == 10.0
    buffer.ended(slow, ended(slow, "invalid"), 4.0)
    again = buffer.next_attempt()
    assert (again.member, again.phone_seconds) == (slow.member, 6.0)
    # What we stopped ourselves is nobody's time.
    buffer.ended(again, ended(again, "stopped"), 5.0)
    again = buffer.next_attempt()
    assert (again.member, again.phone_seconds) == (slow.member, 6.0)
    buffer.ended(again, ended(again, "stopped"), 6.0)
    buffer.ended(good, ended(good, "success"), 9.0)
    last = buffer.next_attempt()
    assert last.member not in (slow.member, good.member) and last.phone_seconds == 10.0
    settled = buffer.ended(last, ended(last, "failure"), 1e9)
    assert (settled.dropped, len(settled.group.episodes), settled.stop) == (None, 2, ())


@pytest.mark.parametrize("seconds", [0.1, 600.0, 1 / 3])
def test_with_the_default_deadline_every_re_run_has_the_time_of_a_whole_episode(seconds):
    limits = GroupLimits(2, 1, 0, max_reruns=2, deadline_seconds=3 * seconds)
    buffer = GroupBuffer(limits)
    buffer.admit(task())
    for _ in range(3):
        attempt = buffer.next_attempt()
        assert attempt.member == 0 and attempt.phone_seconds == pytest.approx(seconds * (3 - attempt.rerun))
        buffer.ended(attempt, ended(attempt, "invalid"), seconds)
    assert buffer.counts.reruns == 2 and buffer.counts.members == {("env_error", "0"): 1}


def test_what_members_came_to_is_counted_by_length():
    buffer = GroupBuffer(replace(LIMITS, max_reruns=0, group_size=6))
    buffer.admit(task())
    for end, steps, seconds in [
        ("success", 1, 0.0),
        ("failure", 3, 0.0),
        ("success", 2, 0.0),
        ("invalid", 9, 1.0),
        ("stopped", 15, 10.0),
        ("invalid", 0, 0.0),
    ]:
        attempt = buffer.next_attempt()
        record = replace(ended(attempt, end), steps=tuple(range(steps)))
        buffer.ended(attempt, record, seconds)
    assert by_length(buffer.counts.members) == {
        "env_error": {"0": 1, "8-15": 1},
        "group_deadline": {"8-15": 1},
        "valid": {"1": 1, "2-3": 2},
    }
    earlier = {"valid": {"1": 1, "16-31": 2}}
    assert by_length(buffer.counts.members, earlier)["valid"] == {"1": 2, "2-3": 2, "16-31": 2}


def test_zero_variance_groups_are_dropped_by_outcome_for_a_bounded_number_of_rounds():
    limits = GroupLimits(2, 1, 0, 0, 2, None, dynamic_sampling=True, max_rounds=2)
    buffer = GroupBuffer(limits)
    for round_ in range(2):
        buffer.admit(task(round_))
        assert play(buffer, ["success", "success"]).dropped is Dropped.UNIFORM
    buffer.admit(task(2))
    assert play(buffer, ["failure", "failure"]).dropped is None
    assert [g.order for g in buffer.consume()] == [2]
    buffer.set_version(1)
    buffer.admit(task(3))
    assert play(buffer, ["failure", "failure"]).dropped is Dropped.UNIFORM
    buffer.admit(task(4))
    assert play(buffer, ["failure", "success"]).dropped is None


def test_a_lone_success_and_an_invalid_one_are_no_contrast():
    limits = GroupLimits(3, 1, 0, 0, 2, None, dynamic_sampling=True)
    buffer = GroupBuffer(limits)
    buffer.admit(task())
    settled = play(buffer, ["success", "invalid", "success"])
    assert settled.dropped is Dropped.UNIFORM


def test_what_is_left_of_a_group_without_those_that_ran_out_of_steps_has_to_teach_something():
    limits = GroupLimits(4, 1, 0, 0, 3, None, dynamic_sampling=True, max_rounds=9, mask_step_limit=True)
    buffer = GroupBuffer(limits)
    cases = {
        ("success", "success", "success", "failure"): Dropped.UNIFORM,
        ("failure", "failure", "failure", "failure"): Dropped.UNIFORM,
        ("success", "gave_up", "failure", "failure"): Dropped.UNIFORM,  # two are too few to compare
        ("success", "success", "gave_up", "failure"): None,
    }
    for number, (ends, fate) in enumerate(cases.items()):
        buffer.admit(task(number))
        assert play(buffer, list(ends)).dropped is fate, ends


def test_an_interrupted_run_takes_its_groups_up_again():
    buffer = GroupBuffer(LIMITS, seed=7)
    for n in range(3):
        buffer.admit(task(n))
    attempts = [buffer.next_attempt() for _ in range(7)]
    for attempt in (*attempts[:4], attempts[5]):
        buffer.ended(attempt, ended(attempt, "success"))
    after = GroupBuffer(LIMITS, seed=7, version=0, prefix="second-")
    settled = after.resume(buffer.unfinished())
    assert [s.group.order for s in settled] == [0]
    assert after.next_order == 3
    rest = list(iter(after.next_attempt, None))
    assert [(w.order, w.member) for w in rest] == [(1, 1), (2, 0), (2, 1), (2, 2)]
    assert {w.seed for w in rest} >= {attempts[4].seed, attempts[6].seed}
    assert not {w.seed for w in rest} & {w.seed for w in (*attempts[:4], attempts[5])}
    assert after.under_way == 3


def test_seeds_depend_on_the_place_alone():
    def seeds(buffer):
        for n in range(2):
            buffer.admit(task(n))
        return [w.seed for w in iter(buffer.next_attempt, None)]

    assert seeds(GroupBuffer(LIMITS, seed=1)) == seeds(GroupBuffer(LIMITS, seed=1, prefix="other"))
    assert not set(seeds(GroupBuffer(LIMITS, seed=1))) & set(seeds(GroupBuffer(LIMITS, seed=2)))


@pytest.mark.parametrize("bad", [{"min_valid": 1}, {"min_valid": 4}, {"groups_per_update": 0}, {"max_staleness": -1}])
def test_impossible_limits(bad):
    with pytest.raises(ValueError, match="min_valid|limits"):
        replace(LIMITS, **bad)


def test_an_older_version_is_refused():
    buffer = GroupBuffer(LIMITS, version=3)
    with pytest.raises(ValueError, match="older"):
        buffer.set_version(2)


def test_fixed_lists_give_one_record_per_place_in_order():
    buffer = EvaluationQueue([task(0), task(1)], 2, max_reruns=1, seed=0, prefix="eval-")
    ends = iter(["success", "invalid", "stopped", "failure", "invalid", "success"])
    seen = []
    while attempt := buffer.next_attempt():
        seen.append((attempt.order, attempt.member, attempt.rerun, attempt.avoid))
        buffer.ended(attempt, ended(attempt, next(ends), f"phone-{len(seen)}"))
    assert seen == [
        (0, 0, 0, frozenset()),
        (0, 1, 0, frozenset()),
        (1, 0, 0, frozenset()),
        (1, 1, 0, frozenset()),
        (0, 1, 1, {"phone-2"}),
        (1, 0, 0, frozenset()),
    ]
    assert buffer.done
    results = buffer.results()
    assert [(r.task.seed, r.outcome) for r in results] == [
        (0, Outcome.SUCCESS),
        (0, Outcome.INVALID),
        (1, Outcome.SUCCESS),
        (1, Outcome.FAILURE),
    ]


# --- batches that can't be learned from -------------------------------------------------------------------------------


def test_a_batch_whose_frames_are_lost_is_the_next_one_again_after_they_were_played_again():
    buffer = GroupBuffer(replace(LIMITS, max_staleness=0))
    for number in range(2):
        buffer.admit(task(number))
    play(buffer, ["success", "failure", "success"] * 2)
    batch = buffer.consume()
    assert not buffer.room and not buffer.holds(batch[0].id)
    gone = batch[1].episodes[1]
    buffer.put_back(batch, {gone.id})
    assert not buffer.ready() and not buffer.room and buffer.holds(batch[0].id)
    assert [r.order for r in buffer.unfinished()] == [0, 1]
    attempt = buffer.next_attempt()
    assert (attempt.group, attempt.member, attempt.seed) == (batch[1].id, 1, gone.seed)
    assert attempt.episode != gone.id and buffer.next_attempt() is None
    settled = buffer.ended(attempt, ended(attempt, "success"))
    assert settled.dropped is None and buffer.ready()
    again = buffer.consume()
    assert again[0] == batch[0]
    assert [e.id for e in again[1].episodes if e.id != attempt.episode] == [batch[1].episodes[k].id for k in (0, 2)]
    assert (buffer.counts.consumed, buffer.counts.accepted) == (2, 2)


def test_what_an_incomplete_group_went_on_without_is_not_played_again():
    buffer = GroupBuffer(replace(LIMITS, groups_per_update=1, max_reruns=0))
    buffer.admit(task())
    play(buffer, ["success", "invalid", "failure"])
    (group,) = buffer.consume()
    buffer.put_back([group], set())
    assert buffer.ready() and buffer.next_attempt() is None
    assert buffer.consume() == [group]
