"""`tapforge relearn` on a recording that was made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.batch import Batch, BatchRules, build_batch
from tapforge_trainer.cli.main import cli
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner.frame_store import PixelFormat
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.records import EpisodeRecord, Generation, GroupRecord, StepRecord
from tapforge_trainer.tiny.folder import write_model

TASK = Task(suite="quickstart", template="open", seed=1)
SPEC = """\
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: x}
spec:
  environment: {source: {processes: {count: 3}}}
  rollout: {groupSize: 2, groupsPerUpdate: 2}
  algorithm: {advantage: {grpo: {}}}
"""


def episode(group: str, number: int, outcome: Outcome, length: int) -> EpisodeRecord:
    name = f"{group}.{number}"
    steps = tuple(
        StepRecord(
            episode=name,
            index=index,
            frames=(),
            state_key=f"s{index}",
            app=None,
            generation=Generation((1,), (2, 3), (-0.5, -0.5), (0, 0), "stop", 1),
            text="",
            action={"type": "home"},
            parse_error=None,
            reward=0.0,
            note="",
            seconds_model=0.0,
            seconds_environment=0.0,
        )
        for index in range(length)
    )
    return EpisodeRecord(name, group, TASK, 0, "slot", number, Reason.DONE, outcome, None, "", steps, 0.0, 1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three groups; the third was played again in part, after a resume."""
    won, lost = Outcome.SUCCESS, Outcome.FAILURE
    (tmp_path / "spec.yaml").write_text(SPEC)
    recorder = Recorder(tmp_path / "rollout")
    for order, outcomes in enumerate([(won, lost), (lost, lost), (lost, won)]):
        members = tuple(episode(f"g{order}", number, one, 2 + number) for number, one in enumerate(outcomes))
        for one in members:
            recorder.episode(one, {})
        recorder.group(GroupRecord(f"g{order}", order, TASK, 0, members))
    again = replace(
        members[1], attempt=1, id="g2.1b", steps=tuple(replace(s, episode="g2.1b") for s in members[1].steps)
    )
    recorder.episode(again, {})
    recorder.group(GroupRecord("g2", 2, TASK, 0, (members[0], again)))
    recorder.close()
    return tmp_path


def said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["relearn", *words])
    return result.exit_code, result.output


def test_the_runs_own_and_others_are_compared_step_by_step(run: Path) -> None:
    code, text = said(str(run), "--output", "json", "--set", "algorithm.advantage.rloo={}")
    assert code == 0, text
    found = json.loads(text)
    assert (found["groups"], found["batches"], found["steps"]) == (3, 2, 15)
    rows = {row["name"]: row for row in found["compared"]}
    own, rloo = rows["the run's own"], rows["with --set"]
    assert (own["correlation"], own["size"], own["sign_changes"]) == (pytest.approx(1.0), 1.0, 0.0)
    assert own["zero"] == pytest.approx(1 / 3), "the group that ended alike"
    assert rloo["size"] == pytest.approx(2**0.5, abs=1e-3) and rloo["sign_changes"] == 0.0
    assert rows["dr_grpo, prime_rl"]["size"] == pytest.approx(2**-0.5, abs=1e-3)
    assert rows["reinforce_plus_plus"]["zero"] == 0.0, "it compares with the whole batch"
    assert all(not row["error"] for row in found["compared"])


def test_it_is_the_same_each_time(run: Path) -> None:
    assert said(str(run)) == said(str(run))


def test_what_can_not_be_read_is_said(run: Path, tmp_path: Path) -> None:
    code, text = said(str(tmp_path / "none"))
    assert code == 2 and "doesn't exist" in text
    code, text = said(str(run), "--set", "algorithm.advantge=1")
    assert code == 2 and "did you mean advantage?" in text


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("{name: nobodys}", "with --set: spec.algorithm.advantage: unknown estimator 'nobodys'"),
        ('{name: hgpo, options: [{name: histry, value: "2"}]}', "unknown option of hgpo 'histry'; did you mean"),
    ],
)
def test_an_estimator_that_nobody_has_is_said(run: Path, plugin: str, words: str) -> None:
    code, text = said(str(run), "--set", f"algorithm.advantage.plugin={plugin}")
    assert code == 2 and words in text
    (run / "spec.yaml").write_text(SPEC.replace("{grpo: {}}", f"{{plugin: {plugin}}}"))
    code, text = said(str(run))
    assert code == 2 and "the run's own advantages can't be computed again" in text


