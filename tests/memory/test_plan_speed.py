"""`tapforge plan --speed`: its figures beside those of a hand-made model, what follows from what, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tapforge_api import load
from tapforge_trainer.cli.main import cli
from tapforge_trainer.learner import flops
from tapforge_trainer.learner.families import shape_of
from tapforge_trainer.memory.command import model_config
from tapforge_trainer.speed import cards
from tapforge_trainer.speed.balance import better_split, enough_players
from tapforge_trainer.speed.command import SpeedOptions, assumed_of, work_of
from tapforge_trainer.speed.estimate import Assumed, Work, learner_operations, prompt_tokens, speed

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
H100 = cards.CardSpeed("H100", 989e12, 3.35e12)
SLIDING = ("spec.model.adapter.history=null", "spec.model.adapter.historyImages=3", "spec.model.contextTokens=8192")


def sample(name: str = "run-qwen3-vl-8b", *overrides: str, steps: int = 15) -> tuple[Work, Assumed]:
    """With a window that slides."""
    run = load(SAMPLES / f"{name}.yaml", (*SLIDING, *overrides))
    return work_of(run, shape_of(model_config(run, None))), assumed_of(run, SpeedOptions(steps=steps))


def test_an_8b_on_eight_gpus_waits_for_its_learner() -> None:
    """Beside a model made by hand for the same run: 415 s, 149 s, and 285 s an update with 6 ranks and 2 engines."""
    work, assumed = sample()
    assert (work.episodes, work.ranks, work.engines, work.players) == (128, 4, 4, 64)
    assert prompt_tokens(work, assumed) == 3 * 1280 + 1000
    now = speed(work, assumed, H100, 0.4)
    assert now.learner == pytest.approx(415, rel=0.05) and now.rollout == pytest.approx(149, rel=0.1)
    assert now.update == now.learner + assumed.sync_seconds and now.bound == "learner"
    other = replace(work, ranks=6, engines=2)
    assert speed(other, assumed, H100, 0.4).update == pytest.approx(285, rel=0.05)
    better = better_split(work, assumed, H100, colocated=False, fits=lambda _: True)
    assert better is not None and better.overrides == ("spec.learner.ranks=6", "spec.engine.replicas=2")
    assert better.low.update > better.high.update


def test_a_split_without_room_for_the_model_or_of_shared_gpus_is_not_named() -> None:
    work, assumed = sample()
    assert better_split(work, assumed, H100, colocated=True, fits=lambda _: True) is None
    five = better_split(work, assumed, H100, colocated=False, fits=lambda other: other.ranks < 6)
    assert five is not None and five.overrides[0] == "spec.learner.ranks=5"
    assert better_split(replace(work, ranks=6, engines=2), assumed, H100, colocated=False, fits=lambda _: True) is None


def test_blocks_whose_steps_stay_apart_cost_what_separate_steps_cost() -> None:
    work, assumed = replace(sample()[0], screens=6, keep=2), sample()[1]
    joined, apart = (speed(replace(work, joined=joined), assumed, H100, 0.4) for joined in (True, False))
    assert apart.learner > 2 * joined.learner and apart.step > joined.step
    sliding = replace(work, screens=4, keep=None)  # as many as blocks of 2 to 6 show on average
    assert apart.learner == pytest.approx(speed(sliding, assumed, H100, 0.4).learner, rel=0.15)


def test_phones_that_the_file_does_not_count_are_said_and_can_be_given() -> None:
    auto = ("--set", 'spec.environment={protocol: adb, source: {urls: {list: ["auto"]}}}')
    code, text = plan("-f", str(SAMPLES / "run-qwen3-vl-8b.yaml"), *auto)
    assert code == 0 and "(the most that may play, as the file doesn't say how many there are: --phones)" in text
    code, text = plan("-f", str(SAMPLES / "run-qwen3-vl-8b.yaml"), *auto, "--phones", "3")
    assert code == 0 and "and 3 phones: a step" in text
    for more, known in ((), False), (("--phones", "3"), True):
        code, text = plan("-f", str(SAMPLES / "run-qwen3-vl-8b.yaml"), *auto, *more, "--output", "json")
        assert code == 0 and json.loads(text)["phones_known"] is known


@pytest.mark.parametrize("players", [1, 8, 64, 512])
def test_steps_take_as_long_as_their_parts_and_no_engine_does_more_than_it_can(players: int) -> None:
    work, assumed = replace(sample()[0], players=players), sample()[1]
    found = speed(work, assumed, H100, 0.4)
    assert 0 < found.prompts <= 1 and found.step > assumed.phone_seconds
    # Little's law: episodes at once are steps per second times seconds of a step.
    assert work.episodes * assumed.steps / found.rollout * found.step == pytest.approx(players)
    if players == 1:
        more = speed(replace(work, players=2), assumed, H100, 0.4)
        assert more.rollout == pytest.approx(found.rollout / 2, rel=0.1), "nobody waits for anybody yet"


def test_what_is_computed_again_and_beside_counts() -> None:
    work, assumed = sample()
    plain = speed(replace(work, more_forwards=0), assumed, H100, 0.4)
    text = work.costs.text([prompt_tokens(work, assumed) + assumed.answer_tokens], assumed.answer_tokens)
    again = speed(work, assumed, H100, 0.4)
    assert again.learner - plain.learner == pytest.approx(128 * 15 * text / (4 * 0.4 * H100.peak))
    assert sample("run-qwen3-vl-8b", "spec.learner.miniBatches=4")[0].more_forwards == 1.75
    anchored = sample("run-qwen3-vl-8b", "spec.learner.miniBatches=4", "spec.algorithm.loss.anchor=behavior")[0]
    critic = {"spec.algorithm.critic={}", "spec.algorithm.advantage={plugin: {name: gae}}"}
    assert sample("run-qwen3-vl-8b", *critic)[0].more_forwards == sample("run-qwen3-vl-8b")[0].more_forwards + 1
    assert anchored.more_forwards == 1, "checkpointing alone: nobody reads old log-probabilities"
    lora = sample("run-qwen2.5-vl-7b")[0]
    assert not lora.weights and lora.more_forwards == 2, "checkpointing, and the reference of the KL term"


def test_turns_add_up_and_phones_that_are_too_few_are_said() -> None:
    work, assumed = sample("run-qwen3-vl-8b", "spec.rollout.maxStaleness=0")
    turns = speed(work, assumed, H100, 0.4)
    assert work.in_turns and turns.update == pytest.approx(turns.learner + turns.rollout + assumed.sync_seconds)
    assert enough_players(work, assumed, H100, 256) is None
    few = replace(sample()[0], players=8)
    enough = enough_players(few, assumed, H100, 256)
    assert enough is not None and 8 < enough < 64
    assert speed(replace(few, players=enough - 1), assumed, H100, 0.4).bound == "rollout"
    assert enough_players(few, assumed, H100, 10) is None, "so many are not admitted"


def test_every_gpu_whose_peak_is_known_has_a_rate_of_its_memory() -> None:
    for name, peak in flops._PEAKS:
        found = cards.card_speed(f"NVIDIA-{name.replace(' ', '-')}")
        assert found is not None and found.peak == peak, name
        assert 1e11 < found.bandwidth < 1e13
    assert cards.card_speed("NVIDIA-H100-80GB-HBM3") == replace(H100, name="NVIDIA-H100-80GB-HBM3")
    assert cards.card_speed("Quadro") is None


def plan(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["plan", "--speed", *words])
    return done.exit_code, done.output


def test_the_command_says_what_it_assumes_and_what_would_be_faster() -> None:
    code, text = plan("-f", str(SAMPLES / "run-qwen3-vl-8b.yaml"), "--steps", "15")
    assert code == 0 and "not measured" in text and "assumed" in text
    assert "the learner is what is waited for" in text
    assert "--set spec.learner.ranks=5 --set spec.engine.replicas=3" in text
    h200 = ("--gpu-memory", "H200", "--output", "json", "--phone-seconds", "4", "--answer-tokens", "200")
    code, text = plan("-f", str(SAMPLES / "run-ui-tars-1.5-7b.yaml"), *h200)
    found = json.loads(text)
    assert code == 0 and found["card"]["bandwidth"] == 4.8e12
    assert found["assumed"]["phone_seconds"] == 4 and found["assumed"]["answer_tokens"] == 200
    assert found["low"]["update"] > found["high"]["update"] > 0


def test_the_tables_of_the_docs_are_what_the_command_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (.* s) \| (.* s) \| (.* s) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for name, learner, rollout, update, other in rows:
        code, text = plan("-f", str(SAMPLES / f"{name}.yaml"), "--steps", "15")
        said = dict(re.split(r" {2,}", line, maxsplit=1) for line in text.splitlines())
        assert code == 0 and said["learner"].startswith(learner) and said["rollout"].startswith(rollout)
        assert said["update"].startswith(update) and said.get("faster", "–").startswith(other.rpartition(": ")[2])
    rows = re.findall(
        r"^\| `(\S+)` \| (.* s) \| (.*) \| ([\d,]+ to [\d,]+) \| ([\d,]+ to [\d,]+) \|$", page, re.MULTILINE
    )
    assert len(rows) == 4
    before = [word for override in SLIDING for word in ("--set", override)]
    for name, update, other, sliding, blocks in rows:
        for words, episodes in ((before, sliding), ([], blocks)):
            _, text = plan("-f", str(SAMPLES / f"{name}.yaml"), "--steps", "15", *words)
            said = dict(re.split(r" {2,}", line, maxsplit=1) for line in text.splitlines())
            assert said["episodes"].startswith(f"{episodes} an hour")
            assert not words or said["update"].startswith(update)
            assert not words or said.get("faster", "–").startswith(other.rpartition(": ")[2])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "spec.device=cpu"), "only GPUs' speed is estimated"),
        (("--memory",), "two plans"),
        (("--gpu-memory", "80GiB"), "H100"),
        (("--gpu-memory", "Voodoo2"), "Voodoo2"),
        (("--gpu-memory", "T4"), "not known here"),
    ],
)
def test_what_can_not_be_estimated_is_said(words: tuple[str, ...], said: str) -> None:
    code, text = plan("-f", str(SAMPLES / "run-qwen3-vl-8b.yaml"), *words)
    assert said in text and code == (0 if words[-1] == "80GiB" else 2)


def test_answers_to_a_recorded_step_have_its_prompt_once() -> None:
    played, assumed = sample(steps=1)
    assert played.sharing == 1
    source = "spec.environment={source: {dataset: {path: set}}}"
    recorded = load(SAMPLES / "run-qwen3-vl-8b.yaml", (source, "spec.rollout.groupSize=8"))
    assert work_of(recorded, shape_of(model_config(recorded, None))).sharing == 8
    work = replace(played, sharing=8, episodes=8)
    costs, answer = work.costs, assumed.answer_tokens
    prompt = prompt_tokens(work, assumed)
    lengths, before = [prompt + answer, *[answer] * 7], [0, *[prompt] * 7]
    forward = costs.text(lengths, 8 * answer, before)
    backward = costs.backward(lengths, 8 * answer, (), before, weights=work.weights, tower=False)
    vision = costs.vision([work.screen_patches] * work.screens) * (3 + work.more_forwards if work.tower else 1)
    whole = (1 + work.more_forwards) * forward + backward + vision
    assert learner_operations(work, assumed) == pytest.approx(whole)
    assert learner_operations(replace(work, sharing=1), assumed) > 5 * whole
    # A micro-batch has 8 of them: what it attends to is bounded.
    assert work.token_budget == 20_480
    assert learner_operations(replace(work, sharing=16, episodes=16), assumed) == pytest.approx(2 * whole)
    halves = replace(work, sharing=16, episodes=16, token_budget=10_240)
    assert learner_operations(halves, assumed) == pytest.approx(
        learner_operations(replace(work, sharing=4), assumed) * 2
    )
