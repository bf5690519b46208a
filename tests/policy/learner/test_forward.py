"""The learner's forward against transformers' own, sample by sample."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_samples import Tiny, frame, plain_logprobs, plain_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tapforge_trainer.frames.frame import FrameError, decode
from tapforge_trainer.learner import features, head, linear
from tapforge_trainer.learner.batches import MicroBatchPlan, plan_micro_batches
from tapforge_trainer.learner.frame_store import FrameStore, cut


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("budget", [100_000, 300, 1])
def test_micro_batches_equal_single_samples_of_transformers(tiny: Tiny, budget: int, temperature: float) -> None:
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    model = plain_model(tiny)
    with torch.no_grad():
        expected = torch.cat([plain_logprobs(model, tiny, sample, frames, temperature) for sample in samples])
    policy, store = tiny.policy(model), FrameStore(tiny.form)
    got = torch.full_like(expected, float("nan"))
    for plan in (plan for rank in plan_micro_batches(data.lengths, 1, budget) for plan in rank):
        micro = tiny.micro_batch(data, plan, frames)
        with torch.no_grad():
            got[micro.response], entropy = policy(micro, store.get(micro.frames, frames), temperature)
        assert bool(torch.isfinite(entropy).all())
    assert torch.allclose(got, expected, atol=1e-5, rtol=0)


def test_gradients_equal_those_of_transformers(tiny: Tiny) -> None:
    samples, frames = tiny.mixed(5)
    plain = plain_model(tiny)
    expected = torch.cat([plain_logprobs(plain, tiny, sample, frames) for sample in samples])
    factor = torch.linspace(-1, 1, len(expected))
    (expected * factor).sum().backward()
    policy = tiny.policy(plain_model(tiny))
    data = tiny.token_batch(samples)
    micro = tiny.micro_batch(data, MicroBatchPlan(tuple(range(5))), frames)
    logp, _ = policy(micro, FrameStore(tiny.form).get(micro.frames, frames))
    (logp * factor[micro.response]).sum().backward()
    mine = dict(policy.model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None, name
        gap = (mine[name].grad - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-6)
        assert float(gap) < 1e-4, name


def test_banned_tokens_have_no_probability_and_no_gradient(tiny: Tiny) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 8, generator=generator, requires_grad=True)
    weight = torch.randn(tiny.size, 8, generator=generator, requires_grad=True)
    allowed = torch.from_numpy(tiny.vocabulary.allowed)
    target = torch.tensor(tiny.tokens.allowed_ids[:4])
    logp, entropy = head.token_logprobs(SimpleNamespace(weight=weight), hidden, target, allowed, 0.7)
    logp.sum().backward()
    assert bool(torch.isfinite(hidden.grad).all())
    assert bool(torch.isfinite(weight.grad).all())
    assert float(weight.grad[list(tiny.tokens.banned_ids)].abs().max()) == 0.0
    assert bool((entropy <= np.log(len(tiny.tokens.allowed_ids)) + 1e-5).all())


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_logits_of_bf16_factors_are_not_rounded(monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    """Against fp32 all along, with the weight cast in one piece and in several; gradients within bf16's half a step."""
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(5, 64, generator=generator)).bfloat16().requires_grad_()
    weight = torch.randn(40, 64, generator=generator).bfloat16().requires_grad_(trained)
    grad = torch.randn(5, 40, generator=generator)
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    expected = wide[0] @ wide[1].t()
    expected.backward(grad)
    for at_once in (head._CAST_AT_ONCE, 7 * 64):
        monkeypatch.setattr(head, "_CAST_AT_ONCE", at_once)
        hidden.grad = weight.grad = None
        logits = head._logits(hidden, weight)
        assert logits.dtype == torch.float32
        assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(logits, logits.detach().bfloat16().float(), rtol=1e-5, atol=1e-5)
        logits.backward(grad)
        for mine, theirs in ((hidden, wide[0]), (weight, wide[1]))[: 1 + trained]:
            assert mine.grad is not None and mine.grad.dtype == torch.bfloat16
            assert float((mine.grad - theirs.grad).norm() / theirs.grad.norm()) < 2**-7
        assert trained or weight.grad is None


def test_on_a_gpu_the_weight_of_the_head_is_never_cast() -> None:
    """The kernel itself is there on GPUs alone: here it is asked for, on tensors that hold nothing."""
    calls: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        hidden = torch.empty(4, 8, device="cuda:0", dtype=torch.bfloat16)
        weight = torch.empty(16, 8, device="cuda:0", dtype=torch.bfloat16)
        with Calls():
            logits = head._logits(hidden, weight)
    assert logits.dtype == torch.float32 and logits.device.type == "cuda"
    assert "aten.mm.dtype" in calls and not {"aten._to_copy.default", "aten.mm.default"} & set(calls)


