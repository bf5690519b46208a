"""What ranks saw becomes an update's metrics."""

from __future__ import annotations

import pytest

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
    figures = summary([one, two], seconds=2.0, padding=0.1, gap_alarm=1e-3)
    assert figures["loss"] == 0.75
    assert figures["ratio_max"] == 1.5
    assert figures["entropy"] == 1.0
    assert figures["tokens_per_second"] == 200.0
    assert "gap_mean" not in figures
    assert "gap_alarm" not in figures


@pytest.mark.parametrize("total, alarm", [(0.004, 0.0), (0.04, 1.0), (float("nan"), 1.0)])
def test_a_gap_over_its_bound_raises_the_alarm(total: float, alarm: float) -> None:
    metrics = UpdateMetrics()
    metrics.add("gap_tokens", 10)
    metrics.add("gap_abs", total)
    metrics.add("gap_k3", 0.0)
    assert summary([metrics], 1.0, 0.0, gap_alarm=1e-3)["gap_alarm"] == alarm


def test_throughput_is_over_the_whole_update_and_counts_padding_apart() -> None:
    ranks = [UpdateMetrics(), UpdateMetrics()]
    for metrics in ranks:
        metrics.add("tokens", 300.0)
        metrics.add("positions", 400.0)
        metrics.add("flops", 3e12)
        metrics.add("seconds_forward", 0.5)
        metrics.top("peak_flops", 1e12)
    figures = summary(ranks, seconds=4.0, padding=0.25, gap_alarm=1e-3)
    assert (figures["tokens_per_second"], figures["positions_per_second"]) == (150.0, 200.0)
    assert figures["mfu"] == 0.75
    assert figures["seconds_forward"] == 1.0
    assert "peak_flops" not in figures


def test_without_a_known_peak_there_is_no_utilisation() -> None:
    metrics = UpdateMetrics()
    metrics.add("flops", 3e12)
    metrics.top("peak_flops", 0.0)
    assert "mfu" not in summary([metrics], 1.0, 0.0, gap_alarm=1e-3)
