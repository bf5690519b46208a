"""Losses, masks and weights of the second golden set: every variant that a file can ask for, values and gradients.

What is left out is named in `LEFT_OUT`, with the reason, and nothing else is. `TAPFORGE_GOLDEN` points at another
folder.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapforge_trainer.algorithms.corrections import Policies, correction
from tapforge_trainer.algorithms.distillation import Distillation
from tapforge_trainer.algorithms.losses import corrected, forward_kl, policy_loss
from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.algorithms.tokens import Tokens
from tapforge_trainer.algorithms.whole_step import StepTokens, TopEntropy

FOLDER = Path(os.environ.get("TAPFORGE_GOLDEN") or Path(__file__).parents[1] / "golden")
GOLDEN = json.loads((FOLDER / "losses2.json").read_text())
CASES = GOLDEN["policy"]

_DISTILLATION = "needs a teacher's logits at what its student finds likely"
#: variant -> why it can't be asked for
LEFT_OUT = {
    "ppo clip 0.2/0.2, mask seq_mean_k3 0.05, mean over kept": "divides by what a mask keeps of the whole step",
    "opd prime-rl token_mean": "drops tokens on one side alone, by a bound that is fixed",
    "jsd 0.5 full token_mean": _DISTILLATION,
    "reverse_kl full token_mean": _DISTILLATION,
    "forward_kl teacher top 3 held at -3 token_mean": "holds log-probabilities, by a bound that is fixed",
    "reverse_kl student top 3 renormalised token_mean": _DISTILLATION,
    "reverse_kl student top 3 with tail token_mean": _DISTILLATION,
}

# --- titles -----------------------------------------------------------------------------------------------------------


class NotKnown(Exception):
    """A title that stands for nothing that is here."""


def correction_of(title: str) -> dict[str, dict[str, Any]]:
    """The corrections that the title of a mask or a weight stands for."""
    number = r"([\d.]+)"
    if found := re.fullmatch(rf"(token|seq_sum|seq_mean|seq_max)_k1 {number}_{number}", title):
        by, low, high = found.groups()
        return {"reject": {"by": _by(by), "measure": "k1", "low": float(low), "high": float(high)}}
    if found := re.fullmatch(rf"(token|seq_sum|seq_mean|seq_max)_(k2|k3) {number}", title):
        by, measure, high = found.groups()
        return {"reject": {"by": _by(by), "measure": measure, "high": float(high)}}
    if found := re.fullmatch(rf"(token range|product|geometric) {number}/{number}", title):
        by, low, high = found.groups()
        return {"range": {"by": by.removesuffix(" range"), "low": float(low), "high": float(high)}}
    if found := re.fullmatch(rf"veto {number} drops the row", title):
        return {"veto": {"below": float(found[1])}}
    if found := re.fullmatch(rf"outlier token {number}/{number} drops the row", title):
        return {"veto": {"below": float(found[1]), "above": float(found[2])}}
    if found := re.fullmatch(rf"opsm {number} anchor (old|behavior)", title):
        return {"opsm": {"above": float(found[1]), "against": found[2]}}
    if found := re.fullmatch(rf"(token|sequence) icepop {number}/{number}", title):
        return {"icepop": {"by": found[1], "low": float(found[2]), "high": float(found[3])}}
    if found := re.fullmatch(rf"(token|sequence) tis {number} batch normalised", title):
        return {"normalised": {"by": found[1], "cap": float(found[2])}}
    if found := re.fullmatch(rf"m2po {number}", title):
        return {"second_moment": {"threshold": float(found[1])}}
    if found := re.fullmatch(rf"(?:trl )?(token|sequence)(?: tis|_truncate) {number}", title):
        return {"truncate": {"by": found[1], "cap": float(found[2])}}
    if found := re.fullmatch(rf"trl (token|sequence)_mask {number}", title):
        return {"icepop": {"by": found[1], "low": 0.0, "high": float(found[2])}}
    if found := re.fullmatch(rf"geometric mask {number}/{number} \+ raw token weight", title):
        mask = {"by": "geometric", "low": float(found[1]), "high": float(found[2])}
        return {"range": mask, "truncate": {"by": "token", "cap": 1e9}}
    if found := re.fullmatch(rf"geometric weight, masked outside {number}/{number}", title):
        return {"icepop": {"by": "geometric", "low": float(found[1]), "high": float(found[2])}}
    raise NotKnown(title)


def _by(title: str) -> str:
    return title.replace("seq_", "sequence_")


#: for a coefficient of 1, alone: the policy's part has no advantage
KL = {"kl abs": "abs", "kl k3 times ratio": "k3_ratio", "kl k3 held at 10": "k3_held", "kl k3+": "k3+"}
SEQ_MEAN = "seq_mean_token_mean"


def objective_of(title: str) -> tuple[Objective, bool]:
    """The objective, and whether empty rows count as sequences."""
    number = r"([\de.+-]+)"
    body, aggregation = title, SEQ_MEAN
    rows = title.endswith(" per row")
    constant = 1
    if title.endswith(" token_mean"):
        body, aggregation = title.removesuffix(" token_mean"), "token_mean"
    elif found := re.fullmatch(r"(.*) token_sum / constant (\d+) per (?:row|sequence)", title):
        body, aggregation, constant = found[1], "constant", int(found[2])
    anchor = "old"
    corrections: dict[str, dict[str, Any]] = {}
    if body.startswith("bypass "):
        body, anchor = body.removeprefix("bypass "), "behavior"
    if " anchor behavior" in body and not body.startswith("opsm"):
        body, anchor = body.replace(" anchor behavior", ""), "behavior"
    if found := re.fullmatch(r"(opsm \S+ anchor \w+) (.*)", body):
        corrections, body = correction_of(found[1]), found[2]
    elif found := re.fullmatch(r"(.*), mask (.*)", body):
        body = found[1]
        for part in found[2].split(" + "):
            corrections |= correction_of(part)
    elif found := re.fullmatch(r"(ppo clip \S+) x (.*)", body):
        body, corrections = found[1], correction_of(found[2])
    options: dict[str, Any] = {}
    form = " ratio form"
    if body.endswith(form):
        body, options = body.removesuffix(form), {"form": "ratio"}
    if body in KL:
        kl: Any = {"kl": KL[body], "kl_coefficient": 1.0}
        return Objective(importance_cap=None, aggregation=aggregation, **kl), rows
    if found := re.fullmatch(rf"entropy bonus {number}", body):
        return Objective(importance_cap=None, aggregation=aggregation, entropy_bonus=float(found[1])), rows
    if found := re.fullmatch(r"opd (k1|k2|k3) (?:policy gradient (.*)|supervised)", body):
        taught = Distillation(found[1], alone=True)
        clips = re.fullmatch(rf"ppo clip {number}/{number}", found[2] or "ppo clip 0.2/0.28")
        low, high = map(float, clips.groups())
        options = {"clip_low": low, "clip_high": high}
        return Objective(options=options, importance_cap=None, aggregation=aggregation, distillation=taught), rows
    top_entropy = None
    if found := re.fullmatch(rf"top entropy quantile {number} (.*)", body):
        top_entropy, body = TopEntropy(share=float(found[1])), found[2]
    two = rf"{number}/{number}"
    clips = {"clip_low": 1, "clip_high": 2}
    titles: list[tuple[str, str, dict[str, int]]] = [
        (
            rf"clip_cov ratio {number} bounds {two} clip {two}",
            "clip_cov",
            {"share": 1, "low": 2, "high": 3, "clip_low": 4, "clip_high": 5},
        ),
        (rf"kl_cov ratio {number} coefficient {number}", "kl_cov", {"share": 1, "coefficient": 2}),
        (rf"ppo clip {two} dual {number}", "ppo", clips | {"dual_clip": 3}),
        (rf"ppo clip {two}", "ppo", clips),
        (rf"gspo-token clip {two}", "ppo", clips),
        (rf"gspo clip {two}", "gspo", clips),
        (rf"luspo clip {two}", "gspo", clips),
        (rf"gmpo clip {two}", "gmpo", clips),
        (rf"cispo clip {two}", "cispo", clips),
        (rf"rollout_is {two}", "rollout_is", clips),
        (rf"sapo tau {two}", "sapo", {"tau_positive": 1, "tau_negative": 2}),
        (rf"dppo_tv {two}", "dppo_tv", {"low": 1, "high": 2}),
        (rf"dppo_kl {two}", "dppo_kl", {"low": 1, "high": 2}),
        (rf"prime-rl ipo {number}", "ipo", {"bound": 1}),
        (r"prime-rl default", "prime_rl", {}),
        (rf"dro beta {number}", "dro", {"beta": 1}),
        (r"topr", "topr", {}),
        (
            rf"vespo {two}/{two}",
            "vespo",
            {"k_positive": 1, "lambda_positive": 2, "k_negative": 3, "lambda_negative": 4},
        ),
        (rf"reinforce (?:token|sequence) tis {number}", "reinforce", {"cap": 1}),
    ]
    for pattern, loss, places in titles:
        if found := re.fullmatch(pattern, body):
            name, options = loss, options | {option: float(found[place]) for option, place in places.items()}
            break
    else:
        found = re.fullmatch(rf"cispo cap {number}", body)
        if found is None:
            raise NotKnown(title)
        name, options = "cispo", {"clip_low": 1.0, "clip_high": float(found[1]) - 1.0}
    if body.startswith("gspo-token"):
        options["ratio"] = "sequence"
    if body.startswith("luspo"):
        aggregation = "seq_mean_token_sum"
    if body.startswith(("prime-rl", "rollout_is")):
        anchor = "behavior"
    if body.startswith("clip_cov"):
        options["draw"] = "largest"  # published code draws at random
    if body.startswith("reinforce"):
        options["level"] = body.split()[1]
    objective = Objective(
        loss=name,
        options=options,
        anchor=anchor,
        aggregation=aggregation,
        constant_length=constant,
        importance_cap=None,
        corrections=corrections,
        top_entropy=top_entropy,
    )
    return objective, rows


def known(title: str, read: Any) -> bool:
    try:
        read(title)
    except NotKnown:
        return False
    return True


def likely_of(title: str) -> int:
    """How many of the teacher's likeliest tokens the title of a distillation compares."""
    found = re.fullmatch(r"forward_kl (?:full|teacher top (\d+)) token_mean", title)
    if found is None:
        raise NotKnown(title)
    return int(found[1] or 7)


