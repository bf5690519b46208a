"""A run whose success is what a judge says, and whose phones' verifiers are never asked: killed while verdicts are
outstanding, and gone on with. It can't share the other runs: their rewards are the environment's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole import Command, Finished

from tapforge_envs.protocol import Outcome
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.run.folder import read_events

pytestmark = pytest.mark.long

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {{name: judged}}
spec:
  model: {{contextTokens: 256, adapter: {{prompt: compact, historySteps: 8}}}}
  environment: {{source: {{processes: {{count: 8, servers: 2}}}}}}
  warmStart: {{demonstrations: 100, steps: 30, batchSize: 32, errorRate: 0.5}}
  rollout: {{groupSize: 4, groupsPerUpdate: 2, responseTokens: 24, phonesPerWorker: 4, maxSteps: 6}}
  rewards:
    success: judge
    verifier: ignored
    streams:
    - name: judge
      judge:
        prompt: simulated-phone
        models: [{{url: "{url}", model: simulated-phone, samples: 3, temperature: 1.0}}]
    - {{name: format, weight: 0.1}}
  algorithm: {{signal: reward}}
  learner: {{learningRate: 1e-4}}
  engine: {{maxConcurrentSequences: 8, kvCacheMiB: 64}}
  evaluation: {{greedy: false, baselines: false, episodes: 4}}
  checkpoints: {{export: false, everyUpdates: 1}}
  stop: {{maxUpdates: 4}}
"""
UPDATES = 4


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """Answers after a second, so that verdicts are outstanding at any time; one answer in ten is wrong."""
    words = ("judge", "serve", "--port", "0", "--error-rate", "0.1", "--slow", "1")
    command = [sys.executable, "-m", "tapforge_trainer.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["url"]
        server.terminate()


@pytest.fixture(scope="module")
def run(judge: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str], list[Finished]]:
    """The folder, the episodes that awaited their verdicts at the last checkpoint before the kill, and the sessions
    after that: one whose judges may use next to nothing, and the last."""
    place = tmp_path_factory.mktemp("judged")
    (place / "judged.yaml").write_text(SPEC.format(url=judge))
    folder = place / "runs" / "judged"
    first = Command("run", "-f", "judged.yaml", place=place)
    first.until(lambda: any(event["event"] == "checkpoint" for event in read_events(folder)))
    first.kill()
    first.process.wait(60)
    shutil.copy(folder / "verdicts.jsonl", folder / "before.jsonl")
    newest = (folder / "checkpoints" / "latest").read_text().strip()
    state = json.loads((folder / "checkpoints" / newest / "state.json").read_text())["driver"]
    awaiting = {name for group in state["unfinished"] for name in group["awaiting"]}
    poor = Command("run", "-f", "judged.yaml", "--set", "spec.stop.judgeTokens=10", place=place).wait()
    return folder, awaiting, [poor, Command("run", "-f", "judged.yaml", place=place).wait()]


def test_it_goes_on_and_asks_for_what_was_outstanding(run) -> None:
    folder, awaiting, (_, finished) = run
    assert finished.code == 0, finished.said
    assert finished.left_behind == []
    updates = [event for event in read_events(folder) if event["event"] == "update"]
    assert updates[-1]["update"] == UPDATES
    lines = [json.loads(line) for path in (folder / "rollout").glob("rollout-*.jsonl") for line in path.open()]
    rewarded = Counter(line["id"] for line in lines if line["kind"] == "rewards")
    assert set(rewarded.values()) == {1}
    # Those that had been recorded by the time of the kill are not played again.
    played = {line["id"] for line in lines if line["kind"] == "episode"}
    assert awaiting & played <= rewarded.keys()


def test_verdicts_of_two_workers_are_in_one_journal_and_those_before_the_kill_stay(run) -> None:
    folder, _, _ = run
    journal = (folder / "verdicts.jsonl").read_bytes()
    assert journal.startswith((folder / "before.jsonl").read_bytes().rpartition(b"\n")[0])
    lines = [json.loads(line) for line in journal.splitlines()]
    assert len({line["key"] for line in lines}) == len(lines)
    groups = Recording(folder / "rollout").settled(prompts=False)
    played = [episode for group in groups for episode in group.episodes]
    asked = {episode.id for episode in played if episode.reason in ("done", "declared_infeasible")}
    assert asked and asked <= {line["episode"] for line in lines}


def test_judges_that_may_use_next_to_nothing_end_a_session_with_what_to_raise(run) -> None:
    _, _, (poor, _) = run
    assert poor.code == 75 and poor.left_behind == [], poor.said
    assert "raise spec.stop.judgeTokens, which is 10" in poor.out.splitlines()[-1]


def test_success_is_the_judges_and_no_verifier_was_asked(run) -> None:
    folder, _, _ = run
    groups = Recording(folder / "rollout").settled(prompts=False)
    episodes = [episode for group in groups for episode in group.episodes]
    assert len(episodes) >= UPDATES * 2 * 4
    for episode in episodes:
        assert episode.score is None and len(episode.steps) <= 6
        assert episode.rewards is not None and episode.last_frame is not None
        judged = sum(value or 0.0 for value in episode.rewards.streams["judge"]) >= 0.5
        assert (episode.outcome is Outcome.SUCCESS) == judged


def test_figures_say_what_judging_took(run) -> None:
    folder, _, _ = run
    rewards = [event["rewards"] for event in read_events(folder) if event["event"] == "update"]
    # Of an update are the verdicts that came since the last one: where groups are early, there may be none.
    most = max(rewards, key=lambda one: one["answered"])
    assert most["seconds_waiting_for_verdicts"] > 0 and most["judge_prompt_tokens"] > 0
    assert not any(one["missing"] or "success_verified" in one for one in rewards)
