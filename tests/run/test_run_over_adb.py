"""A run over adb: Debian's real adb server, simulated phones behind it, tasks from a file with setup and check."""

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole import Command, Run

sys.path.append(str(Path(__file__).parent.parent / "phone"))

from real_adb import RealAdb
from tests.teachers.test_collect import served

from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Outcome, Task
from tapforge_trainer.data.folder import DataFolder
from tapforge_trainer.teachers.simulated import Demonstrator, TeacherServer, dialect_named

pytestmark = pytest.mark.long

PHONES, UPDATES = 3, 2

OVER_ADB = f"""
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {{name: desk}}
spec:
  model: {{contextTokens: 256, adapter: {{prompt: compact}}}}
  environment:
    protocol: adb
    source: {{urls: {{list: [auto]}}}}
    settle: {{mode: none}}
    deadlines: {{episodeSeconds: 600, acquireSeconds: 600, resetSeconds: 120, stepSeconds: 120, evaluateSeconds: 120}}
  tasks: {{file: tasks.jsonl}}
  rollout: {{groupSize: 2, groupsPerUpdate: 2, responseTokens: 24, groupDeadlineSeconds: 600}}
  engine: {{maxConcurrentSequences: 8, kvCacheMiB: 64}}
  evaluation: {{sampled: false, baselines: false, episodes: 2}}
  checkpoints: {{export: false}}
  stop: {{maxUpdates: {UPDATES}}}
"""


def tasks_of_the_phone() -> Iterator[Task]:
    suite = catalog.tasks("quickstart", "train")
    return (task for task in (suite.sample(5, number) for number in range(100)) if task.feasible)


def lines(count: int) -> list[str]:
    """Tasks of the simulated phone as ones that any phone behind adb could have."""
    return [
        json.dumps(
            {
                "template": f"{inner.template}-{number}",
                "goal": inner.goal,
                "max_steps": inner.max_steps,
                "params": {
                    "setup": f"am broadcast -a tapforge.RESET --es task {shlex.quote(inner.model_dump_json())}",
                    "check": "am broadcast -a tapforge.FINISH --es status success > /dev/null; getprop tapforge.score",
                    "expect": r"^1\.0$",
                },
            }
        )
        for number, inner in zip(range(count), tasks_of_the_phone(), strict=False)
    ]


@pytest.fixture(scope="session")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Phones behind a server of adb, and the environment of commands that are to see them."""
    adb = RealAdb(tmp_path_factory.mktemp("adb"))
    adb.start()
    command = [sys.executable, "-m", "tapforge_envs.phone.adbd", "--phones", str(PHONES), "--suite", "quickstart"]
    with subprocess.Popen([*command, "--width", "96", "--height", "160"], stdout=subprocess.PIPE, text=True) as phones:
        for port in json.loads(phones.stdout.readline())["ports"]:
            subprocess.run(["adb", "connect", f"127.0.0.1:{port}"], env=adb.environment, check=True, timeout=60)
        yield {name: adb.environment[name] for name in ("ANDROID_ADB_SERVER_PORT",)}
        phones.terminate()
    adb.stop()


def written(place: Path, tasks: int) -> Path:
    (place / "tasks.jsonl").write_text("\n".join(lines(tasks)))
    (place / "desk.yaml").write_text(OVER_ADB)
    return place / "desk.yaml"


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory, attached: dict[str, str]) -> Run:
    place = tmp_path_factory.mktemp("desk")
    file = written(place, 6)
    command = Command("run", "-f", "desk.yaml", place=place, environment=attached)
    return Run(place / "runs" / "desk", file, command.wait())


def test_it_trains_on_every_phone_that_is_attached(desk: Run) -> None:
    assert desk.finished.code == 0, desk.finished.said
    assert desk.finished.left_behind == []
    assert [event["update"] for event in desk.events("update")] == list(range(1, UPDATES + 1))
    episodes = list(desk.recording("rollout").episodes())
    assert len({record.slot for record in episodes}) == PHONES
    assert [record.message for record in episodes if record.outcome == Outcome.INVALID] == []
    assert any(record.valid for record in episodes)
    assert {step.app for record in episodes for step in record.steps} > {"dev.tapforge.home"}
    assert {step.window for record in episodes for step in record.steps} == {".MainActivity"}
    # Each is judged by its own check, whose words are kept.
    done = [record for record in episodes if record.reason == "done"]
    assert all(record.message.startswith("the check wrote '") for record in done)


async def test_a_teacher_plays_twenty_episodes_over_adb(tmp_path: Path, attached: dict[str, str]) -> None:
    """On the phones of the run, whose screens the demonstrator behind the endpoint knows; no engine is started."""
    written(tmp_path, 40)
    async with served(
        TeacherServer("teacher", Demonstrator(tasks_of_the_phone(), 96, 160), dialect_named("qwen3-vl"))
    ) as url:
        words = ("collect", "-f", "desk.yaml", "--teacher", url, "--model", "teacher", "--episodes", "20")
        command = Command(*words, "--into", "set", place=tmp_path, environment=attached)
        done = await asyncio.to_thread(command.wait)
    assert done.code == 0 and done.left_behind == [], done.said
    found = list(DataFolder(tmp_path / "set"))
    assert len(found) == 20 and {episode.outcome for episode in found} == {"success"}
    assert all(step.screen and step.action is not None for episode in found for step in episode.steps)
