"""The packed forward pass of each family on a GPU that is made up: fake tensors say "cuda" and hold nothing. What mixes
devices, or waits for the GPU to read a number or a size from it, raises; what flash kernels refuse is checked here. The
backward pass of a fake GPU needs a driver: `tests/memory` traces it on a fake CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import flash_stub
import numpy as np
import pytest
import torch
from tests.families import real
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tapforge_trainer.learner import attention
from tapforge_trainer.learner.batches import MicroBatch
from tapforge_trainer.learner.frame_store import Patches, PixelFormat
from tapforge_trainer.learner.sharding import build_policy, materialize
from tapforge_trainer.placement.settings import LearnerSettings, LoraSettings

GPU = torch.device("cuda:0")
#: visual tokens of two frames, and tokens of the two sequences that show them
GRIDS, LENGTHS = ((12, 7), (10, 4)), (100, 60)


class Attention(TorchDispatchMode):
    """What attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.torch_attn._varlen_attn.default:
            self.calls.append(args)
        if func is torch.ops.tapforge_tests.varlen_forward.default:
            query, key, value, bounds, key_bounds, longest, *_ = args
            self.calls.append((query, key, value, bounds, key_bounds, longest, longest))
        return func(*args, **(kwargs or {}))


def micro_batch(form: PixelFormat) -> tuple[MicroBatch, dict[str, Patches]]:
    frames = {
        f"f{k}": Patches(np.zeros((rows * columns * form.merge**2, 3 * form.patch**2), np.uint8), rows, columns)
        for k, (rows, columns) in enumerate(GRIDS)
    }
    total, visual = sum(LENGTHS), sum(rows * columns for rows, columns in GRIDS)
    batch = MicroBatch(
        ids=np.zeros((1, total), np.int64),
        positions=np.zeros((3, 1, total), np.int64),
        lengths=np.asarray(LENGTHS),
        frames=tuple(frames),
        visual=np.arange(visual),
        feature=np.arange(visual),
        predict=np.arange(20),
        target=np.zeros(20, np.int64),
        response=np.arange(20),
        padding=False,
    )
    return batch, frames


WAYS = {"frozen tower": {}, "trained tower": {"freeze_vision": False}, "lora": {"lora": LoraSettings(8, 16.0)}}


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-8b"])
def test_so_it_is_with_flash_attns_call(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the package's signature, with a made-up op."""
    monkeypatch.setitem(WAYS, "by flash-attn", {"freeze_vision": False, "attention": "flash-attn"})
    with flash_stub.installed():
        test_nothing_leaves_the_gpu_and_its_kernels_take_what_they_get(name, "by flash-attn", tmp_path, monkeypatch)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("heads", "keys", "size"), [(28, 4, 128), (16, 16, 80)])
def test_flash_attns_gradients_have_the_shapes_of_what_they_are_of(
    device: str, heads: int, keys: int, size: int
) -> None:
    """On a fake GPU by the op itself: autograd would ask for a driver."""
    with flash_stub.installed():
        kernel = attention.by_package()
    with FakeTensorMode():
        place = torch.device(device)
        tokens = sum(LENGTHS)
        given = [
            torch.empty(tokens, n, size, dtype=torch.bfloat16, device=place, requires_grad=True)
            for n in (heads, keys, keys)
        ]
        bounds = torch.empty(len(LENGTHS) + 1, dtype=torch.int32, device=place)
        spans = attention.Bounds(bounds, max(LENGTHS))
        out = kernel(*given, spans, spans, None, True)
        assert out.shape == (tokens, heads, size) and out.device.type == device and out.dtype == torch.bfloat16
        if device == "cpu":
            out.sum().backward()
            found = [one.grad for one in given]
        else:
            op = torch.ops.tapforge_tests.varlen_backward
            found = op(torch.empty_like(out), *given, bounds, bounds, max(LENGTHS), size**-0.5, True)
        for grad, one in zip(found, given, strict=True):
            assert (grad.shape, grad.dtype, grad.device) == (one.shape, one.dtype, one.device)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen2-vl-7b", "qwen2.5-vl-7b", "qwen3-vl-8b", "qwen3-vl-30b-a3b"])
def test_nothing_leaves_the_gpu_and_its_kernels_take_what_they_get(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))  # experts ask
    real.config(name, 2, 2).save_pretrained(tmp_path)
    form = PixelFormat(real.patch_size(name), 2, (0.5,) * 3, (0.5,) * 3)
    settings = LearnerSettings(str(tmp_path), (0, 1, 2), device="cuda", dtype="bfloat16", **WAYS[way])
    policy, _ = build_policy(settings, form)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        materialize(policy, policy.model, GPU)
        for parameter in policy.parameters():  # as FSDP gathers them
            parameter.data = parameter.data.to(torch.bfloat16)
    assert {buffer.dtype for buffer in policy.model.buffers()} == {torch.float32}
    monkeypatch.setattr(policy, "_put", lambda v: torch.from_numpy(v) if isinstance(v, np.ndarray) else v)
    given = policy.inputs(*micro_batch(form))  # type: ignore[union-attr]

    def there(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with fake:
            return fake.from_tensor(value).to(GPU)

    made = {field.name: there(getattr(given, field.name)) for field in fields(given)}
    made["vision"] = {key: there(value) for key, value in given.vision.items()}
    seen = Attention()
    with fake, seen:
        logp, entropy = policy(replace(given, **made))
    assert logp.device == entropy.device == GPU and logp.dtype == torch.float32
    assert logp.requires_grad and not entropy.requires_grad
    assert len(seen.calls) == 4  # two vision blocks, two layers
    for query, key, value, *bounds, longest_query, longest_key in (call[:7] for call in seen.calls):
        for part in (query, key, value):
            assert part.device == GPU and part.dtype == torch.bfloat16
            assert part.stride(-1) == 1 and part.shape[-1] % 8 == 0 and part.shape[-1] <= 256
        for places in bounds:
            assert places.device == GPU and places.dtype == torch.int32 and places.is_contiguous()
        assert type(longest_query) is type(longest_key) is int
