"""The phone's judge behind HTTP says what the phone says, and errs as often as it is asked to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from judged_episodes import played, serving, solved, some, spec

from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Reason
from tapforge_trainer.judges.judge import Trajectory, VerdictMissing, judge_of
from tapforge_trainer.judges.server import Faults, JudgeServer
from tapforge_trainer.judges.simulated import Errors


@pytest.mark.parametrize("suite", ["quickstart", "standard"])
async def test_it_agrees_with_the_verifier(suite: str) -> None:
    trajectories = list(some(40, suite))
    assert 5 < sum(map(solved, trajectories)) < 40
    async with serving(JudgeServer("simulated-phone")) as url:
        judge = judge_of(spec(url), "task")
        for trajectory in trajectories:
            verdict = await judge.task(trajectory)
            assert (verdict.value == 1.0) == solved(trajectory), (trajectory.episode.task.key, verdict.reason)
        await judge.close()


async def test_an_episode_that_was_cut_short_is_no_success() -> None:
    whole = played(catalog.tasks("quickstart", "train", ["open"]).sample(1, 0))
    short = replace(whole.episode, steps=whole.episode.steps[:-1], reason=Reason.STEP_LIMIT)
    async with serving(JudgeServer("simulated-phone")) as url:
        judge = judge_of(spec(url), "task")
        assert (await judge.task(whole)).value == 1.0
        assert (await judge.task(Trajectory(short, whole.screens[:-1]))).value == 0.0
        await judge.close()


async def test_a_task_that_has_a_goal_alone_has_no_answer_here() -> None:
    whole = played(catalog.tasks("quickstart", "train", ["open"]).sample(1, 0))
    goal = whole.episode.task.model_copy(update={"template": "proposed-1", "params": {}, "goal": "open the mail"})
    asked = Trajectory(replace(whole.episode, task=goal), whole.screens)
    async with serving(JudgeServer("simulated-phone")) as url:
        judge = judge_of(spec(url), "task")
        with pytest.raises(VerdictMissing, match="has a goal and no check"):
            await judge.task(asked)
        await judge.close()


async def test_a_step_is_right_where_it_has_an_effect() -> None:
    trajectory = played(catalog.tasks("quickstart", "train", ["switch"]).sample(1, 0))
    steps = list(trajectory.episode.steps)
    beside = replace(steps[0], action={"type": "tap", "x": 0.99, "y": 0.01})
    missed = replace(trajectory.episode, steps=(beside, *steps[1:]))
    async with serving(JudgeServer("simulated-phone")) as url:
        judge = judge_of(spec(url, prompt="simulated-phone-step"), "step")
        assert [(await judge.step(trajectory, i)).value for i in range(len(steps))] == [1.0] * len(steps)
        found = [(await judge.step(Trajectory(missed, trajectory.screens), i)).value for i in (0, len(steps) - 1)]
        assert found == [0.0, 0.0]
        last = Trajectory(trajectory.episode, trajectory.screens[:-1])
        with pytest.raises(VerdictMissing, match="no screen after it"):
            await judge.step(last, len(steps) - 1)
        await judge.close()


async def test_errors_come_at_the_stated_rate_and_always_the_same() -> None:
    trajectories = list(some(60))
    rates = Errors(rate=0.3, by_template={"open": 1.0}, seed=4)
    seen = []
    for _ in range(2):
        async with serving(JudgeServer("simulated-phone", rates)) as url:
            judge = judge_of(spec(url, model={"samples": 5, "temperature": 1.0}), "task")
            seen.append([(await judge.task(one)).votes for one in trajectories])
            await judge.close()
    assert seen[0] == seen[1]
    wrong = [
        [vote.value != solved(one) for vote in votes]
        for one, votes in zip(trajectories, seen[0], strict=True)
        if one.episode.task.template != "open"
    ]
    assert 0.2 < sum(map(sum, wrong)) / (5 * len(wrong)) < 0.4
    # samples err apart from each other
    assert any(0 < sum(one) < 5 for one in wrong)
    opened = [v for one, v in zip(trajectories, seen[0], strict=True) if one.episode.task.template == "open"]
    assert opened
    for one, votes in zip([one for one in trajectories if one.episode.task.template == "open"], opened, strict=True):
        assert all(vote.value != solved(one) for vote in votes)


async def test_voting_mends_independent_errors() -> None:
    trajectories = list(some(60))

    async def wrong(samples: int) -> int:
        async with serving(JudgeServer("simulated-phone", Errors(rate=0.2, seed=1))) as url:
            judge = judge_of(spec(url, model={"samples": samples, "temperature": 1.0}), "task")
            found = [(await judge.task(one)).value != solved(one) for one in trajectories]
            await judge.close()
            return sum(found)

    assert await wrong(7) < await wrong(1)


async def test_a_judge_that_favours_long_answers_can_be_hacked() -> None:
    task = catalog.tasks("quickstart", "train", ["switch"]).sample(1, 0)
    bad = next(t for t in (played(task, error_rate=1.0, text=w) for w in ("tap",)) if not solved(t))
    long = played(task, error_rate=1.0, text="tap " + "very " * 100)
    async with serving(JudgeServer("simulated-phone", Errors(favour_long=400))) as url:
        judge = judge_of(spec(url), "task")
        assert (await judge.task(bad)).value == 0.0
        assert (await judge.task(long)).value == 1.0
        await judge.close()


async def test_what_it_cannot_play_is_a_named_error() -> None:
    trajectory = played(catalog.tasks("quickstart", "train").sample(1, 0))
    elsewhere = replace(trajectory.episode, task=trajectory.episode.task.model_copy(update={"suite": "androidworld"}))
    async with serving(JudgeServer("simulated-phone", faults=Faults())) as url:
        judge = judge_of(spec(url), "task")
        with pytest.raises(VerdictMissing, match="unknown suite"):
            await judge.task(Trajectory(elsewhere, trajectory.screens))
        await judge.close()
        words = judge_of(spec(url, prompt="task"), "task")
        with pytest.raises(VerdictMissing, match="set prompt to one of them") as missing:
            await words.task(trajectory)
        assert missing.value.permanent
        await words.close()