def test_an_estimator_that_breaks_on_a_recording_is_a_note(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(groups: object, rules: BatchRules, facts: object = None) -> Batch:
        if rules.estimator == "maxrl":
            raise TypeError("its own mistake")
        return build_batch(groups, rules)

    monkeypatch.setattr("tapforge_trainer.run.relearn.build_batch", build)
    code, text = said(str(run))
    assert code == 0 and text.endswith("note: maxrl: its own mistake\n")


# --- gradients --------------------------------------------------------------------------------------------------------

MODEL = """\
  model: {contextTokens: 256, source: {path: {folder: FOLDER}}, adapter: {name: qwen3-vl, prompt: compact}}
"""


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with screens, of the tiny model: three groups, of which one ended alike."""
    folder = tmp_path_factory.mktemp("learned")
    model = folder / "model"
    write_model(model, 0)
    spec = SPEC.replace("groupsPerUpdate: 2}", "groupsPerUpdate: 2, responseTokens: 24}")
    (folder / "spec.yaml").write_text(spec + MODEL.replace("FOLDER", str(model)))
    record(folder, model, Retention())
    return folder


def record(folder: Path, model: Path, retention: Retention) -> None:
    won, lost = Outcome.SUCCESS, Outcome.FAILURE
    tokens = Tokens.load(model)
    form = PixelFormat.of_folder(model)
    recorder = Recorder(folder / "rollout", retention)
    random = np.random.default_rng(0)
    for order, outcomes in enumerate([(won, lost), (lost, lost), (lost, won)]):
        members = []
        for number, outcome in enumerate(outcomes):
            plain, shots, steps = episode(f"g{order}", number, outcome, 2 + number), {}, []
            for step in plain.steps:
                pixels = random.integers(0, 256, (64, 96, 3), dtype=np.uint8)
                shot = FittedFrame.of(pixels)
                shots[shot.name] = shot
                ids = (tokens.im_start, tokens.vision_start, tokens.image_pad, tokens.vision_end)
                rows, columns = form.grid(shot.width, shot.height)
                said = tuple(random.choice(tokens.allowed_ids, 3).tolist())
                answer = Generation(ids, said, (-2.0,) * 3, (0,) * 3, "stop", 3 + rows * columns)
                steps.append(replace(step, frames=(shot.name,), generation=answer))
            members.append(replace(plain, steps=tuple(steps)))
            recorder.episode(members[-1], shots)
        recorder.group(GroupRecord(f"g{order}", order, TASK, 0, tuple(members)))
    recorder.close()


def test_gradients_are_compared_and_are_the_same_to_the_bit(learned: Path) -> None:
    words = ("--gradients", "--output", "json", "--set", "algorithm.loss={plugin: {name: kl_cov, options: []}}")
    first, again = said(str(learned), *words), said(str(learned), *words)
    assert first == again and first[0] == 0, first[1]
    rows = {row["name"]: row for row in json.loads(first[1])["compared"]}
    own = rows["the run's own"]["gradient"]
    assert (own["cosine"], own["size"]) == (pytest.approx(1.0), pytest.approx(1.0)) and own["noise"] > 0
    other = rows["with --set"]
    assert other["correlation"] == pytest.approx(1.0), "the same advantages"
    digests = [row["gradient"]["digest"] for row in rows.values()]
    assert len(set(digests)) > 4
    scaled = next(row for name, row in rows.items() if name.startswith("dr_grpo"))
    assert scaled["gradient"]["cosine"] == pytest.approx(1.0, abs=1e-4), "the deviation is the same in all groups"
    assert scaled["gradient"]["size"] == pytest.approx(2**-0.5, abs=1e-3)


def test_what_reads_answers_first_has_advantages_with_gradients_alone(learned: Path) -> None:
    otb = ("--set", "algorithm.advantage={plugin: {name: otb}}", "--updates", "1")
    code, text = said(str(learned), *otb)
    assert code == 0 and "note: with --set: the score_square of step 0 of episode g0.0 was not read" in text
    code, text = said(str(learned), *otb, "--gradients")
    assert code == 0 and "was not read" not in text
    assert " ".join(text.splitlines()[1].split()).endswith("zero gradient: cosine size noise digest")


@pytest.mark.parametrize(
    ("retention", "words"),
    [
        (Retention(frames="none"), "but 6 of 6 episodes lack some (the first: g0.0): "),
        (Retention(encoding="webp"), "they were recorded as webp. Record with recording.frames: all"),
    ],
)
def test_gradients_without_the_screens_say_what_is_missing(
    learned: Path, tmp_path: Path, retention: Retention, words: str
) -> None:
    (tmp_path / "spec.yaml").write_text((learned / "spec.yaml").read_text())
    record(tmp_path, learned / "model", retention)
    code, text = said(str(tmp_path), "--gradients")
    assert code == 2 and words in text and "Traceback" not in text


def test_weights_of_a_run_with_adapters_are_refused(learned: Path, tmp_path: Path) -> None:
    """They would change nothing: gradients are at the adapters that the run begins with."""
    spec = (learned / "spec.yaml").read_text().replace("model: {", "model: {lora: {rank: 4}, ")
    (tmp_path / "spec.yaml").write_text(spec)
    record(tmp_path, learned / "model", Retention())
    code, text = said(str(tmp_path), "--gradients", "--weights", str(learned / "model"))
    assert code == 2 and "leave --weights out" in text and "Traceback" not in text


def test_weights_are_of_gradients(run: Path, tmp_path: Path) -> None:
    code, text = said(str(run), "--weights", str(tmp_path))
    assert code == 2 and "--weights is of --gradients" in text


def test_gradients_know_one_temperature(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC + "  stages: [{temperature: 0.5, stop: {maxUpdates: 1}}]\n")
    code, text = said(str(tmp_path), "--gradients")
    assert code == 2 and "stages have temperatures of their own" in text and "Traceback" not in text
