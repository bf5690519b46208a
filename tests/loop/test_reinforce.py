"""The loop on real phones with a learner that only counts: what an update leads to, and what is saved at which end."""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from counted import SPEC, group_of, parts, updates
from phones import until

from tapforge_api import load
from tapforge_envs.protocol import Outcome
from tapforge_trainer.algorithms import registry
from tapforge_trainer.frames.handles import FramesLost
from tapforge_trainer.judges.server import JudgeServer
from tapforge_trainer.loop import reinforce
from tapforge_trainer.recording.learner_tokens import LearnerTokenReader
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.rollout.scheduler import RolloutError
from tapforge_trainer.run.context import RunContext
from tapforge_trainer.run.folder import ROLLOUT, read_events
from tapforge_trainer.run.saving import checkpoint_due, grace_note
from tapforge_trainer.run.shutdown import StopReason
from tapforge_trainer.run.start import judge_budget_of
from tapforge_trainer.tasks.figures import task_table
from tapforge_trainer.telemetry.progress import Progress


async def test_each_update_is_learned_synced_reported_and_saved_when_due(tmp_path: Path) -> None:
    async with parts(tmp_path) as context:
        progress = Progress()
        await reinforce(context, progress)
        policy: Any = context.policy
        assert [version for _, version, _ in policy.learner.updates] == [0, 1, 2]
        assert len({seed for _, _, seed in policy.learner.updates}) == 3
        assert policy.synced == [1, 2, 3] and progress.version == 3
        assert [update for update, _ in policy.saved] == [2, 3], "when it is due, and at the end"
        assert policy.saved[0][1]["first_proof"] == {"gap_mean": 0.5}, "by which a resumed run judges later syncs"
        assert context.telemetry.view.update == 3 and len(context.telemetry.view.curve) == 3
        await reinforce(context, progress)
        assert len(policy.learner.updates) == 3, "a finished run learns nothing more"
    assert updates(tmp_path) == [1, 2, 3]
    learner = [event["learner"] for event in read_events(tmp_path) if event["event"] == "update"]
    assert all(metrics["seconds_rollout_wait"] >= 0 and metrics["seconds_prepare"] > 0 for metrics in learner)
    assert [metrics["seconds_checkpoint"] > 0 for metrics in learner] == [False, False, True], "after a checkpoint"
    notes = [event["text"] for event in read_events(tmp_path) if event["event"] == "note"]
    words = "importance weights can't be trusted", "held after a full set of weights was sent once more"
    assert [sum(word in note for note in notes) for word in words] == [3, 3] and len(notes) == 6


