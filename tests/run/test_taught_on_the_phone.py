"""From a teacher to a trained model on the simulated phone, by the commands of docs/data.md: a teacher plays, its
successes are imitated, and reinforcement goes on from there. Each step is measured on the same held-out tasks. What has
been imitated is then a teacher itself, one that the command serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole import Command, Run, tapforge

from tapforge_envs.protocol import Outcome
from tapforge_trainer.data.folder import DataFolder
from tapforge_trainer.model_source.tiny_base import base_folder, judge_folder
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.statistics import Gain, gain

pytestmark = pytest.mark.long

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: phone}
spec:
  seed: 1
  model: {contextTokens: 256, adapter: {prompt: compact, historySteps: 8}}
  environment: {source: {processes: {count: 32}}, deadlines: {episodeSeconds: 600}}
  tasks: {templates: [open, open_two, switch, switch_two, switch_then_open, two_panels]}
  rollout: {groupSize: 8, groupsPerUpdate: 8, responseTokens: 24}
  learner: {learningRate: 1.5e-4, miniBatches: 2}
  engine: {maxConcurrentSequences: 64, kvCacheMiB: 128}
  evaluation: {episodes: 100, greedy: false, baselines: false}
  checkpoints: {everyUpdates: 100, export: false}
  stop: {maxUpdates: 20}
"""
COMPACT = """{% block system %}{% endblock %}
{% block user %}
{{ goal }}
{% for turn in history %}
{{ " click" if "click" in turn.text else " home" if "Home" in turn.text else " back" }}
{%- endfor %}{% endblock %}
"""
IMITATION = "warmStart={data: {path: part, heldOut: rest}, epochs: 4, batchSize: 64, learningRate: 1e-3}"


def successes(folder: Path) -> dict[tuple[str, str], list[bool]]:
    found: dict[tuple[str, str], list[bool]] = {}
    for episode in Recording(folder).episodes():
        if episode.valid:
            won = episode.outcome is Outcome.SUCCESS
            found.setdefault((episode.task.template, episode.task.key), []).append(won)
    return found


def gained(before: Path, after: Path) -> Gain:
    found = gain(successes(before), successes(after))
    assert found is not None and found.tasks == 100 and found.interval is not None
    return found


def test_a_teacher_is_imitated_and_reinforcement_adds_to_it(tmp_path: Path) -> None:
    (tmp_path / "phone.yaml").write_text(SPEC)
    teacher = Command("teacher", "serve", "-f", "phone.yaml", "--port", "0", "--error-rate", "0.3", place=tmp_path)
    try:
        (out,) = (path for path in tmp_path.glob("teacher-*.out"))
        teacher.until(lambda: out.read_text().endswith("\n"))
        url = json.loads(out.read_text())["url"]
        asked = ("--teacher", url, "--model", "demonstrator", "--episodes", "250", "--concurrency", "32")
        done = tapforge("collect", "-f", "phone.yaml", *asked, "--into", "set", place=tmp_path)
        assert done.code == 0 and "set: 250 episodes" in done.said, done.said
    finally:
        teacher.kill()

    def typed(command: str, *words: str) -> None:
        done = tapforge(command, *words, place=tmp_path)
        assert done.code == 0, done.said

    typed("data", "split", "set", "-o", "part", "--held-out", "rest", "--share", "0.2", "--by", "task")
    typed("sft", "-f", "phone.yaml", "--set", IMITATION)
    typed("eval", "-f", "phone.yaml", "--set", "metadata.name=base", "--model", str(base_folder()))
    source = "model.source={path: {folder: runs/phone/sft}}"
    run = tapforge("run", "-f", "phone.yaml", "--set", "metadata.name=run", "--set", source, place=tmp_path)
    found = Run(tmp_path / "runs" / "run", tmp_path / "phone.yaml", run)
    assert run.code == 0, run.said
    (base,) = (tmp_path / "runs" / "base").rglob("eval-sampled")
    imitated, learned = (found.folder / "evaluation" / f"{when}-sampled" for when in ("before", "after"))
    by_imitation, by_reinforcement = gained(base, imitated), gained(imitated, learned)
    assert by_imitation.interval.low > 0, by_imitation
    assert by_reinforcement.interval.low > 0, by_reinforcement
    served_as_a_teacher(tmp_path)


def served_as_a_teacher(place: Path) -> None:
    """The imitated model, whose folder gets the chat template that an endpoint needs; by a prompt file it is asked as
    it was trained."""
    template = json.loads((judge_folder() / "tokenizer_config.json").read_text())["chat_template"]
    (place / "runs" / "phone" / "sft" / "chat_template.jinja").write_text(template)
    (place / "compact.jinja").write_text(COMPACT)
    model = "{name: large, source: {path: {folder: runs/phone/sft}}, contextTokens: 512, kvCacheMiB: 64}"
    asked = ("--teacher", "large", "--prompt-file", "compact.jinja", "--answer-tokens", "24", "--temperature", "0")
    sets = ("--set", f"models=[{model}]", "--set", "tasks.templates=[open, switch]")
    done = Command("collect", "-f", "phone.yaml", *sets, *asked, "--episodes", "6", "--into", "own", place=place).wait()
    assert done.code == 0 and "own: 6 episodes" in done.said, done.said
    assert done.left_behind == []
    data = DataFolder(place / "own")
    assert data.about["made_of"]["teacher"] == "spec.models[large]"
    assert all(episode.outcome == "success" and episode.provenance.model == "large" for episode in data)
