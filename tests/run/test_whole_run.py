"""What a run leaves behind after its first session: figures, pictures, weights, and every step that it learned from."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from whole import Run, tapforge

from tapforge_envs.protocol import Outcome
from tapforge_trainer.agents import make_agent
from tapforge_trainer.data import sources
from tapforge_trainer.data.convert import convert
from tapforge_trainer.data.folder import DataFolder
from tapforge_trainer.data.imitation import ImitationData
from tapforge_trainer.learner.frame_store import PixelFormat, decode
from tapforge_trainer.loggers.figures import figures_of, meaning
from tapforge_trainer.recording.learner_tokens import LearnerTokenReader
from tapforge_trainer.records import EpisodeRecord
from tapforge_trainer.telemetry.throughput import PHASES

MODES = ("sampled", "greedy")
UPDATES, GROUPS, MEMBERS, EPISODES = 2, 4, 4, 16


def test_it_ends_well_and_leaves_no_process(trained: Run) -> None:
    assert trained.finished.code == 0, trained.finished.said
    assert trained.finished.left_behind == []
    assert "Traceback" not in trained.finished.err
    for name in ("summary.json", "curve.png", "replay.html", "export"):
        assert f"/{name}" in trained.finished.out


@pytest.mark.parametrize("when", ["success_before", "success_after"])
@pytest.mark.parametrize("mode", MODES)
def test_success_is_said_with_its_interval_and_its_number_of_episodes(trained: Run, when: str, mode: str) -> None:
    result = trained.summary[when][mode]
    low, high = result["interval"]
    assert 0 <= low <= result["success"] <= high <= 1
    assert result["episodes"] + result["invalid"] == EPISODES
    assert sum(result["reasons"].values()) == EPISODES


def test_the_summary_is_complete_and_adds_up(trained: Run) -> None:
    summary = trained.summary
    assert summary["updates"] == UPDATES
    assert summary["ended_after"] == f"{UPDATES} updates"
    assert summary["episodes"] >= UPDATES * GROUPS * MEMBERS
    assert summary["invalid_episodes"] == 0
    assert set(summary["members"]) == {"valid"} and 0 < sum(summary["members"]["valid"].values()) <= summary["episodes"]
    assert summary["env_steps_per_second"] > 0
    assert 0 < summary["slot_busy_share"] <= 1
    parts = [summary[f"seconds_{part}"] for part in ("start", "sft", "rl")]
    assert all(part > 0 for part in parts)
    assert sum(parts) <= summary["seconds_total"]
    assert set(summary["baselines"]) == {"random", "always_infeasible"}
    assert all(baseline["episodes"] == EPISODES for baseline in summary["baselines"].values())
    assert "test" in summary["held_out"]["held_out"]
    practised = summary["practised"]["templates"].values()
    assert sum(row["attempts"] for row in practised) == UPDATES * GROUPS * MEMBERS
    assert trained.events("alarm") == []


def test_every_update_says_where_its_time_went_and_the_summary_adds_it_up(trained: Run) -> None:
    updates = [event["learner"] for event in trained.events("update")]
    for metrics in updates:
        assert all(metrics[f"seconds_{phase}"] > 0 for phase in PHASES if phase != "checkpoint")
        computed = sum(metrics[f"seconds_{phase}"] for phase in ("forward", "backward", "optimizer"))
        assert computed <= metrics["seconds"] <= metrics["seconds_learn"]
        assert 0 < metrics["tokens_per_second"] <= metrics["positions_per_second"]
        assert "mfu" not in metrics, "nothing is known of what a CPU can do"
    throughput = trained.summary["throughput"]
    assert throughput["mfu"] is None and set(throughput["seconds_by_phase"]) == set(PHASES)
    assert throughput["seconds_by_phase"]["checkpoint"] > 0, "of the first update's"


def test_the_start_says_what_it_waits_for(trained: Run) -> None:
    phases = [event["text"] for event in trained.events("phase")]
    waited = [text for text in phases if text.startswith("waiting for ")]
    for what in ("the learner (", "an engine ("):
        assert any(what in text for text in waited), phases
    assert phases.index(waited[-1]) < next(k for k, text in enumerate(phases) if text.startswith("measuring before"))


def test_the_base_model_s_answers_are_checked_before_the_first_update(trained: Run) -> None:
    (found,) = trained.events("base_model")
    assert found["answers"] == sum(
        len(e.steps) for m in MODES for e in trained.recording("evaluation", f"before-{m}").episodes()
    )
    assert trained.summary["base_model"] == {
        name: value for name, value in found.items() if name not in ("at", "event")
    }


def test_every_figure_that_loggers_get_is_documented(trained: Run) -> None:
    events = [event for kind in ("update", "warm_start", "evaluation", "baseline") for event in trained.events(kind)]
    names = {name for event in events for name in figures_of(event)}
    assert len(names) > 60 and sorted(name for name in names if meaning(name) is None) == []


def test_the_pictures_open_from_disk(trained: Run) -> None:
    assert (trained.folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    page = (trained.folder / "replay.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
    assert "data:image/png;base64," in page
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?!data:|#)[^"'\s>]+""", page) == []