@pytest.mark.parametrize("again", [0, 1])
async def test_a_recording_tells_which_groups_an_update_had(tmp_path: Path, again: int) -> None:
    """The replay puts batches together by the order of groups alone."""
    async with parts(tmp_path, "rollout.dynamicSampling.enabled=true") as context:
        policy: Any = context.policy
        policy.learner.loses = again
        await reinforce(context, Progress())
    orders = {group.id: group.order for group in Recording(tmp_path / ROLLOUT).groups()}
    number = {order: n for n, order in enumerate(sorted(orders.values()))}
    learned = policy.learner.samples[again:]
    assert [{number[orders[sample.group]] // 4 for sample in samples} for samples in learned] == [{0}, {1}, {2}]
    events = [event for event in read_events(tmp_path) if event["event"] == "update"]
    for event, samples in zip(events, learned, strict=True):
        consumed = event["consumed"]["groups"]
        assert {sample.group for sample in samples} <= set(consumed) and not event["consumed"]["replayed"]
        assert len(consumed) == 4 and [orders[group] for group in consumed] == sorted(map(orders.get, consumed))


async def test_what_tasks_came_to_is_remembered_over_sessions(tmp_path: Path) -> None:
    """Every valid episode of the groups that updates are past counts once, dropped ones included."""
    options = ("tasks.maxTasks=6", "tasks.sampler.name=near_half", "tasks.cooldown={afterSolved: 1, updates: 1}")
    options = (*options, "rollout.dynamicSampling.enabled=true", "rollout.groupSize=2")
    async with parts(tmp_path, *options) as context:
        await reinforce(context, Progress())
        first: Any = context.policy
    _, state = first.saved[-1]
    state = json.loads(json.dumps(state))  # as a checkpoint keeps it
    assert state["practice"]["memory"]["update"] == 3
    async with parts(tmp_path, *options, "stop.maxUpdates=5") as context:
        await reinforce(context, Progress.of(state))
        second: Any = context.policy
    table = task_table(second.saved[-1][1]["practice"])
    events = [event for event in read_events(tmp_path) if event["event"] == "update"]
    attempts = sum(row["attempts"] for row in table["tasks"].values())
    assert attempts == sum(row["attempts"] for row in table["templates"].values())
    assert attempts == sum(row["episodes"] for event in events for row in event["templates"].values())
    played = sum(event["attempts"].get(outcome, 0) for event in events for outcome in ("success", "failure"))
    assert played <= attempts <= played + 16, "plus what the first session played of groups that the second dropped"
    assert table["tasks_known"] <= 6 and table["paused"] == events[-1]["tasks"]["paused"] > 0
    assert all(event["staleness"]["max"] <= 1 for event in events)


@pytest.mark.parametrize("lost", [0, 1])
async def test_rare_successes_come_again_also_after_a_restart(tmp_path: Path, lost: int) -> None:
    """The learner looks whether their frames are there: those of the first session are in the recording alone."""
    options = ("algorithm.loss.anchor=behavior", "rollout.replay={share: 0.5, maxSuccess: 0.75}")
    async with parts(tmp_path, *options) as context:
        await reinforce(context, Progress())
        first: Any = context.policy
    _, state = first.saved[-1]
    state = json.loads(json.dumps(state))
    assert state["replay"], "as a checkpoint keeps it"
    async with parts(tmp_path, *options, "stop.maxUpdates=5") as context:
        second: Any = context.policy
        second.learner.loses = lost
        await reinforce(context, Progress.of(state))
    recorded = {episode.id: episode for episode in Recording(tmp_path / ROLLOUT).episodes()}
    tokens, seen = LearnerTokenReader(tmp_path / ROLLOUT), set[str]()
    events = [event for event in read_events(tmp_path) if event["event"] == "update"]
    for event, samples in zip(events, [*first.learner.samples, *second.learner.samples[lost:]], strict=True):
        again = {sample.episode for sample in samples} & seen
        assert {recorded[name].group for name in again} == set(event["consumed"]["replayed"])
        assert len(again) == event["replay"]["episodes"] <= 8
        assert {recorded[name].outcome for name in again} <= {Outcome.SUCCESS}
        share = sum(sample.episode in again for sample in samples) / len(samples)
        assert event["replay"]["share"] == pytest.approx(share)
        learned = {sample.episode: tokens.find(sample.episode, event["update"]) for sample in samples}
        assert {found and found[0] for found in learned.values()} == {event["update"]}, "not of an earlier pass"
        seen |= {sample.episode for sample in samples}
    assert events[0]["replay"]["episodes"] == 0 < events[1]["replay"]["episodes"]
    kept_then = {name for kept in state["replay"] for name in kept["episodes"]}
    later = {sample.episode for sample in second.learner.samples[lost]}
    assert lost or later & kept_then, "of the first session"
    assert events[1]["replay"]["age_mean"] >= 1


async def test_a_success_whose_frames_are_lost_does_not_come_again(tmp_path: Path) -> None:
    options = ("algorithm.loss.anchor=behavior", "rollout.replay={share: 0.5, maxSuccess: 0.75}")
    async with parts(tmp_path, *options) as context:
        policy: Any = context.policy
        policy.learner.loses_sample = -1  # what comes again follows on the batch

        async def lose() -> None:
            policy.learner.loses = int(len(policy.learner.updates) == 1 and not policy.learner.lost)

        policy.learner.during = lose
        await reinforce(context, Progress())
        (lost,) = policy.learner.lost
        assert [version for _, version, _ in policy.learner.updates] == [0, 1, 2]
        first, failed, *later = ({sample.episode for sample in samples} for samples in policy.learner.samples)
        assert lost in first & failed and not any(lost in episodes for episodes in later)
        assert later[0] == failed - first, "the batch was whole, and came again at once, alone"
        assert len(later) == 2 and later[1] & first


async def test_what_an_estimator_does_wrong_is_said_with_the_update(tmp_path: Path, monkeypatch: Any) -> None:
    def broken(steps: Any) -> Any:
        raise ValueError("too few groups")

    monkeypatch.setitem(registry._BUILT_IN, "broken", broken)
    async with parts(tmp_path, "algorithm.advantage={plugin: {name: broken}}") as context:
        with pytest.raises(ValueError, match="^update 1: too few groups\n"):
            await reinforce(context, Progress())


@pytest.mark.parametrize(
    ("recording", "whole"),
    [("frames=none", {False}), ("share=0.5", {True}), ("encoding=webp", {False}), ("maxGiB=0.1", {True})],
)
async def test_an_update_has_its_frames_whatever_is_recorded(tmp_path: Path, recording: str, whole: set[bool]) -> None:
    """The learner looks whether every sample's frames are there."""
    async with parts(tmp_path, f"recording.{recording}") as context:
        await reinforce(context, Progress())
        policy: Any = context.policy
        assert len(policy.learner.updates) == 3
    recorded = Recording(tmp_path / ROLLOUT)
    assert {recorded.is_complete(episode) for episode in recorded.episodes() if episode.steps} == whole


async def test_unfinished_groups_that_were_not_recorded_are_rerun(tmp_path: Path) -> None:
    async with parts(tmp_path, "recording.frames=none", "rollout.maxStaleness=3") as context:
        await reinforce(context, Progress())
        first: Any = context.policy
    _, state = first.saved[-1]
    assert any(group["episodes"] for group in state["unfinished"])
    async with parts(tmp_path, "recording.frames=none", "stop.maxUpdates=5") as context:
        await reinforce(context, Progress(**state))
        second: Any = context.policy
        assert len(second.learner.updates) == 2
    groups = list(Recording(tmp_path / ROLLOUT).groups())
    assert len({group.order for group in groups}) >= 5 * 4


async def test_counters_and_the_order_of_tasks_continue_over_sessions(tmp_path: Path) -> None:
    async with parts(tmp_path) as context:
        await reinforce(context, Progress())
        first: Any = context.policy
    async with parts(tmp_path, "stop.maxUpdates=4") as context:
        _, state = first.saved[-1]
        progress = Progress(**state)
        await reinforce(context, progress)
        second: Any = context.policy
        _, later = second.saved[-1]
    assert (state["update"], later["update"], later["starts"]) == (3, 4, 2)
    assert later["episodes"] >= state["episodes"] >= 3 * 4 * 4, "a batch may have been played ahead"
    assert later["tasks"] >= state["tasks"] and later["next_order"] >= state["next_order"]
    assert later["seconds_rl"] > state["seconds_rl"]
    assert updates(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("seconds", "grace", "stopping", "words"),
    [
        (29.0, 60.0, False, ""),
        (45.0, 60.0, False, r"takes 45 s, and a stop has 60 s .*suspendGraceSeconds .*--grace\) to 90 or more"),
        (45.0, 60.0, True, r"took 45 s"),
    ],
)
def test_a_grace_that_is_too_short_for_a_checkpoint_is_reported(
    seconds: float, grace: float, stopping: bool, words: str
) -> None:
    """An update has to fit as well: half of the grace is for it."""
    found = grace_note(seconds, grace, stopping)
    assert re.search(words, found) if words else found == ""


@pytest.mark.parametrize(
    ("update", "since", "wrote", "due"),
    [
        (10, 0.0, math.inf, True),  # by its number, whatever the clock says
        (11, 899.0, 5.0, False),
        (11, 900.0, 5.0, True),
        (11, 900.0, 0.0, True),  # nobody knows what one takes before the first
        (11, 1000.0, 120.0, False),  # an eighth of the time would be writing
        (11, 1200.0, 120.0, True),
        (11, 1e9, math.inf, False),  # the last one is still being written
    ],
)
def test_a_checkpoint_is_due_by_updates_and_by_time(update: int, since: float, wrote: float, due: bool) -> None:
    settings = load(SPEC, ("checkpoints.everyUpdates=10",)).spec.checkpoints
    assert settings.every_seconds == 900
    assert checkpoint_due(update, since, wrote, settings) is due


async def test_slow_updates_are_saved_by_time(tmp_path: Path) -> None:
    often = ("checkpoints.everyUpdates=1000", "checkpoints.everySeconds=1", "stop.maxUpdates=2")
    async with parts(tmp_path, *often) as context:
        policy: Any = context.policy
        policy.learner.during = partial(asyncio.sleep, 1.0)
        await reinforce(context, Progress())
        assert [update for update, _ in policy.saved] == [1, 2]


async def test_a_checkpoint_counts_when_it_is_complete(tmp_path: Path) -> None:
    async with parts(tmp_path, "stop.maxUpdates=2") as context:
        await reinforce(context, Progress())
        (event,) = [one for one in read_events(tmp_path) if one["event"] == "checkpoint"]
        assert {"update", "path", "seconds", "seconds_stalled", "bytes"} <= set(event)
        assert context.telemetry.view.saved is not None and context.telemetry.view.saved.path == "update-2"


@pytest.mark.parametrize("mid_episode", ["true", "false"])
async def test_a_stop_finishes_the_update_and_saves_it(tmp_path: Path, mid_episode: str) -> None:
    # Phones have more to play than they can before the update, however late that comes on a busy machine.
    staleness = "rollout.maxStaleness=64"
    async with parts(tmp_path, "stop.maxUpdates=50", staleness, f"sync.midEpisode={mid_episode}") as context:
        policy: Any = context.policy

        async def stop() -> None:
            policy.generator.seconds = 3600.0
            await until(lambda: policy.generator.inside)  # an episode is under way, and would take long to end
            context.stop.request(StopReason.SUSPEND)

        policy.learner.during = stop
        progress = Progress()
        await reinforce(context, progress)
        assert (progress.update, progress.version) == (1, 1)
        assert [update for update, _ in policy.saved] == [1]
        assert policy.synced == ([1] if mid_episode == "true" else []), "nobody waits for episodes only to sync"
    assert updates(tmp_path) == [1]


async def test_a_stop_while_a_batch_is_played_saves_what_was_finished(tmp_path: Path) -> None:
    async with parts(tmp_path) as context:
        asyncio.get_running_loop().call_later(0.05, context.stop.request, StopReason.INTERRUPT)
        policy: Any = context.policy
        policy.generator.seconds = 3600.0
        await reinforce(context, Progress())
        assert policy.learner.updates == [] and [update for update, _ in policy.saved] == [0]


async def test_an_update_that_fails_is_not_saved(tmp_path: Path) -> None:
    async def fail() -> None:
        raise RuntimeError("rank 1 died")

    async with parts(tmp_path) as context:
        policy: Any = context.policy
        policy.learner.during = fail
        with pytest.raises(RuntimeError, match="rank 1 died") as caught:
            await reinforce(context, Progress())
        assert policy.saved == [] and not hasattr(caught.value, "__notes__")


async def test_a_batch_whose_frames_are_lost_comes_again_with_other_episodes(tmp_path: Path) -> None:
    async with parts(tmp_path, "rollout.maxStaleness=0") as context:
        policy: Any = context.policy
        policy.learner.loses = 1
        progress = Progress()
        await reinforce(context, progress)
        assert (progress.update, progress.version) == (3, 3)
        assert [version for _, version, _ in policy.learner.updates] == [0, 1, 2]
        first, again, *_ = ({sample.episode for sample in samples} for samples in policy.learner.samples)
        (lost,) = policy.learner.lost
        assert lost not in again and {group_of(name) for name in again} == {group_of(name) for name in first}
    assert updates(tmp_path) == [1, 2, 3]
    (note, *_) = [event["text"] for event in read_events(tmp_path) if event["event"] == "note"]
    assert "update 1 waits" in note and lost in note


async def test_what_advantages_need_of_the_learner_is_read_first(
    tmp_path: Path,
) -> None:
    changes = ("advantage={plugin: {name: otb}}", "kl={place: reward, estimator: k1, coefficient: 0.1}")
    async with parts(tmp_path, "rollout.maxStaleness=0", *(f"algorithm.{one}" for one in changes)) as context:
        policy: Any = context.policy
        policy.learner.loses = 1
        progress = Progress()
        await reinforce(context, progress)
        assert (progress.update, progress.version) == (3, 3)
        assert [reads for reads, _ in policy.learner.read] == [["divergence", "score_square"]] * 4
        learned = [len(samples) for samples in policy.learner.samples]
        assert all(read >= some for (_, read), some in zip(policy.learner.read[1:], learned, strict=True))
    (note, *_) = [event["text"] for event in read_events(tmp_path) if event["event"] == "note"]
    assert "update 1 waits" in note


async def test_an_update_without_samples_wakes_engines_that_slept_while_answers_were_read(tmp_path: Path) -> None:
    """All groups end alike, and outcomes gate: there is nothing to learn, and no sync."""
    async with parts(tmp_path, "algorithm.advantage={plugin: {name: otb}}", "stop.maxUpdates=1") as context:
        policy: Any = context.policy
        policy.generator.careless = lambda sampling: True
        await reinforce(context, Progress())
        assert policy.learner.read and not policy.learner.updates and not policy.synced
        assert not policy.asleep


async def test_frames_that_are_lost_again_and_again_end_the_run_and_leave_whole_weights(tmp_path: Path) -> None:
    async with parts(tmp_path, "rollout.maxStaleness=0") as context:
        policy: Any = context.policy
        policy.learner.loses = 100
        with pytest.raises(FramesLost):
            await reinforce(context, Progress())
        assert len(policy.learner.samples) == 4, "it comes again three times"
        ((update, state),) = policy.saved
        assert (update, state["version"]) == (0, 0)
        orders = [group["order"] for group in state["unfinished"]]
        assert orders[:2] == [0, 1], "the run can be resumed with the batch that no update has consumed"


async def test_an_update_is_saved_when_what_comes_after_it_fails(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("an engine died")

    async with parts(tmp_path) as context:
        policy: Any = context.policy
        policy.on_sync = fail
        with pytest.raises(RuntimeError, match="an engine died") as caught:
            await reinforce(context, Progress())
        ((update, state),) = policy.saved
        assert (update, state["version"]) == (1, 1)
        assert any("update 1 is saved" in note for note in caught.value.__notes__)


async def test_a_measurement_in_between_is_of_one_version_and_training_continues(tmp_path: Path) -> None:
    async with parts(tmp_path, "evaluation.everyUpdates=2", "stop.maxUpdates=5") as context:
        await reinforce(context, Progress())
        policy: Any = context.policy
        assert len(policy.learner.updates) == 5
    measured = [event for event in read_events(tmp_path) if event["event"] == "evaluation"]
    assert [(e["update"], e["policy_version"], e["mode"]) for e in measured] == [(2, 2, "greedy"), (4, 4, "greedy")]


async def test_a_judge_that_is_away_ends_the_run_with_its_address(tmp_path: Path) -> None:
    judge = "{name: judge, judge: {models: [{url: 'http://127.0.0.1:9/v1', model: m}]}}"
    # Shorter than the first pause, so that nothing is asked twice, and longer than a refusal takes on a busy machine.
    rewards = f"rewards={{success: judge, deadlineSeconds: 1.4, streams: [{judge}]}}"
    async with parts(tmp_path, rewards) as context:
        with pytest.raises(RolloutError, match="at the judge; .*127.0.0.1:9"):
            await reinforce(context, Progress())
    episodes = list(Recording(tmp_path / ROLLOUT).episodes())
    assert episodes and {episode.attempt for episode in episodes} == {0}, "no phone played again for it"


async def test_judges_that_may_not_go_on_stop_the_run_after_a_checkpoint_and_more_lets_it_go_on(tmp_path: Path) -> None:
    runner = web.AppRunner(JudgeServer("simulated-phone").application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    model = f"{{url: '{url}', model: simulated-phone, concurrency: 4}}"
    judge = f"{{name: judge, judge: {{prompt: simulated-phone, models: [{model}]}}}}"
    rewards = f"rewards={{success: judge, verifier: ignored, streams: [{judge}]}}"

    async def session(progress: Progress, *limits: str) -> tuple[RunContext, dict[str, Any]]:
        async with parts(tmp_path, rewards, *limits) as found:
            context = replace(found, judge_budget=judge_budget_of(found.run, found.stop, progress))
            await reinforce(context, progress)
            policy: Any = context.policy
            return context, json.loads(json.dumps(policy.saved[-1][1]))

    try:
        # Some 100 tokens a verdict, and 48 episodes or more: it ends behind the first update.
        context, state = await session(Progress(), "stop.judgeTokens=2800")
        assert context.stop.reason is StopReason.JUDGE_BUDGET and context.stop.exit_code == 75
        assert "raise spec.stop.judgeTokens, which is 2,800" in context.stop.remedy
        assert 0 < state["update"] < 3 and any(group["awaiting"] for group in state["unfinished"])
        assert 2800 <= state["judge_tokens"] == context.telemetry.view.judge_tokens < 5600
        context, later = await session(Progress.of(state), "stop.judgeTokens=60000")
        assert not context.stop.requested.is_set() and later["update"] == 3
        used = [e["rewards"]["judges_used_tokens"] for e in read_events(tmp_path) if e["event"] == "update"]
        assert used == sorted(used) and used[-1] > state["judge_tokens"]
    finally:
        await runner.cleanup()
