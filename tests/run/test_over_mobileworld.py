"""A run trains over MobileWorld's protocol, on servers that somebody else started: the simulated phone's, with a list
of task names as its users have it. Two phones are behind one server, and one phone is sick."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from whole import Command, Run

#: a whole run of its own; what it shows of the protocol, tests/clients and tests/phone show in the first tier
pytestmark = pytest.mark.long

UPDATES, SERVERS = 2, 5
#: answers screenshots that stop in the middle, at every step
SICK = 4

SPEC = f"""
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {{name: mobileworld}}
spec:
  seed: 3
  model: {{contextTokens: 256, adapter: {{prompt: compact, historySteps: 8}}, source: {{path: {{folder: model}}}}}}
  environment:
    protocol: mobileworld
    source: {{urls: {{file: servers.txt}}}}
    settle: {{mode: none}}
    deadlines: {{acquireSeconds: 600}}
  tasks: {{file: tasks.jsonl}}
  rollout:
    groupSize: 6
    groupsPerUpdate: 2
    responseTokens: 24
    groupDeadlineSeconds: 600
    dynamicSampling: {{enabled: true, maxRounds: 64}}
  learner: {{learningRate: 1e-4}}
  engine: {{maxConcurrentSequences: 8, kvCacheMiB: 64}}
  evaluation: {{sampled: false, baselines: false, episodes: 4, everyUpdates: 0}}
  checkpoints: {{export: false}}
  stop: {{maxUpdates: {UPDATES}}}
"""


@dataclass
class MobileWorlds:
    port: int
    run: Run
    tasks: list[str]

    def ask(self, slot: int, path: str, body: dict | None = None, method: str = "GET") -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}/slot/{slot}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def goal(self, task: str) -> str:
        return json.loads(self.ask(0, f"/task/goal?task_name={task}")[1])


@pytest.fixture(scope="module")
def over_mobileworld(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MobileWorlds]:
    place = tmp_path_factory.mktemp("mobileworld")
    (place / "model").symlink_to(trained.folder / "export")
    (place / "mobileworld.yaml").write_text(SPEC)
    command = [sys.executable, "-m", "tapforge_envs.phone.server", "--protocol", "mobileworld", "--slots", str(SERVERS)]
    with subprocess.Popen(
        [*command, "--suites", "quickstart", "--devices", "a", "b"], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        port = json.loads(server.stdout.readline())["port"]
        worlds = MobileWorlds(
            port, Run(place / "runs" / "mobileworld", place / "mobileworld.yaml", trained.finished), []
        )
        names = [card["name"] for card in json.loads(worlds.ask(0, "/task/list")[1]) if "train" in card["tags"]]
        # The tiny model solves some of the tasks with one step at times, and hardly any other.
        worlds.tasks = [name for name in names if " then " not in worlds.goal(name)][:24]
        assert worlds.ask(SICK, "/faults", [{"kind": "half"}], "POST")[0] == 200
        lines = [f"127.0.0.1:{port}/slot/{slot}?device=a\n" for slot in range(SERVERS)]
        lines.append(f"http://127.0.0.1:{port}/slot/0/?device=b\n")
        (place / "servers.txt").write_text("# one phone per line\n" + "".join(lines))
        lines = [json.dumps({"template": name, "max_steps": 4}) for name in worlds.tasks]
        (place / "tasks.jsonl").write_text("\n".join(lines))
        finished = Command("run", "-f", "mobileworld.yaml", place=place).wait()
        worlds.run = Run(worlds.run.folder, worlds.run.file, finished)
        yield worlds
        server.terminate()


def test_it_trains_a_few_updates_and_ends_well(over_mobileworld: MobileWorlds) -> None:
    run = over_mobileworld.run
    assert run.finished.code == 0, run.finished.said
    assert run.finished.left_behind == []
    updates = run.events("update")
    assert [event["update"] for event in updates] == list(range(1, UPDATES + 1))
    assert all(event["samples"] > 0 and event["learner"]["gradient_norm"] > 0 for event in updates)


def test_names_are_practised_with_the_goals_and_scores_of_their_server(over_mobileworld: MobileWorlds) -> None:
    episodes = [e for e in over_mobileworld.run.recording("rollout").episodes() if e.outcome is not None]
    valid = [e for e in episodes if e.valid]
    assert valid and {e.task.template for e in episodes} <= set(over_mobileworld.tasks)
    assert {(e.task.suite, e.task.threshold) for e in episodes} == {("mobileworld", 0.99)}
    for episode in valid:
        assert episode.task.goal == over_mobileworld.goal(episode.task.template)
        assert (episode.outcome == "success") == (episode.score is not None and episode.score >= 0.99)
    well = {e.slot for e in valid if f"/slot/{SICK}?" not in e.slot}
    assert len(well) == SERVERS, "every phone that is well is played on, both of one server too"


def test_no_screen_of_the_sick_phone_was_shown_to_the_model(over_mobileworld: MobileWorlds) -> None:
    episodes = [e for e in over_mobileworld.run.recording("rollout").episodes() if f"/slot/{SICK}?" in e.slot]
    for episode in episodes:
        acted = [step for step in episode.steps if step.action and step.action["type"] not in ("answer", "terminate")]
        assert len(acted) <= 1, "the screen after the first action is the end"
        assert not acted or episode.outcome in (None, "invalid")
        assert episode.outcome != "invalid" or "half a PNG" in episode.message
