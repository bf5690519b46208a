"""Which engine an episode asks: the same one as long as that lives, so that its prompts are in the engine's caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def choose_engine(wanted: int | None, load: Mapping[int, int]) -> int | None:
    """The engine that is wanted if it lives, else the one with the least load. `load`: of the live ones, by index."""
    if wanted in load:
        return wanted
    return min(load, key=lambda index: (load[index], index), default=None)


def engine_of_new_episode(live: Sequence[int], episodes: Iterable[int | None]) -> int | None:
    """The live engine with the fewest episodes; `episodes`: the engines of those that are being played."""
    load = dict.fromkeys(live, 0)
    for engine in episodes:
        if engine in load:
            load[engine] += 1
    return choose_engine(None, load)
