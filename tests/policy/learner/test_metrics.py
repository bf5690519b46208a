"""What ranks saw becomes an update's metrics."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tapforge_trainer.learner.age import compare_by_age
from tapforge_trainer.learner.metrics import UpdateMetrics, summary


def test_sums_add_up_over_ranks_and_of_maxima_the_largest_counts() -> None:
    one, two = UpdateMetrics(), UpdateMetrics()
    one.add("policy_loss", 0.25)
    two.add("policy_loss", 0.5)
    for metrics, tokens, entropy in ((one, 300.0, 6.0), (two, 100.0, 2.0)):
        metrics.add("tokens", tokens)
        metrics.add("entropy", entropy)
        metrics.add("weight", 4.0)
    one.top("ratio_max", 1.5)
    one.top("ratio_max", 1.2)
    two.top("ratio_max", 1.4)
    figures = summary([one, two], seconds=2.0, padding=0.1)
    assert figures["loss"] == 0.75
    assert figures["ratio_max"] == 1.5
    assert figures["entropy"] == 1.0
    assert figures["tokens_per_second"] == 200.0
    assert not [name for name in figures if "age" in name], "nothing was compared"


def test_the_divergence_is_by_age_over_ranks_and_the_oldest_count_together() -> None:
    def batch(versions: list[int], sampled: list[float], weights: list[float]) -> Any:
        return SimpleNamespace(version=np.array(versions), behavior=np.array(sampled), weight=np.array(weights))

    ranks = [UpdateMetrics(), UpdateMetrics()]
    one = batch([20, 19, 19, 3, 11], [-1.0, -1.0, -1.0, -2.0, -2.0], [1.0, 1.0, 0.0, 0.5, 1.0])
    compare_by_age(np.array([-1.0, -1.5, -9.0, -2.0, -1.0]), one, np.arange(5), 20, ranks[0].add)
    compare_by_age(np.array([-0.5]), batch([0, 19], [0.0, -1.0], [1.0, 1.0]), np.array([1]), 20, ranks[1].add)
    found = summary(ranks, 1.0, 0.0)
    k3 = {gap: math.exp(-gap) - 1 + gap for gap in (0.5, -0.5, -1.0)}
    assert {name: value for name, value in found.items() if "age" in name} == pytest.approx(
        {
            "tokens_age_0": 1,
            "kl_age_0": 0.0,
            "tokens_age_1": 2,
            "kl_age_1": (k3[0.5] + k3[-0.5]) / 2,
            "tokens_age_8": 2,
            "kl_age_8": k3[-1.0] / 2,
        }
    )


def test_a_busy_learners_update_is_compared_though_nothing_is_of_its_own_version() -> None:
    metrics = UpdateMetrics()
    data: Any = SimpleNamespace(version=np.full(64, 6), behavior=np.full(64, -1.0), weight=np.ones(64))
    compare_by_age(np.full(64, -1.1), data, np.arange(64), 7, metrics.add)
    found = summary([metrics], 1.0, 0.0)
    assert found["tokens_age_1"] == 64 and 0 < found["kl_age_1"] < 0.01 and "kl_age_0" not in found


def test_throughput_is_over_the_whole_update_and_counts_padding_apart() -> None:
    ranks = [UpdateMetrics(), UpdateMetrics()]
    for metrics in ranks:
        metrics.add("tokens", 300.0)
        metrics.add("positions", 400.0)
        metrics.add("flops", 3e12)
        metrics.add("seconds_forward", 0.5)
        metrics.top("peak_flops", 1e12)
    figures = summary(ranks, seconds=4.0, padding=0.25)
    assert (figures["tokens_per_second"], figures["positions_per_second"]) == (150.0, 200.0)
    assert figures["mfu"] == 0.75
    assert figures["seconds_forward"] == 1.0
    assert "peak_flops" not in figures


def test_without_a_known_peak_there_is_no_utilisation() -> None:
    metrics = UpdateMetrics()
    metrics.add("flops", 3e12)
    metrics.top("peak_flops", 0.0)
    assert "mfu" not in summary([metrics], 1.0, 0.0)
