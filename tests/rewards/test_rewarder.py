"""Rewards that are asked for after an episode's end: what is asked, what is counted, and what is missing."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from test_streams import JUDGE, LOST, WON

from tapforge_api.rewards import Rewards
from tapforge_envs.protocol import Outcome, Reason
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.judges.usage import Usage
from tapforge_trainer.judges.verdicts import Trajectory, Verdict, VerdictMissing
from tapforge_trainer.recording.lines import encode_rewards
from tapforge_trainer.rewards.rewarder import Rewarder

FRAMES = {name: FittedFrame(name, name.encode(), 1, 1) for name in ("f", "last")}
TASK, STEPS = {"name": "judge", "judge": JUDGE}, {"name": "steps", "judge": JUDGE}


class Scripted:
    """A judge that says what it is given, one after another; the last again and again."""

    def __init__(self, *answers: float | Exception):
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []
        self.closed = False
        self.usage = Usage()

    async def task(self, trajectory: Trajectory) -> Verdict:
        return self._next(trajectory, -1)

    async def step(self, trajectory: Trajectory, index: int) -> Verdict:
        return self._next(trajectory, index)

    async def close(self) -> None:
        self.closed = True

    def _next(self, trajectory: Trajectory, index: int) -> Verdict:
        self.asked.append((trajectory.episode.id, index))
        self.usage.sent(0.5, False)
        self.usage.prompt_tokens += 10
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return Verdict(answer, f"saw {len(trajectory.screens)} screens", (), 0, 10, 2, 0.5, "m")


def rewarder(judge: Scripted, *streams, pauses: list | None = None, **more) -> Rewarder:
    async def sleep(seconds: float) -> None:
        if pauses is not None:
            pauses.append(seconds)

    rewards = Rewards.model_validate({"streams": list(streams), **more})

    def make(spec, kind, *, endpoints, usage, journal) -> Scripted:
        judge.usage = usage
        return judge

    return Rewarder(rewards, 1, make, sleep)


def rewards_of(asks: Rewarder, episode):
    async def go():
        found = await asks.rewards(episode, FRAMES)
        await asks.close()
        return found

    return asyncio.run(go())


def test_a_judge_of_episodes_sees_every_screen_and_speaks_on_the_last_step():
    judge = Scripted(1.0)
    found = rewards_of(rewarder(judge, TASK), replace(WON, last_frame="last"))
    assert found.streams == {"judge": (0.0, 0.0, 1.0)}
    assert found.words["judge"][-1] == "saw 4 screens"
    assert (found.outcome, found.verified) == (Outcome.SUCCESS, Outcome.SUCCESS)
    assert found.usage["prompt_tokens"] == 10
    assert judge.closed


@pytest.mark.parametrize(
    ("value", "threshold", "outcome"),
    [
        (1.0, 0.5, Outcome.SUCCESS),
        (0.0, 0.5, Outcome.FAILURE),
        (0.5, 0.5, Outcome.SUCCESS),
        (0.6, 0.7, Outcome.FAILURE),
    ],
)
def test_the_stream_of_success_decides_and_the_environment_is_kept_beside_it(value, threshold, outcome):
    asks = rewarder(Scripted(value), TASK, success="judge", threshold=threshold)
    found = rewards_of(asks, WON)
    assert (found.outcome, found.reason, found.verified) == (outcome, Reason.DONE, Outcome.SUCCESS)


@pytest.mark.parametrize("reason", [Reason.STEP_LIMIT, Reason.PARSE_FAILURES, Reason.CONTEXT_LIMIT])
def test_what_the_agent_did_not_end_has_failed_and_no_judge_is_asked(reason):
    judge = Scripted(1.0)
    asks = rewarder(judge, TASK, success="judge")
    found = rewards_of(asks, replace(LOST, reason=reason))
    assert (found.outcome, found.reason, found.streams) == (Outcome.FAILURE, reason, {"judge": (0.0, 0.0, 0.0)})
    assert judge.asked == []


def test_a_declared_infeasibility_is_judged_like_any_other_end():
    """Whether the task can be done is a label; where rewards decide, it is not read."""
    asks = rewarder(Scripted(0.0), TASK, success="judge", verifier="ignored")
    record = replace(WON, reason=Reason.DECLARED_INFEASIBLE, outcome=None, awaits_rewards=True)
    found = rewards_of(asks, record)
    assert (found.outcome, found.verified) == (Outcome.FAILURE, None)
    assert record.rewarded(found).valid


def test_steps_are_judged_apart_and_an_answer_that_is_no_action_is_not_asked_about():
    judge = Scripted(1.0)
    found = rewards_of(rewarder(judge, STEPS), LOST)  # its first two answers are no actions
    assert found.streams == {"steps": (0.0, 0.0, 1.0)}
    assert judge.asked == [("lost", 2)]


def test_a_missing_verdict_is_asked_for_again_with_growing_pauses():
    pauses: list[float] = []
    judge = Scripted(VerdictMissing("away"), VerdictMissing("away"), 1.0)
    found = rewards_of(rewarder(judge, TASK, pauses=pauses), WON)
    assert found.streams["judge"][-1] == 1.0
    assert len(pauses) == 2 and pauses[0] < pauses[1]
    assert found.usage["asked_again"] == 2
    assert found.usage["prompt_tokens"] == 30 and found.usage["requests"] == 3, "also what came to nothing"


def test_without_a_verdict_by_the_deadline_the_episode_leaves_its_group():
    asks = rewarder(Scripted(VerdictMissing("http://judge: away")), TASK, success="judge", deadlineSeconds=0.5)
    found = rewards_of(asks, WON)
    record = replace(WON, awaits_rewards=True).rewarded(found)
    assert (record.outcome, record.reason, record.valid) == (Outcome.INVALID, Reason.VERDICT_MISSING, False)
    assert "http://judge: away" in record.message
    assert found.streams == {"judge": (None, None, None)}


def test_a_step_without_a_verdict_is_left_out_and_the_episode_stays():
    asks = rewarder(Scripted(VerdictMissing("away"), 1.0), STEPS, deadlineSeconds=0.5)
    found = rewards_of(asks, WON)
    assert found.streams["steps"][0] is None and found.streams["steps"][1:] == (1.0, 1.0)
    assert (found.outcome, found.usage["missing"]) == (Outcome.SUCCESS, 1)


def test_what_never_changes_is_not_asked_for_again():
    judge = Scripted(VerdictMissing("refused: no images", permanent=True))
    assert rewards_of(rewarder(judge, TASK), WON).outcome is Outcome.INVALID
    assert len(judge.asked) == 1


def test_the_screen_after_an_answer_that_was_no_action_is_the_one_before():
    bad = replace(WON, steps=tuple(replace(step, parse_error="json") for step in WON.steps))
    assert len(Trajectory.of(bad, FRAMES).screens) == 4
    assert len(Trajectory.of(WON, FRAMES).screens) == 3
    assert Trajectory.of(replace(WON, last_frame="last"), FRAMES).screens[-1] == b"last"


# --- rewards of installed packages ------------------------------------------------------------------------------------


def plugin(kind, monkeypatch) -> None:
    class Point:
        value, load = "mine:Mine", staticmethod(lambda: kind)

    monkeypatch.setattr("tapforge_trainer.plugins.find", lambda group, name, ours=(): Point if name == "mine" else None)


def test_a_reward_of_another_package(monkeypatch):
    class Taps:
        def __init__(self, *, worth: float = 1.0):
            self.worth = worth

        async def __call__(self, trajectory):
            return [self.worth * step.index for step in trajectory.episode.steps]

    plugin(Taps, monkeypatch)
    stream = {"name": "mine", "options": [{"name": "worth", "value": "0.5"}]}
    assert rewards_of(rewarder(Scripted(0.0), stream), WON).streams == {"mine": (0.0, 0.5, 1.0)}


@pytest.mark.parametrize(
    ("answer", "why"), [([1.0], "gave 1 values for episode won of 3 steps"), (float("nan"), "gave nan at step 2")]
)
def test_what_is_no_reward_ends_the_run(answer, why, monkeypatch):
    class Broken:
        async def __call__(self, trajectory):
            return answer

    plugin(Broken, monkeypatch)
    with pytest.raises(ValueError, match=why):
        rewards_of(rewarder(Scripted(0.0), {"name": "mine"}), WON)


@pytest.mark.parametrize(
    ("answer", "values"),
    [(np.float32(0.5), (0.0, 0.0, 0.5)), (np.array([1, 0, 0.5], np.float32), (1.0, 0.0, 0.5)), (True, (0.0, 0.0, 1.0))],
)
def test_numbers_of_numpy_are_recorded_as_any_other(answer, values, monkeypatch):
    class Computed:
        async def __call__(self, trajectory):
            return answer

    plugin(Computed, monkeypatch)
    found = rewards_of(rewarder(Scripted(0.0), {"name": "mine"}), WON)
    assert found.streams == {"mine": values}
    assert encode_rewards("e", found)


def test_a_reward_of_another_package_that_never_answers_is_missing_at_the_deadline(monkeypatch):
    class Hangs:
        async def __call__(self, trajectory):
            await asyncio.Event().wait()

    plugin(Hangs, monkeypatch)
    found = rewards_of(rewarder(Scripted(0.0), {"name": "mine"}, deadlineSeconds=0.05), WON)
    assert (found.outcome, found.reason) == (Outcome.INVALID, Reason.VERDICT_MISSING)
    assert "'mine' gave no answer within 0.05 s" in found.message


def test_of_an_episode_that_ended_before_its_first_step_nothing_is_asked(monkeypatch):
    """Its first prompt was too long, say."""

    class Broken:
        async def __call__(self, trajectory):
            return float(trajectory.episode.steps[0].index)

    plugin(Broken, monkeypatch)
    asks = rewarder(Scripted(1.0), TASK, {"name": "mine"}, success="judge")
    found = rewards_of(asks, replace(LOST, steps=(), reason=Reason.CONTEXT_LIMIT))
    assert (found.outcome, found.streams) == (Outcome.FAILURE, {"judge": (), "mine": ()})


def test_an_unknown_reward_has_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'format'"):
        rewarder(Scripted(0.0), {"name": "formatt"})
