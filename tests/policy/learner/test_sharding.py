"""Models that are built without memory and filled shard by shard, on one rank and on two."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import real
from tiny_samples import PlainFrames, Tiny, plain_model
from two_ranks import TwoRanks, two_ranks

from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner import export as exports
from tapforge_trainer.learner import lora, sharding
from tapforge_trainer.learner.batch_loss import DeviceFigures, batch_loss
from tapforge_trainer.learner.batches import MicroBatchPlan, TokenBatch, plan_micro_batches
from tapforge_trainer.learner.families import FolderError, ModelConfig
from tapforge_trainer.learner.metrics import UpdateMetrics
from tapforge_trainer.learner.rank import MiniBatch, Rank
from tapforge_trainer.learner.sharding import (
    EngineWeights,
    build_policy,
    load_weights,
    materialize,
    meta_model,
    unsharded,
)
from tapforge_trainer.placement.settings import LearnerSettings, LoraSettings, UpdateSettings

OBJECTIVE = Objective(importance_cap=None)


ADAPTERS = LoraSettings(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    with two_ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def untied(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny model with a head of its own, so that embedding and head are groups of their own."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(tiny.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return replace(tiny, folder=folder)


def one_process(settings: LearnerSettings) -> Rank:
    return Rank(settings, 0, torch.distributed.HashStore())


def accumulated(rank: Rank, data: TokenBatch, frames: dict[str, FittedFrame], batch: MiniBatch) -> dict[str, Any]:
    """Gradients of all ranks' samples by name."""
    figures = DeviceFigures(UpdateMetrics())
    loss = partial(batch_loss, data, data.behavior, None, None, OBJECTIVE, batch.counts, figures, 1, False)
    rank.accumulate(data, PlainFrames(frames), batch, UpdateSettings(), loss, UpdateMetrics(), figures)
    found = {
        name: unsharded(parameter.grad).numpy().copy()
        for name, parameter in rank.policy.model.named_parameters()
        if parameter.grad is not None
    }
    rank.optimizer.zero_grad()
    return found


def gradients_on_a_rank(
    index: int,
    store: Any,
    settings: LearnerSettings,
    data: TokenBatch,
    frames: dict[str, FittedFrame],
    plans: list[list[MicroBatchPlan]],
    counts: Counts,
) -> dict[str, Any]:
    rank = Rank(settings, index, store)
    stir(rank)
    return accumulated(rank, data, frames, MiniBatch(tuple(plans[index]), counts))


def stir(rank: Rank) -> None:
    """Adapters that change something: B is zero at first."""
    for name, parameter in lora.matrices(rank.policy.model).items():
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        local = lora._shard(parameter, 0.1 * values)
        parameter.detach().to_local().copy_(local)


