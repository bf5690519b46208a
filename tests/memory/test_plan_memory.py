"""`tapforge plan --memory`: the GPU samples fit, the JSON keeps its form, advice is followed by a run that fits."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_api import load
from tapforge_api.gpus import cluster_gpus_error, gpus_needed
from tapforge_trainer.cli.main import cli
from tapforge_trainer.learner.families import ModelConfig, shape_of
from tapforge_trainer.memory.advice import advice
from tapforge_trainer.memory.command import model_config
from tapforge_trainer.memory.estimate import card_of, estimate, visual_tokens
from tapforge_trainer.memory.known import config_of, published
from tapforge_trainer.memory.learner import CATEGORIES
from tapforge_trainer.memory.report import Figures, as_json, render
from tapforge_trainer.model_source.tiny_base import base_folder

SAMPLES = Path("manifests/samples")
GPU_SAMPLES = ("run-qwen3-vl-8b.yaml", "run-qwen2.5-vl-7b.yaml", "run-ui-tars-1.5-7b.yaml")


def planned(name: str, *words: str) -> tuple[int, str]:
    said = CliRunner().invoke(cli, ["plan", "--memory", "-f", str(SAMPLES / name), *words])
    assert said.exception is None or isinstance(said.exception, SystemExit), said.exception
    return said.exit_code, said.output


def document(name: str, *words: str) -> tuple[int, dict[str, Any]]:
    code, text = planned(name, "--output", "json", *words)
    return code, json.loads(text)


@pytest.mark.parametrize("name", GPU_SAMPLES)
@pytest.mark.parametrize("card", ["80GiB", "H100-80GB"])
def test_the_gpu_samples_fit(name: str, card: str) -> None:
    code, plan = document(name, "--gpu-memory", card)
    assert code == 0
    assert plan["fits"]
    assert plan["advice"] == []
    assert plan["gpus"] <= 8
    assert plan["peak_bytes"] + plan["reserve_bytes"] <= plan["gpu_bytes"]
    assert plan["answers_at_full_context"] >= 16


@pytest.mark.parametrize("name", GPU_SAMPLES)
@pytest.mark.parametrize("words", [(), ("--gpu-memory", "24GiB"), ("--set", "spec.placement.mode=apart")])
def test_the_json_keeps_its_form(name: str, words: tuple[str, ...]) -> None:
    code, plan = document(name, *words)
    assert code == (0 if plan["fits"] else 2)
    roles = set(plan["per_gpu_bytes"])
    assert roles == {"learner", "engine"}
    for role, by_category in plan["per_gpu_bytes"].items():
        assert tuple(by_category) == CATEGORIES
        assert all(type(size) is int and size >= 0 for size in by_category.values())
        assert sum(by_category.values()) == plan["roles"][role]["peak_bytes"] <= plan["peak_bytes"]
    assert plan["host_bytes"] == sum(plan["host"].values())
    assert bool(plan["advice"]) != plan["fits"]
    assert plan["updates_per_hour"] is None
    assert plan["checkpoint_seconds"] is None


def served(repo: str, **fields: Any) -> tuple[str, ...]:
    model = json.dumps([{"name": "j", "source": {"huggingFace": {"repo": repo}}, **fields}])
    judge = '{"streams": [{"name": "judge", "judge": {"models": [{"model": "j"}]}}]}'
    return "--set", f"spec.models={model}", "--set", f"spec.rewards={judge}"


@pytest.mark.parametrize(
    ("source", "fields", "problem"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", {}, None),
        ("Qwen/Qwen2.5-VL-7B-Instruct", {"gpuMemoryShare": 0.1}, "the key-value cache gets 0.0 GiB"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", {"tensorParallel": 3}, "models[j].tensorParallel 3 does not divide"),
        ("Else/Where-VL", {}, None),
    ],
)
def test_a_model_that_the_run_serves_has_a_line_and_its_gpus(source: str, fields: dict, problem: str | None) -> None:
    name = "run-qwen3-vl-8b.yaml"
    before = document(name, "--gpu-memory", "80GiB")[1]
    without_cluster = ("--set", "spec.cluster=null", "--gpu-memory", "80GiB")
    _, plan = document(name, *without_cluster, *served(source, **fields))
    found = plan["models"]["j"]
    assert plan["gpus"] == before["gpus"] + fields.get("tensorParallel", 1)
    assert (found["problem"] is None) == (problem is None) and plan["fits"] == (problem is None)
    assert problem is None or found["problem"].startswith(problem)
    text = planned(name, *without_cluster, *served(source, **fields))[1]
    assert "model j " in text and (source.startswith("Qwen") or "its sizes are not known here" in text)

    # Asked by no judge, it is a teacher of `tapforge collect`: the run's GPUs, and whether it fits, are its own.
    teacher = (*without_cluster, *served(source, **fields)[:2])
    code, plan = document(name, *teacher)
    assert (code, plan["gpus"], plan["fits"]) == (0, before["gpus"], True)
    assert plan["models"]["j"] == found | {"started": False} and "not counted" in planned(name, *teacher)[1]


TOO_MUCH = [
    ("run-qwen3-vl-8b.yaml", ("spec.learner.activationCheckpointing=false",), "80GiB"),
    ("run-qwen3-vl-8b.yaml", ("spec.learner.gradientAccumulation=unsharded", "spec.learner.ranks=1"), "80GiB"),
    ("run-qwen3-vl-8b.yaml", ("spec.learner.ranks=1",), "80GiB"),
    ("run-qwen3-vl-8b.yaml", (), "24GiB"),
    ("run-qwen2.5-vl-7b.yaml", (), "16GiB"),
    (
        "run-qwen3-vl-8b.yaml",
        ("spec.placement.mode=colocated", "spec.learner.ranks=8", "spec.engine.replicas=8"),
        "24GiB",
    ),
]


@pytest.mark.parametrize(("name", "overrides", "card"), TOO_MUCH)
def test_advice_is_true(name: str, overrides: tuple[str, ...], card: str) -> None:
    """Following it word by word gives a run that fits."""
    words = [word for o in overrides for word in ("--set", o)]
    code, plan = document(name, *words, "--gpu-memory", card)
    assert code == 2
    (line,) = plan["advice"]
    advised = shlex.split(line.partition("fits with ")[2].partition(";")[0])
    code, plan = document(name, *words, *advised, "--gpu-memory", card)
    assert [role["problem"] for role in plan["roles"].values()] in ([None], [None, None])
    assert (code, plan["fits"]) == ((2, False) if "that takes" in line else (0, True))


@pytest.mark.parametrize(("card", "share"), [("80GiB", 0.75), ("141GiB", 0.5)])
def test_a_run_with_room_is_told_what_is_faster_and_fits(card: str, share: float) -> None:
    name, fields = "run-qwen3-vl-8b.yaml", ("spec.learner.tokensPerMicroBatch=16384", "spec.model.adapter.history=null")
    own = ("--gpu-memory", card, *(word for field in fields for word in ("--set", field)))
    code, plan = document(name, *own)
    (line,) = plan["faster"]
    advised = shlex.split(line.partition("fits with ")[2].partition(",")[0])
    assert code == 0 and advised == ["--set", f"spec.learner.checkpointedShare={share}"]
    code, better = document(name, *advised, *own)
    assert (code, better["fits"], better["faster"]) == (0, True, [])
    assert better["roles"]["learner"]["peak_bytes"] > plan["roles"]["learner"]["peak_bytes"]
    code, more = document(name, "--set", f"spec.learner.checkpointedShare={share - 0.25}", *own)
    assert code == 2 and not more["fits"]
    assert "learner.checkpointedShare=" in more["advice"][0]


@pytest.mark.parametrize("name", GPU_SAMPLES)
@pytest.mark.parametrize("card", ["40GiB", "24GiB", "16GiB", "12GiB", "8GiB"])
@pytest.mark.parametrize(
    "changed",
    [
        (),
        ("spec.placement.mode=colocated", "spec.learner.ranks=4", "spec.engine.replicas=4"),
        ("spec.model.maxPixels=null",),
        ("spec.cluster=null", "spec.environment.source={processes: {count: 4}}"),
    ],
)
def test_what_is_advised_has_its_gpus_or_says_so_and_shows_its_screens(
    name: str, card: str, changed: tuple[str, ...]
) -> None:
    run = load(SAMPLES / name, overrides=[*changed])
    shape = shape_of(model_config(run, None))
    size = card_of(run, card)
    lines = advice(run, estimate(run, shape, size), lambda other: estimate(other, shape, size))
    line = "".join(lines)
    if not lines or "nothing that was tried" in line:
        return
    words, _, note = line.partition("fits with ")[2].partition(";")
    overrides = [word for word in shlex.split(words) if word != "--set"]
    told = load(SAMPLES / name, overrides=[*changed, *overrides])
    assert estimate(told, shape, size).fits
    wrong = cluster_gpus_error(told.spec)
    if run.spec.cluster is None and gpus_needed(told.spec) > gpus_needed(run.spec):
        wrong = "more than before"
    assert bool(wrong) == bool(note), (line, wrong)
    assert not note or f"that takes {gpus_needed(told.spec)} GPUs" in note
    if "contextTokens" in words:
        images = told.spec.model.adapter.images
        room = told.spec.model.context_tokens - told.spec.rollout.response_tokens
        assert visual_tokens(told, shape) * images + 1000 <= room, line


def test_a_budget_that_windows_fill_is_named_where_the_runs_leaves_much_empty() -> None:
    words = ("--set", "spec.learner.tokensPerMicroBatch=16384")
    _, plan = document(GPU_SAMPLES[0], *words)
    (line,) = (one for one in plan["faster"] if "tokensPerMicroBatch" in one)
    assert "tokensPerMicroBatch=18944, which 2 sequences of a whole window" in line and "43% of them stay empty" in line
    wider = load(SAMPLES / GPU_SAMPLES[0], ["spec.learner.tokensPerMicroBatch=18944"])
    assert wider.spec.learner.tokens_per_micro_batch >= 2 * 9280
    for others in ((), (*words, "--set", "spec.model.adapter.history=null"), (*words, "--gpu-memory", "50GiB")):
        assert not any("tokensPerMicroBatch" in one for one in document(GPU_SAMPLES[0], *others)[1]["faster"]), others


def test_gpus_that_are_not_there_do_not_fit() -> None:
    words = ("--set", "spec.engine.replicas=8")
    code, plan = document("run-qwen3-vl-8b.yaml", *words)
    assert (code, plan["fits"], plan["advice"]) == (2, False, [])
    assert "need 12 GPUs" in plan["gpus_problem"]
    code, text = planned("run-qwen3-vl-8b.yaml", *words)
    assert code == 2 and "fits         no\ntoo few: " in text and "need 12 GPUs" in text


def test_nothing_helps_a_card_that_is_much_too_small() -> None:
    code, plan = document("run-qwen3-vl-8b.yaml", "--gpu-memory", "2GiB")
    assert code == 2
    assert "nothing that was tried" in plan["advice"][0]


def test_colocated_ranks_and_engines_take_turns() -> None:
    words = [w for o in ("placement.mode=colocated", "learner.ranks=8", "engine.replicas=8") for w in ("--set", o)]
    code, plan = document("run-qwen3-vl-8b.yaml", *words)
    assert code == 0
    assert plan["gpus"] == 8
    (kinds,) = plan["per_gpu_bytes"].values()
    assert list(plan["per_gpu_bytes"]) == ["colocated"]
    assert kinds["optimizer"] > 0


def test_an_engine_that_shares_its_gpu_takes_its_share_beside_the_resting_learner() -> None:
    fields = ("placement.mode=colocated", "learner.ranks=8", "engine.replicas=8", "engine.gpuMemoryShare=0.85")
    code, plan = document("run-qwen3-vl-8b.yaml", *(w for o in fields for w in ("--set", o)))
    assert code == 2
    assert plan["roles"]["colocated"]["when"] == "proof of a sync"
    assert "engine.gpuMemoryShare" in plan["advice"][0]


def test_heads_that_can_not_be_shared_are_said() -> None:
    code, plan = document("run-qwen2.5-vl-7b.yaml", "--set", "spec.engine.tensorParallel=7")
    assert code == 2
    assert "4 key-value heads" in plan["roles"]["engine"]["problem"]
    code, plan = document("run-qwen2.5-vl-7b.yaml", "--set", "spec.engine.tensorParallel=8")
    assert code == 2
    assert "28 attention heads" in plan["roles"]["engine"]["problem"]


def test_a_checkpoint_that_takes_longer_than_the_grace_is_said() -> None:
    _, text = planned("run-qwen3-vl-8b.yaml", "--disk-rate", "200")
    assert "longer than cluster.suspendGraceSeconds (300)" in text
    _, text = planned("run-qwen3-vl-8b.yaml", "--disk-rate", "2000")
    assert "within cluster.suspendGraceSeconds (300)" in text


def test_quantized_weights_of_a_served_model_count_with_their_bits(tmp_path: Path) -> None:
    plain = json.loads((base_folder() / "config.json").read_text())
    groups = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}, "quant_method": "compressed-tensors"}
    sizes = []
    for number, how in enumerate(({}, {"bits": 4}, groups, {"quant_method": "fp8"}, {"bits": "auto"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(plain | ({"quantization_config": how} if how else {})))
        words = served("x/y", source={"path": {"folder": str(folder)}}, contextTokens=1024)
        sizes.append(document("quickstart.yaml", "--gpu-memory", "80GiB", *words)[1]["models"]["j"]["weights_bytes"])
    assert [round(sizes[0] / size, 1) for size in sizes] == [1, 4, 4, 2, 1]


def test_speed_is_only_what_was_measured(tmp_path: Path) -> None:
    _, text = planned("run-qwen3-vl-8b.yaml")
    assert "per hour" not in text
    run = tmp_path / "phones"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps({"updates": 20, "env_steps": 4000, "seconds_rl": 7200.0}))
    _, text = planned("run-qwen3-vl-8b.yaml", "--measured", str(run))
    assert "phones: 10.0 updates per hour, 2,000 steps of phones" in text
    code, text = planned("run-qwen3-vl-8b.yaml", "--measured", str(tmp_path / "none"))
    assert code == 2
    assert "records no update yet" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu-memory", "a lot"), "neither a size such as 80GiB nor a GPU"),
        (("--config", "nowhere"), "nowhere/config.json is missing"),
        (("--set", "spec.model.source.huggingFace.repo=someone/else"), "--config"),
        (("--set", "spec.model.source.objectStorage.uri=s3://b/m"), "--config"),
        (
            ("--set", "spec.algorithm.distillation.teacher.objectStorage.uri=s3://b/m"),
            "in its place, --set spec.algorithm.distillation.teacher=",
        ),
        (("--set", "spec.model.lora.targets=[o_prj]"), "o_prj is not a linear layer"),
    ],
)
def test_what_is_not_known_is_said(words: tuple[str, ...], said: str) -> None:
    code, text = planned("run-qwen3-vl-8b.yaml", *words)
    assert code == 2
    assert said in text


def test_a_configuration_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    path.write_text(json.dumps(published()["Qwen3-VL-2B"]))
    _, plan = document("run-qwen3-vl-8b.yaml", "--config", str(path))
    assert plan["parameters"] == 2_127_532_032


def test_the_card_comes_from_the_pods_that_ask_for_gpus() -> None:
    run = load(SAMPLES / GPU_SAMPLES[0])
    assert card_of(run, None).source.startswith("assumed")
    words = 'spec.cluster.workers[0].template.spec.nodeSelector["nvidia.com/gpu.product"]=NVIDIA-H200'
    run = load(SAMPLES / GPU_SAMPLES[0], overrides=[words])
    assert card_of(run, None).bytes == 143_771 * 2**20
    assert card_of(run, "48GB").bytes == 48 * 10**9


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_run_that_the_api_takes_ends_in_an_estimate(data: st.DataObject) -> None:
    draw = data.draw
    overrides = {
        "learner.ranks": draw(st.sampled_from([1, 2, 7, 64])),
        "learner.tokensPerMicroBatch": draw(st.integers(64, 2_000_000)),
        "learner.activationCheckpointing": draw(st.sampled_from(["true", "false", "null"])),
        "learner.checkpointedShare": draw(st.sampled_from([0.01, 0.5, 1.0])),
        "learner.gradientAccumulation": draw(st.sampled_from(["sharded", "unsharded", "null"])),
        "learner.cpuOffload": draw(st.sampled_from(["true", "false"])),
        "learner.reshardAfterForward": draw(st.sampled_from(["true", "false"])),
        "engine.tensorParallel": draw(st.integers(1, 64)),
        "engine.maxConcurrentSequences": draw(st.integers(1, 65536)),
        "engine.maxBatchedTokens": draw(st.sampled_from(["null", 64, 16_777_216])),
        "engine.kvCacheMiB": draw(st.sampled_from(["null", 1, 100_000])),
        "engine.gpuMemoryShare": draw(st.sampled_from(["null", 0.01, 1.0])),
        "model.contextTokens": draw(st.integers(1024, 1_048_576)),
        "model.maxPixels": draw(st.sampled_from(["null", 784, 1_000_000, 67_108_864])),
        **draw(
            st.builds(lambda n: {"model.adapter.history": "null", "model.adapter.historyImages": n}, st.integers(1, 64))
            | st.builds(lambda n: {"model.adapter.history": f"{{blocks: {{keep: 1, upTo: {n}}}}}"}, st.integers(2, 64))
        ),
        "model.dtype": draw(st.sampled_from(["null", "float32", "bfloat16"])),
        "algorithm.kl.coefficient": draw(st.sampled_from([0.0, 0.1])),
    }
    words = [f"spec.{name}={value}" for name, value in overrides.items()]
    if draw(st.booleans()):
        words.append(f"spec.model.lora.rank={draw(st.integers(1, 4096))}")
    else:
        words.append(f"spec.model.freezeVision={draw(st.sampled_from(['true', 'false']))}")
    if draw(st.booleans()):
        ranks = int(overrides["learner.ranks"])
        words += ["spec.placement.mode=colocated", f"spec.engine.replicas={ranks}", "spec.engine.tensorParallel=1"]
    shape = shape_of(ModelConfig.of_document(Path("model"), published()[draw(st.sampled_from(sorted(published())))]))
    run = load(SAMPLES / GPU_SAMPLES[0], overrides=words)
    found = estimate(run, shape, card_of(run, draw(st.sampled_from([None, "1GiB", "B200"]))))
    for role in found.roles:
        assert sum(role.peak.bytes.values()) == role.peak.total > 0
        assert all(size >= 0 for size in role.peak.bytes.values())
        if role.problem is None:
            assert role.peak.total <= found.card.usable
    document = as_json(run, found, (), Figures())
    assert json.loads(json.dumps(document)) == document
    assert "fits" in render(run, found, (), Figures())


def test_adapters_alone_take_room_beside_an_engines_weights() -> None:
    """Rank 64 of a 7B: 161 million numbers; a rank that vLLM has not takes what the next one does. Where engines sleep,
    the host keeps their weights."""
    alone = ("--set", "sync.lora=adapter")
    _, merged = document("run-qwen2.5-vl-7b.yaml")
    plans = [document("run-qwen2.5-vl-7b.yaml", *alone, "--set", f"model.lora.rank={rank}")[1] for rank in (64, 48)]
    weights = [plan["per_gpu_bytes"]["engine"]["weights"] for plan in (merged, *plans)]
    assert weights[1] - weights[0] == pytest.approx(2 * 161e6, rel=0.02)
    assert weights[2] == weights[1]
    together = ("--set", "placement.mode=colocated", "--set", "learner.ranks=2", "--set", "engine.replicas=2")
    host = [document("run-qwen2.5-vl-7b.yaml", *words)[1]["host"] for words in (together, (*together, *alone))]
    assert [one["sleeping engines"] for one in host] == [0, pytest.approx(2 * 2 * 8.292e9, rel=0.01)]


def test_a_teacher_takes_its_weights_on_each_rank() -> None:
    """Shards of the language model, and the tower whole, in the pass's number format."""
    teacher = "algorithm.distillation={teacher: {huggingFace: {repo: Qwen/Qwen3-VL-8B-Instruct}}}"
    (_, plain), (_, taught) = (document("run-qwen3-vl-8b.yaml", *words) for words in ((), ("--set", teacher)))
    config = config_of("Qwen/Qwen3-VL-8B-Instruct")
    assert config is not None
    shape, ranks = shape_of(config), 4
    before, after = (plan["per_gpu_bytes"]["learner"]["weights"] for plan in (plain, taught))
    assert after - before == pytest.approx(2 * shape.text / ranks + 2 * shape.vision.parameters, rel=1e-3)
    # An id and a log-probability of each of 64 tokens, at each token of an update's answers.
    fewer = document("run-qwen3-vl-8b.yaml", "--set", teacher, "--set", "algorithm.distillation.topK=16")[1]
    sampled = document("run-qwen3-vl-8b.yaml", "--set", teacher, "--set", "algorithm.distillation.kind=k1")[1]
    none, tokens, quarter, nothing = (one["host"]["teacher's tokens"] for one in (plain, taught, fewer, sampled))
    assert none == nothing == 0 and tokens == 4 * quarter
    rollout = load(SAMPLES / "run-qwen3-vl-8b.yaml").spec.rollout
    steps, left = divmod(tokens, rollout.groups_per_update * rollout.group_size * rollout.response_tokens * 64 * 8)
    assert 1 <= steps <= 100 and left == 0
    # With what is replayed beside, and the longest tasks of any stage.
    again = ("--set", "rollout.replay={share: 0.5}", "--set", "algorithm.loss.anchor=behavior")
    assert document("run-qwen3-vl-8b.yaml", "--set", teacher, *again)[1]["host"]["teacher's tokens"] == 1.5 * tokens
    few = ("--set", "tasks={suite: standard, templates: [turn_switch]}")
    short, long = (
        document("run-qwen3-vl-8b.yaml", "--set", teacher, *few, *stages)[1]["host"]
        for stages in ((), ("--set", "stages=[{tasks: {suite: standard}, stop: {maxUpdates: 4}}]"))
    )
    assert short["teacher's tokens"] < tokens == long["teacher's tokens"] and short["frames"] < long["frames"]
    code, said = planned("run-qwen3-vl-8b.yaml", "--set", teacher.replace("Qwen/Qwen3-VL-8B-Instruct", "any/thing"))
    assert code and "spec.algorithm.distillation.teacher.huggingFace: the sizes of any/thing are not known" in said


def test_a_data_set_elsewhere_is_not_needed() -> None:
    """Its episodes have one step each, whatever it holds."""
    place = "environment.source.dataset={path: 'hf://datasets/any/thing', heldOut: null}"
    taught = "algorithm.distillation={teacher: {huggingFace: {repo: Qwen/Qwen3-VL-8B-Instruct}}}"
    code, found = document("offline.yaml", "--gpu-memory", "80GiB", "--set", place, "--set", taught)
    assert code == 0 and found["host"]["frames"] > 0 and found["host"]["teacher's tokens"] > 0
