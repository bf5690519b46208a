"""A run trains over the bridge on phones that only offer adb: simulated ones, behind Debian's adb server."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from e2e import packages
from whole import Command, Run

from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Task

pytestmark = pytest.mark.long

PHONES, UPDATES = 4, 2

SPEC = f"""
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {{name: bridged}}
spec:
  seed: 3
  model: {{contextTokens: 256, adapter: {{prompt: compact, historySteps: 8}}, source: {{path: {{folder: model}}}}}}
  environment:
    source: {{urls: {{file: phones.txt}}}}
    deadlines: {{episodeSeconds: 600, acquireSeconds: 600, resetSeconds: 120, stepSeconds: 120, evaluateSeconds: 120}}
  tasks: {{file: tasks.jsonl}}
  rollout:
    groupSize: 6
    groupsPerUpdate: 2
    responseTokens: 24
    groupDeadlineSeconds: 600
    dynamicSampling: {{enabled: true, maxRounds: 64}}
  learner: {{learningRate: 1e-4}}
  engine: {{maxConcurrentSequences: 4, kvCacheMiB: 64}}
  evaluation: {{greedy: false, baselines: false, episodes: 4}}
  checkpoints: {{export: false}}
  stop: {{maxUpdates: {UPDATES}}}
"""


def over_adb(task: Task) -> Task:
    """What a task file says to a phone that knows no tasks: shell lines (`tapforge_envs.phone.adbd`)."""
    finish = "am broadcast -a tapforge.FINISH --es status success > /dev/null"
    return Task(
        suite="adb",
        template=task.template,
        goal=task.goal,
        max_steps=task.max_steps,
        params={
            "setup": f"am broadcast -a tapforge.RESET --es task {shlex.quote(task.model_dump_json())}",
            "check": f"{finish}; getprop tapforge.score",
            "expect": r"^1\.0$",
        },
    )


def ready_line(stack: ExitStack, *words: str) -> dict:
    process = stack.enter_context(subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE))
    stack.callback(process.terminate)
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.fixture(scope="module")
def bridged(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    packages.ensure(packages.ADB)
    place = tmp_path_factory.mktemp("bridged")
    (place / "model").symlink_to(trained.folder / "export")
    tasks = [catalog.tasks("quickstart", "train").sample(5, index) for index in range(80)]
    # The tiny model solves some of the tasks with one step at times, and hardly any other.
    listed = {task.key: over_adb(task) for task in tasks if task.feasible and " then " not in task.goal}
    (place / "tasks.jsonl").write_text("\n".join(task.model_dump_json() for task in list(listed.values())[:24]) + "\n")
    (place / "bridged.yaml").write_text(SPEC)
    with socket.create_server(("127.0.0.1", 0)) as free:
        adb_port = str(free.getsockname()[1])
    with ExitStack() as stack:
        size = ("--width", "96", "--height", "160")
        phones = ready_line(stack, "tapforge_envs.phone.adbd", "--phones", str(PHONES), "--suite", "quickstart", *size)
        devices = [word for port in phones["ports"] for word in ("--device", f"127.0.0.1:{port}")]
        serve = (
            "tapforge_trainer.cli.main",
            "env",
            "serve",
            "--protocol",
            "adb",
            "--adb-port",
            adb_port,
            "--port",
            "0",
        )
        bridge = ready_line(stack, *serve, "--settle", "none", *devices)
        urls = [f"http://127.0.0.1:{bridge['port']}/slot/{slot}\n" for slot in range(PHONES)]
        (place / "phones.txt").write_text("".join(urls))
        finished = Command("run", "-f", "bridged.yaml", place=place).wait()
        yield Run(place / "runs" / "bridged", place / "bridged.yaml", finished)


def test_it_trains_a_few_updates_and_ends_well(bridged: Run) -> None:
    assert bridged.finished.code == 0, bridged.finished.said
    assert bridged.finished.left_behind == []
    updates = bridged.events("update")
    assert [event["update"] for event in updates] == list(range(1, UPDATES + 1))
    assert all(event["samples"] > 0 and event["learner"]["gradient_norm"] > 0 for event in updates)
    assert bridged.summary["invalid_episodes"] == 0


def test_every_phone_was_played_on_and_judged_by_its_shell(bridged: Run) -> None:
    episodes = list(bridged.recording("rollout").episodes())
    assert len({episode.slot for episode in episodes}) == PHONES
    assert {episode.task.suite for episode in episodes} == {"adb"}
    assert all(episode.valid for episode in episodes if episode.outcome is not None)
    assert all(step.app for episode in episodes for step in episode.steps)
    frames = {name for episode in episodes for step in episode.steps for name in step.frames}
    sizes = {(f.width, f.height) for f in map(bridged.recording("rollout").frames.frame, frames)}
    assert sizes == {(96, 160)}, "the tiny model sees the screen as it is"
