"""A whole run on recorded steps: it learns from their rewards and is measured, and starts no phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole import Run, tapforge

from tapforge_trainer.data.convert import convert
from tapforge_trainer.data.demo import ROWS, demo
from tapforge_trainer.data.sets import split
from tapforge_trainer.data.sources import read

pytestmark = pytest.mark.long

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: offline}
spec:
  model: {contextTokens: 256, adapter: {prompt: compact, historySteps: 8}}
  environment: {source: {dataset: {path: part, heldOut: rest}}}
  warmStart: {data: {path: part}, steps: 30, batchSize: 32}
  rollout: {groupSize: 4, groupsPerUpdate: 4, responseTokens: 24}
  rewards: {streams: [{name: environment}, {name: format, gate: mixedOutcomes, weight: 0.2}]}
  algorithm: {signal: reward, advantage: {grpo: {}}}
  engine: {maxConcurrentSequences: 16, kvCacheMiB: 64}
  evaluation: {episodes: 16, greedy: false}
  stop: {maxUpdates: 2}
"""

REWARD = "environment.source.dataset.reward"


def test_a_run_learns_from_recorded_steps_and_starts_no_phone(tmp_path: Path) -> None:
    demo(tmp_path / "demo", episodes=60, seed=0)
    convert(read("verl", tmp_path / "demo" / ROWS, {}), "verl", tmp_path / "set", {}, 0.1)
    split(tmp_path / "set", tmp_path / "part", tmp_path / "rest", share=0.2, by="task", seed=0)
    (tmp_path / "offline.yaml").write_text(SPEC)
    run = Run(
        tmp_path / "runs" / "offline", tmp_path / "offline.yaml", tapforge("run", "-f", "offline.yaml", place=tmp_path)
    )
    assert run.finished.code == 0, run.finished.said
    updates = run.events("update")
    assert [event["update"] for event in updates] == [1, 2]
    assert run.summary["invalid_episodes"] == 0 and run.summary["episodes"] >= 32
    rewards = [step.reward for episode in run.recording("rollout").episodes() for step in episode.steps]
    assert {0.0, 1.0} <= set(rewards) and len(rewards) >= 32
    after = run.summary["success_after"]["sampled"]
    assert 0 < after["type_accuracy"] <= 1 and after["success"] <= after["type_accuracy"]
    assert set(run.summary["baselines"]) == {"random", "always_infeasible"}
    # its recording is learned from anew and asked for other rewards, as that of every run
    relearned = tapforge("relearn", str(run.folder), place=tmp_path)
    assert relearned.code == 0 and "gigpo" in relearned.said, relearned.said
    other = tapforge("rescore", str(run.folder), "--set", f"{REWARD}.type=0", place=tmp_path)
    assert other.code and "spec.environment: what the environment gave is recorded" in other.said
    again = tapforge("run", "-f", "offline.yaml", "--set", f"{REWARD}.type=0", place=tmp_path)
    assert again.code and "reward.type: 0.5 there, 0.0 here" in again.said, again.said
