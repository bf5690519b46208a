"""Every algorithm that the API can write down runs, with the numbers that were written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tapforge_api.algorithm import Algorithm
from tapforge_trainer.algorithms.composition import estimator_of, objective_of
from tapforge_trainer.algorithms.loss_registry import loss
from tapforge_trainer.algorithms.objective import Objective
from tapforge_trainer.algorithms.registry import estimate
from tapforge_trainer.algorithms.steps import Steps
from tapforge_trainer.batch import BatchRules

STEPS = Steps([0, 0, 0], [0, 0, 1], [0, 1, 0], [0.0, 1.0, 0.0], [True] * 3)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"advantage": {"gigpo": {"normalization": "mean", "gamma": 0.5, "weight": 2.0}}}, [1.0, 0.5, -1.0]),
        ({"advantage": {"grpo": {"normalization": "mean"}}}, [0.5, 0.5, -0.5]),
        ({"advantage": {"grpo": {"normalization": "mean"}}, "statistics": "steps"}, [1 / 3, 1 / 3, -2 / 3]),
        ({"advantage": {"rloo": {}}}, [1.0, 1.0, -1.0]),
    ],
)
def test_advantages_as_written(spec, expected):
    name, options = estimator_of(Algorithm.model_validate(spec))
    np.testing.assert_allclose(estimate(name, STEPS, **options).total, expected, atol=1e-12)


def test_defaults_agree_with_the_estimators_own():
    name, options = estimator_of(Algorithm())
    np.testing.assert_array_equal(estimate(name, STEPS, **options).total, estimate(name, STEPS).total)


def test_objective_as_written():
    written = Algorithm.model_validate(
        {
            "loss": {
                "ratio": "sequence",
                "clipLow": 0.1,
                "clipHigh": 0.3,
                "dualClip": 4.0,
                "aggregation": "seq_mean_token_sum",
                "importanceCap": 5.0,
            },
            "kl": {"coefficient": 0.02, "advantageCap": True},
        }
    )
    expected = Objective(
        options={"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 4.0},
        constant_length=64,
        aggregation="seq_mean_token_sum",
        importance_cap=5.0,
        kl="k2",
        kl_coefficient=0.02,
        kl_advantage_cap=True,
    )
    assert objective_of(written, 64) == expected


def test_the_defaults_of_the_loss_are_those_of_the_objective():
    written = objective_of(Algorithm(), 64)
    assert replace(written, options={}) == Objective(constant_length=64)
    assert loss(written.loss, written.options) == loss("ppo", {})


@pytest.mark.parametrize(("coefficient", "keeps"), [(0.0, False), (0.01, True)])
def test_batch_rules_of_a_spec(coefficient, keeps):
    spec = Algorithm.model_validate({"kl": {"coefficient": coefficient}, "invalidAnswerPenalty": 0.5})
    rules = BatchRules.of(spec, min_valid=3)
    assert (rules.estimator, rules.min_valid, rules.invalid_answer_penalty) == ("gigpo", 3, 0.5)
    assert rules.keep_zero_variance_groups is keeps  # without a policy gradient they still have a KL term
