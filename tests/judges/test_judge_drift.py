"""A judge that is hacked is noticed within five updates, and one that errs alike both ways is not."""

from __future__ import annotations

from random import Random

import pytest

from tapforge_trainer.judges.drift import UPDATES, Drift, difference


def episodes(rng: Random, count: int, solved: float, false_yes: float, false_no: float) -> list[tuple[bool, bool]]:
    def one() -> tuple[bool, bool]:
        verified = rng.random() < solved
        return rng.random() < (1 - false_no if verified else false_yes), verified

    return [one() for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_a_hacked_judge_is_noticed(seed: int) -> None:
    rng, drift = Random(seed), Drift()
    for _ in range(20):  # ten per cent of errors at half of all solved
        assert not drift.update(episodes(rng, 32, 0.5, 0.1, 0.1)).parted
    seen = [drift.update(episodes(rng, 32, 0.3, 0.4, 0.0)) for _ in range(UPDATES)]
    assert seen[-1].parted and "learning what the judge likes" in str(seen[-1])


def test_little_is_said_of_few_and_nothing_of_none() -> None:
    assert not difference([]).parted
    assert not difference([(True, False)] * 10).parted
    assert difference([(True, False)] * 40).parted
    assert not difference([(False, True)] * 40).parted
    assert not Drift().update([]).parted
