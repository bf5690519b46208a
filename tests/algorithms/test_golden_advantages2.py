"""Every case and variant of the second set of advantages, checked against published code (`tests/golden/README.md`).
`TAPFORGE_GOLDEN` points at another folder of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapforge_trainer.algorithms.distillation import Distillation
from tapforge_trainer.algorithms.registry import estimate
from tapforge_trainer.algorithms.steps import NO_STATE, Steps

FOLDER = Path(os.environ.get("TAPFORGE_GOLDEN") or Path(__file__).parents[1] / "golden")
GOLDEN = json.loads((FOLDER / "advantages2.json").read_text())
CASES, TOKENS = GOLDEN["cases"], GOLDEN["tokens"]
#: A return that is compared with nothing, and a reward that is no advantage
WAITING_TOKENS = {
    "return per span gamma 0.9",
    "kl k1 in reward 0.05",
}
#: a teacher's part of an advantage, which is made per token and not by an estimator
DISTILLED = {"opd k1": Distillation("k1", alone=True), "opd k1 0.5 added to a return": Distillation("k1", 0.5)}

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "dr_grpo": ("dr_grpo", {}),
    "gpg": ("gpg", {}),
    "grpo group mean, batch std": ("grpo", {"deviation": "batch", "epsilon": 1e-4}),
    "grpo length penalty output 0.1 turns 0.2": ("grpo_length_penalty", {"output": 0.1, "turns": 0.2}),
    "maxrl": ("maxrl", {}),
    "otb per step": ("otb", {"tail": "raw"}),
    "otb per step, tail kept": ("otb", {"tail": "kept"}),
    "maxrl eps 1e-6": ("maxrl", {"epsilon": 1e-6}),
    "opo": ("opo", {}),
    "rloo": ("rloo", {}),
    "reinforce++-baseline whiten steps": ("reinforce_plus_plus_baseline", {"per": "step"}),
    "reinforce++-baseline whiten tokens": ("reinforce_plus_plus_baseline", {"per": "token"}),
}


def _gdpo(task: str, form: str, whiten: str) -> dict[str, Any]:
    how = {"whiten tokens": "tokens", "whiten trajectories": "trajectories", "no batch step": "none"}[whiten]
    return {"weights": f"task={task}, format={form}", "whiten": how} | (
        {"epsilon": 1e-4} if how == "trajectories" else {}
    )


def _hgpo(form: str | None, history: str, alpha: str, mode: str, rest: str | None) -> dict[str, Any]:
    extra = {
        None: {"drop_zeros": form is None},
        " base": {"drop_zeros": True, "base": True},
        " zeros kept": {"drop_zeros": False},
    }[rest]
    return {
        "form": form or "code",
        "history": int(history),
        "alpha": float(alpha),
        "normalization": mode,
    } | extra


def _graphgpo(form: str, what: str, mode: str) -> dict[str, Any]:
    options: dict[str, Any] = {"form": form, "normalization": mode, "omega": 0.1}
    for word in {
        "trajectory_once": ["once"],
        "cross_steps": ["rows"],
        "omega 0.9 trajectory_once": ["once", "omega"],
        "distance gain cross_steps": ["gain", "rows"],
        "graph term only": ["once", "alone"],
    }[what]:
        options |= {
            "once": {"row_statistics": False},
            "rows": {"row_statistics": True},
            "omega": {"omega": 0.9},
            "gain": {"form": "gain"},
            "alone": {"episode_weight": 0.0},
        }[word]
    return options


PATTERNS = (
    (r"grpo_passk (mean|mean_std)", "grpo_passk", lambda mode: {"normalization": mode}),
    (
        r"grpo discounted steps gamma ([\d.]+) (mean|mean_std)",
        "discounted_grpo",
        lambda gamma, mode: {"gamma": float(gamma), "normalization": mode},
    ),
    (
        r"reinforce\+\+ gamma ([\d.]+) whiten (token|step)s",
        "reinforce_plus_plus",
        lambda gamma, per: {"gamma": float(gamma), "per": per},
    ),
    (
        r"gae per step gamma ([\d.]+) lambda ([\d.]+)( whiten steps)?",
        "gae",
        lambda gamma, lam, whiten: {
            "gamma": float(gamma),
            "lambda_": float(lam),
            "whiten": "steps" if whiten else "none",
        },
    ),
    (r"gdpo weights (\S+)/(\S+) (whiten tokens|whiten trajectories|no batch step)", "gdpo", _gdpo),
    (r"hgpo (?:(paper) )?history (\d) alpha ([\d.]+) (mean|mean_std)( base| zeros kept)?", "hgpo", _hgpo),
    (r"graphgpo (code|paper) (.+) (mean|mean_std)", "graphgpo", _graphgpo),
)


def estimator_of(variant: str) -> tuple[str, dict[str, Any]]:
    """The name and options that a variant's title stands for; an unknown title is an error, never a skip."""
    if variant in PLAIN:
        return PLAIN[variant]
    for pattern, name, options in PATTERNS:
        if found := re.fullmatch(pattern, variant):
            return name, options(*found.groups())
    raise KeyError(f"no estimator is known for the variant {variant!r}")


