"""A run that is rewarded by nothing but the tiny judge, behind vLLM's own server that the run starts: it gets better by
the verifier, which it never asks in training. It can't share another run: its rewards are of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole import Command

from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.run.compare import compare
from tapforge_trainer.run.folder import read_events

pytestmark = pytest.mark.long

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: judged}
spec:
  seed: 1
  model: {contextTokens: 256, adapter: {prompt: compact, historySteps: 8}}
  environment: {source: {processes: {count: 32}}}
  tasks: {templates: [open, open_two, switch, switch_two]}
  warmStart: {demonstrations: 400, steps: 90, batchSize: 64, learningRate: 1e-3, warmupSteps: 20, errorRate: 0.5}
  models: [{name: tiny-judge, source: {tiny: {weights: judge}}, contextTokens: 512, kvCacheMiB: 128}]
  rewards:
    success: judge
    verifier: ignored
    streams:
    - name: judge
      judge: {prompt: tiny, answerKey: false, models: [{model: tiny-judge, maxTokens: 16, concurrency: 32}]}
  rollout: {groupSize: 8, groupsPerUpdate: 12, responseTokens: 24, minValid: 4}
  algorithm: {advantage: {gigpo: {normalization: mean_std, gamma: 0.95, weight: 1.0}}}
  learner: {learningRate: 1.5e-4, warmupUpdates: 4, miniBatches: 2}
  engine: {maxConcurrentSequences: 32, kvCacheMiB: 64}
  evaluation: {tasks: {split: test}, episodes: 120, greedy: false, baselines: false}
  checkpoints: {export: false}
  stop: {maxUpdates: 14}
"""


def test_held_out_success_by_the_verifier_rises(tmp_path: Path) -> None:
    (tmp_path / "judged.yaml").write_text(SPEC)
    finished = Command("run", "-f", "judged.yaml", place=tmp_path).wait()
    assert finished.code == 0, finished.said
    assert finished.left_behind == []
    folder = tmp_path / "runs" / "judged"
    updates = [event for event in read_events(folder) if event["event"] == "update"]
    assert len(updates) == 14
    episodes = [one for group in Recording(folder / "rollout").settled(prompts=False) for one in group.episodes]
    assert all(one.score is None for one in episodes)  # no verifier was asked
    verdicts = [json.loads(line) for line in (folder / "verdicts.jsonl").open()]
    assert verdicts and all(line["model"] == "judge" for line in verdicts)
    found = compare(folder, folder, name="before-sampled", other="after-sampled")
    assert found.difference.tasks >= 100 and not found.before.judged
    assert found.difference.interval is not None and found.difference.interval.low > 0, found.difference
