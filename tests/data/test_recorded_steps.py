"""Answers to recorded steps through the rollout's own scheduler, worker and batch: no phone, process or model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data.test_bad_rows import long_episode

from tapforge_api import load
from tapforge_api.dataset import StepReward
from tapforge_envs.protocol import Action, AskUser, Back, Outcome, Reason, Tap, Terminate
from tapforge_envs.slots.places import Places
from tapforge_trainer.agents import make_agent
from tapforge_trainer.agents.agent import Agent
from tapforge_trainer.attempt import EpisodeLimits
from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.data.convert import convert
from tapforge_trainer.data.demo import ROWS, demo
from tapforge_trainer.data.episodes import DataError
from tapforge_trainer.data.folder import DataFolder
from tapforge_trainer.data.imitation import ImitationData
from tapforge_trainer.data.recorded import RecordedSteps
from tapforge_trainer.data.recorded_tasks import PRACTISED, recorded_tasks, step_of
from tapforge_trainer.data.sources import read
from tapforge_trainer.records import Generation, GroupRecord, Prompt, Sampling
from tapforge_trainer.rewards.streams import ENVIRONMENT, OUTCOME, StreamRule
from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.scheduler import Scheduler
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.run.adapters import adapter_options
from tapforge_trainer.run.assembly import recorded_steps
from tapforge_trainer.run.evaluation import measured
from tapforge_trainer.tasks.source import TaskSource
from tapforge_trainer.tiny.folder import write_model

OFFLINE = Path("manifests/samples/offline.yaml").absolute()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Agent:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 0)
    return make_agent(
        "qwen3-vl", folder, context_tokens=256, prompt="compact", history_images=2, history_steps=8, response_tokens=24
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    folder = tmp_path_factory.mktemp("demo")
    demo(folder / "rows", episodes=6, seed=0)
    convert(read("verl", folder / "rows" / ROWS, {}), "verl", folder / "set", {}, 0.1)
    return DataFolder(folder / "set")


class Says:
    """Answers with what `choose` says for the number of the request: an action, or a text that is none."""

    def __init__(self, agent: Agent, choose: Callable[[int], Action | str]):
        self._agent, self._choose = agent, choose
        self.prompts: list[Prompt] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        said = self._choose(len(self.prompts))
        self.prompts.append(prompt)
        action = Back() if isinstance(said, str) else said
        ids = self._agent.answer_ids(action, prompt.frames[-1])
        if isinstance(said, str):
            ids = ids[1:]  # without its opening tag
        return Generation(prompt.ids, ids, (-0.5,) * len(ids), (0,) * len(ids), "stop", prompt.expanded_length)


def worker_of(agent: Agent, data: DataFolder, policy: Any, reward: StepReward | None = None) -> RolloutWorker:
    steps = RecordedSteps(agent, {PRACTISED: data}, reward or StepReward(), 2)
    return RolloutWorker(agent, {"": policy}, steps, earlier=steps.earlier)


def scheduler_of(worker: RolloutWorker, data: DataFolder, size: int, groups: int) -> Scheduler:
    tasks = TaskSource(recorded_tasks(data.folder, ("success", "unknown")), seed=0)
    limits = GroupLimits(group_size=size, groups_per_update=groups, max_staleness=0, min_valid=size)
    once = EpisodeLimits(max_parse_failures=1)
    return Scheduler(Places(4), worker, Sampling(24), tasks=tasks, groups=limits, episodes=once)


async def batch_of(agent: Agent, data: DataFolder, choose: Callable[[int], Action | str]) -> list[GroupRecord]:
    """Two groups of four."""
    worker = worker_of(agent, data, Says(agent, choose))
    scheduler = scheduler_of(worker, data, 4, 2)
    try:
        return await scheduler.next_batch()
    finally:
        await scheduler.close()
        await worker.close()


def test_every_screen_that_a_history_in_blocks_shows_is_there(data: DataFolder, tmp_path: Path) -> None:
    overrides = [
        f"spec.environment.source.dataset.path={data.folder}",
        "spec.environment.source.dataset.heldOut=null",
        "spec.model.contextTokens=4096",
        "spec.model.adapter={prompt: full, history: {blocks: {keep: 1, upTo: 3}}}",
    ]
    run = load(OFFLINE, overrides)
    write_model(tmp_path / "model", 0)
    agent = make_agent("qwen3-vl", tmp_path / "model", **adapter_options(run))
    found = recorded_steps(run, agent)
    assert found is not None
    tasks, shown = recorded_tasks(data.folder, ("success", "unknown")), set[int]()
    for task in (tasks.at(number) for number in range(10)):
        seen = agent.prepare(found.recorded(task).observation)[0]
        prompt = agent.prompt(task.goal, found.earlier(task), seen)
        assert isinstance(prompt, Prompt) and all(frame.data for frame in prompt.frames)
        shown.add(len(prompt.frames))
    assert shown == {1, 2, 3}


async def test_a_step_is_asked_as_imitation_asks_it_and_its_action_is_right(agent: Agent, data: DataFolder) -> None:
    tasks = recorded_tasks(data.folder, ("success", "unknown"))
    imitated = ImitationData(agent, data, ("success", "unknown"))
    assert len(tasks) == len(imitated) > 20
    every = [tasks.at(number) for number in range(len(tasks))]
    actions = [data[step_of(task)[0]].steps[step_of(task)[1]].action for task in every]
    assert [task.template for task in every] == [action.type for action in actions if action is not None]
    policy = Says(agent, lambda number: actions[number] or Back())
    worker = worker_of(agent, data, policy)
    scheduler = Scheduler(Places(1), worker, Sampling(24))
    records = await scheduler.run_fixed(every)
    await scheduler.close()
    assert [record.outcome for record in records] == [Outcome.SUCCESS] * len(every)
    assert {record.steps[0].reward for record in records} == {1.0}
    for sample, prompt in zip(imitated.batch(range(len(every))).samples, policy.prompts, strict=True):
        assert tuple(sample.ids[: sample.spans[0].start]) == tuple(prompt.ids)
        assert sample.frames == tuple(frame.name for frame in prompt.frames)
        assert all(frame.data for frame in prompt.frames), "also those of history"
    figures = measured(records)
    assert (figures["type_accuracy"], figures["parameter_accuracy"], figures["understood"]) == (1, 1, 1)


async def test_members_of_a_group_answer_one_step_and_are_compared(agent: Agent, data: DataFolder) -> None:
    found: list[Action | str] = [Tap(x=0.01, y=0.99), Back(), Terminate(status="failure"), "no call"]
    groups = await batch_of(agent, data, lambda number: found[number % 4])
    assert [len(group.episodes) for group in groups] == [4, 4]
    for group in groups:
        assert {episode.task.key for episode in group.episodes} == {group.task.key} and group.task.max_steps == 1
        assert {len(episode.steps) for episode in group.episodes} == {1}
        reasons = sorted(episode.reason for episode in group.episodes)
        assert reasons == sorted([Reason.DONE] * 3 + [Reason.PARSE_FAILURES]), "no limit of steps ended any"


async def test_form_alone_separates_no_group(agent: Agent, data: DataFolder) -> None:
    # Half of the answers can be read, and none is right: their type is that of no recorded step but the last ones.
    said: list[Action | str] = [AskUser(text="what?"), "no call"]
    groups = await batch_of(agent, data, lambda number: said[number % 2])
    read = [step.parse_error is None for group in groups for episode in group.episodes for step in episode.steps]
    assert sum(read) == 4 and {episode.outcome for group in groups for episode in group.episodes} == {Outcome.FAILURE}
    guarded = (ENVIRONMENT, OUTCOME, StreamRule("format", "format", weight=0.5, gate="mixedOutcomes"))
    free = (*guarded[:2], StreamRule("format", "format", weight=0.5))

    def learned(streams: tuple[StreamRule, ...]) -> int:
        return len(build_batch(groups, BatchRules(estimator="grpo", signal="reward", streams=streams)).samples)

    assert learned(free) == 8, "the guard is what makes the difference"
    assert learned(guarded) == 0

    # What is partly right teaches, also where nothing is wholly right.
    place = Tap(x=0.99, y=0.99)
    groups = await batch_of(agent, data, lambda number: place if number % 2 else Terminate(status="failure"))
    assert learned(guarded) == 8


async def test_a_damaged_screen_costs_its_own_step_alone(agent: Agent, tmp_path: Path) -> None:
    data = long_episode(tmp_path / "set", 3)
    [pack] = (tmp_path / "set" / "screens").glob("*.tar")
    whole = bytearray(pack.read_bytes())
    whole[700] ^= 0xFF
    pack.write_bytes(bytes(whole))
    data = DataFolder(tmp_path / "set")
    tasks = recorded_tasks(data.folder, ("unknown",))
    worker = worker_of(agent, data, Says(agent, lambda number: Back()))
    scheduler = Scheduler(Places(1), worker, Sampling(24), groups=GroupLimits(max_reruns=0))
    records = await scheduler.run_fixed([tasks.at(number) for number in range(3)])
    await scheduler.close()
    outcomes = [record.outcome for record in records]
    assert Outcome.INVALID in outcomes and "damaged" in " ".join(record.message for record in records)


def test_each_step_comes_once_before_any_comes_again(data: DataFolder) -> None:
    tasks = recorded_tasks(data.folder, ("success", "unknown"))
    count = len(tasks)
    rounds = [[tasks.sample(7, around * count + place).key for place in range(count)] for around in range(2)]
    assert len(set(rounds[0])) == count and sorted(rounds[0]) == sorted(rounds[1]) and rounds[0] != rounds[1]
    assert [tasks.sample(7, place).key for place in range(count)] == rounds[0]
    with pytest.raises(DataError, match="no step to answer"):
        recorded_tasks(data.folder, ("failure",))
