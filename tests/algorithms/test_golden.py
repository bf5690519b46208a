"""Every case and variant of the golden data, values and gradients. `TAPFORGE_GOLDEN` points at another folder of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tapforge_trainer.algorithms.losses import kl, policy_loss, token_shares
from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.algorithms.registry import estimate
from tapforge_trainer.algorithms.steps import Steps

FOLDER = Path(os.environ.get("TAPFORGE_GOLDEN") or Path(__file__).parents[1] / "golden")
ADVANTAGES = json.loads((FOLDER / "advantages.json").read_text())
LOSSES = json.loads((FOLDER / "losses.json").read_text())


def variants(cases):
    return [
        pytest.param(case, variant, id=f"{case['name']}: {variant}") for case in cases for variant in case["expected"]
    ]


def estimator_of(variant: str) -> tuple[str, dict]:
    """The name and options that a variant's title stands for; an unknown title is an error, never a skip."""
    row = {"row_statistics": True} if variant.endswith(" row_statistics") else {}
    title = variant.removesuffix(" row_statistics")
    plain = {
        "grpo mean_std": ("grpo", {"normalization": "mean_std"}),
        "grpo mean (dr_grpo)": ("grpo", {"normalization": "mean"}),
        "grpo mean_std eps 1e-8 (zerogui)": ("grpo", {"normalization": "mean_std", "epsilon": 1e-8}),
        "rloo": ("rloo", {}),
    }
    if title in plain:
        return plain[title][0], plain[title][1] | row
    mode, gamma, weight = re.fullmatch(r"gigpo (\w+) gamma ([\d.]+) weight ([\d.]+)", title).groups()
    return "gigpo", {"normalization": mode, "gamma": float(gamma), "weight": float(weight)} | row


def steps_of(trajectories: list[dict]) -> Steps:
    groups: dict[str, int] = {}
    states: dict[str, int] = {}
    rows = [
        (
            groups.setdefault(t["group"], len(groups)),
            index,
            states.setdefault(s["state"], len(states)),
            s["reward"],
            t["outcome"] != "invalid",
        )
        for index, t in enumerate(trajectories)
        for s in t["steps"]
    ]
    return Steps(*(np.array(column) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize(("case", "variant"), variants(ADVANTAGES))
def test_advantages(case, variant):
    name, options = estimator_of(variant)
    steps = steps_of(case["trajectories"])
    total = estimate(name, steps, **options).total
    for index, expected in enumerate(case["expected"][variant]):
        mine = total[steps.trajectory == index]
        if expected is None:
            assert not mine.any()
        else:
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5)


def objective_of(variant: str) -> Objective:
    if variant.startswith("gspo"):
        low, high = re.fullmatch(r"gspo clip (\S+)/(\S+)", variant).groups()
        options = {"ratio": "sequence", "clip_low": float(low), "clip_high": float(high)}
        return Objective(options=options, aggregation="seq_mean_token_mean")
    low, high, dual, aggregation = re.fullmatch(
        r"ppo clip ([\d.]+)/([\d.]+)(?: dual ([\d.]+))? (\w+)", variant
    ).groups()
    options = {"clip_low": float(low), "clip_high": float(high)} | ({"dual_clip": float(dual)} if dual else {})
    return Objective(options=options, aggregation=aggregation)


def loss_of(variant: str, logp, old, ref, advantage, sequence, counts):
    if not variant.startswith("kl "):
        return policy_loss(logp, old, advantage, sequence, objective=objective_of(variant), counts=counts).loss
    kind, coefficient, aggregation = re.fullmatch(
        r"kl (k\d)(?: advantage cap, coefficient ([\d.]+))? (\w+)", variant
    ).groups()
    cap = advantage.abs() / float(coefficient) if coefficient else None
    shares = token_shares(torch.ones_like(logp), sequence, aggregation, counts)
    return (shares * kl(logp, ref, kind, cap)).sum()


@pytest.mark.parametrize(("case", "variant"), variants(LOSSES["policy"]))
def test_loss_and_gradient(case, variant):
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    flat = {
        name: torch.tensor(case[name], dtype=torch.float64)[mask]
        for name in ("logp", "old_logp", "ref_logp", "advantage")
    }
    sequence = mask.nonzero()[:, 0]
    logp = flat["logp"].requires_grad_()
    counts = Counts.of((int(row.sum()), 1.0) for row in mask)
    loss = loss_of(variant, logp, flat["old_logp"], flat["ref_logp"], flat["advantage"], sequence, counts)
    loss.backward()
    expected = case["expected"][variant]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-5)
    np.testing.assert_allclose(logp.grad, torch.tensor(expected["grad"])[mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", LOSSES["gae"])
def test_gae(case):
    n = len(case["rewards"])
    zeros = np.zeros(n, dtype=int)
    steps = Steps(zeros, zeros, zeros, case["rewards"], np.ones(n), value=case["values"])
    result = estimate("gae", steps, gamma=case["gamma"], lambda_=case["lambda"])
    np.testing.assert_allclose(result.total, case["advantages"], rtol=0, atol=1e-5)
