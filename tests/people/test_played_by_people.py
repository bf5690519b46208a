"""A person plays in a real browser, on a phone behind `tapforge env serve --page`: what is kept is a recording and a
data set that a model imitates."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import tab
from click.testing import CliRunner
from people_house import demonstrated
from phones import phones
from test_env_serve import started

from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Task, Terminate
from tapforge_trainer.agents import make_agent
from tapforge_trainer.cli.main import cli
from tapforge_trainer.dashboard.opened import OpenRun
from tapforge_trainer.data.folder import DataFolder
from tapforge_trainer.data.imitation import ImitationData
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.tiny.folder import write_model

TAPFORGE = [sys.executable, "-m", "tapforge_trainer.cli.main"]
SAMPLE = Path("manifests/samples/quickstart.yaml").absolute()
TEXT = "document.querySelector('{}').textContent"


def tapforge(*words: str) -> str:
    done = CliRunner().invoke(cli, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


async def a_person_plays(tmp_path: Path) -> list[Task]:
    """Keeps two tasks of two steps each in `people`, and discards a third."""
    tasks = catalog.tasks("quickstart", "train", ["open", "switch"])
    played = [task for number in range(20) for task in [tasks.sample(0, number)] if len(demonstrated(task)) == 2][:2]
    goal = "<b>Open</b> & <img src=x onerror=alert(1)>"
    played[1] = played[1].model_copy(update={"goal": goal})
    (tmp_path / "tasks.jsonl").write_text("".join(task.model_dump_json() + "\n" for task in played))
    people = tmp_path / "people"
    async with phones(1) as behind:
        options = ["--url", behind.url(), "--tasks", str(tmp_path / "tasks.jsonl"), "--page", "0"]
        process, ready = await started(*options, "--record", str(people))
        try:
            async with tab(ready["page"], tmp_path / "profile") as page:
                await page.until("tasks && document.querySelector('#key').options.length === 2")
                assert not people.exists()
                for number, task in enumerate(played):
                    await page.click("#start" if number == 0 else "#next")
                    await page.until("state.phase === 'playing' && state.steps === 0 && state.frame")
                    assert await page.value(TEXT.format("#goal")) == task.goal
                    for step, action in enumerate(demonstrated(task)):
                        if isinstance(action, Terminate):
                            break
                        await page.until("document.querySelector('#screen').complete")
                        await page.click("#screen", action.x, action.y)
                        await page.until(f"state.steps === {step + 1}")
                        if number == 0:  # in the middle of the task
                            await page.call("Page.reload")
                            await page.until("typeof state === 'object' && state && state.steps === 1")
                            assert await page.value(TEXT.format("#goal")) == task.goal
                    await page.click("#done")
                    await page.until("state.verdict && state.phase === 'ended'")
                    assert "success, score 1" in await page.value(TEXT.format("#outcome"))
                    assert behind.slots[0].episode is None, "the phone is given back before the person decides"
                    await page.screenshot(Path(os.environ.get("TAPFORGE_SHOTS", tmp_path)) / f"person-{number}.png")
                    await page.click("#keep")
                    await page.until(f"{TEXT.format('#kept')}.startsWith('Kept: person-')")
                assert await page.value("document.querySelectorAll('#goal *').length") == 0
                # What is discarded is nowhere.
                await page.click("#start")
                await page.until("state.phase === 'playing'")
                await page.click("#impossible")
                await page.until("state.verdict && state.verdict.outcome === 'failure' && state.phase === 'ended'")
                await page.click("#discard")
                await page.until("state.phase === 'idle'")
                assert page.complaints == []
        finally:
            process.terminate()
            _, said = await process.communicate()
        assert (process.returncode, said) == (0, b"")
    return played


async def test_a_person_plays_and_what_is_kept_is_imitated(tmp_path: Path) -> None:
    played, people = await a_person_plays(tmp_path), tmp_path / "people"
    assert "2 episodes, 4 steps" in tapforge("data", "inspect", str(people))
    data = DataFolder(people)
    assert [episode.task.goal for episode in data] == [task.goal for task in played]
    assert {(episode.outcome, episode.provenance.source, episode.provenance.model) for episode in data} == {
        ("success", "person", "")
    }
    first = [step.action.model_dump() for step in data[0].steps if step.action]
    for done, due in zip(first, [action.model_dump() for action in demonstrated(played[0])], strict=True):
        assert done.keys() == due.keys() and abs(done.get("x", 0) - due.get("x", 0)) < 0.02

    # The same episodes as a run's recording.
    [one, two] = Recording(people / "rollout").groups()
    assert [len(group.episodes[0].steps) for group in (one, two)] == [2, 2]
    assert OpenRun(people).brief()
    assert json.loads(tapforge("show", str(people), "--output", "json"))
    said = tapforge("data", "convert", "recording", str(people), "-o", str(tmp_path / "set"))
    assert "2 episodes, 4 steps" in said
    assert {episode.provenance.model for episode in DataFolder(tmp_path / "set")} == {""}
    for command in (["merge", str(people), str(tmp_path / "set"), "-o", str(tmp_path / "both")],
                    ["export", str(people), "-o", str(tmp_path / "people.parquet")],
                    ["redact", str(people), "--text", "Open", "-o", str(tmp_path / "redacted")]):  # fmt: skip
        tapforge("data", *command)

    write_model(tmp_path / "model", 0)
    agent = make_agent(
        "qwen3-vl", tmp_path / "model", context_tokens=256, prompt="compact", history_images=1, history_steps=8,
        response_tokens=24,
    )  # fmt: skip
    imitated = ImitationData(agent, data, ("success", "unknown"))
    assert len(imitated.batch(range(4)).samples) == 4 and not imitated.left_out.counts


@pytest.mark.long
async def test_a_model_is_trained_on_what_a_person_played(tmp_path: Path) -> None:
    """By the commands of docs/data.md."""
    await a_person_plays(tmp_path)
    imitation = f"warmStart={{data: {{path: {tmp_path / 'people'}}}, steps: 3, batchSize: 4}}"
    words = ["sft", "-f", str(SAMPLE), "--runs", str(tmp_path / "runs"), "--set", imitation]
    done = await asyncio.to_thread(
        subprocess.run, [*TAPFORGE, *words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "quickstart" / "sft" / "model.safetensors").exists()