def steps_of(trajectories: list[dict[str, Any]]) -> Steps:
    groups: dict[str, int] = {}
    states: dict[str, int] = {}

    def number(state: str | None) -> int:
        return NO_STATE if state is None else states.setdefault(state, len(states))

    def whole(step: int, trajectory: dict[str, Any], value: float) -> float:
        return value if step == len(trajectory["steps"]) - 1 else 0.0

    rows = [(index, t, i, s) for index, t in enumerate(trajectories) for i, s in enumerate(t["steps"])]
    names = {name for t in trajectories for name in t["components"]}
    return Steps(
        group=np.array([groups.setdefault(t["group"], len(groups)) for _, t, _, _ in rows]),
        trajectory=np.array([index for index, _, _, _ in rows]),
        state=np.array([number(s["state"]) for _, _, _, s in rows]),
        reward=np.array([s["reward"] for _, _, _, s in rows]),
        valid=np.array([t["outcome"] != "invalid" for _, t, _, _ in rows]),
        value=np.array([s["value"] for _, _, _, s in rows]),
        tokens=np.array([s["tokens"] for _, _, _, s in rows]),
        streams={name: np.array([whole(i, t, t["components"][name]) for _, t, i, _ in rows]) for name in names},
        score_square=np.array([_square(s["logp"], s["sum_pi2"]) for _, _, _, s in rows]),
        final_state=np.array([number(t["final_state"]) for _, t, _, _ in rows]),
        goal=np.array([t["outcome"] == "success" for _, t, _, _ in rows]),
    )


def _square(logp: list[float], sum_pi2: list[float]) -> float:
    return float(np.sum(1 - 2 * np.exp(np.array(logp, dtype=float)) + np.array(sum_pi2, dtype=float)))


def is_known(variant: str) -> bool:
    try:
        estimator_of(variant)
    except KeyError:
        return False
    return True


def test_what_waits_is_all_that_is_left():
    assert not {variant for case in CASES for variant in case["expected"] if not is_known(variant)}


@pytest.mark.parametrize(
    ("case", "variant"),
    [pytest.param(case, variant, id=f"{case['name']}: {variant}") for case in CASES for variant in case["expected"]],
)
def test_advantages(case, variant):
    name, options = estimator_of(variant)
    steps = steps_of(case["trajectories"])
    total = estimate(name, steps, **options).total
    for index, expected in enumerate(case["expected"][variant]):
        mine = total[steps.trajectory == index]
        if expected is None:
            assert not mine.any()
        else:
            np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-5)


# --- matrices of tokens: the same arithmetic, with a token or a run of tokens in the place of a step ------------------

IN_STEPS = (
    (r"tir_otb(?: importance weighted)?", "otb", lambda: {"tail": "raw"}),
    (r"tir_otb, tail kept", "otb", lambda: {"tail": "kept"}),
    (r"kl k1 in reward 0.05, reinforce\+\+ gamma 1.0", "reinforce_plus_plus", lambda: {"gamma": 1.0}),
    (r"reinforce\+\+ per token gamma ([\d.]+)", "reinforce_plus_plus", lambda gamma: {"gamma": float(gamma)}),
    (r"reinforce\+\+ per span gamma ([\d.]+)", "reinforce_plus_plus", lambda gamma: {"gamma": float(gamma)}),
    (
        r"gae per token gamma ([\d.]+) lambda ([\d.]+)( whitened)?",
        "gae",
        lambda gamma, lam, whiten: {
            "gamma": float(gamma),
            "lambda_": float(lam),
            "whiten": "tokens" if whiten else "none",
        },
    ),
)


def in_steps(variant: str) -> tuple[str, dict[str, Any]] | None:
    for pattern, name, options in IN_STEPS:
        if found := re.fullmatch(pattern, variant):
            return name, options(*found.groups())
    return None


def test_what_waits_of_tokens_is_all_that_is_left():
    variants = {variant for case in TOKENS for variant in case["expected"]}
    assert {variant for variant in variants if in_steps(variant) is None} == WAITING_TOKENS | DISTILLED.keys()


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        pytest.param(case, variant, id=f"{case['name']}: {variant}")
        for case in TOKENS
        for variant in case["expected"]
        if variant not in WAITING_TOKENS | DISTILLED.keys()
    ],
)
def test_tokens_in_the_place_of_steps(case, variant):
    name, options = in_steps(variant)
    mask = np.array(case["mask"]) > 0
    rows, columns = np.nonzero(mask)
    begins = np.ones(len(rows), dtype=bool)
    if " per span " in variant:
        begins[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1] + 1)
    part = np.cumsum(begins) - 1
    last = np.flatnonzero(np.append(begins[1:], True)[: len(rows)])

    def of_last(key: str) -> np.ndarray:
        return np.array(case[key])[rows, columns][last]

    square = 1 - 2 * np.exp(of_last("logp")) + of_last("sum_pi2")
    if "importance weighted" in variant:
        square = square * of_last("weight") ** 2
    reward = of_last("reward")
    if variant.startswith("kl k1 in reward 0.05"):
        reward = reward - 0.05 * (of_last("logp") - of_last("ref_logp"))
    groups = np.unique(case["group"], return_inverse=True)[1]
    steps = Steps(
        group=groups[rows[last]] if "otb" in variant else np.zeros(len(last)),
        trajectory=rows[last],
        state=np.full(len(last), NO_STATE),
        reward=reward,
        score_square=square,
        valid=np.ones(len(last)),
        value=np.array(case["value"])[rows, columns][last],
        tokens=np.bincount(part, minlength=len(last)),
    )
    total = estimate(name, steps, **options).total
    np.testing.assert_allclose(total[part], np.array(case["expected"][variant])[mask], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("variant", DISTILLED)
@pytest.mark.parametrize("case", TOKENS, ids=[case["name"] for case in TOKENS])
def test_a_teacher_s_part_of_an_advantage(case, variant):
    mask = np.array(case["mask"]) > 0
    returns = np.where(mask, np.array(case["reward"]), 0.0)[:, ::-1].cumsum(1)[:, ::-1]
    found = DISTILLED[variant].advantage(returns, np.array(case["logp"]), np.array(case["teacher_logp"]))
    np.testing.assert_allclose(np.where(mask, found, 0.0), case["expected"][variant], rtol=1e-6, atol=1e-5)
