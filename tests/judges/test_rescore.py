"""`tapforge rescore`: other rewards for recorded episodes, asked of a real endpoint."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from judged_episodes import played, serving

from tapforge_envs.phone import catalog
from tapforge_trainer.cli.main import cli
from tapforge_trainer.frames.frame import FittedFrame, decode
from tapforge_trainer.judges import conventions
from tapforge_trainer.judges.server import JudgeServer
from tapforge_trainer.judges.simulated import Errors
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import GroupRecord
from tapforge_trainer.run.assembly import ConfigurationError
from tapforge_trainer.run.rescore import rescore

FILE = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: run}\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six groups of four attempts at a task, by demonstrators that err."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "spec.yaml").write_text(FILE)
    recorder = Recorder(folder / "rollout")
    tasks = catalog.tasks("quickstart", "train")
    for number in range(6):
        task, episodes = tasks.sample(3, number), []
        for member in range(4):
            trajectory = played(task, f"g{number}.{member}.0", 0.4, seed=4 * number + member)
            screens = [FittedFrame.of(decode(screen, "screen")) for screen in trajectory.screens]
            steps = [
                replace(step, frames=(frame.name,))
                for step, frame in zip(trajectory.episode.steps, screens, strict=False)
            ]
            last = screens[-1].name if len(screens) > len(steps) else None
            record = replace(trajectory.episode, group=f"g{number}", steps=tuple(steps), last_frame=last)
            recorder.episode(record, {frame.name: frame for frame in screens})
            episodes.append(record)
        recorder.group(GroupRecord(f"g{number}", number, task, 0, tuple(episodes)))
    recorder.close()
    return folder


def judged_by(url: str) -> str:
    model = {"url": url, "model": "simulated-phone"}
    judge = {"prompt": "simulated-phone", "models": [model]}
    streams = [{"name": "judge", "judge": judge}, {"name": "format", "weight": 0.1}]
    return f"spec.rewards={json.dumps({'streams': streams, 'success': 'judge'})}"


async def test_a_judge_that_does_not_err_changes_no_outcome_and_is_asked_once(recorded):
    server = JudgeServer("simulated-phone")
    async with serving(server) as url:
        found = await rescore(recorded, [judged_by(url)])
        asked = server.requests
        again = await rescore(recorded, [judged_by(url)])
    assert (found.episodes, found.groups, found.missing, found.without_screens) == (24, 6, 0, 0)
    assert set(found.outcomes) <= {"success -> success", "failure -> failure"}
    assert found.mixed_before == found.mixed_after > 0
    by_name = {stream.name: stream for stream in found.streams}
    assert by_name["judge"].before is None and by_name["judge"].after == pytest.approx(by_name["outcome"].before)
    assert by_name["format"].after == pytest.approx(0.1)
    assert asked > 0 and server.requests == asked and again == found


async def test_a_prompt_file_that_was_edited_is_asked_with_anew(recorded, tmp_path):
    ours = Path(conventions.__file__).parent / "prompts" / "simulated-phone.jinja"
    mine = tmp_path / "mine.jinja"
    server = JudgeServer("simulated-phone")
    async with serving(server) as url:
        model = {"url": url, "model": "simulated-phone"}
        judge = {"prompt": "simulated-phone", "promptFile": str(mine), "models": [model]}
        rewards = f"spec.rewards={json.dumps({'streams': [{'name': 'judge', 'judge': judge}], 'success': 'judge'})}"
        mine.write_text(ours.read_text())
        await rescore(recorded, [rewards])
        asked = server.requests
        mine.write_text(ours.read_text() + "{# of another day #}\n")
        await rescore(recorded, [rewards])
    assert server.requests > asked > 0


async def test_a_judge_that_errs_shows_where(recorded):
    async with serving(JudgeServer("simulated-phone", Errors(rate=1.0))) as url:
        found = await rescore(recorded, [judged_by(url)])
    assert found.outcomes.get("success -> failure", 0) > 0 and "success -> success" not in found.outcomes


async def test_weights_alone_ask_for_nothing(recorded):
    found = await rescore(recorded, ["spec.rewards={streams: [{name: outcome, weight: 2}]}"])
    (outcome,) = (stream for stream in found.streams if stream.name == "outcome")
    assert outcome.after == 2 * outcome.before and found.journal == ""


async def test_what_can_not_be_rescored(recorded, tmp_path):
    with pytest.raises(ConfigurationError, match="did you mean 'format'"):
        await rescore(recorded, ["spec.rewards={streams: [{name: formatt}]}"])
    with pytest.raises(ConfigurationError):
        await rescore(tmp_path, [])


def test_the_command(recorded):
    async def go(*more: str):
        async with serving(JudgeServer("simulated-phone")) as url:
            call = ["rescore", str(recorded), "--set", judged_by(url), *more]
            return await asyncio.to_thread(CliRunner().invoke, cli, call)

    shown = asyncio.run(go())
    assert shown.exit_code == 0, shown.output
    assert "24 episodes of 6 groups" in shown.output and "success of" in shown.output
    assert json.loads(asyncio.run(go("--output", "json")).stdout)["episodes"] == 24


async def test_a_run_whose_stages_have_rewards_of_their_own_is_refused(tmp_path):
    stages = "spec: {stages: [{rewards: {}, stop: {maxUpdates: 1}}]}\n"
    (tmp_path / "spec.yaml").write_text(FILE + stages)
    with pytest.raises(ConfigurationError, match="stages have rewards of their own"):
        await rescore(tmp_path, ["spec.rewards={streams: [{name: outcome, weight: 2}]}"])
