"""Alarms: what each needs to fire, that what is as it should be fires none, and that each is reported once."""

from __future__ import annotations

import io
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.loggers.figures import figures_of, meaning
from tapforge_trainer.rollout.stats import RolloutStats
from tapforge_trainer.run.folder import read_events
from tapforge_trainer.telemetry.alarms import CLEARS, AlarmMonitor, UpdateFigures, alarms
from tapforge_trainer.telemetry.progress import Progress
from tapforge_trainer.telemetry.telemetry import ProgressView, Telemetry

WELL: dict[str, Any] = {
    "success": 0.5,
    "groups": 16,
    "varied": 9,
    "step_limit": 0.1,
    "understood": 0.9,
    "entropy": 0.5,
    "kl_reference": 0.02,
    "kl_behavior": 0.003,
    "clipped": 0.02,
    "masked": 0.01,
    "capped": 0.01,
    "waiting": 0.6,
    "templates": {"open": (8, 16), "rare": (1, 2)},
    "compared": 16,
    "judge_above": 0.02,
    "disagreements": 0.1,
    "verdict_wait": 0.3,
    "verdicts_missing": 0.01,
}
UP_TO_HALF = [0.2, 0.3, 0.5]


def updates(count: int, **last: list[Any]) -> list[UpdateFigures]:
    """`count` updates that are well, the last ones with other figures."""
    made = []
    for number in range(count):
        figures = dict(WELL)
        for name, values in last.items():
            place = number - (count - len(values))
            if place >= 0:
                figures[name] = values[place]
        made.append(UpdateFigures(update=number + 1, **figures))
    return made


def linear(steps: int, by: float) -> list[float]:
    return [by * n for n in range(steps)]


@pytest.mark.parametrize(
    ("name", "history", "words"),
    [
        (
            "entropy_collapse",
            updates(20, entropy=[0.05] * 5),
            r"entropy fell from 0.5 to 0.05 .* Lower learner.learning",
        ),
        (
            "uniform_groups",
            updates(9, varied=[0] * 3),
            r"all 48 groups of the last 3 .* tasks.sampler to near",
        ),
        (
            "uniform_groups",
            updates(3, varied=[0] * 3, success=[0.0] * 3),
            r"No attempt succeeds: begin with easier",
        ),
        ("kl_reference", updates(15, kl_reference=[0.04] * 5 + [0.1] * 5 + [0.3] * 5), r"is 0.3 nats .*kl.coefficient"),
        ("kl_behavior", updates(9, kl_behavior=[0.2] * 3), r"by 0.2 nats .* rollout.maxStaleness"),
        ("clipped", updates(9, clipped=[0.4] * 3), r"40% of the tokens .* clipped"),
        ("masked", updates(9, masked=[0.5] * 3), r"50% of the tokens .* masked by algorithm.loss.corrections"),
        ("capped", updates(9, capped=[0.35] * 3), r"35% of the tokens .* at its cap"),
        ("step_limit", updates(9, step_limit=[0.6] * 5), r"60% of .* step limit. Raise"),
        (
            # what a published run logged: format from 0.008 to 0.86 within 13 updates, and nothing right
            "format_alone",
            updates(13, success=[0.0] * 13, understood=[0.008 + n * 0.071 for n in range(13)]),
            r"rose from 1% to 86% and none was right: .* gate mixedOutcomes",
        ),
        (
            "success_falls/open",
            updates(30, templates=[{"open": (2, 16)}] * 5),
            r"success of open fell from 50% to 12% \(80 episodes\)",
        ),
        (
            "judge_and_verifier",
            updates(9, judge_above=[0.15] * 5, disagreements=[0.2] * 5),
            r"calls 15 points more of the last 80 episodes .*tapforge judge calibrate",
        ),
        ("verdicts_late", updates(9, verdict_wait=[1.5] * 5), r"waits 1.5 times as long .* concurrency"),
        ("verdicts_missing", updates(9, verdicts_missing=[0.2] * 3), r"20% of the last 3 .* endpoint"),
        ("rollout_waiting", updates(9, waiting=[0.95] * 5), r"waited for episodes in 95% .* More phones"),
    ],
)
def test_an_alarm_fires_with_a_remedy(name: str, history: list[UpdateFigures], words: str) -> None:
    found = alarms(history)
    assert found.keys() == {name}
    assert re.search(words, found[name]), found[name]


@pytest.mark.parametrize(
    "history",
    [
        [],
        updates(1),
        updates(60),
        updates(20, entropy=[0.15] * 5),  # surer, but not by much
        updates(20, entropy=[0.05] * 5, success=[0.6] * 5),  # and better
        updates(20, entropy=[0.05] * 20, success=[0.97] * 20, varied=[0] * 20),  # solved
        updates(9, varied=[0] * 2),
        updates(9, varied=[0] * 3, groups=[2] * 3),  # so few may all end alike
        updates(9, varied=[0, 0, 1, 0]),
        updates(20, kl_reference=linear(20, 0.05)),  # steady growth
        updates(20, kl_reference=[0.3] * 15),  # far away, and stays there
        updates(20, kl_reference=[0.001] * 5 + [0.01] * 5 + [0.09] * 5),  # hardly differs
        updates(9, kl_behavior=[0.12, 0.01, 0.12]),
        updates(9, clipped=[0.4] * 2),
        updates(9, step_limit=[0.45] * 5),
        updates(13, success=[0.0] * 12 + [0.1], understood=[0.07 * n for n in range(13)]),  # form, and then the matter
        updates(13, success=[0.0] * 13, understood=[0.8] * 13),  # hard from the beginning, and well-formed
        updates(30, templates=[{"open": (6, 16)}] * 5),  # within noise
        updates(30, templates=[{"rare": (0, 3)}] * 5),  # too few to tell
        updates(7, templates=[{"open": (0, 16)}] * 7),  # hard from the beginning
        updates(9, waiting=[0.85] * 5),
        updates(9, judge_above=[-0.2] * 5, disagreements=[0.3] * 5),  # stricter than the verifier
        updates(9, judge_above=[0.08] * 5),
        updates(9, judge_above=[0.12] * 5, disagreements=[0.9] * 5),  # errs both ways
        updates(2, compared=[8] * 2, judge_above=[0.5] * 2),  # too few to tell
        updates(9, verdict_wait=[0.9] * 5),
        updates(9, verdicts_missing=[0.12] * 2),
        [UpdateFigures.of({"update": n, "event": "update", "groups": 4, "groups_zero_variance": 2}) for n in range(9)],
    ],
)
def test_what_is_as_it_should_be_is_no_alarm(history: list[UpdateFigures]) -> None:
    assert alarms(history) == {}


