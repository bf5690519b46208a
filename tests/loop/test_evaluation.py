"""Measurements: fixed tasks, one policy version, honest baselines."""

from collections import Counter
from pathlib import Path

import pytest

from tapforge_api import load
from tapforge_envs.protocol import ACTION, Outcome, Reason, Task
from tapforge_trainer.agents import make_agent
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.model_source.tiny_base import SHIPPED
from tapforge_trainer.records import EpisodeRecord, Generation, Prompt, Sampling, StepRecord
from tapforge_trainer.rollout.baselines import baselines
from tapforge_trainer.run.evaluation import measured
from tapforge_trainer.tasks.selection import evaluation_tasks, training_tasks

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "quickstart.yaml"


@pytest.fixture(scope="module")
def agent():
    return make_agent(
        "qwen3-vl", SHIPPED, prompt="compact", history_images=1, history_steps=8, context_tokens=256, response_tokens=24
    )


def _episode(number: int, outcome: Outcome | None, version: int = 1, template: str = "open") -> EpisodeRecord:
    generation = Generation((1, 2), (3,), (-0.1,), (version,), "stop", 2)
    step = StepRecord(f"e{number}", 0, (), None, None, generation, "", None, None, 0.0, "", 0.0, 0.0)
    reason = {None: Reason.CANCELLED, Outcome.INVALID: Reason.DEADLINE}.get(outcome, Reason.DONE)
    task = Task(suite="quickstart", template=template)
    return EpisodeRecord(f"e{number}", "g", task, 0, "s", 0, reason, outcome, None, "", (step,), 0.0, 1.0)


def test_invalid_and_stopped_episodes_are_in_no_rate():
    outcomes = [Outcome.SUCCESS] * 3 + [Outcome.FAILURE] + [Outcome.INVALID] * 4 + [None]
    result = measured([_episode(n, outcome) for n, outcome in enumerate(outcomes)])
    assert result["success"] == 0.75
    assert result["success_attempted"] == 3 / 8
    assert (result["episodes"], result["invalid"]) == (4, 4)
    assert result["interval"][0] < 0.75 < result["interval"][1]


def test_nothing_valid_is_no_figure():
    result = measured([_episode(0, Outcome.INVALID)])
    assert result["success"] is None
    assert result["interval"] is None


def test_two_policy_versions_are_not_one_measurement():
    with pytest.raises(ValueError, match="mixed the policy versions"):
        measured([_episode(0, Outcome.SUCCESS, 1), _episode(1, Outcome.SUCCESS, 2)])


def test_only_the_version_that_was_to_be_measured_is():
    episodes = [_episode(0, Outcome.SUCCESS, 3), _episode(1, Outcome.FAILURE, 3)]
    assert measured(episodes, version=3)["policy_version"] == 3
    assert measured([], version=3)["policy_version"] is None
    with pytest.raises(ValueError, match="policy version 4 was to be measured, and version 3 answered"):
        measured(episodes, version=4)


def test_a_run_is_measured_on_tasks_that_do_not_depend_on_its_seed():
    one, two = (load(SAMPLE, overrides=[f"spec.seed={seed}"]) for seed in (1, 2))
    assert evaluation_tasks(one).tasks == evaluation_tasks(two).tasks
    assert len({task.key for task in evaluation_tasks(one).tasks}) == one.spec.evaluation.episodes
    assert training_tasks(one).sample(1, 0) != training_tasks(two).sample(2, 0)


def test_measured_goals_are_never_practised():
    run = load(SAMPLE)
    measured_goals = {task.goal for task in evaluation_tasks(run).tasks}
    practised = {training_tasks(run).sample(run.spec.seed, index).goal for index in range(4000)}
    assert not measured_goals & practised


@pytest.mark.parametrize("name", ["random", "always_infeasible"])
async def test_baselines_answer_in_words_that_the_agent_reads(agent, name):
    policy = baselines(agent)[name]
    seen: Counter[str] = Counter()
    screen = FittedFrame("screen", b"", 96, 160)
    for seed in range(200):
        generation = await policy.generate(Prompt((1,), (screen,), 1), Sampling(max_tokens=24, seed=seed))
        action = agent.read(agent.decode(generation.ids), generation.finish_reason, screen)
        seen[ACTION.dump_python(action)["type"]] += 1
    assert seen["terminate"] == 200 if name == "always_infeasible" else {"tap", "terminate"} < set(seen)
