"""Rare successes come again: which, how many, how long; and with the advantages of their own group."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.batch import BatchRules, build_batch, replayed_samples
from tapforge_trainer.records import EpisodeRecord, Generation, GroupRecord, StepRecord
from tapforge_trainer.rollout.success_replay import ReplayLimits, SuccessReplay

TASK = Task(suite="s", template="t", seed=1)


def group(order: int, won: int, of: int = 8, version: int = 0, invalid: int = 0) -> GroupRecord:
    outcomes = [Outcome.SUCCESS] * won + [Outcome.FAILURE] * (of - won) + [Outcome.INVALID] * invalid
    generation = Generation((1,), (2, 3), (-0.5, -0.25), (version, version), "stop", 1)
    episodes = []
    for n, outcome in enumerate(outcomes):
        name = f"g{order}.{n}.0"
        step = StepRecord(name, 0, ("f",), "s", None, generation, "", {"type": "home"}, None, 0.0, "", 0.1, 0.1)
        episodes.append(
            EpisodeRecord(name, f"g{order}", TASK, 0, "a", n, Reason.DONE, outcome, None, "", (step,), 0.0, 1.0)
        )
    return GroupRecord(f"g{order}", order, TASK, version, tuple(episodes))


def kept(replay: SuccessReplay) -> list[int]:
    return [one.order for one in replay.groups]


def test_groups_are_kept_of_which_few_succeeded():
    replay = SuccessReplay(ReplayLimits(max_success=0.25), 0)
    replay.keep([group(n, won) for n, won in enumerate([0, 1, 2, 3, 8])], 1)
    assert kept(replay) == [1, 2]
    replay.keep([group(9, 1, of=3, invalid=5)], 1)
    assert kept(replay) == [1, 2], "one of three valid episodes is no rare success"


def test_the_oldest_go_by_number_and_by_age():
    replay = SuccessReplay(ReplayLimits(groups=3, max_age=5), 0)
    replay.keep([group(n, 1, version=n) for n in range(4)], 4)
    assert kept(replay) == [1, 2, 3]
    replay.keep([], 7)
    assert kept(replay) == [2, 3] and replay.episodes == {"g2.0.0", "g3.0.0"}
    replay.discard(["g3.0.0", "other"], 8)
    assert kept(replay) == [2]
    assert replay.draw(8, 128) == [] != replay.draw(9, 128), "that update goes without"


@given(st.integers(0, 100), st.floats(0.01, 0.5), st.integers(0, 30))
def test_what_comes_again_is_bounded_and_only_successes(update, share, groups):
    replay = SuccessReplay(ReplayLimits(share=share), 5)
    replay.keep([group(n, 1 + n % 2) for n in range(groups)], 1)
    drawn = replay.draw(update, 128)
    episodes = [name for one in drawn for name in one.episodes]
    won = sum(1 + n % 2 for n in range(groups))
    assert len(episodes) == min(int(share * 128), won) == len(set(episodes))
    outcomes = {episode.id: episode.outcome for one in drawn for episode in one.group.episodes}
    assert {outcomes[name] for name in episodes} <= {Outcome.SUCCESS}


def test_a_draw_follows_from_seed_and_update_and_survives_a_restart():
    groups = [group(n, 1) for n in range(40)]
    replay = SuccessReplay(ReplayLimits(), 5)
    replay.keep(groups, 1)
    again = SuccessReplay(ReplayLimits(), 5, replay.groups)
    assert replay.draw(3, 64) == again.draw(3, 64) != replay.draw(4, 64)
    assert SuccessReplay(ReplayLimits(), 6, groups).draw(3, 64) != replay.draw(3, 64)


def test_without_limits_nothing_comes_again():
    replay = SuccessReplay(None, 0)
    replay.keep([group(0, 1)], 1)
    assert replay.draw(1, 10_000) == [] and replay.groups == []


@pytest.mark.parametrize("estimator", ["grpo", "gigpo", "rloo", "maxrl"])
def test_samples_have_the_advantages_and_versions_of_their_own_update(estimator):
    rules, rare = BatchRules(estimator=estimator), group(0, 2, version=3)
    others = [replace(group(n, 4, version=9)) for n in (1, 2)]
    then = {sample.episode: sample for sample in build_batch([rare, *others], rules).samples}
    samples = replayed_samples(rare, {"g0.0.0", "g0.1.0"}, rules)
    assert [sample.episode for sample in samples] == ["g0.0.0", "g0.1.0"]
    assert all(sample == then[sample.episode] for sample in samples)
    assert all(sample.spans[0].advantage > 0 and list(sample.spans[0].versions) == [3, 3] for sample in samples)
