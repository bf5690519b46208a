"""Rewards that are asked for after an episode's end, by name: judges, and what installed packages offer.

A reward of another package is a class whose options are keyword-only, and whose instances are async functions of a
`Trajectory`: a number for the episode, or one per step, None where there is none. An entry point offers it:

    [project.entry-points."tapforge.rewards"]
    my_reward = "my_package.module:MyReward"
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from tapforge_api.rewards import RewardStream

from .. import plugins
from ..algorithms.options import check_options, read_options, unknown
from ..judges.verdicts import Trajectory

ENTRY_POINTS = "tapforge.rewards"
#: computed from records, and asked of judges
COMPUTED, JUDGED = ("environment", "format", "length", "outcome"), ("judge", "steps")

Reward = Callable[[Trajectory], Awaitable[float | Sequence[float | None]]]


def names() -> list[str]:
    """All rewards that can be asked for, sorted. Loads no entry point."""
    return sorted({*COMPUTED, *JUDGED, *plugins.names(ENTRY_POINTS)})


def reward_of(stream: RewardStream) -> Reward:
    """A reward of an installed package. Raises UnknownName, ValueError for options, and TypeError for what is not
    a reward."""
    point = plugins.find(ENTRY_POINTS, stream.kind, (*COMPUTED, *JUDGED))
    if point is None:
        raise unknown("reward", stream.kind, names())
    kind = point.load()
    if not callable(kind):
        raise TypeError(f"the entry point {point.value!r} of the reward {stream.kind!r} can't be called: {kind!r}")
    given: Mapping[str, str] = {option.name: option.value for option in stream.options}
    check_options(stream.kind, kind, given)
    made = kind(**read_options(stream.kind, kind, given))
    if not callable(made):
        raise TypeError(f"the reward {stream.kind!r} made {made!r}, which can't be called with a trajectory")
    return made
