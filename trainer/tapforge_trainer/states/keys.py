"""The states of a group's episodes by a named key, and what is known of where each episode ended.

- `screen`: what the step saw (`grouping.py`).
- `actions`: the actions that the episode had executed before it. Episodes of a group begin alike, so that where phones
  are deterministic the same actions lead to the same state; nothing of a screen is compared. A malformed answer
  executes nothing, and the state stays.

The state after the last step is in no record. By `actions` it follows; by `screen` it is known in two cases: after a
malformed answer the screen stays, and an episode that is over (a final action, an environment that is done) is in a
state that no step leaves. Where a limit cut the episode off, it is UNKNOWN.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tapforge_api.algorithm import StateKey
from tapforge_envs.protocol import Reason

from ..records import EpisodeRecord, StepRecord
from .grouping import UNKNOWN, states_of


@dataclass(frozen=True, slots=True)
class GroupStates:
    """Numbers that mean the same inside one group alone; UNKNOWN is like no other."""

    #: one per step, episode by episode
    steps: list[int]
    #: one per episode: the state that its last step led to. One that no step saw is a state that no step leaves
    final: list[int]


def group_states(episodes: Sequence[EpisodeRecord], key: StateKey) -> GroupStates:
    """Of episodes of one group, each with one step or more. What is equal doesn't depend on the order of episodes."""
    return _by_actions(episodes) if key == "actions" else _by_screen(episodes)


def _by_screen(episodes: Sequence[EpisodeRecord]) -> GroupStates:
    states = states_of([step for episode in episodes for step in episode.steps])
    over, at, final = max(states, default=0) + 1, 0, []
    for episode in episodes:
        at += len(episode.steps)
        if episode.steps[-1].parse_error is not None:
            final.append(states[at - 1])
        else:
            final.append(over if episode.reason in (Reason.DONE, Reason.DECLARED_INFEASIBLE) else UNKNOWN)
    return GroupStates(states, final)


def _by_actions(episodes: Sequence[EpisodeRecord]) -> GroupStates:
    known: dict[tuple[int, str], int] = {}
    states, final = [], []
    for episode in episodes:
        now = 0
        for step in episode.steps:
            states.append(now)
            if (action := _executed(step)) is not None:
                now = known.setdefault((now, action), len(known) + 1)
        final.append(now)
    return GroupStates(states, final)


def _executed(step: StepRecord) -> str | None:
    return None if step.action is None else json.dumps(step.action, sort_keys=True)
