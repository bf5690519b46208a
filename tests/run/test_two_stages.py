"""A run with two stages: made tasks with their checks, then test tasks without their verifiers, by a voted judge. It is
killed in the second stage and gone on with. It can't share the other runs: they have one stage."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole import Command, Finished

from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.run.folder import read_events
from tapforge_trainer.tasks.walked import write_walked

pytestmark = pytest.mark.long

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {{name: staged}}
spec:
  model: {{contextTokens: 256, adapter: {{prompt: compact, historySteps: 8}}}}
  environment: {{source: {{processes: {{count: 8, servers: 2}}}}}}
  tasks: {{templates: [open, switch]}}
  warmStart: {{demonstrations: 100, steps: 30, batchSize: 32, errorRate: 0.5}}
  rollout: {{groupSize: 4, groupsPerUpdate: 2, responseTokens: 24, maxSteps: 6}}
  algorithm: {{signal: reward, kl: {{coefficient: 0.05}}}}
  learner: {{learningRate: 1e-4}}
  engine: {{maxConcurrentSequences: 8, kvCacheMiB: 64}}
  stages:
  - {{tasks: {{file: walked.jsonl}}, stop: {{maxUpdates: 1}}}}
  - tasks: {{split: test, templates: [open, switch]}}
    rewards:
      success: judge
      verifier: ignored
      streams:
      - name: judge
        judge:
          prompt: simulated-phone
          models: [{{url: "{url}", model: simulated-phone, samples: 3, temperature: 1.0}}]
    temperature: 0.8
    learningRate: 2e-4
    stop: {{maxUpdates: 3}}
  evaluation: {{greedy: false, baselines: false, episodes: 4, otherTemplates: 2}}
  checkpoints: {{export: false, everyUpdates: 1, keep: 100}}
"""


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    words = ("judge", "serve", "--port", "0", "--error-rate", "0.1")
    command = [sys.executable, "-m", "tapforge_trainer.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["url"]
        server.terminate()


def state(folder: Path, update: int) -> dict:
    found = folder / "checkpoints" / f"update-{update:08d}" / "state.json"
    return json.loads(found.read_text())["driver"]


def saved(folder: Path) -> list[int]:
    return [event["update"] for event in read_events(folder) if event["event"] == "checkpoint"]


@pytest.fixture(scope="module")
def run(judge: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, Finished]:
    """The folder; when the second stage's reference was written; and the session after the kill."""
    place = tmp_path_factory.mktemp("staged")
    (place / "staged.yaml").write_text(SPEC.format(url=judge))
    write_walked(place / "walked.jsonl", suite="quickstart", count=8, seed=0, most=1, rollouts=8)
    folder = place / "runs" / "staged"
    # as of a second stage that was begun before the run went back to a checkpoint of the first
    (folder / "reference-2").mkdir(parents=True)
    (folder / "reference-2" / "config.json").write_text("{}")
    first = Command("run", "-f", "staged.yaml", place=place)
    first.until(lambda: 2 in saved(folder))
    first.kill()
    first.process.wait(60)
    reference = (folder / "reference-2" / "config.json").stat().st_mtime_ns
    return folder, reference, Command("run", "-f", "staged.yaml", place=place).wait()


def test_both_stages_are_gone_through_and_updates_count_through(run) -> None:
    folder, reference, finished = run
    assert finished.code == 0 and finished.left_behind == [], finished.said
    events = list(read_events(folder))
    assert [event["update"] for event in events if event["event"] == "update"][-1] == 4
    assert [(event["stage"], event["update"]) for event in events if event["event"] == "stage"] == [(2, 1)]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["updates"] == 4 and summary["ended_after"] == "3 updates of stage 2"
    # the policy that the second stage began with; the session after the kill went on with it
    assert (folder / "reference-2" / "config.json").stat().st_mtime_ns == reference
    weights = [next((folder / name).glob("*.safetensors")).read_bytes() for name in ("reference", "reference-2")]
    assert weights[0] != weights[1]
    assert (folder / "replay.html").is_file()


def test_a_checkpoint_names_its_stage_and_the_second_one_begins_without_moments(run) -> None:
    folder, _, _ = run
    assert [state(folder, update)["stage"] for update in (0, 1, 2, 4)] == [0, 1, 1, 1]
    assert state(folder, 1)["stage_began"] == 1 and state(folder, 4)["stages_drawn"] == state(folder, 1)["stages_drawn"]
    sizes = [
        sum(file.stat().st_size for file in (folder / "checkpoints" / f"update-{update:08d}").rglob("*"))
        for update in (1, 2)
    ]
    assert 2 * sizes[0] < sizes[1]


def test_the_second_stage_asks_no_verifier_and_measurements_do(run) -> None:
    folder, _, _ = run
    stage = next(event for event in read_events(folder) if event["event"] == "stage")
    groups = Recording(folder / "rollout").settled(prompts=False)
    first = [episode for group in groups if group.order < stage["order"] for episode in group.episodes]
    second = [episode for group in groups if group.order >= stage["order"] for episode in group.episodes]
    assert first and all(e.task.template.startswith("walk-") and e.rewards is None for e in first)
    assert any(e.score is not None for e in first)
    assert second and all(e.task.template in ("open", "switch") and e.rewards is not None for e in second)
    assert all(e.score is None for e in second)
    measured = list(Recording(folder / "evaluation" / "after-sampled").episodes())
    assert measured and all(e.rewards is None for e in measured)
    assert any(e.score is not None for e in measured if e.reason == "done")
    held_out = json.loads((folder / "summary.json").read_text())["held_out"]["held_out"]
    assert held_out.startswith("not all, on purpose: ")