def both_ways(
    pair: TwoRanks, tiny: Tiny, budget: int = 150, **changes: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Gradients of one rank in one micro-batch, and of two with these settings in many."""
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in samples)
    plain = {key: value for key, value in changes.items() if key in ("freeze_vision", "lora")}
    rank = one_process(tiny.learner_settings(**plain))
    stir(rank)
    try:
        batch = MiniBatch((MicroBatchPlan(tuple(range(len(data)))),), counts)
        expected = accumulated(rank, data, frames, batch)
    finally:
        torch.distributed.destroy_process_group()
    plans = plan_micro_batches(data.lengths, 2, budget)
    assert min(len(of_rank) for of_rank in plans) > 1
    found = pair.run(gradients_on_a_rank, tiny.learner_settings(ranks=2, **changes), data, frames, plans, counts)
    return expected, found


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(np.linalg.norm(value)) for value in expected.values())
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= tolerance * max(float(np.linalg.norm(value)), 1e-2 * scale), name


@pytest.mark.parametrize(
    "changes",
    [
        {"sharded_gradients": True},
        {"sharded_gradients": False},
        {"sharded_gradients": True, "reshard_after_forward": False, "freeze_vision": True},
        {"sharded_gradients": True, "activation_checkpointing": True},
        {"sharded_gradients": True, "cpu_offload": True},
        {"sharded_gradients": True, "lora": ADAPTERS},
        {"sharded_gradients": False, "lora": ADAPTERS, "activation_checkpointing": True},
    ],
    ids=",".join,
)
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_gradients_of_two_ranks_are_those_of_one(
    pair: TwoRanks, tiny: Tiny, untied: Tiny, head: str, changes: dict[str, Any]
) -> None:
    expected, found = both_ways(pair, tiny if head == "tied" else untied, **changes)
    assert_close(found[0], expected)
    assert_close(found[1], found[0], 0.0)


def test_sharded_gradients_take_no_more_than_a_share(pair: TwoRanks, tiny: Tiny) -> None:
    assert pair.run(_gradient_bytes, tiny.learner_settings(ranks=2, sharded_gradients=True), *_three(tiny)) == [0, 0]
    whole_ones = pair.run(_gradient_bytes, tiny.learner_settings(ranks=2), *_three(tiny))
    assert min(whole_ones) > 1_000_000


def _three(tiny: Tiny) -> tuple[TokenBatch, dict[str, FittedFrame]]:
    samples, frames = tiny.mixed(4)
    return tiny.token_batch(samples), frames


def _gradient_bytes(
    index: int, store: Any, settings: LearnerSettings, data: TokenBatch, frames: dict[str, FittedFrame]
) -> int:
    """Of gradients that are not sharded, after the first of two micro-batches."""
    rank = Rank(settings, index, store)
    seen: list[int] = []

    def loss(logp: Any, chosen: Any, weight: Any, entropy: Any) -> Any:
        groups = [g for m in rank.policy.modules() if hasattr(m, "_get_fsdp_state") for g in _groups(m)]
        params = [p for g in groups for p in g.fsdp_params]
        kept = [p.unsharded_accumulated_grad for p in params]
        kept += [p._unsharded_param.grad for p in params if hasattr(p, "_unsharded_param")]
        seen.append(sum(grad.numel() * grad.element_size() for grad in kept if grad is not None))
        return (logp * weight).sum()

    plans = tuple(MicroBatchPlan((k,)) for k in range(2))
    metrics = UpdateMetrics()
    batch = MiniBatch(plans, Counts(1.0, 1.0))
    rank.accumulate(data, PlainFrames(frames), batch, UpdateSettings(), loss, metrics, DeviceFigures(metrics))
    return seen[1]


def _groups(module: Any) -> list[Any]:
    return module._get_fsdp_state()._fsdp_param_groups


# --- number formats and buffers ---------------------------------------------------------------------------------------


def test_a_frozen_towers_weights_are_narrow_and_its_frequencies_are_not(tiny: Tiny) -> None:
    """Rounded to bf16, the frequencies turn patch row 150 by a quarter of a radian too much."""
    model = plain_model(tiny)
    rank = one_process(tiny.learner_settings(dtype="bfloat16", freeze_vision=True))
    try:
        kinds = {name: p.dtype for name, p in rank.policy.model.named_parameters()}
        assert {kind for name, kind in kinds.items() if ".visual." in name} == {torch.bfloat16}
        assert {kind for name, kind in kinds.items() if ".visual." not in name} == {torch.float32}
        mine, theirs = dict(rank.policy.model.named_buffers()), dict(model.named_buffers())
        assert mine.keys() == theirs.keys() and mine
        for name, buffer in theirs.items():
            assert torch.equal(mine[name], buffer), name
        rows = 152
        cos, sin = rank.policy.visual.rotary_pos_emb(*_places(rows))
        exact_cos, exact_sin = model.model.visual.rotary_pos_emb(*_places(rows))
        assert torch.allclose(cos, exact_cos, atol=1e-6) and torch.allclose(sin, exact_sin, atol=1e-6)
    finally:
        torch.distributed.destroy_process_group()


def _places(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.vision_utils import get_vision_position_ids

    places = get_vision_position_ids(torch.tensor([[1, rows, 2]]), 2)
    return places.float(), places


def test_a_model_without_memory_has_only_meta_tensors(tiny: Tiny) -> None:
    policy, _ = build_policy(tiny.learner_settings(freeze_vision=True, dtype="bfloat16"), tiny.form)
    model = policy.model
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert model.lm_head.weight is model.get_input_embeddings().weight


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_weights_are_the_folders(tiny: Tiny, tmp_path: Path, kind: torch.dtype) -> None:
    """Whatever the number format of the files, and in several files."""
    weights = {name: tensor.to(kind) for name, tensor in load_file(tiny.folder / "model.safetensors").items()}
    folder = _copy(tiny, tmp_path, weights, files=3)
    rank = one_process(replace(tiny, folder=folder).learner_settings())
    try:
        found = rank.weights()
        assert found.keys() == weights.keys()
        for name, tensor in weights.items():
            assert torch.equal(found[name], tensor.float()), name
    finally:
        torch.distributed.destroy_process_group()


def _copy(tiny: Tiny, tmp_path: Path, weights: dict[str, torch.Tensor], files: int = 1) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    names = sorted(weights)
    for k in range(files):
        part = {name: weights[name] for name in names[k::files]}
        save_file(part, folder / f"model-{k + 1:05d}-of-{files:05d}.safetensors", {"format": "pt"})
    return folder


def test_what_a_folder_lacks_is_named(tiny: Tiny, tmp_path: Path) -> None:
    weights = load_file(tiny.folder / "model.safetensors")
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    taken = weights.pop(name)
    with pytest.raises(FolderError, match=f"1 tensors are in none of its safetensors files, {name}"):
        _load(tiny, _copy(tiny, tmp_path / "a", weights))
    weights[name] = taken[:-1].clone()
    with pytest.raises(FolderError, match=rf"another shape.*{name} is \[383, 128\] and not \[384, 128\]"):
        _load(tiny, _copy(tiny, tmp_path / "b", weights))
    folder = _copy(tiny, tmp_path / "c", weights)
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(FolderError, match="can't be read .* fetch the model again"):
        _load(tiny, folder)


def _load(tiny: Tiny, folder: Path) -> None:
    try:
        one_process(replace(tiny, folder=folder).learner_settings())
    finally:
        torch.distributed.destroy_process_group()


def _peak_while_it_loads(index: int, store: Any, settings: LearnerSettings) -> tuple[int, int]:
    """(most bytes that this process held beyond what it held before, bytes of its shards)."""
    Rank(settings, index, torch.distributed.PrefixStore("first", store))  # imports and kernels
    torch.distributed.destroy_process_group()
    ended, before, most = threading.Event(), _held(), [0]

    def watch() -> None:
        while not ended.wait(0.001):
            most[0] = max(most[0], _held() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    rank = Rank(settings, index, store)
    ended.set()
    thread.join()
    local = [p.to_local() for p in rank.policy.parameters() if hasattr(p, "to_local")]
    return most[0], sum(tensor.numel() * tensor.element_size() for tensor in local)


def _held() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def test_no_rank_holds_the_whole_model(pair: TwoRanks, tiny: Tiny, tmp_path: Path) -> None:
    """A model of 100 MB in fp32, in bf16 files."""
    folder = _wide(tiny, tmp_path)
    size = 2 * sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size > 80_000_000
    for peak, shards in pair.run(_peak_while_it_loads, replace(tiny, folder=folder).learner_settings(ranks=2)):
        assert 0.45 * size < shards < 0.55 * size
        assert peak < 0.75 * size


def _wide(tiny: Tiny, tmp_path: Path) -> Path:
    folder = tmp_path / "wide"
    shutil.copytree(tiny.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 20_000
    (folder / "config.json").write_text(json.dumps(config))
    policy, _ = build_policy(replace(tiny, folder=folder).learner_settings(), tiny.form)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 0.05 * torch.randn(shape, generator=generator)
        for name, shape in EngineWeights(policy.model, torch.float32).shapes()
    }
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def test_the_reference_uses_the_frozen_tower_of_the_policy(tiny: Tiny) -> None:
    rank = one_process(tiny.learner_settings(reference=True, freeze_vision=True, dtype="bfloat16"))
    try:
        rank.reference.load(str(tiny.folder))
        assert rank.reference.policy is not None
        assert rank.reference.policy.visual is rank.policy.visual
        assert {p.dtype for p in rank.reference.policy.parameters()} == {torch.bfloat16}
        assert not any(p.requires_grad for p in rank.reference.policy.parameters())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "flat"),
    [*((name, False) for name in real.TINY), *((name, True) for name in real.TINY if name.startswith("qwen2"))],
)
def test_every_family_is_loaded_as_transformers_loads_it(name: str, flat: bool) -> None:
    """Parameters, buffers and tied weights; from nested and flat configurations."""
    from transformers import AutoModelForImageTextToText

    folder = real.folder(name, flat=flat)
    mine = meta_model(ModelConfig.of_folder(folder))
    materialize(mine, mine, torch.device("cpu"))
    load_weights(mine, folder)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for kind in ("named_parameters", "named_buffers"):
        found, expected = dict(getattr(mine, kind)()), dict(getattr(theirs, kind)())
        assert found.keys() == expected.keys() and found
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key


def _export_to(index: int, store: Any, settings: LearnerSettings, folder: str) -> str:
    """What went wrong, and how many tensors every rank can still gather."""
    rank = Rank(settings, index, store)
    error = ""
    try:
        exports._export_rank(rank, folder)
    except Exception as found:  # noqa: BLE001 - whatever it is
        error = str(found)
    return (
        f"{error}|{len(rank.weights()) if index == 0 else len(list(EngineWeights(rank.policy.model, torch.float32)))}"
    )


def test_an_export_that_fails_on_one_rank_leaves_none_waiting(pair: TwoRanks, tiny: Tiny, tmp_path: Path) -> None:
    settings = tiny.learner_settings(ranks=2)
    first, second = pair.run(_export_to, settings, str(tmp_path / "nowhere"))
    assert "the first rank on another machine or in another Pod does not see it" in first and second.startswith("|")
    assert first.split("|")[1] == second.split("|")[1]
    (tmp_path / "out" / "model.safetensors").mkdir(parents=True)  # can't be written
    first, second = pair.run(_export_to, settings, str(tmp_path / "out"))
    assert not first.startswith("|") and second.startswith("|")


@pytest.mark.parametrize("adapters", [None, ADAPTERS])
def test_shards_are_on_the_gpu_before_they_are_gathered_for_engines(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, adapters: LoraSettings | None
) -> None:
    """With cpuOffload they are in the host's memory. The meta device stands for the GPU."""
    rank = one_process(tiny.learner_settings(cpu_offload=True, lora=adapters))
    try:
        gathered: list[str] = []

        def recorded(tensor: torch.Tensor) -> torch.Tensor:
            gathered.append(tensor.device.type)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

        monkeypatch.setattr(sharding, "unsharded", recorded)
        found = dict(EngineWeights(rank.policy.model, torch.bfloat16, torch.device("meta")))
        assert set(gathered) == {"meta"} == {tensor.device.type for tensor in found.values()}
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == dict(
            EngineWeights(rank.policy.model, torch.bfloat16).shapes()
        )
    finally:
        torch.distributed.destroy_process_group()
