"""What judges may use: once it is used up no episode is asked about, what was asked counts, and more of it goes on."""

import asyncio

import pytest
from house import POOL, a_house, run
from phones import until
from scripted import Demonstrator

from tapforge_api.judge import JudgeModel, JudgeSpec
from tapforge_api.learning import Stop
from tapforge_api.rewards import Rewards
from tapforge_envs.protocol import Outcome
from tapforge_trainer.records import EpisodeRewards
from tapforge_trainer.rewards.budget import AT_ONCE, JudgeBudget, JudgeBudgetSpent, episodes_at_once

#: that an episode takes
TOKENS = 100


class Judged:
    """In the place of a `Rewarder`: everything succeeded, and costs the same."""

    def __init__(self):
        self.asked = []
        self.gate = asyncio.Event()

    async def rewards(self, record, frames):
        self.asked.append(record.id)
        await self.gate.wait()
        used = {"prompt_tokens": TOKENS - 10, "answer_tokens": 10, "money": 0.5}
        return EpisodeRewards({}, Outcome.SUCCESS, record.reason, record.outcome, usage=used)

    async def close(self):
        pass


def test_questions_that_wait_for_an_answer_count_and_no_more_are_asked():
    async def go():
        judged, stop = Judged(), Stop(judge_tokens=3 * TOKENS)
        budget = JudgeBudget(lambda: stop, at_once=4)
        async with a_house(Demonstrator(POOL), rewarder=judged, rewarded=True, budget=budget) as house:
            batch = asyncio.create_task(house.scheduler.next_batch())
            await until(lambda: len(judged.asked) == 4 and house.slots.counts().leased == 0)
            judged.gate.set()
            with pytest.raises(JudgeBudgetSpent, match="raise spec.stop.judgeTokens, which is 300"):
                await batch
            # At most those that were asked about at once are beyond it; the other episodes were played, and are kept.
            assert 3 <= len(judged.asked) <= 3 + 4
            assert budget.tokens == TOKENS * len(judged.asked)
            assert budget.money == 0.5 * len(judged.asked)
            assert any(group.awaiting for group in house.scheduler.buffer.unfinished())

    run(go())


def test_what_is_judged_is_handed_out_and_the_next_batch_waits_for_more():
    async def go():
        judged = Judged()
        judged.gate.set()
        limits = {"stop": Stop(judge_money=0.5 * 12)}
        budget = JudgeBudget(lambda: limits["stop"], at_once=1)
        async with a_house(Demonstrator(POOL), rewarder=judged, rewarded=True, budget=budget) as house:
            assert len(await house.scheduler.next_batch()) == 2
            await until(lambda: len(judged.asked) == 12)
            house.scheduler.set_version(1)
            assert len(await house.scheduler.next_batch()) == 2
            house.scheduler.set_version(2)
            with pytest.raises(JudgeBudgetSpent, match="judges have cost 6.00"):
                await house.scheduler.next_batch()
            limits["stop"] = Stop(judge_money=100.0)
            assert len(await house.scheduler.next_batch()) == 2

    run(go())


def test_a_measurement_that_asks_no_judge_is_made_whatever_is_spent():
    async def go():
        budget = JudgeBudget(lambda: Stop(judge_tokens=1), tokens=5)
        async with a_house(Demonstrator(POOL), rewarder=Judged(), rewarded=True, budget=budget) as house:
            assert all(record.valid for record in await house.scheduler.run_fixed(POOL[:3]))
            with pytest.raises(JudgeBudgetSpent):
                await house.scheduler.run_fixed(POOL[:3], judged=True)

    run(go())


def test_with_a_budget_no_more_episodes_are_asked_about_than_questions_have_places():
    model = JudgeModel(url="http://127.0.0.1:9/v1", model="m", concurrency=5)
    rewards = Rewards.model_validate({"streams": [{"name": "judge", "judge": JudgeSpec(models=(model,))}]})
    assert episodes_at_once(rewards, Stop()) == AT_ONCE
    assert episodes_at_once(rewards, Stop(judge_tokens=10)) == 5
    assert episodes_at_once(Rewards(), Stop(judge_tokens=10)) == AT_ONCE
