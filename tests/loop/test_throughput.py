"""Where a run's time went, from its events."""

from __future__ import annotations

from typing import Any

from tapforge_trainer.telemetry.throughput import phases_of, shares, throughput_of


def _update(number: int, **learner: Any) -> dict[str, Any]:
    return {"event": "update", "update": number, "learner": learner}


LEARNED = {"tokens": 100.0, "positions": 150.0, "seconds": 2.0, "seconds_forward": 0.5, "seconds_sync": 0.25}


def test_totals_are_over_the_updates_that_learned_and_each_counts_once() -> None:
    events = [
        {"event": "phase", "text": "reinforcement"},
        _update(1, **LEARNED),
        _update(2, **LEARNED),
        _update(2, **(LEARNED | {"tokens": 300.0})),  # made again after a crash
        _update(3, seconds_rollout_wait=4.0),  # no samples
    ]
    found = throughput_of(events)
    assert found is not None
    assert (found["tokens_per_second"], found["positions_per_second"], found["mfu"]) == (100.0, 75.0, None)
    spent = {phase: seconds for phase, seconds in found["seconds_by_phase"].items() if seconds}
    assert spent == {"rollout_wait": 4.0, "forward": 1.0, "sync": 0.5}


def test_utilisation_is_weighted_by_time() -> None:
    found = throughput_of([_update(1, **LEARNED, mfu=0.4), _update(2, **(LEARNED | {"seconds": 6.0}), mfu=0.2)])
    assert found is not None and found["mfu"] == 0.25


def test_a_run_that_never_learned_has_none() -> None:
    assert throughput_of([]) is None
    assert throughput_of([_update(1, seconds_rollout_wait=1.0)]) is None


def test_phases_in_words_begin_with_the_largest() -> None:
    metrics = {"seconds_rollout_wait": 6.0, "seconds_backward": 3.0, "seconds_forward": 0.97, "seconds_sync": 0.03}
    assert phases_of({"seconds": 1.0, "loss": 2.0}) == {}
    assert shares(metrics) == "rollout wait 60 %, backward 30 %, forward 10 %"
    assert shares({}) == ""
