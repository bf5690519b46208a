"""Which attempts a success rate is over: of every group up to the last one that an update took."""

from __future__ import annotations

import pytest

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.attempt import Attempt, EpisodeResult
from tapforge_trainer.records import EpisodeRecord, Generation, GroupRecord, StepRecord
from tapforge_trainer.rollout.stats import BusyMeter, RolloutStats, pace_of, rate_of

TASK = Task(suite="s", template="t")
WON, LOST, BROKE, STOPPED = Outcome.SUCCESS, Outcome.FAILURE, Outcome.INVALID, None
REASONS = {WON: Reason.DONE, LOST: Reason.DONE, BROKE: Reason.ENV_ERROR, STOPPED: Reason.CANCELLED}


def attempts(stats: RolloutStats, order: int, *outcomes: Outcome | None) -> GroupRecord:
    """Plays a group; what an update would get of it."""
    records = []
    for member, outcome in enumerate(outcomes):
        attempt = Attempt(f"g{order}", order, member, 0, 0, TASK, seed=member)
        record = EpisodeRecord(
            attempt.episode, attempt.group, TASK, 0, "s", member, REASONS[outcome], outcome, None, "", (), 0.0, 1.0
        )
        stats.episode(EpisodeResult(attempt, record, {}, None))
        records.append(record)
    return GroupRecord(f"g{order}", order, TASK, 0, tuple(r for r in records if r.valid))


def test_dropped_groups_count_with_the_update_that_they_were_played_for():
    stats = RolloutStats()
    attempts(stats, 0, WON, WON, WON)  # dropped: nothing to compare
    first = attempts(stats, 1, WON, LOST, BROKE, STOPPED)
    attempts(stats, 2, LOST, BROKE, BROKE)  # dropped: too few are valid
    later = attempts(stats, 3, WON, WON)
    stats.consumed([first], 0)
    assert stats.drawn == {"success": 4, "failure": 1, "invalid": 1}
    assert rate_of(stats.drawn) == pytest.approx(4 / 5)
    before = stats.drawn.copy()
    stats.consumed([later], 0)
    assert stats.drawn - before == {"success": 2, "failure": 1, "invalid": 2}
    assert not stats.ahead


def test_episodes_of_an_earlier_session_count_when_their_group_is_taken():
    stats = RolloutStats()
    resumed = attempts(RolloutStats(), 0, WON, LOST)
    attempts(stats, 0, LOST)
    stats.consumed([GroupRecord("g0", 0, TASK, 0, (*resumed.episodes, resumed.episodes[1]))], 0)
    assert stats.drawn == {"success": 1, "failure": 2}


def test_no_valid_attempt_is_no_rate():
    assert rate_of({"invalid": 3}) is None


def test_a_batch_that_was_put_back_counts_once():
    stats = RolloutStats()
    first = attempts(stats, 0, WON, LOST)
    stats.consumed([first], 0)
    attempts(stats, 0, LOST)  # its frames were lost: played again
    stats.consumed([first], 0)
    assert stats.drawn == {"success": 1, "failure": 2} and stats.group_sizes == {2: 1} and not stats.ahead


def acted(*actions: tuple[str, float]) -> EpisodeRecord:
    """An episode whose actions took so many seconds; one that no action came of has the type ""."""
    generation = Generation((1,), (2,), (-0.5,), (0,), "stop", 1)
    steps = tuple(
        StepRecord(
            "e", i, (), None, None, generation, "", {"type": kind} if kind else None, None, 0.0, "", 1.0, seconds
        )
        for i, (kind, seconds) in enumerate(actions)
    )
    return EpisodeRecord("e", "g", TASK, 0, "s", 0, Reason.DONE, WON, 1.0, "", steps, 0.0, 1.0)


@pytest.mark.parametrize(
    ("actions", "pace"),
    [
        ((("tap", 1.0), ("tap", 2.0), ("tap", 2.0)), None),
        ((("tap", 1.0), ("tap", 2.0), ("tap", 4.0), ("tap", 9.0)), 3.0),
        ((("tap", 1.0), ("tap", 1.0), ("tap", 1.0), ("open_app", 60.0)), 1.0),
        ((("tap", 1.0), ("wait", 60.0), ("wait", 60.0), ("tap", 2.0), ("tap", 2.0), ("tap", 3.0)), 2.0),
        ((("tap", 1.0), ("", 0.0), ("", 0.0), ("tap", 2.0), ("tap", 2.0), ("tap", 0.0)), None),
    ],
)
def test_a_phone_s_pace_is_told_by_what_it_did_and_not_by_how_long_it_was_asked_to_wait(actions, pace):
    assert pace_of(acted(*actions)) == pace


def test_no_more_than_all_slots_are_busy_while_a_lost_phones_lease_ends() -> None:
    stats = RolloutStats()
    meter = BusyMeter(stats, 0.0, slots=3)
    meter.note(1.0, slots=3, leases=3)
    meter.note(2.0, slots=2, leases=3)
    meter.note(3.0, slots=2, leases=2)
    assert (stats.busy_seconds, stats.slot_seconds) == (5.0, 8.0)
