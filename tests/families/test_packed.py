"""Packed sequences against each sample alone and against transformers' own forward pass, for every family."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from tests.families import real
from tests.families.samples import Case

from tapforge_trainer.learner.batches import MicroBatchPlan
from tapforge_trainer.learner.packed import Inputs

FAMILIES = pytest.mark.parametrize("name", real.TINY)


def gaps(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> dict[str, float]:
    """Relative differences of gradients, by name."""
    result = {}
    for name, theirs in expected.items():
        ours = found[name]
        if theirs is None:
            assert ours is None or float(ours.abs().max()) == 0.0, name
            continue
        assert ours is not None, name
        # Some gradients are zero by symmetry (a key's bias) and rounding in either.
        result[name] = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-5))
    return result


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


@FAMILIES
def test_packed_equals_transformers(name: str) -> None:
    case = Case(real.folder(name))
    plain = case.model(attn_implementation="eager")
    expected = case.expected(plain, 0.7)
    factor = torch.linspace(-1, 1, len(expected))
    (expected * factor).sum().backward()
    policy = case.policy(case.model())
    found = case.run(policy, (3, 0, 2, 1, 4), temperature=0.7)
    assert torch.allclose(found, expected, atol=2e-5, rtol=0)
    (found * factor).sum().backward()
    worst = gaps(gradients(policy.model), gradients(plain))
    assert max(worst.values()) < 1e-3, sorted(worst.items(), key=lambda item: -item[1])[:5]


@FAMILIES
def test_packed_equals_each_sample_alone(name: str) -> None:
    case = Case(real.folder(name))
    policy = case.policy(case.model(), freeze_vision=True)
    with torch.no_grad():
        alone = case.run(policy, (0,), (1,), (2,), (3,), (4,))
        for plans in ([(4, 3, 2, 1, 0)], [(0, 2), (1, 3, 4)]):
            assert torch.allclose(case.run(policy, *plans), alone, atol=1e-5, rtol=0)
    sdpa = case.model(attn_implementation="sdpa")
    with torch.no_grad():
        assert torch.allclose(case.expected(sdpa), alone, atol=2e-5, rtol=0)


# --- traps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b-tiny", "qwen3-vl-8b-tiny"])
def test_transformers_tells_packed_sequences_apart_by_a_fourth_row_of_positions_only(name: str) -> None:
    """Why nothing here hands packed rows to its SDPA: with three rows sequences see each other, without a warning."""
    case = Case(real.folder(name))
    model = case.model(attn_implementation="sdpa")
    micro = case.micro(MicroBatchPlan((1, 4)))  # text alone
    ids, three = torch.from_numpy(micro.ids), torch.from_numpy(micro.positions)
    restarts = torch.cat([torch.arange(n) for n in micro.lengths.tolist()]).view(1, 1, -1)
    with torch.no_grad():
        alone = case.run(case.policy(case.model()), (1, 4))

        def gap(positions: torch.Tensor) -> float:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
            logits = torch.where(torch.from_numpy(case.vocabulary.allowed), logits, float("-inf"))
            places, target = torch.from_numpy(micro.predict), torch.from_numpy(micro.target)
            return float((logits.log_softmax(-1)[places].gather(1, target[:, None])[:, 0] - alone).abs().max())

        assert gap(torch.cat([restarts, three])) < 2e-5
        assert gap(three) > 0.01


@FAMILIES
def test_a_tower_that_learns_runs_without_frames_too(name: str) -> None:
    case = Case(real.folder(name))
    policy = case.policy(case.model())
    calls: list[int] = []
    policy.visual.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    logp = case.run(policy, (1,))
    assert calls == [4]  # one visual token
    logp.sum().backward()
    for key, parameter in policy.model.named_parameters():
        if ".visual." in key:
            assert parameter.grad is not None and float(parameter.grad.abs().max()) == 0.0, key
    assert torch.allclose(logp, case.run(case.policy(case.model(), freeze_vision=True), (1,)), atol=1e-6)


@FAMILIES
def test_recomputed_layers_give_the_same_gradients(name: str) -> None:
    case = Case(real.folder(name))
    results = []
    for again in (False, True):
        model = case.model()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = case.policy(model)
        entered: list[str] = []
        for part, module in (("layer", policy.language.layers[0]), ("block", policy.visual.blocks[0])):
            module.register_forward_pre_hook(lambda *_, part=part, to=entered: to.append(part))
        case.run(policy, (0, 1, 2)).sum().backward()
        assert sorted(entered) == (["block", "block", "layer", "layer"] if again else ["block", "layer"])
        results.append(gradients(policy.model))
    for key, gradient in results[0].items():
        assert torch.allclose(results[1][key], gradient, atol=1e-6), key


def test_a_frozen_tower_sees_each_frame_once_and_forgets_on_demand() -> None:
    case = Case(real.folder("qwen2.5-vl-7b-tiny"))
    policy = case.policy(case.model(), freeze_vision=True)
    seen: list[int] = []
    policy.visual.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0]) // 4))
    with torch.no_grad():
        for plan in ((0,), (3, 0, 2), (1,), (2,)):
            case.run(policy, plan)
    areas = [rows * columns for rows, columns in (case.form.grid(f.width, f.height) for f in case.frames.values())]
    assert sum(seen) == sum(areas)
    policy.forget_features()
    with torch.no_grad():
        case.run(policy, (0,))
    assert sum(seen) == sum(areas) + 18


# --- number formats, tracing ------------------------------------------------------------------------------------------


@FAMILIES
def test_bf16_is_near_fp32_and_the_softmax_is_wide(name: str) -> None:
    case = Case(real.folder(name))
    with torch.no_grad():
        exact = case.run(case.policy(case.model()), (0, 1, 2, 3, 4))
        narrow = case.model()
        for parameter in narrow.parameters():
            parameter.data = parameter.data.bfloat16()
        found = case.run(case.policy(narrow), (0, 1, 2, 3, 4))
    assert found.dtype == torch.float32
    assert 0 < float((found - exact).abs().max()) < 0.25
    assert not torch.equal(found, found.bfloat16().float())


@FAMILIES
def test_the_pass_reads_nothing_from_the_device(name: str) -> None:
    """Traced on fake tensors, which have no values: whatever asked for one would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = Case(real.folder(name))
    policy = case.policy(case.model())
    for parameter in policy.parameters():
        parameter.data = parameter.data.bfloat16()  # torch knows grouped products of no other kind without values
    micro = case.micro(MicroBatchPlan((0, 1, 2, 3, 4)))
    given = policy.inputs(micro, case.store.get(micro.frames, case.frames))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if torch.is_tensor(value) else value

        values = {field.name: fake(getattr(given, field.name)) for field in fields(given)}
        values["vision"] = {key: fake(value) for key, value in given.vision.items()}
        logp, entropy = policy(Inputs(**values))
        assert logp.shape == entropy.shape == (len(micro.target),)
        logp.sum().backward()
