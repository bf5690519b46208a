"""A run's own pool is there while the run is active, follows its file before the start, and goes with it."""

from __future__ import annotations

from typing import Any

import pytest
from runs_made import OWN, SAFE, Story, job, made, pool

from tapforge_operator.trainingrun import rayjob


def mine(story: Story, **fields: Any) -> Any:
    plain = {"name": "run", "owned": True, "spec": rayjob.pool_spec_hash(story.run), "ready": 2, "largest": 2}
    return pool(**{**plain, **fields})


def test_an_own_pool_is_there_while_the_run_is_active() -> None:
    story = Story(made(environment=OWN, checkpoints=SAFE))
    assert story.plan().create_pool and story.ready == ("False", "WaitingForPhones")
    story.plan(pool=mine(story))
    assert story.plan().create_job == 1
    assert not story.plan(jobs=(job(1, "RUNNING/Running"),)).delete_pool
    assert story.plan(pool=None).create_pool, "somebody deleted it"
    story.plan(pool=mine(story))
    story.edit(suspend=True)
    story.plan()
    story.reports(final="stopped")
    story.plan()
    story.plan(jobs=())
    assert story.plan().delete_pool == "pool-uid" and story.condition("Suspended")[0] == "True"
    assert not story.plan(pool=mine(story, deleting=True)).delete_pool
    assert not story.plan(pool=None).create_pool
    story.edit(suspend=False)
    assert story.plan().create_pool


def test_an_own_pool_is_made_again_when_the_file_is_edited_before_the_start() -> None:
    story = Story(made(environment=OWN))
    story.plan(pool=mine(story, ready=0))
    assert not story.plan().delete_pool
    story.run = made(environment={"source": {"ownPool": {"spec": {"external": {"urls": ["http://c"]}}}}})
    assert story.plan().delete_pool == "pool-uid" and not story.run.status.start_time


@pytest.mark.parametrize("state", ["SUCCEEDED/Complete", "STOPPED/Complete"])
def test_an_own_pool_ends_with_the_run(state: str) -> None:
    story = Story(made(environment=OWN))
    story.plan(pool=mine(story))
    story.started()
    assert not story.plan(jobs=(job(1, state),)).delete_pool
    assert story.plan().delete_pool == "pool-uid"
