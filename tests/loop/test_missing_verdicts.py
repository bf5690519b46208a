"""Of an update whose judge was away: its figures are written down before the run stops."""

from types import SimpleNamespace

import pytest

from tapforge_api.rewards import Rewards
from tapforge_trainer.loop import _Rollout
from tapforge_trainer.rewards.budget import JudgeBudget
from tapforge_trainer.rollout.rewarding import RewardCounts
from tapforge_trainer.rollout.scheduler import RolloutError


def rollout_of(counts: RewardCounts, **rewards):
    spec = SimpleNamespace(rewards=Rewards.model_validate(rewards))
    context = SimpleNamespace(run=SimpleNamespace(spec=spec), judge_budget=JudgeBudget())
    scheduler = SimpleNamespace(rewards=counts)
    return _Rollout(context, SimpleNamespace(update=3), scheduler, *[None] * 6)


def test_too_many_missing_verdicts_stop_the_run_once_their_update_is_written_down():
    rollout = rollout_of(RewardCounts(asked=8, answered=8, missing=5, last_missing="http://judge: 503"))
    assert rollout.rewards(())["missing_share"] == 5 / 8
    with pytest.raises(
        RolloutError, match=r"5 of 8 episodes have no verdict.*\(50%\); the last one: http://judge: 503"
    ):
        rollout.check_verdicts()


def test_shares_are_those_of_an_update_and_up_to_the_limit_the_run_goes_on():
    rollout = rollout_of(RewardCounts(asked=8, answered=8, missing=4))
    rollout.rewards(())
    rollout.check_verdicts()
    rollout.scheduler.rewards = RewardCounts(asked=10, answered=10, missing=6)
    assert rollout.rewards(())["missing"] == 2
    with pytest.raises(RolloutError, match="2 of 2 episodes"):
        rollout.check_verdicts()
