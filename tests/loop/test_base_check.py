"""What a base model's first answers say, by tables of answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.agents.coordinates import Fraction, Grid, ImagePixels
from tapforge_trainer.records import EpisodeRecord, FinishReason, Generation, StepRecord
from tapforge_trainer.run.base_check import LEAST, check_base


def _step(
    number: int, action: dict[str, Any] | None = None, error: str | None = None, ended: FinishReason = "stop"
) -> StepRecord:
    said = Generation((1,), (2,), (-0.1,), (0,), ended, 1)
    return StepRecord("e", number, (f"f{number}",), None, None, said, "", action, error, 0.0, "", 0.0, 0.0)


def _played(*steps: StepRecord) -> list[EpisodeRecord]:
    task = Task(suite="quickstart", template="open")
    return [
        EpisodeRecord("e", "g", task, 0, "s", 0, Reason.DONE, Outcome.FAILURE, 0.0, "", steps, 0.0, 1.0)
    ]  # fmt: skip


def _tap(number: int, x: float, y: float) -> StepRecord:
    return _step(number, {"type": "tap", "x": x, "y": y})


def _taps(place: Callable[[random.Random], tuple[float, float]], count: int = 60) -> list[StepRecord]:
    chance = random.Random(1)
    return [_tap(number, *place(chance)) for number in range(count)]


def _of(coordinates: Any, value: object) -> str:
    """The error of an answer with such a coordinate, as a parser reports it."""
    try:
        coordinates.read(value, 1000, "coordinate")
    except ValueError as error:
        return f"action: action click: {error}"
    raise AssertionError("the coordinate is in range")


WELL = _taps(lambda chance: (chance.random(), chance.random()))
CASES: dict[str, tuple[list[StepRecord], list[str]]] = {
    "taps everywhere": (WELL, []),
    "too few answers": ([_step(n, error="no_tool_call: x") for n in range(LEAST - 1)], []),
    "nothing": ([], []),
    "half of the answers cut off": (
        [*WELL[:20], *(_step(n, error="cut_off: x", ended="length") for n in range(100, 120))],
        ["cut_off"],
    ),
    "pixels read as thousandths": (
        [*WELL[:30], *(_step(n, error=_of(Grid(999), 1600)) for n in range(100, 110))],
        ["outside"],
    ),
    "thousandths read as pixels": (_taps(lambda c: (c.random() * 0.93, c.random() * 0.41)), ["half"]),
    "pixels of a narrow screen read as thousandths": (
        _taps(lambda c: (c.random() * 0.44, c.random() * 0.96)),
        ["half"],
    ),
    "pixels of a small image": (_taps(lambda c: (c.random() * 0.3, c.random() * 0.4)), ["corner"]),
    "shares read as thousandths": (_taps(lambda c: (c.random() / 999, c.random() / 999)), ["corner"]),
    "shares among other actions": (
        [
            *_taps(lambda c: (c.random() / 999, c.random() / 999), 20),
            *(_step(100 + n, {"type": "type", "text": f"word {n}"}) for n in range(20)),
        ],
        ["corner"],
    ),
    "prose": ([_step(n, error="no_tool_call: the answer has no <tool_call>") for n in range(40)], ["unreadable"]),
    "desktop actions on a phone": (
        [*WELL[:20], *(_step(n, error="unsupported_action: hotkey") for n in range(100, 120))],
        ["unsupported"],
    ),
    "always home": ([_step(n, {"type": "home"}) for n in range(40)], ["same_action"]),
    "always the same on one screen": ([_tap(0, 0.5, 0.5) for _ in range(40)], []),
    "a few answers that can't be read": (
        [*WELL, *(_step(n, error="json: x") for n in range(100, 105)), _step(200, error=_of(Grid(999), 1001))],
        [],
    ),
    "the engine's own aborts": (
        [*WELL[:20], *(_step(n, error="aborted: x", ended="abort") for n in range(100, 140))],
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_base_model_s_answers_are_named(name: str) -> None:
    steps, expected = CASES[name]
    found = check_base(_played(*steps), "qwen3-vl")
    assert [finding.kind for finding in found.findings] == expected
    assert found.answers == len(steps)
    json.dumps(found.plain())


@pytest.mark.parametrize(
    "coordinates, value", [(Grid(999), 1043), (Grid(1000), 1043), (Fraction(), 320), (ImagePixels(), 1043)]
)
def test_the_words_of_every_convention_are_known(coordinates: Any, value: object) -> None:
    steps = [_step(n, error=_of(coordinates, value)) for n in range(20)]
    found = check_base(_played(*steps), "qwen3-vl")
    assert (found.outside, found.unreadable) == (20, {})
    (finding,) = found.findings
    assert str(value) in finding.text and "spec.model.adapter.name" in finding.text


def test_kinds_are_counted_apart_and_the_remedy_names_the_field() -> None:
    steps = [_step(n, error="json: x") for n in range(10)] + [_step(n, error="shape: y") for n in range(10, 14)]
    found = check_base(_played(*steps), "aguvis")
    assert found.unreadable == {"json": 10, "shape": 4}
    (finding,) = found.findings
    assert "json 10, shape 4" in finding.text and "aguvis" in finding.text and "promptFile" in finding.text


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1), st.floats(0, 1), st.sampled_from([None, "json: x", "cut_off: x", "action: odd", ""]),
            st.sampled_from(["stop", "length", "abort"]),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_any_answers_are_counted_and_shares_are_shares(answers: list[tuple[float, float, str | None, Any]]) -> None:
    steps = [
        _step(n, None if error else {"type": "tap", "x": x, "y": y}, error, ended)
        for n, (x, y, error, ended) in enumerate(answers)
    ]
    found = check_base(_played(*steps), "qwen3-vl")
    assert all(0 < finding.share <= 1 for finding in found.findings)
    assert found.cut_off + found.outside + sum(found.unreadable.values()) <= found.answers
