"""A run with what a real model brings: another family than the demo's, at width 256, with the published vocabulary and
chat template, a screen of 1080x2400, adapters on its language model, and packed sequences."""

from __future__ import annotations

import math

import pytest
from tests.families import real
from whole import Run, tapforge

WIDE = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: wide}
spec:
  model:
    source: {path: {folder: model}}
    adapter: {name: qwen2.5-vl, historySteps: 2, maxParseFailures: 2}
    contextTokens: 4096
    maxPixels: 1003520  # 1280 cells of 28x28
    lora: {rank: 4, alpha: 8}
  environment:
    source: {processes: {count: 4}}
    screen: {width: 1080, height: 2400}
    deadlines: {episodeSeconds: 600, acquireSeconds: 600, resetSeconds: 120, stepSeconds: 120, evaluateSeconds: 120}
  rollout: {groupSize: 2, groupsPerUpdate: 2, responseTokens: 8, groupDeadlineSeconds: 600, maxStaleness: 0}
  # A random model fails at everything: what it learns it learns from demonstrations, and groups without variance stay
  # for the KL term.
  warmStart: {demonstrations: 2, steps: 2, batchSize: 2, learningRate: 1e-2}
  algorithm: {kl: {coefficient: 0.05}}
  learner: {learningRate: 1e-3, tokensPerMicroBatch: 8192}
  engine: {maxConcurrentSequences: 4, kvCacheMiB: 64, maxBatchedTokens: 4096}
  evaluation: {sampled: false, baselines: false, episodes: 2}
  checkpoints: {export: false}
  stop: {maxUpdates: 1}
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("wide")
    (place / "model").symlink_to(real.folder("qwen2.5-vl-7b-tiny", flat=True))
    (place / "wide.yaml").write_text(WIDE)
    finished = tapforge("run", "-f", "wide.yaml", place=place)
    return Run(place / "runs" / "wide", place / "wide.yaml", finished)


def test_it_learns_from_screens_of_a_real_phone(wide: Run) -> None:
    assert wide.finished.code == 0, wide.finished.err
    (shown,) = wide.events("warm_start")
    assert shown["learner"]["padding_share"] == 0.0
    assert 0 < shown["learner"]["gradient_norm"] < math.inf
    # The engines got merged adapters, and each sync was proved: else the run had ended.
    (update,) = wide.events("update")
    learned = update["learner"]
    assert learned["padding_share"] == 0.0
    # Engine and learner say the same of the same tokens: ids, positions, pixels and weights agree.
    assert 0 < learned["kl_age_0"] < 1e-6 and learned["gap"] < 1e-4
    # Every prompt holds one screen of 1,272 visual tokens, besides the tools and the task.
    assert learned["tokens"] > update["samples"] * 1272