def test_the_export_is_the_checkpoint_and_loads_with_transformers(trained: Run) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import Qwen3VLForConditionalGeneration

    from tapforge_trainer.model_source.tiny_base import base_folder

    model = Qwen3VLForConditionalGeneration.from_pretrained(trained.folder / "export", dtype=torch.float32)
    assert json.loads((trained.folder / "export" / "tapforge.json").read_text())["prompt"] == "compact"
    exported = dict(model.named_parameters())
    folder = trained.folder / "checkpoints" / f"update-{UPDATES:08d}"
    kept = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    saved = {f"model.{n}": torch.empty_like(tensor) for n, tensor in exported.items() if f"model.{n}" in kept}
    with warnings.catch_warnings(action="ignore"):  # about being a single process
        dcp.load(saved, checkpoint_id=folder)
    base = Qwen3VLForConditionalGeneration.from_pretrained(base_folder(), dtype=torch.float32)
    frozen = {f"model.{name}": tensor for name, tensor in base.named_parameters() if ".visual." in name}
    assert saved.keys() | frozen.keys() == {f"model.{name}" for name in exported}
    assert not saved.keys() & frozen.keys()  # no checkpoint holds what nobody trains
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor.detach(), (saved | frozen)[f"model.{name}"].detach(), rtol=0, atol=0)


def test_the_kl_reference_is_the_policy_after_the_warm_start(trained: Run) -> None:
    from safetensors.torch import load_file

    from tapforge_trainer.model_source.tiny_base import base_folder

    reference, base, last = (
        load_file(folder / "model.safetensors")
        for folder in (trained.folder / "reference", base_folder(), trained.folder / "export")
    )
    assert any((reference[name] != base[name].to(reference[name].dtype)).any() for name in reference)
    assert any((reference[name] != last[name]).any() for name in reference)
    first, *_ = trained.events("update")
    assert first["learner"]["kl_reference"] == pytest.approx(0, abs=1e-9)


def test_every_answer_of_a_measurement_is_of_one_version(trained: Run) -> None:
    """Also of the measurement in between, while training is paused."""
    versions = {"before": 1, "update-1": 2, "after": 3}
    for name, version in versions.items():
        for mode in MODES:
            episodes = list(trained.recording("evaluation", f"{name}-{mode}").episodes())
            assert len(episodes) == EPISODES
            assert {v for e in episodes for s in e.steps for v in s.generation.versions} == {version}
    measured = {(e["name"], e["mode"]): e["policy_version"] for e in trained.events("evaluation")}
    assert measured == {(name, mode): version for name, version in versions.items() for mode in MODES}


def test_the_same_tasks_are_measured_each_time_and_none_was_practised(trained: Run) -> None:
    def keys(*place: str) -> list[str]:
        return sorted(e.task.key for e in trained.recording(*place).episodes())

    before = keys("evaluation", "before-sampled")
    assert len(set(before)) == EPISODES
    for name in ("before-greedy", "after-sampled", "after-greedy", "baseline-random", "baseline-always_infeasible"):
        assert keys("evaluation", name) == before
    assert not set(before) & set(keys("rollout"))


