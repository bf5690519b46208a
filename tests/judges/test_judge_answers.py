"""What counts as a verdict in a model's answer, and what never does."""

from __future__ import annotations

import json
from random import Random

import pytest

from tapforge_trainer.judges.answers import LONGEST, form, read_answer
from tapforge_trainer.judges.voting import agree, decide

KEY = "3fa9c1d2"


def said(score: object, reason: str = "", key: str | None = KEY) -> str:
    return json.dumps({"key": key, "reason": reason, "score": score})


@pytest.mark.parametrize(
    "text, value",
    [
        (said(1), 1.0),
        (said(0), 0.0),
        (said(1.0), 1.0),
        (f"It is done.\n```json\n{said(1)}\n```\n", 1.0),
        (f"Answer: {said(0)}", 0.0),
        (f"First {said(1)}\nOn second thought:\n{said(0)}", 0.0),
        (json.dumps(json.loads(said(1, "a\nb")), indent=2), 1.0),
        (f"FINAL ANSWER\n**Score {KEY}: 1**", 1.0),
        (f"score {KEY}: 0.0", 0.0),
        (f"score {KEY}: 1\n{said(0)}", 0.0),
        (f"{said(0)}\nscore {KEY}: 1", 1.0),
        (f"<think>{said(0)}</think>{said(1)}", 1.0),
        # unreadable
        ("", None),
        ("It was done.", None),
        ("score: 1", None),
        (said(1, key=None), None),
        (said(1, key="00000000"), None),
        (said(2), None),
        (said(0.5), None),
        (said("1"), None),
        (said(True), None),
        (said(None), None),
        (f'"{said(1)}"', None),
        (f"<think>{said(1)}", None),
        (f'{{"key": "{KEY}", "score": 0, "score": 1}}', None),
        (f'{{"key": "{KEY}", "reason": "it says "x"\n{said(1)}', None),
        (f"{{'key': '{KEY}', 'score': 1}}", None),
        (f"{said(1)}\n{said(7)}", None),
        (said(1) + " " * LONGEST, None),
        ("{" * 30_000, None),
        ('{"a":' * 6_000, None),
        ('{"score": ' + "9" * 6_000 + "}", None),
    ],
)
def test_answers(text: str, value: float | None) -> None:
    found = read_answer(text, KEY)
    assert found.value == value
    assert found.value is not None or found.reason


@pytest.mark.parametrize(
    "shown", ["score: 1", "SCORE: 1\n", '{"score": 1}', '{"reason": "ok", "score": 1}', "\nscore: 1\n"]
)
def test_text_of_a_screen_that_is_copied_is_no_score(shown: str) -> None:
    assert read_answer(shown, KEY).value is None
    assert read_answer(f"The screen says {shown}", KEY).value is None
    assert read_answer(f"The screen says\n{shown}\n{said(0, shown)}", KEY).value == 0.0
    assert read_answer(f"{said(0, shown)}\nThe screen says\n{shown}", KEY).value == 0.0


def test_without_a_key_the_last_one_counts_and_quotations_still_do_not() -> None:
    assert read_answer('{"score": 1}', None).value == 1.0
    assert read_answer("score: 0", None).value == 0.0
    assert read_answer('The screen says "score: 1"', None).value is None
    assert read_answer('The screen says "{"score": 1}"', None).value is None
    assert read_answer('{"reason": "it says "\n{"score": 1}\n"", "score": 0}', None).value is None
    assert '"key"' not in form(None) and '"key": "3fa9c1d2"' in form(KEY)


def test_ten_thousand_answers_never_crash_and_never_leave_the_range() -> None:
    rng = Random(5)
    pieces = [
        '{"', '"}', "{", "}", "[", '"key"', f'"{KEY}"', KEY, ":", ",", '"score"', "score", "0", "1", "-1", "1e999",
        "NaN", "2", "0.5", "\n", " ", "\\", "```", "<think>", "</think>", "\ud800", "\u2028", "\x00", said(1), said(0),
        "true", "null", '"reason"', "é", "**", "=", "The screen says", "'",
    ]  # fmt: skip
    seen = set()
    for _ in range(10_000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(40)))
        found = read_answer(text, KEY if rng.random() < 0.7 else None)
        seen.add(found.value)
        assert len(found.reason) <= 600 and "\n" not in found.reason
    assert seen == {None, 0.0, 1.0}


Y, N, U = 1.0, 0.0, None


@pytest.mark.parametrize(
    "votes, unanimous, majority, anyone",
    [
        ((), None, None, None),
        ((Y,), 1, 1, 1),
        ((N,), 0, 0, 0),
        ((U,), None, None, None),
        ((Y, Y, Y), 1, 1, 1),
        ((Y, Y, N), 0, 1, 1),
        ((Y, N), 0, None, 1),
        ((Y, Y, U), None, 1, 1),
        ((Y, U, U), None, None, 1),
        ((N, N, U), 0, 0, None),
        ((Y, N, U), 0, None, 1),
        ((Y, Y, N, N), 0, None, 1),
        ((N, N, N, U), 0, 0, None),
    ],
)
def test_votes_decide_only_what_unreadable_ones_could_not_change(
    votes: tuple[float | None, ...], unanimous: float | None, majority: float | None, anyone: float | None
) -> None:
    assert decide(votes, "unanimous") == unanimous
    assert decide(votes, "majority") == majority
    assert decide(votes, "any") == anyone
    assert agree(votes) == (len(set(votes)) == 1 and U not in votes)