def test_figures_are_those_of_an_updates_event() -> None:
    learner = {
        "entropy": 0.2, "clip_fraction_low": 0.01, "clip_fraction_high": 0.02, "importance_capped": 0.03,
        "masked": 0.04, "kl_reference": 0.5, "kl_age_0": 9.0, "kl_age_1": 0.1, "kl_age_2": 0.4, "tokens_age_0": 9.0,
        "tokens_age_1": 3.0, "tokens_age_2": 1.0, "seconds_rollout_wait": 6.0, "seconds_learn": 2.0,
        "seconds_sync": 1.0, "seconds_checkpoint": 1.0,
    }  # fmt: skip
    event = {
        "event": "update", "update": 4, "success_rate_all": 0.25, "groups": 6, "groups_dropped": 1, "learner": learner,
        "groups_zero_variance": 3, "step_limit_rate": 0.5, "templates": {"open": {"success": 0.25, "episodes": 8}},
    }  # fmt: skip
    found = UpdateFigures.of(event)
    assert (found.update, found.success, found.groups, found.varied, found.step_limit) == (4, 0.25, 5, 2, 0.5)
    assert found.kl_behavior == pytest.approx(0.7 / 4), "of older weights alone, by tokens"
    assert found.clipped == pytest.approx(0.03) and (found.masked, found.capped, found.waiting) == (0.04, 0.03, 0.6)
    assert found.templates == {"open": (2, 8)}
    assert UpdateFigures.of(event | {"learner": {"seconds_rollout_wait": 3.0}}).waiting is None, "nothing was learned"


def _event(update: int, varied: int) -> dict[str, Any]:
    return {
        "event": "update",
        "update": update,
        "groups": 8,
        "groups_zero_variance": 8 - varied,
        "success_rate_all": 0.4,
    }


def test_an_alarm_fires_once_until_it_has_cleared() -> None:
    monitor, said = AlarmMonitor(), []
    # Two updates that are well don't clear it, five in a row do.
    for number, some in enumerate([0] * 6 + [3] * 2 + [0] * 3 + [3] * CLEARS + [0] * 3, 1):
        fired, cleared = monitor.update(_event(number, some))
        said += [(number, name) for name in fired] + [(number, f"{name} cleared") for name in cleared]
    assert said == [(3, "uniform_groups"), (16, "uniform_groups cleared"), (19, "uniform_groups")]


def test_what_an_earlier_session_said_is_not_said_again() -> None:
    events = [_event(number, 0) for number in (1, 2, 3, 4, 5)]
    monitor = AlarmMonitor()
    monitor.replay([{"event": "phase"}, *events, _event(3, 0)], 4)
    assert monitor.active == {"uniform_groups": 0}
    assert monitor.update(_event(5, 0)) == ({}, [])


def test_a_stage_is_not_compared_with_the_one_before() -> None:
    monitor = AlarmMonitor()
    monitor.replay([_event(number, 0) for number in (1, 2, 3, 4)], 4, since=3)
    assert monitor.active == {} and monitor.update(_event(5, 0)) == ({}, [])
    assert list(monitor.update(_event(6, 0))[0]) == ["uniform_groups"]


def test_an_alarm_is_an_event_a_line_and_a_figure(tmp_path: Path) -> None:
    said = io.StringIO()
    nothing = build_batch([], BatchRules()).statistics
    with closing(Telemetry(tmp_path, ProgressView("watched", 9), Console(file=said, width=200))) as telemetry:
        for number in range(1, 5 + CLEARS):
            capped = {"importance_capped": 0.5 if number < 4 else 0.0}
            telemetry.updated(Progress(update=number), nothing, RolloutStats(), {}, capped)
    events = list(read_events(tmp_path))
    (alarm,) = (event for event in events if event["event"] == "alarm")
    assert (alarm["update"], alarm["alarm"]) == (3, "capped") and alarm["text"].startswith(
        "update 3: 50% of the tokens"
    )
    (cleared,) = (event for event in events if event["event"] == "alarm_cleared")
    assert cleared["alarm"] == "capped" and cleared["text"] == f"update {cleared['update']}: capped has cleared"
    assert "update 3: 50% of the tokens" in said.getvalue() and "capped has cleared" in said.getvalue()
    figures = {event["update"]: figures_of(event) for event in events if event["event"] == "update"}
    assert figures[2]["alarms/active"] == 0 and "alarms/capped" not in figures[2]
    assert figures[3]["alarms/active"] == 1 and figures[3]["alarms/capped"] == 1
    assert all(meaning(name) for name in figures[3])