def test_every_step_is_recorded_as_the_engine_saw_it(trained: Run) -> None:
    config = json.loads((trained.folder / "export" / "config.json").read_text())
    form = PixelFormat.of_folder(trained.folder / "export")
    recording = trained.recording("rollout")
    steps = [step for episode in recording.episodes() for step in episode.steps]
    assert len(steps) > UPDATES * GROUPS * MEMBERS
    for step in steps:
        generation = step.generation
        assert len(generation.ids) == len(generation.logprobs) == len(generation.versions) > 0
        assert len(generation.ids) <= 24
        assert generation.prompt_length + len(generation.ids) <= 256
        assert all(-math.inf < logprob <= 0 for logprob in generation.logprobs)
        frames = [recording.frames.frame(name) for name in step.frames]
        tokens = sum(math.prod(form.grid(frame.width, frame.height)) for frame in frames)
        assert generation.prompt_ids.count(config["image_token_id"]) == len(frames) > 0
        assert generation.prompt_length - len(generation.prompt_ids) == tokens - len(frames)
        assert config["image_token_id"] not in generation.ids
        assert (step.action is None) == (step.parse_error is not None)
    for name in {name for step in steps for name in step.frames}:
        frame = recording.frames.frame(name)
        assert decode(frame.data, name).shape == (frame.height, frame.width, 3)


def test_its_episodes_are_data_that_its_model_can_imitate(trained: Run, tmp_path: Path) -> None:
    played = [e for e in trained.recording("rollout").episodes() if e.outcome is Outcome.SUCCESS]
    convert(sources.read("recording", trained.folder, {"successes": "true"}), "recording", tmp_path / "set", {}, 0.0)
    data = DataFolder(tmp_path / "set")
    twice = data.about["rejected"].get("duplicate", {"rows": 0})["rows"]
    assert len(data) + twice == len(played) and {episode.outcome for episode in data} == {"success"}
    options: dict[str, Any] = {"prompt": "compact", "history_images": 1, "history_steps": 8, "response_tokens": 24}
    agent = make_agent("qwen3-vl", trained.folder / "export", context_tokens=256, **options)
    shown = ImitationData(agent, data, ("success",))
    assert len(shown.batch(range(20)).samples) == 20 and shown.left_out.total == 0


def test_groups_are_of_one_task_and_as_old_as_allowed(trained: Run) -> None:
    groups = list(trained.recording("rollout").groups())
    assert len(groups) >= UPDATES * GROUPS
    assert [g.order for g in groups if g.order < UPDATES * GROUPS] != []
    for group in groups:
        assert len(group.episodes) == MEMBERS
        assert all(_counts(episode) and episode.task == group.task for episode in group.episodes)
        versions = {v for e in group.episodes for s in e.steps for v in s.generation.versions}
        assert group.version <= min(versions) and max(versions) <= group.version + 1


def _counts(episode: EpisodeRecord) -> bool:
    return episode.outcome in (Outcome.SUCCESS, Outcome.FAILURE)


def test_engine_and_learner_agree(trained: Run) -> None:
    updates = trained.events("update")
    assert [event["update"] for event in updates] == [1, 2]
    for event in updates:
        assert event["learner"]["gap"] < 1e-4
        assert event["sample_age"] <= 1
        assert event["learner"]["gap_mean"] <= event["learner"]["gap"] and event["learner"]["gap_alarm"] == 0
    # on the tokens that the learner's very weights sampled
    assert updates[0]["learner"]["kl_age_0"] < 1e-6


def test_every_trained_token_has_the_learner_s_log_probability_and_entropy(trained: Run) -> None:
    """Those of an update whose weights sampled the tokens are the engine's, within the bound of a sync's proof."""
    updates = trained.events("update")
    reader, groups = LearnerTokenReader(trained.folder / "rollout"), trained.recording("rollout").groups()
    consumed = {name: event for event in updates for name in event["consumed"]["groups"]}
    tokens = dict.fromkeys((1, 2), 0)
    entropies: dict[int, list[float]] = {1: [], 2: []}
    for group in groups:
        for episode in group.episodes:
            found = reader.find(episode.id)
            if found is None:  # its group has no variance, or its update never came
                continue
            update, learner = found
            assert consumed[group.id]["update"] == update and learner.episode == episode.id
            assert [step for step, _ in learner.steps] == [step.index for step in episode.steps]
            for step in episode.steps:
                gaps, spread = learner.of_step(step.index) or ([], [])
                assert len(gaps) == len(spread) == len(step.generation.ids)
                if set(step.generation.versions) == {group.version} and update == 1:
                    assert max(map(abs, gaps)) < 1e-4
                assert all(value >= 0 for value in spread)
                entropies[update] += spread
                tokens[update] += len(gaps)
    assert tokens == {event["update"]: event["response_tokens"] for event in updates}
    assert all(tokens.values())
    for event in updates:
        mean = sum(entropies[event["update"]]) / tokens[event["update"]]
        assert mean == pytest.approx(event["learner"]["entropy"], rel=1e-3)


