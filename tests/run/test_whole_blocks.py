"""A history in blocks from the engine to the gradient: a family with its published vocabulary and chat template, and
weights that say anything. It can't share the other runs: their prompts are compact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.families import real
from whole import Command

from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.run.folder import read_events

pytestmark = pytest.mark.long

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {{name: blocks}}
spec:
  model:
    source: {{path: {{folder: {folder}}}}}
    contextTokens: 6000
    maxPixels: 100000
    adapter: {{history: {{blocks: {{keep: 2, upTo: 4}}}}, maxParseFailures: 100}}
  environment: {{source: {{processes: {{count: 4}}}}}}
  rollout: {{groupSize: 2, groupsPerUpdate: 2, responseTokens: 24, minValid: 2, maxSteps: 6}}
  algorithm:
    signal: reward
    invalidAnswerPenalty: 0.1
    advantage: {{plugin: {{name: reinforce_plus_plus}}}}
  evaluation: {{episodes: 2, everyUpdates: 0, greedy: false, baselines: false}}
  checkpoints: {{export: false}}
  stop: {{maxUpdates: 1}}
"""


def test_steps_that_extend_each_other_are_learned_from_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SPEC.format(folder=json.dumps(str(real.folder("qwen3-vl-8b-tiny")))))
    finished = Command("run", "-f", "run.yaml", place=tmp_path).wait()
    assert finished.code == 0, finished.err
    folder = tmp_path / "runs" / "blocks"
    update = next(event for event in read_events(folder) if event["event"] == "update")
    groups = Recording(folder / "rollout").settled(prompts=True)[:2]
    episodes = [episode for group in groups for episode in group.episodes]
    # The first window has four steps, each later one three: the last step of a window has all of them in its prompt.
    last = [s for e in episodes for s in e.steps if (s.index % 3 == 0 and s.index) or s.index == len(e.steps) - 1]
    sequences = sum(step.generation.prompt_length + len(step.generation.ids) for step in last)
    assert update["samples"] == sum(len(episode.steps) for episode in episodes) > 2 * len(last)
    learner = update["learner"]
    # Members of a group begin with the same prompt, which is computed once.
    again = sum((len(group.episodes) - 1) * group.episodes[0].steps[0].generation.prompt_length for group in groups)
    assert learner["tokens"] == sequences - again
    # Log-probabilities of joined steps, by the learner, are those that the engine sampled each of them with.
    assert learner["engine_gap_max"] < 1e-4
