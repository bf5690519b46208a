"""A run whose judges have used up what spec.stop gives them is suspended, and goes on when that is raised."""

from __future__ import annotations

import pytest
from runs_made import OWN, SAFE, Story, begin, job, made, pool

from tapforge_api.learning import Stop
from tapforge_operator.trainingrun.rayjob import pool_spec_hash

SPENT = {
    "final": "stopped",
    "reason": "JudgeBudgetSpent",
    "message": "judges have used 1,010 tokens: raise spec.stop.judgeTokens, which is 1,000",
    "checkpoint": {"update": 5, "path": "/storage/5"},
    "advance": {"update": 5, "judgeTokens": 1010},
}


def spent(**spec: object) -> Story:
    """Its driver has just ended because of that."""
    cluster = {"image": "i", "activeDeadlineSeconds": 1000}
    run = made(checkpoints=SAFE, cluster=cluster, stop={"judgeTokens": 1000}, **spec)
    own = pool(name="run", owned=True, spec=pool_spec_hash(run)) if spec else None
    story = Story(run, pool=own).started()
    story.reports(advance={"update": 4, "judgeTokens": 800})
    assert story.ready == ("True", "Running")
    story.reports(**SPENT)
    return story


def test_phones_and_machines_are_given_back_until_the_limit_is_raised() -> None:
    story = spent()
    assert story.ready == ("False", "Stopping")
    assert story.plan().delete_jobs
    story.plan(jobs=())
    story.plan()
    assert story.ready == ("True", "JudgeBudgetSpent") == story.condition("Suspended")
    assert "raise spec.stop.judgeTokens, which is 1,000" in story.run.status.message
    assert "the checkpoint of update 5" in story.run.status.message
    assert story.run.status.failures == 0 and story.run.status.lost_clusters == 0
    # Neither time, nor another operator, nor a limit that doesn't help makes it go on.
    story.restart()
    story.edit(stop=Stop(max_updates=7, judge_tokens=1010))
    story.plan(5000)
    assert story.ready == ("True", "JudgeBudgetSpent") and story.phase == "Over"
    story.edit(stop=Stop(judge_tokens=5000))
    assert begin(story, 1) == 2
    assert story.condition("Suspended")[0] == "False" and story.run.status.progress.judge_tokens == 1010


def test_a_limit_that_is_raised_while_the_driver_leaves_counts() -> None:
    story = spent()
    story.edit(stop=Stop(judge_tokens=5000))
    assert story.plan().delete_jobs
    story.plan(jobs=())
    assert begin(story, 1) == 2


def test_its_own_pool_goes() -> None:
    story = spent(environment=OWN)
    story.plan(jobs=())
    assert story.plan().delete_pool == "pool-uid"


@pytest.mark.parametrize("raised", [False, True])
def test_who_suspends_it_as_well_has_to_do_both(raised: bool) -> None:
    story = spent()
    story.plan()
    story.plan(jobs=())
    story.edit(suspend=True)
    story.plan()
    assert story.ready == ("True", "Suspended")
    story.edit(suspend=False, **({"stop": Stop(judge_tokens=5000)} if raised else {}))
    story.plan()
    assert story.ready == (("False", "Starting") if raised else ("True", "JudgeBudgetSpent"))


def test_a_run_whose_stage_asks_no_judge_goes_on_after_a_suspension_though_the_budget_is_spent() -> None:
    """Its judges were asked in an earlier stage: its driver has not said that it waits for them."""
    story = Story(made(checkpoints=SAFE, stop={"judgeTokens": 1000})).started()
    story.reports(advance={"update": 5, "judgeTokens": 1010})
    assert story.ready == ("True", "Running")
    story.edit(suspend=True)
    story.plan()
    story.reports(final="stopped", message="suspended", checkpoint={"update": 5, "path": "/s/5"})
    for _ in range(4):
        story.plan(jobs=())
    assert story.ready == ("True", "Suspended")
    story.edit(suspend=False)
    assert begin(story, 1) == 2


def test_money_is_counted_alike() -> None:
    story = Story(made(checkpoints=SAFE, stop={"judgeMoney": 2.5})).started()
    story.reports(**{**SPENT, "advance": {"update": 5, "judgeMoney": 2.51}})
    story.plan()
    story.plan(jobs=())
    story.plan()
    assert "judges have cost 2.51: raise spec.stop.judgeMoney, which is 2.50" in story.run.status.message
    story.edit(stop=Stop(judge_money=3.0))
    assert begin(story, 1) == 2


def test_a_driver_whose_last_report_is_lost_says_it_again_in_the_next_attempt() -> None:
    """All that is left of the first one is its exit code."""
    story = Story(made(checkpoints=SAFE, stop={"judgeTokens": 1000})).started()
    story.plan(jobs=(job(1, "FAILED/Complete", message="exit code 75"),))
    story.plan()
    story.plan(jobs=())
    assert begin(story, 30) == 2
    story.plan(jobs=(job(2, "RUNNING/Running"),))
    story.reports(**SPENT)
    story.plan()
    story.plan(jobs=())
    story.plan()
    assert story.ready == ("True", "JudgeBudgetSpent")