def test_a_complete_run_says_so_and_starts_nothing(trained: Run, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    before = copy.events("reinforcement")
    again = tapforge("run", "-f", trained.file, "--runs", tmp_path, place=tmp_path)
    assert again.code == 0, again.said
    assert "complete after 2 updates" in again.out
    assert copy.events("reinforcement") == before
    assert copy.summary == trained.summary


def test_view_draws_again(trained: Run, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    for name in ("curve.png", "replay.html"):
        (copy.folder / name).unlink()
    drawn = tapforge("view", copy.folder, place=tmp_path)
    assert drawn.code == 0, drawn.said
    pages = [(run.folder / "replay.html").read_text() for run in (copy, trained)]
    here, there = (re.sub(r"<dd>[\d.]+</dd>", "", page) for page in pages)  # the first was drawn within the run's time
    assert here == there
    assert (copy.folder / "curve.png").stat().st_size > 0


def test_export_writes_the_last_checkpoint(trained: Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    copy = trained.copied(tmp_path)
    written = tapforge("export", copy.folder, tmp_path / "model", place=tmp_path)
    assert written.code == 0, written.said
    assert written.left_behind == []
    here, there = (load_file(f / "model.safetensors") for f in (tmp_path / "model", trained.folder / "export"))
    assert here.keys() == there.keys()
    assert all((here[name] == there[name]).all() for name in here)


def test_eval_measures_the_export(trained: Run, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    few = ("--set", "spec.evaluation.episodes=4", "--set", "spec.evaluation.sampled=false")
    measured = tapforge("eval", "-f", trained.file, "--runs", tmp_path, *few, place=tmp_path)
    assert measured.code == 0, measured.said
    assert measured.left_behind == []
    result = json.loads(measured.out)
    assert set(result) == {"greedy", "baselines"}
    assert result["greedy"]["episodes"] == 4
    place = next((copy.folder / "evaluations").iterdir())
    assert json.loads((place / "result.json").read_text()) == result


@pytest.mark.long
def test_eval_in_passes_and_tries_of_a_task_file(trained: Run, tmp_path: Path) -> None:
    """Whole processes; which tasks, which figures and which file is in tests/loop/test_regimes.py and tests/tasks."""
    copy = trained.copied(tmp_path)
    few = ("--set", "spec.evaluation.episodes=4")
    passes = ("--regimes", "instances", "--passes", "2")
    measured = tapforge("eval", "-f", trained.file, "--runs", tmp_path, *few, *passes, place=tmp_path)
    assert measured.code == 0, measured.said
    result = json.loads(measured.out)["regimes"]["instances"]
    assert result["episodes"] == 8 and len(result["passes"]) == 2 and result["tasks_with_k"] == 4
    place = next((copy.folder / "evaluations").iterdir())
    assert "by instance" in (place / "result.html").read_text() and "by instance" in measured.err
    file, tried = tmp_path / "walked.jsonl", tmp_path / "tried.jsonl"
    walk = ("tasks", "walk", "-o", file, "--count", "3", "--rollouts", "8")
    assert tapforge(*walk, place=tmp_path).code == 0
    given = ("--set", f"spec.tasks={{file: {file}}}", "--set", "spec.warmStart=null", "--tries", "2", "-o", tried)
    done = tapforge("tasks", "try", "-f", trained.file, "--runs", tmp_path, *given, place=tmp_path)
    assert done.code == 0, done.said
    about = [json.loads(line)["about"] for line in tried.read_text().splitlines()]
    assert [one["by"] for one in about] == ["walk"] * 3
    ends = ("done", "failed", "step_limit", "malformed", "infeasible_wrongly", "infeasible")
    assert all(sum(one["tries"][kind] for kind in ends) == 2 for one in about)
