"""Numbers of a run that depend on each other: what can't work is refused, what is odd is a note with a number."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from whole import SPEC

from tapforge_api import TrainingRun, load
from tapforge_envs.phone import catalog
from tapforge_trainer.cli.main import cli
from tapforge_trainer.run.feasibility import ModelFacts, judge
from tapforge_trainer.run.model_facts import facts_of

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
RUNS = sorted(path for path in SAMPLES.glob("*.yaml") if "\nkind: TrainingRun\n" in path.read_text())
HEAD = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: x}\n"
EIGHT = ModelFacts("Q/8B", "qwen3_vl", "qwen3-vl", 32, 8, 8_767_123_696, 147_456, 262_144, 1280, 1280, (700, 700))


def run(*overrides: str) -> TrainingRun:
    return load(HEAD, overrides)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_shipped_runs_are_accepted_without_a_note(path: Path) -> None:
    shipped = load(path)
    facts = facts_of(shipped)
    assert facts is not None
    found = judge(shipped, facts)
    assert (found.errors, found.notes) == ((), ())


def test_defaults_are_accepted_with_a_published_model() -> None:
    found = judge(run(), EIGHT)
    assert (found.errors, found.notes) == ((), ())


@pytest.mark.parametrize(
    ("overrides", "facts", "words"),
    [
        (["model.contextTokens=900"], {}, "1980 tokens with its screen of 1280 visual tokens"),
        (["model.contextTokens=900"], {}, "give at least 2236, or a smaller model.maxPixels"),
        (["model.contextTokens=2235"], {}, "spec.model.contextTokens: 2235 is too little"),
        (
            ["model.contextTokens=900"],
            {"screen": None, "whole_screen": None},
            "701 tokens with its screen, and an answer",
        ),
        (["model.contextTokens=900"], {"screen": 483}, "give at least 2236"),  # the whole screen and the text
        (
            ["model.contextTokens=900"],
            {"screen": 483, "whole_screen": 9000},
            "give at least 3060",
        ),  # four times the text
        (["engine.tensorParallel=3"], {}, "3 GPUs can't share the 32 heads (8 of keys and values)"),
        (["engine.tensorParallel=3"], {}, "; 1, 2, 4, 8, 16, 32 can"),
        (["engine.tensorParallel=7"], {"heads": 28, "kv_heads": 4}, "; 1, 2, 4, 28 can"),
        (
            ["engine.maxBatchedTokens=64", "engine.maxConcurrentSequences=65"],
            {},
            "fewer than maxConcurrentSequences (65)",
        ),
        (
            ["engine.kvCacheMiB=1151"],
            {},
            "1151 MiB hold no answer of 8192 tokens (model.contextTokens), which take 1152",
        ),
        (["engine.kvCacheMiB=287", "engine.tensorParallel=4"], {}, "which take 288 MiB on each device"),
        (["learner.learningRate=1.0"], {}, "spec.learner.learningRate: 1 moves every weight"),
        (["learner.learningRate=0.1"], {}, "usual are 1e-6"),
        (
            ["model.lora={}", "sync.lora=adapter"],
            {"merged_only": "its experts are kernels"},
            "spec.sync.lora: adapter can't be had with Q/8B: its experts are kernels; set it to merged",
        ),
        (
            ["model.lora.rank=513", "sync.lora=adapter"],
            {},
            "spec.model.lora.rank: engines take adapters of a rank up to 512 with sync.lora adapter, not of 513",
        ),
        ([], {"adapter_refused": "the adapter x is for models built on y"}, "spec.model.adapter.name: the adapter x"),
    ],
)
def test_what_can_not_work_is_refused(overrides: list[str], facts: dict[str, object], words: str) -> None:
    found = judge(run(*overrides), replace(EIGHT, **facts))
    assert any(words in error for error in found.errors), found.errors


def test_a_family_whose_samples_share_no_prompts_is_named() -> None:
    assert not any("anew" in note for note in judge(run(), EIGHT).notes)
    found = judge(run(), replace(EIGHT, shares_prompts=False)).notes
    assert any("the prompt of every answer anew" in note and "qwen3_vl models share none" in note for note in found)


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["model.contextTokens=2236"], {}),
        (["model.contextTokens=262144"], {}),
        (["model.contextTokens=300000"], {"positions": None}),
        (["engine.kvCacheMiB=1152"], {}),
        (["engine.tensorParallel=16"], {}),  # heads of keys and values are copied
        (["engine.tensorParallel=4"], {"heads": 28, "kv_heads": 4}),
        (["engine.maxBatchedTokens=64", "engine.maxConcurrentSequences=64"], {}),
        (["learner.learningRate=1.0", "model.lora={}"], {}),
        (["model.lora.rank=512", "sync.lora=adapter"], {}),
        (["model.lora.rank=513"], {}),
    ],
)
def test_what_just_works_is_not_refused(overrides: list[str], facts: dict[str, object]) -> None:
    assert judge(run(*overrides), replace(EIGHT, **facts)).errors == ()


@pytest.mark.parametrize(
    ("overrides", "facts", "words"),
    [
        (["model.contextTokens=300000", "learner.tokensPerMicroBatch=300000"], {}, "262144 positions that Q/8B has"),
        (["learner.warmupUpdates=100"], {}, "never reaches learningRate; 10 would do"),
        (
            ["learner.activationCheckpointing=false", "learner.checkpointedShare=0.5"],
            {},
            "checkpointedShare (0.5) does nothing",
        ),
        (["evaluation.everyUpdates=100"], {}, "nothing is measured between the first update and the last; 25 would do"),
        (["evaluation={repeats: 2, sampled: false}"], {}, "evaluation.repeats counts for sampled answers only"),
        (["stop.targetSuccess=0.0"], {}, "ends after its first update"),
        (["environment.deadlines.resetSeconds=601"], {}, "resetSeconds (601) is longer than episodeSeconds (600)"),
        (["environment.deadlines.evaluateSeconds=601"], {}, "evaluateSeconds (601) is longer"),
        (["environment.settle.mode=none"], {}, "environment.settle has no effect with protocol tapforge"),
        (["environment.adb.unlock=false"], {}, "environment.adb has no effect with protocol tapforge"),
        (["tasks.maxTasks=3"], {}, "practises each task more than four times"),
        (["model.adapter.historyImages=40"], {}, "but 5 screens of 1280 visual tokens have room"),
        (["model.adapter.historyImages=40"], {}, "give model.contextTokens 52936, historyImages 5, or a smaller"),
        (["model.adapter.historyImages=40"], {"screen": 100}, "a screen is shrunk from 1280 to 100 visual tokens"),
        (["model.adapter.history={blocks: {keep: 2, upTo: 40}}"], {}, "blocks.upTo is 40, but 5 screens of 1280"),
        (["model.adapter.history={blocks: {keep: 2, upTo: 40}}"], {}, "contextTokens 52936, upTo 5, or a smaller"),
        (["model.adapter.history={blocks: {keep: 8, upTo: 40}}"], {}, "contextTokens 52936, or a smaller"),
        (["model.adapter.name=qwen2.5-vl"], {}, "Q/8B is qwen3_vl: its coordinates mean something else"),
        (["model.adapter.name=qwen2.5-vl-computer"], {}, "the one of its makers is qwen3-vl"),
        ([], {"model_type": "qwen2_vl", "adapter": None}, "docs/models.md has those that fit"),
        (["learner.learningRate=0.01"], {}, "is large for all weights of a model with 8.8 billion parameters: 1e-6"),
        (["learner.learningRate=0.1", "model.lora={}"], {}, "is large for LoRA's adapters"),
        (["warmStart={}"], {}, "warmStart.learningRate (0.001) is large for all weights"),
        (
            [],
            {"prompted": {"prompt": "turns", "history": {"blocks": {"keep": 2, "upTo": 6}}, "historySteps": 16}},
            'prompt: "full", history: {"sliding": {}}, and there prompt: "turns", history: {"blocks": {"keep": 2, ',
        ),
        ([], {"text": (700, 7000)}, "may be too little for the first prompt: it takes up to 8280 tokens"),
    ],
)
def test_what_is_odd_is_a_note_with_the_number_that_would_do(
    overrides: list[str], facts: dict[str, object], words: str
) -> None:
    found = judge(run(*overrides), replace(EIGHT, **facts))
    assert found.errors == () and len(found.notes) == 1 and words in found.notes[0], found


def test_the_numbers_that_are_given_will_do() -> None:
    """What a message proposes is accepted, and without that message."""
    for context in (300, 900, 2000):
        (error,) = judge(run(f"model.contextTokens={context}", "rollout.responseTokens=200"), EIGHT).errors
        given = re.search(r"give at least (\d+)", error)
        assert given is not None
        found = judge(run(f"model.contextTokens={given[1]}", "rollout.responseTokens=200"), EIGHT)
        assert (found.errors, found.notes) == ((), ())
    (note,) = judge(run("model.adapter.historyImages=40"), EIGHT).notes
    given = re.search(r"contextTokens (\d+), historyImages (\d+)", note)
    assert given is not None
    for better in (["historyImages=40", f"contextTokens={given[1]}"], [f"historyImages={given[2]}"]):
        fields = [f"model.{'adapter.' if one.startswith('history') else ''}{one}" for one in better]
        assert judge(run(*fields), EIGHT).notes == ()


# --- the model's sizes, without a download ----------------------------------------------------------------------------


def planned(folder: Path, *settings: str) -> tuple[int, str]:
    (folder / "tiny.yaml").write_text(SPEC)
    words = [word for one in settings for word in ("--set", one)]
    done = CliRunner().invoke(cli, ["plan", "-f", str(folder / "tiny.yaml"), "--runs", str(folder / "runs"), *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


BIG = (
    "spec.model.source.huggingFace.repo=Qwen/Qwen3-VL-8B-Instruct",
    "spec.model.adapter.prompt=full",
    "spec.warmStart=null",
    "spec.engine.kvCacheMiB=null",
)


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (
            ["spec.model.contextTokens=400"],
            2,
            "spec.model.contextTokens: 400 is too little: the shortest first prompt takes",
        ),
        (["spec.model.contextTokens=8192"], 0, "context     8,192 tokens"),
        (["spec.model.contextTokens=8192", "spec.learner.learningRate=1.0"], 2, "spec.learner.learningRate: 1 moves"),
        (["spec.model.contextTokens=8192", "spec.engine.tensorParallel=3"], 2, "can't share the 32 heads"),
        (
            ["spec.model.contextTokens=8192", "spec.model.adapter.name=ui-tars"],
            2,
            "spec.model.adapter.name: the adapter ui-tars is for models built on qwen2_vl",
        ),
        (
            ["spec.model.contextTokens=8192", "spec.model.adapter.name=qwen2.5-vl"],
            0,
            "note: model.adapter.name qwen2.5-vl",
        ),
    ],
)
def test_a_published_model_is_judged_without_a_download(
    tmp_path: Path, settings: list[str], code: int, words: str
) -> None:
    found = planned(tmp_path, *BIG, *settings)
    assert found[0] == code and words in found[1], found[1]


def test_the_tiny_model_is_judged_by_its_own_tokenizer(tmp_path: Path) -> None:
    code, said = planned(tmp_path, "spec.model.contextTokens=64", "spec.rollout.responseTokens=40")
    assert code == 2 and "spec.model.contextTokens: 64 is too little" in said
    code, said = planned(tmp_path, "spec.model.contextTokens=5000")
    assert code == 0 and "(5000) is more than the 4096 positions that the tiny model has" in said
    code, said = planned(tmp_path, "spec.model.adapter.prompt=full")
    assert code == 2 and "every episode would end at its first step" in said


def test_one_long_goal_is_a_note_and_refuses_no_run(tmp_path: Path) -> None:
    tasks = [catalog.tasks("quickstart", "train").sample(0, number) for number in range(8)]
    tasks[3] = tasks[3].model_copy(update={"goal": "open settings " * 200})
    (tmp_path / "tasks").write_text("\n".join(task.model_dump_json() for task in tasks))
    code, said = planned(
        tmp_path, f"spec.tasks.file={tmp_path / 'tasks'}", "spec.model.contextTokens=400", "spec.warmStart=null"
    )
    assert code == 0 and "may be too little for the first prompt" in said, said


def test_a_repository_that_nobody_knows_is_not_judged() -> None:
    assert facts_of(run("model.source.huggingFace.repo=a/b")) is None


def test_a_mixture_of_experts_gets_no_adapters_alone() -> None:
    facts = facts_of(run("model.source.huggingFace={repo: Qwen/Qwen3-VL-30B-A3B-Instruct, revision: c0ffee}"))
    assert facts is not None and "Triton" in facts.merged_only
