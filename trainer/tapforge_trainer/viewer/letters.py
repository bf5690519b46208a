"""Letters for the states that several steps of a group saw, as the run's own comparison has them (`states/keys.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tapforge_api.algorithm import StateKey

from ..records import EpisodeRecord
from ..states.grouping import UNKNOWN
from ..states.keys import group_states


def letters_of(episodes: Sequence[EpisodeRecord], key: StateKey) -> dict[tuple[str, int], tuple[str, int]]:
    """Episode and step -> letter of the state, and how many steps of the group saw it. Of valid episodes."""
    valid = [episode for episode in episodes if episode.valid and episode.steps]
    steps = [step for episode in valid for step in episode.steps]
    states = group_states(valid, key).steps if valid else []
    seen = Counter(state for state in states if state != UNKNOWN)
    shared = [state for state, count in seen.items() if count > 1]
    names = {state: (_letter(number), seen[state]) for number, state in enumerate(shared)}
    return {(s.episode, s.index): names[state] for s, state in zip(steps, states, strict=True) if state in names}


def _letter(number: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text
