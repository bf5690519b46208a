"""flash-attn in place of torch's kernel: the same numbers by its signature, and refused where it can't be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import flash_stub
import pytest
import torch

from tapforge_api import load
from tapforge_trainer.doctor.findings import Needs, diagnose
from tapforge_trainer.doctor.machine import observe
from tapforge_trainer.learner import attention
from tapforge_trainer.placement.machine import Machine
from tapforge_trainer.run.assembly import ConfigurationError
from tapforge_trainer.run.feasibility import judge
from tapforge_trainer.run.policy_settings import learner_settings

LENGTHS = (37, 64, 1, 90)
SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: fast}
spec: {learner: {attention: flash-attn}}
"""


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_called_with_what_gives_the_same_numbers_as_torchs(causal: bool) -> None:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    with flash_stub.installed():
        kernels = [attention.by_torch, attention.by_package()]
    found = []
    for kernel in kernels:
        rows = [
            torch.randn(1, heads, sum(LENGTHS), 40, generator=torch.Generator().manual_seed(heads)).requires_grad_()
            for heads in (8, 2, 2)
        ]
        module = SimpleNamespace(is_causal=causal)
        out, _ = attention.attention(
            module, *rows, None, 0.2, cu_seq_lens_q=bounds, max_length_q=max(LENGTHS), kernel=kernel
        )
        out.square().sum().backward()
        found.append([out, *(row.grad for row in rows)])
    for torchs, packages in zip(*found, strict=True):
        assert torch.allclose(torchs, packages, atol=1e-4)


def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(RuntimeError, match="learner.attention: flash-attn can't be imported .*docs/gpus.md"):
        attention.by_package()


def test_cpus_refuse_it_by_name_and_plans_say_that_it_never_ran(tmp_path: Path) -> None:
    (error,) = judge(load(SPEC, ["device=cpu"]), None).errors
    assert error.startswith("spec.learner.attention: flash-attn has kernels for GPUs alone")
    judged = judge(load(SPEC, ["device=cuda"]), None)
    assert not judged.errors and any("never run" in note for note in judged.notes)
    agent = SimpleNamespace(allowed_ids=(1,))
    with pytest.raises(ConfigurationError, match="flash-attn has kernels for GPUs alone"):
        learner_settings(load(SPEC), tmp_path, agent, Machine(4, 0), "cpu")  # type: ignore[arg-type]
    for said, kernel in (("flash-attn", "flash-attn"), ("auto", "torch"), ("torch", "torch")):
        run = load(SPEC, [f"learner.attention={said}"])
        assert learner_settings(run, tmp_path, agent, Machine(4, 1), "cuda").attention == kernel  # type: ignore[arg-type]


def test_doctor_looks_for_the_package() -> None:
    facts = observe({}, whole=False)
    (finding,) = [one for one in diagnose(facts, Needs(flash_attn=True)) if one.check == "flash-attn"]
    assert (finding.state, "not installed" in finding.text) == ("fail", True) and "docs/gpus.md" in finding.remedy
    assert not [one for one in diagnose(facts, Needs()) if one.check == "flash-attn"]
