"""Adapters: the model as it was at first, nothing else moves, and peft agrees about what they are."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_samples import PlainFrames, Tiny, plain_logprobs, plain_model

from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner import export as exports
from tapforge_trainer.learner import lora
from tapforge_trainer.learner.batches import plan_micro_batches
from tapforge_trainer.learner.digest import digest
from tapforge_trainer.learner.families import FolderError, families
from tapforge_trainer.learner.rank import MiniBatch, Rank
from tapforge_trainer.learner.sharding import adapters, sent, unsharded
from tapforge_trainer.model_source.ref import ModelError, ModelRef
from tapforge_trainer.placement.settings import LoraSettings, UpdateSettings
from tapforge_trainer.records import Sample
from tapforge_trainer.storage.object_storage import Store
from tapforge_trainer.sync.received import Report, difference

ADAPTERS = LoraSettings(rank=4, alpha=8.0)
OBJECTIVE = Objective(importance_cap=None)


@contextmanager
def one_rank(tiny: Tiny, **changes: Any) -> Iterator[Rank]:
    rank = Rank(tiny.learner_settings(**{"lora": ADAPTERS} | changes), 0, torch.distributed.HashStore())
    try:
        yield rank
    finally:
        torch.distributed.destroy_process_group()


def batch_of(tiny: Tiny, samples: list[Sample]) -> tuple[Any, MiniBatch]:
    data = tiny.token_batch(samples)
    counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in samples)
    return data, MiniBatch(tuple(plan_micro_batches(data.lengths, 1, 8192)[0]), counts)


def learn(
    rank: Rank, tiny: Tiny, samples: list[Sample], frames: dict[str, FittedFrame], steps: int = 2, **settings: Any
) -> Any:
    data, batch = batch_of(tiny, samples)
    options: dict[str, Any] = {"objective": OBJECTIVE, "learning_rate": 1e-2} | settings
    for step in range(steps):
        found = rank.update(data, PlainFrames(frames), [batch], UpdateSettings(**options), step)
    return found


def logprobs(rank: Rank, tiny: Tiny, samples: list[Sample], frames: dict[str, FittedFrame]) -> np.ndarray:
    data, batch = batch_of(tiny, samples)
    return rank.logprobs(data, PlainFrames(frames), batch.plans, 1.0)


def write(rank: Rank, folder: Path, adapter: bool = False) -> Path:
    """As `export` does, without Ray."""
    partial = folder.with_name(".partial")
    exports._prepare(folder, partial)
    exports._export_rank(rank, str(partial), adapter)
    exports._publish(None if adapter else Path(rank.settings.model), partial, folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_first_the_model_is_the_one_of_the_folder(tiny: Tiny, dtype: Any) -> None:
    samples, frames = tiny.mixed()
    with one_rank(tiny, dtype=dtype) as adapted:
        found, weights = logprobs(adapted, tiny, samples, frames), adapted.weights()
    with one_rank(tiny, dtype=dtype, lora=None) as plain:
        assert np.abs(found - logprobs(plain, tiny, samples, frames)).max() < (1e-6 if dtype == "float32" else 1e-9)
        expected = plain.weights()
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_an_update_moves_the_adapters_and_nothing_else(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    with one_rank(tiny, dtype="bfloat16") as rank:
        before = {name: unsharded(p.detach()).clone() for name, p in rank.policy.model.named_parameters()}
        learn(rank, tiny, samples, frames)
        after = {name: unsharded(p.detach()) for name, p in rank.policy.model.named_parameters()}
        assert sum(p.numel() for group in rank.optimizer.param_groups for p in group["params"]) < 60_000
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in after if ".lora_" in name}
    assert len(moved) == 2 * 7 * 3 and all(name.startswith("model.language_model.layers.") for name in moved)
    assert {after[name].dtype for name in moved} == {torch.float32}
    assert {tensor.dtype for name, tensor in after.items() if name not in moved} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_sent_without_their_adapter_are_named(
    tiny: Tiny, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the adapters themselves, whatever the merging takes for adapted."""
    samples, frames = tiny.mixed()
    with one_rank(tiny, dtype=dtype) as rank:
        learn(rank, tiny, samples, frames)
        whole = rank.weights()
        digests, unmerged = sent(rank)
        assert digests == {name: int(digest(tensor)) for name, tensor in whole.items()} and not unmerged
        assert difference(digests, unmerged, [(0, [Report(digests, {})])]) == ""
        with monkeypatch.context() as fault:
            fault.setattr(lora.Adapted, "merged", lambda layer: layer.weight.float())
            rank.weights()
        digests, unmerged = sent(rank)
        assert set(unmerged) == {f"{name}.weight" for name in lora.layers(rank.policy.model)}
        matrices = lora.matrices(rank.policy.model)
        with monkeypatch.context() as fault:
            fault.setattr(lora, "layers", lambda model: {})
            fault.setattr(lora, "matrices", lambda model: matrices)
            rank.weights()
        assert sent(rank) == (digests, unmerged)
        assert "without the adapter" in difference(digests, unmerged, [(0, [Report(digests, {})])])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_get_the_bytes_that_the_forward_pass_computes_with(tiny: Tiny, dtype: Any) -> None:
    """With all weights trained: masters are fp32, and what FSDP gathers for a pass is rounded from them as what is
    sent."""
    samples, frames = tiny.mixed(4)
    data = tiny.token_batch(samples)
    (plans,) = plan_micro_batches(data.lengths, 1, 8192)
    computed: dict[str, int] = {}

    def note(name: str) -> Any:
        def before(module: Any, _: Any) -> None:
            for part, parameter in module.named_parameters(recurse=False):
                if not isinstance(parameter, torch.distributed.tensor.DTensor):
                    computed[f"{name}.{part}"] = int(digest(parameter.detach().clone()))

        return before

    with one_rank(tiny, dtype=dtype, lora=None) as rank:
        batch = MiniBatch(tuple(plans), Counts(float(len(data.index)), float(len(samples))))
        rank.supervised(data, PlainFrames(frames), [batch], UpdateSettings(learning_rate=1e-3))
        for name, module in rank.policy.model.named_modules():
            module.register_forward_pre_hook(note(name))
        rank.logprobs(data, PlainFrames(frames), plans, 1.0)
        rank.weights()
        digests, _ = sent(rank)
    found = {name: value for name, value in computed.items() if name in digests}  # a tied head is the embedding
    assert len(found) > 0.9 * len(digests)
    assert found == {name: digests[name] for name in found}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_sent_as_the_forward_pass_computes_with_them(tiny: Tiny, dtype: Any) -> None:
    samples, frames = tiny.mixed()
    with one_rank(tiny, dtype=dtype) as rank:
        learn(rank, tiny, samples, frames)
        found = adapters(rank)
        digests, unmerged = sent(rank)
        layers = lora.layers(rank.policy.model)
        assert digests == {name: int(digest(tensor)) for name, tensor in found.items()} and not unmerged
        assert set(found) == set(lora.matrices(rank.policy.model))
        for name, layer in layers.items():
            first, second = (found[f"{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
            assert first.dtype == second.dtype == getattr(torch, dtype)
            change = second.float() @ first.float()
            expected = (layer.merged() - layer.weight.float()).detach().to_local()
            assert torch.allclose(change, expected, atol=2e-2 * float(expected.abs().max()))


def test_weights_that_are_sent_with_another_adapter_are_named_and_those_summed_in_another_order_are_not() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        layer = lora.Adapted(torch.nn.Linear(48, 64, bias=False), 4, 2.0)
        with torch.no_grad():
            layer.lora_B.weight.normal_(std=0.02)
            product = sum(
                b[:, None] * a[None] for a, b in zip(layer.lora_A.weight, layer.lora_B.weight.t(), strict=True)
            )
        other = layer.weight + 2.0 * product
        assert dtype is not torch.float32 or not torch.equal(other, layer.merged())
        assert lora.is_merged(layer, other.to(dtype)) and lora.is_merged(layer, layer.merged().to(dtype))
        for wrong in (layer.weight, layer.weight + product, layer.weight + 2.0 * product.flip(0)):
            assert not lora.is_merged(layer, wrong.to(dtype))
        with torch.no_grad():
            layer.lora_B.weight.zero_()
        assert lora.is_merged(layer, layer.weight.detach().to(dtype)), "there is nothing to merge"


@torch.no_grad()
def test_in_bf16_a_layer_sums_as_engines_do_and_loses_what_merged_weights_lose() -> None:
    """Of a layer as large as an 8B's beside its update, after so many updates in one direction: the slope of the
    change on the whole one (`bench/lora.py` has it of log-probabilities)."""
    width, rank, rate = 256, 64, 2e-5
    generator = torch.Generator().manual_seed(0)
    base = torch.nn.Linear(width, 512, bias=False)
    base.weight.data = (torch.randn(512, width, generator=generator) * 0.08).bfloat16()
    layer = lora.Adapted(base, rank, 2.0)
    layer.lora_A.weight.data = (torch.rand(rank, width, generator=generator) * 2 - 1) / width**0.5
    direction = torch.randn(512, rank, generator=generator).sign()
    x = torch.randn(64, width, generator=generator).bfloat16()
    found: dict[int, list[float]] = {}
    for updates in (1, 5, 100):
        layer.lora_B.weight.data = direction * rate * updates
        whole = 2.0 * x.float() @ layer.lora_A.weight.t() @ layer.lora_B.weight.t()
        narrow = copy.deepcopy(layer).bfloat16()
        plain = torch.nn.functional.linear(x, layer.weight)
        summed = (narrow(x) - plain).float()
        vllms = plain.clone()
        vllms += 2.0 * narrow.lora_B(narrow.lora_A(x))
        assert torch.equal(summed, (vllms - plain).float())
        merged = x.float() @ (layer.merged().bfloat16().float() - layer.weight.float()).t()
        base_output = x.float() @ layer.weight.float().t()
        in_fp32 = (base_output + whole).bfloat16().float() - base_output
        found[updates] = [float((part * whole).sum() / (whole * whole).sum()) for part in (summed, merged, in_fp32)]
    assert max(found[1][:2]) < 0.2 and max(found[5][:2]) < 0.5
    assert min(found[100]) > 0.95 and min(found[5][2], found[1][2]) > 0.8, "only fp32 sums have it all at once"


def test_targets_are_layers_of_the_language_model(tiny: Tiny) -> None:
    with one_rank(tiny, lora=replace(ADAPTERS, targets=("q_proj", "down_proj"))) as rank:
        names = set(lora.layers(rank.policy.model))
    layers = range(3)
    assert names == {
        f"model.language_model.layers.{k}.{part}" for k in layers for part in ("self_attn.q_proj", "mlp.down_proj")
    }


def test_a_target_that_is_not_there_is_named() -> None:
    family = families()["qwen3_vl"]
    assert family.adapted(()) == family.lora_targets
    with pytest.raises(FolderError, match=r"q_prj is not a linear layer .* qwen3_vl; did you mean q_proj\? It has q_"):
        family.adapted(("k_proj", "q_prj"))
    with pytest.raises(FolderError, match="gate_proj is not a linear layer"):
        families()["qwen3_vl_moe"].adapted(("gate_proj",))  # experts are no linear layers


def test_peft_gives_the_same_model(tiny: Tiny, tmp_path: Path) -> None:
    """Adapter on the base, merged by peft, merged for the engine, and the exported folder: one and the same."""
    from peft import PeftModel

    samples, frames = tiny.mixed()
    with one_rank(tiny) as rank:
        learn(rank, tiny, samples, frames)
        mine = logprobs(rank, tiny, samples, frames)
        sent = rank.weights()
        folder = write(rank, tmp_path / "out")
        data, _ = batch_of(tiny, samples)
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (tiny.folder.name, None)
    hub = ModelRef("hub", "owner/name", "c0ffee")
    assert exports._base(tiny.learner_settings(source=hub)) == ("owner/name", "c0ffee")
    base = plain_model(tiny)
    first = torch.stack([plain_logprobs(base, tiny, s, frames).sum() for s in samples])
    adapted = PeftModel.from_pretrained(base, str(folder / "adapter"))
    with torch.no_grad():
        for k, sample in enumerate(samples):
            expected = plain_logprobs(adapted, tiny, sample, frames)
            assert torch.allclose(expected, torch.from_numpy(mine[data.sample == k]), atol=1e-5)
            assert abs(float(expected.sum() - first[k])) > 1e-3, "the adapters change something"
    merged = dict(adapted.merge_and_unload().named_parameters())
    assert sent.keys() == merged.keys()
    for name, tensor in merged.items():
        assert torch.allclose(sent[name], tensor, atol=1e-7), name
    exported = replace(tiny, folder=folder)
    model = plain_model(exported)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, sent[name]), name
    with torch.no_grad():
        found = plain_logprobs(model, exported, samples[0], frames)
    assert torch.allclose(found, torch.from_numpy(mine[data.sample == 0]), atol=1e-5)


def test_an_export_may_take_several_files(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "_FILE_BYTES", 500_000)
    with one_rank(tiny, lora=None) as rank:
        folder = write(rank, tmp_path / "out")
        expected = rank.weights()
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    model = plain_model(replace(tiny, folder=folder))
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
    with one_rank(replace(tiny, folder=folder)) as again:
        found = again.weights()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_reference_is_the_model_itself_and_nothing_is_loaded_twice(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    pulled: dict[str, Any] = {"objective": replace(OBJECTIVE, kl_coefficient=1.0), "learning_rate": 0.0}
    with one_rank(tiny, reference=True) as rank:
        assert rank.reference.policy is None
        first = logprobs(rank, tiny, samples, frames)
        assert learn(rank, tiny, samples, frames, 1, **pulled).sums["kl_loss"] == pytest.approx(0, abs=1e-9)
        learn(rank, tiny, samples, frames)
        moved = logprobs(rank, tiny, samples, frames)
        assert np.abs(moved - first).max() > 0.01
        assert learn(rank, tiny, samples, frames, 1, **pulled).sums["kl_loss"] > 1e-4
        assert np.array_equal(logprobs(rank, tiny, samples, frames), moved), "the trained adapters are back"
        with rank.reference.entered() as policy:
            data, batch = batch_of(tiny, samples)
            referred = rank.read(policy, data, PlainFrames(frames), batch.plans, 1.0)[0]
        assert np.array_equal(referred, first)


def test_after_a_warm_start_its_adapters_are_the_reference(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, frames = tiny.mixed()
    pulled: dict[str, Any] = {"objective": replace(OBJECTIVE, kl_coefficient=1.0), "learning_rate": 0.0}
    with one_rank(tiny, reference=True) as rank:
        learn(rank, tiny, samples, frames)
        warm = logprobs(rank, tiny, samples, frames)
        folder = write(rank, tmp_path / "reference", adapter=True)
        assert [path.name for path in folder.iterdir()] == ["adapter"], "of a model that all have only the adapter"
        exports.refer_to(rank, str(folder), "")
        assert learn(rank, tiny, samples, frames, 1, **pulled).sums["kl_loss"] == pytest.approx(0, abs=1e-9)
        learn(rank, tiny, samples, frames)
        assert learn(rank, tiny, samples, frames, 1, **pulled).sums["kl_loss"] > 1e-4
    with one_rank(tiny, reference=True) as later:  # a later session
        exports.put_folder(Store(f"file://{tmp_path}/store"), "reference", folder, lambda: None)
        cache = tmp_path / "cache"
        monkeypatch.setenv("TAPFORGE_CACHE", str(cache))
        asked = list[str]()
        monkeypatch.setattr(
            Store, "get", lambda self, path, target, get=Store.get: asked.append(path) or get(self, path, target)
        )
        exports.refer_to(later, str(tmp_path / "elsewhere"), f"file://{tmp_path}/store/reference")
        assert sorted(asked) == ["adapter_config.json", "adapter_model.safetensors"]
        assert [path.suffix for path in (cache / "references").iterdir()] == [".lock"], "read, it goes"
        with pytest.raises(ModelError, match="the KL term's reference: .*/nothing holds nothing complete"):
            exports.refer_to(later, str(tmp_path / "elsewhere"), f"file://{tmp_path}/store/nothing")
        with later.reference.entered() as policy:
            data, batch = batch_of(tiny, samples)
            assert np.array_equal(later.read(policy, data, PlainFrames(frames), batch.plans, 1.0)[0], warm)
    with one_rank(tiny, reference=True, lora=replace(ADAPTERS, rank=8)) as other:
        with pytest.raises(FolderError, match=r"another rank.*lora_A.weight is \[4, 128\], not \[8, 128\]"):
            other.reference.load(str(folder / "adapter"))
        with pytest.raises(FolderError, match="does not hold the adapters"):
            other.reference.load(str(tiny.folder))
