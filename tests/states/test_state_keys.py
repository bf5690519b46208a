"""States of a group's episodes by key, and where each episode ended as far as it is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.records import EpisodeRecord, Generation, StepRecord
from tapforge_trainer.states.grouping import UNKNOWN, states_of
from tapforge_trainer.states.keys import group_states

GENERATION = Generation((), (), (), (), "stop", 0)
TASK = Task(suite="quickstart", template="open", params={"app": "clock"})


def episode(name: str, *walk: tuple[str | None, dict | None], reason: Reason = Reason.STEP_LIMIT) -> EpisodeRecord:
    """`walk`: the exact key of each step's screen, and its action; None: the answer was malformed."""
    steps = tuple(
        StepRecord(name, i, (), key, None, GENERATION, "", action, None if action else "malformed", 0.0, "", 0.0, 0.0)
        for i, (key, action) in enumerate(walk)
    )
    return EpisodeRecord(name, "g", TASK, 0, "slot", 0, reason, Outcome.FAILURE, None, "", steps, 0.0, 1.0)


def tap(x: int) -> dict:
    return {"type": "tap", "x": x, "y": 1}


HOME = {"type": "home"}


def test_actions_that_were_executed_make_the_state():
    first = episode("a", ("s", tap(1)), ("t", None), ("t", HOME), ("u", tap(2)))
    second = episode("b", ("other", {"y": 1, "x": 1, "type": "tap"}), ("t", tap(2)), ("u", HOME))
    found = group_states([first, second], "actions")
    start, tapped, home, after = found.steps[0], found.steps[1], found.steps[3], found.steps[6]
    # A malformed answer executes nothing, so the state stays; the order of an action's fields says nothing.
    assert found.steps == [start, tapped, tapped, home, start, tapped, after]
    assert len({start, tapped, home, after, *found.final}) == 6
    assert UNKNOWN not in found.final
    assert group_states([replace(first, steps=first.steps[:2])], "actions").final == [1]  # where its last step was


def test_same_actions_from_another_place_are_another_state():
    found = group_states([episode("a", ("s", HOME), ("s", tap(1)), ("s", HOME))], "actions")
    assert len(set(found.steps)) == 3


def test_episodes_of_any_order_share_the_same_states():
    walks = [episode("a", ("s", tap(1)), ("s", HOME)), episode("b", ("s", HOME), ("s", HOME))]
    forth, back = group_states(walks, "actions"), group_states(walks[::-1], "actions")
    assert [forth.steps[0] == forth.steps[2], forth.steps[1] == forth.steps[3]] == [True, False]
    assert [back.steps[0] == back.steps[2], back.steps[1] == back.steps[3]] == [True, False]


@pytest.mark.parametrize("reason", [Reason.DONE, Reason.DECLARED_INFEASIBLE])
def test_an_episode_that_is_over_is_where_no_step_was(reason):
    over = episode("a", ("s", HOME), ("t", {"type": "terminate", "status": "success"}), reason=reason)
    cut = episode("b", ("s", HOME), ("t", HOME))
    found = group_states([over, cut], "screen")
    assert found.steps == states_of([*over.steps, *cut.steps])
    assert found.final[0] not in (*found.steps, UNKNOWN)
    assert found.final[1] == UNKNOWN


@pytest.mark.parametrize("reason", [Reason.PARSE_FAILURES, Reason.STEP_LIMIT])
def test_after_a_malformed_answer_the_screen_stays(reason):
    stuck = episode("a", ("s", HOME), ("t", None), reason=reason)
    found = group_states([stuck], "screen")
    assert found.final == [found.steps[1]]
    blind = group_states([episode("a", (None, HOME), (None, None), reason=reason)], "screen")
    assert blind.final == [UNKNOWN]


def test_no_episodes():
    for key in ("screen", "actions"):
        found = group_states([], key)
        assert (found.steps, found.final) == ([], [])