def asked(kind: str) -> list[Any]:
    return [
        pytest.param(case, title, id=f"{case['name']}: {title}")
        for case in CASES
        for title in case[kind]
        if title not in LEFT_OUT
    ]


def test_what_is_left_out_is_what_cannot_be_asked_for():
    titles = {title for case in CASES for title in case["expected"]}
    parts = {title for case in CASES for title in (*case["masks"], *case["weights"])}
    distilled = {title for case in GOLDEN["distillation"] for title in case["expected"]}
    unknown = {title for title in titles if not known(title, objective_of)}
    unknown |= {title for title in parts if not known(title, correction_of)} - {"top entropy quantile 0.25"}
    distilled = {title for title in distilled if not known(title, likely_of)}
    assert unknown | distilled == set(LEFT_OUT)


# --- numbers ----------------------------------------------------------------------------------------------------------


def close(mine: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(mine), np.asarray(expected), rtol=1e-6, atol=1e-5)


def flat(case: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    names = ("logp", "old_logp", "behavior_logp", "ref_logp", "teacher_logp", "advantage", "entropy")
    found = {name: torch.tensor(case[name], dtype=torch.float64)[mask] for name in names}
    sequence = mask.nonzero()[:, 0]
    score = torch.tensor(case["score"], dtype=torch.float64)[sequence]
    return mask, found | {"sequence": sequence, "score": score}


@pytest.mark.parametrize(("case", "title"), asked("expected"))
def test_loss_and_gradient(case, title):
    objective, rows = objective_of(title)
    mask, tokens = flat(case)
    counts = Counts.of((int(row.sum()), 1.0) for row in mask)
    if rows:
        counts = Counts(counts.tokens, float(len(mask)))
    leaf = tokens["logp"].requires_grad_()
    entropy = tokens["entropy"].requires_grad_()
    if objective.kl_coefficient or objective.entropy_bonus:
        tokens["advantage"] = torch.zeros_like(leaf)
    if title.startswith("bypass"):  # nothing is recomputed
        tokens["old_logp"] = None
    found = policy_loss(**(tokens | {"logp": leaf}), objective=objective, counts=counts)
    found.loss.backward()
    expected = case["expected"][title]
    close(found.loss.item(), expected["loss"])
    gradient = torch.zeros(mask.shape, dtype=torch.float64)
    gradient[mask] = leaf.grad
    close(gradient, expected["grad"])
    if "grad_entropy" in expected:
        gradient[mask] = entropy.grad
        close(gradient, expected["grad_entropy"])


@pytest.mark.parametrize("case", GOLDEN["distillation"], ids=lambda case: case["name"])
@pytest.mark.parametrize("title", ["forward_kl full token_mean", "forward_kl teacher top 3 token_mean"])
def test_divergence_from_what_a_teacher_finds_likely(case, title):
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    logits = torch.tensor(case["student_logits"], dtype=torch.float64, requires_grad=True)
    own = logits.log_softmax(-1)[mask]
    teacher = torch.tensor(case["teacher_logits"], dtype=torch.float64).log_softmax(-1)[mask]
    likely = teacher.topk(likely_of(title))
    objective = Objective(importance_cap=None, distillation=Distillation("forward_kl", alone=True))
    found = policy_loss(
        own[:, 0],
        None,
        torch.ones(len(own)),
        mask.nonzero()[:, 0],
        objective=objective,
        counts=Counts.of((int(row.sum()), 1.0) for row in mask),
        teacher_logp=teacher[:, 0],
        apart=forward_kl(own.gather(1, likely.indices), likely.values),
    )
    found.loss.backward()
    close(found.loss.item(), case["expected"][title]["loss"])
    close(logits.grad, case["expected"][title]["grad"])


@pytest.mark.parametrize(("case", "title"), [*asked("masks"), *asked("weights")])
def test_masks_and_weights(case, title):
    mask, tokens = flat(case)
    rows = len(mask)
    view = Tokens(
        tokens["logp"],
        tokens["old_logp"],
        tokens["advantage"],
        torch.ones_like(tokens["sequence"], dtype=torch.bool),
        tokens["sequence"],
        rows,
    )
    step = StepTokens(
        advantage=tokens["advantage"].numpy(),
        sequence=tokens["sequence"].numpy(),
        place=np.arange(len(tokens["sequence"])),
        entropy=tokens["entropy"].numpy(),
        old=tokens["old_logp"].numpy(),
        behavior=tokens["behavior_logp"].numpy(),
    )
    if found := re.fullmatch(r"top entropy quantile ([\d.]+)", title):
        kept = torch.zeros(mask.shape, dtype=torch.float64)
        kept[mask] = torch.tensor(TopEntropy(share=float(found[1])).gather(step), dtype=torch.float64)
        close(kept, case["masks"][title])
        return
    asked_of = {name: correction(name, options) for name, options in correction_of(title).items()}
    gathered = {name: torch.tensor(one.gather(step)) for name, one in asked_of.items() if hasattr(one, "gather")}
    policies = Policies(view, tokens["old_logp"], tokens["behavior_logp"], gathered)
    factor, told = corrected(policies, correction_of(title))
    matrix = torch.zeros(mask.shape, dtype=torch.float64)
    matrix[mask] = factor
    close(matrix, (case["masks"] | case["weights"])[title])
    assert torch.equal(told["masked"], factor == 0)
    if title in case["masks"]:
        (options,) = correction_of(title).items()
        assert torch.equal(correction(*options)(policies)[1], factor == 0)
