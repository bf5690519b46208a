"""Packed sequences against each sample alone and against transformers' own forward pass, for every family."""

from __future__ import annotations

import pytest
import torch
from tests.models import real
from tests.models.samples import Case

from tapforge_trainer.policy.forward import VLPolicy

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


def test_packed_equals_padded() -> None:
    case = Case(real.folder("qwen3-vl-8b-tiny"))
    padded = VLPolicy(case.model(), case.form, case.vocabulary)
    packed = case.policy(case.model())
    results = []
    for policy in (padded, packed):
        found = case.run(policy, (0, 1), (2, 3, 4))
        found.square().sum().backward()
        results.append((found.detach(), gradients(policy.model)))
    (one, ours), (other, theirs) = results
    assert torch.allclose(one, other, atol=1e-5, rtol=0)
    assert max(gaps(ours, theirs).values()) < 1e-3
