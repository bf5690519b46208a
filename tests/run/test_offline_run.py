"""A whole run on recorded steps: it learns from their rewards and is measured, and starts no phone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file, save_file
from whole import Run, tapforge

from tapforge_trainer.data.convert import convert
from tapforge_trainer.data.demo import ROWS, demo
from tapforge_trainer.data.folder import DataFolder
from tapforge_trainer.data.sets import split
from tapforge_trainer.data.sources import read
from tapforge_trainer.model_source.tiny_base import base_folder
from tapforge_trainer.telemetry.schema import ImitationEpoch

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


def written(folder: Path, episodes: int, *, anywhere: bool = False) -> None:
    """A data set in two parts, and a run on it. `anywhere`: each of its actions is a tap at a place drawn by lot."""
    demo(folder / "demo", episodes=episodes, seed=0)
    if anywhere:
        file, lot = folder / "demo" / ROWS, Random(0)
        rows = [json.loads(line) for line in file.open()]
        for row in rows:
            places = [[lot.randrange(1000), lot.randrange(1000)] for _ in row["actions"]]
            row["actions"] = [{"action": "click", "coordinate": place} for place in places]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert(read("verl", folder / "demo" / ROWS, {}), "verl", folder / "set", {}, 0.1)
    split(folder / "set", folder / "part", folder / "rest", share=0.2, by="task", seed=0)
    (folder / "offline.yaml").write_text(SPEC)


def unsure(folder: Path) -> None:
    """The tiny base with a final norm of less than a third: its logits are as if they were sampled at 3.3."""
    shutil.copytree(base_folder(), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.language_model.norm.weight"] *= 0.3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_student_moves_towards_a_trained_teacher_whatever_rewards_say(tmp_path: Path) -> None:
    """The teacher is an imitated model's folder; the student has hardly begun to imitate, and its rewards are
    ignored."""
    written(tmp_path, episodes=200)
    more = ["warmStart.batchSize=64", "warmStart.learningRate=1e-3", "learner.learningRate=1e-4"]
    more += ["rollout.groupsPerUpdate=16", "evaluation.episodes=200", "evaluation.baselines=false"]
    more += ["stop.maxUpdates=30", "rewards={streams: [{name: environment}]}"]

    def typed(command: str, name: str, *others: str) -> Run:
        options = [part for one in (f"metadata.name={name}", *more, *others) for part in ("--set", one)]
        done = tapforge(command, "-f", "offline.yaml", *options, place=tmp_path)
        assert done.code == 0, done.said
        return Run(tmp_path / "runs" / name, tmp_path / "offline.yaml", done)

    taught = typed("sft", "teacher", "warmStart.steps=100")
    assert "epoch 1: loss " in taught.finished.said, taught.finished.said
    passes = [ImitationEpoch.model_validate(event) for event in taught.events("imitation_epoch")]
    assert passes[-1].loss < passes[0].loss and passes[0].held_out_loss is None
    teacher = "{teacher: {path: {folder: runs/teacher/sft}}, rewards: ignored}"
    run = typed("run", "student", "warmStart.steps=8", f"algorithm.distillation={teacher}")
    apart = [update["learner"]["distillation_kl"] for update in run.events("update")]
    assert len(apart) == 30 and sum(apart[-10:]) < sum(apart[:10])
    before, after = (run.summary[f"success_{when}"]["sampled"] for when in ("before", "after"))
    assert after["interval"][0] > before["success"]


def test_a_run_learns_from_recorded_steps_and_starts_no_phone(tmp_path: Path) -> None:
    written(tmp_path, episodes=60)
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
    # its successes are imitated, and measured on held-out steps after each pass; it is the best model that is kept
    options = ["--from", str(run.folder), "--successes", "--balance", "--set", "metadata.name=again"]
    options += ["--set", "warmStart={epochs: 2, batchSize: 16, data: {path: part, heldOut: rest}}"]
    imitated = tapforge("sft", "-f", "offline.yaml", *options, place=tmp_path)
    again = Run(tmp_path / "runs" / "again", tmp_path / "offline.yaml", imitated)
    assert imitated.code == 0, imitated.said
    epochs = again.events("imitation_epoch")
    assert [ImitationEpoch.model_validate(epoch).number for epoch in epochs] == [1, 2] and epochs[0]["best"]
    assert all(0 <= epoch["answers"]["type_accuracy"] <= 1 and epoch["held_out_loss"] > 0 for epoch in epochs)
    best = min(epochs, key=lambda epoch: epoch["held_out_loss"])
    assert f"of epoch {best['number']} of 2" in imitated.out and (again.folder / "sft" / "config.json").is_file()
    assert all(episode.outcome == "success" for episode in DataFolder(again.folder / "imitated"))
    # its recording is learned from anew and asked for other rewards, as that of every run
    relearned = tapforge("relearn", str(run.folder), place=tmp_path)
    assert relearned.code == 0 and "gigpo" in relearned.said, relearned.said
    other = tapforge("rescore", str(run.folder), "--set", f"{REWARD}.type=0", place=tmp_path)
    assert other.code and "spec.environment: what the environment gave is recorded" in other.said
    changed = tapforge("run", "-f", "offline.yaml", "--set", f"{REWARD}.type=0", place=tmp_path)
    assert changed.code and "reward.type: 0.5 there, 0.0 here" in changed.said, changed.said


def test_an_alarm_says_where_only_the_form_of_an_answer_is_learned(tmp_path: Path) -> None:
    """Places that can't be foreseen, an exact one asked for: a tap of the right form is worth something, and no answer
    is ever right. The base is unsure of every token, and rarely keeps to the form until that is what it learns. It
    can't share the other runs' stack: an alarm looks back over the updates of a run, in which these must not
    succeed."""
    written(tmp_path, episodes=60, anywhere=True)
    unsure(tmp_path / "base")
    changes = [
        "metadata.name=form",
        "warmStart=null",
        "environment.source.dataset={path: part, reward: {type: 0.5, place: distance, tolerance: 0}}",
        "rewards.streams=[{name: environment}, {name: format, gate: mixedOutcomes, weight: 0.5}]",
        "model.source={path: {folder: base}}",
        "rollout={groupSize: 8, groupsPerUpdate: 8, responseTokens: 24}",
        "learner.learningRate=5e-4",
        "evaluation={episodes: 8, greedy: false, baselines: false}",
        "stop.maxUpdates=20",
    ]
    sets = [part for one in changes for part in ("--set", one)]
    done = tapforge("run", "-f", "offline.yaml", *sets, place=tmp_path)
    assert done.code == 0, done.said
    run = Run(tmp_path / "runs" / "form", tmp_path / "offline.yaml", done)
    updates, alarms = run.events("update"), run.events("alarm")
    assert len(updates) == 20 and not any(update["success_rate_all"] for update in updates)
    alarm = next((event for event in alarms if event["alarm"] == "format_alone"), None)
    shares = [update["valid_action_ratio"] for update in updates]
    assert alarm is not None, (shares, [event["alarm"] for event in alarms])
    assert "none was right: the policy learns the form of an answer" in alarm["text"]