def test_the_head_in_pieces_equals_the_head_at_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, frames = tiny.mixed(6)
    data = tiny.token_batch(samples)
    policy = tiny.policy(plain_model(tiny))
    micro = tiny.micro_batch(data, MicroBatchPlan(tuple(range(6))), frames)
    patches = FrameStore(tiny.form).get(micro.frames, frames)
    results = []
    for limit in (head.LOGITS_AT_ONCE, 3 * tiny.size):
        monkeypatch.setattr(head, "LOGITS_AT_ONCE", limit)
        policy.zero_grad()
        logp, entropy = policy(micro, patches)
        logp.sum().backward()
        results.append((logp.detach(), entropy, policy.language.layers[0].mlp.up_proj.weight.grad.clone()))
    for whole, pieces in zip(*results, strict=True):
        assert torch.allclose(whole, pieces, atol=1e-5)


def test_a_frozen_tower_sees_each_frame_once(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    policy = tiny.policy(plain_model(tiny), freeze_vision=True)
    free = tiny.policy(plain_model(tiny))
    store = FrameStore(tiny.form)
    shown: list[int] = []
    policy.visual.merger.register_forward_hook(lambda _module, _given, found: shown.append(len(found)))
    for plan in (MicroBatchPlan((0, 1)), MicroBatchPlan((3, 1, 0)), MicroBatchPlan((2,))):
        micro = tiny.micro_batch(data, plan, frames)
        ready = store.get(micro.frames, frames)
        with torch.no_grad():
            assert torch.allclose(policy(micro, ready)[0], free(micro, ready)[0], atol=1e-5)
    assert sum(shown) == sum(rows * columns for rows, columns in tiny.grids(frames).values())
    assert not any(parameter.requires_grad for parameter in policy.visual.parameters())


def test_frozen_features_are_bounded(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny.policy(plain_model(tiny), freeze_vision=True)
    shots = [frame(96, 160, k) for k in range(12)]
    frames = {f.name: f for f in shots}
    one = 15 * 128 * 3 * 4
    monkeypatch.setattr(features, "FEATURES_KEPT", 4 * one)
    store = FrameStore(tiny.form)
    data = tiny.token_batch([tiny.sample([shot], k) for k, shot in enumerate(shots)])
    for k, shot in enumerate(shots):
        policy(tiny.micro_batch(data, MicroBatchPlan((k,)), frames), store.get([shot.name], frames))
    assert len(policy._features) == 4
    assert policy._features.nbytes == 4 * one


def test_patches_are_the_image_processors(tiny: Tiny) -> None:
    from transformers import AutoImageProcessor

    for width, height in ((96, 160), (64, 64), (224, 128)):
        shot = frame(width, height, 1)
        made = AutoImageProcessor.from_pretrained(tiny.folder)([Image.open(io.BytesIO(shot.data))], return_tensors="pt")
        mine = torch.from_numpy(cut(decode(shot.data, shot.name), tiny.form)).float()
        # the processor's patch: channel, time (two copies), row, column
        theirs = made["pixel_values"].view(len(mine), 3, 2, -1)
        assert torch.equal(theirs[:, :, 0], theirs[:, :, 1])
        assert torch.allclose(mine.view(len(mine), 3, -1) / 127.5 - 1, theirs[:, :, 0], atol=1e-5)


def test_frames_that_are_wrong_are_named(tiny: Tiny) -> None:
    shot = frame(96, 160, 0)
    store = FrameStore(tiny.form)
    with pytest.raises(FrameError, match=shot.name[:12]):
        store.get([shot.name], {})
    broken = type(shot)("ab" * 32, shot.data[:50], 96, 160)
    with pytest.raises(FrameError, match="abababababab.*decoded"):
        store.get([broken.name], {broken.name: broken})
    odd = frame(100, 160, 0)
    with pytest.raises(FrameError, match="100x160"):
        store.get([odd.name], {odd.name: odd})
    lying = type(shot)(shot.name, shot.data, 160, 96)
    with pytest.raises(FrameError, match="announced was 160x96"):
        store.get([lying.name], {lying.name: lying})


def test_the_frame_store_is_bounded_and_keeps_what_is_used(tiny: Tiny) -> None:
    shots = [frame(64, 64, k) for k in range(6)]
    frames = {f.name: f for f in shots}
    store = FrameStore(tiny.form, max_bytes=3 * 64 * 64 * 3)
    for shot in shots[:3]:
        store.get([shot.name], frames)
    store.get([shots[0].name], frames)
    store.get([shots[3].name], frames)
    assert [shot.name in store for shot in shots[:4]] == [True, False, True, True]


@pytest.mark.skipif(not linear.available(), reason="PyTorch was built without oneDNN")
@pytest.mark.parametrize("shape", [(7, 5, 3), (128, 384, 64), (1, 16, 16)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_layers_equal_pytorchs(shape: tuple[int, int, int], biased: bool) -> None:
    rows, inner, outer = shape
    generator = torch.Generator().manual_seed(0)
    make = lambda *size: torch.randn(*size, generator=generator).requires_grad_()  # noqa: E731
    x, weight, bias = make(rows, 2, inner), make(outer, inner), make(outer) if biased else None
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    grad = torch.randn(rows, 2, outer, generator=generator)
    mine = linear.linear(x, weight, bias)
    theirs = torch.nn.functional.linear(x, weight, bias)
    assert torch.allclose(mine, theirs, atol=1e-4)
    for a, b in zip(torch.autograd.grad(mine, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True):
        assert torch.allclose(a, b, atol=1e-4 * max(1.0, float(b.detach().abs().max())))
