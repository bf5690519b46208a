"""What installed packages offer, by name: the entry points of one of our groups.

A name that is offered twice, or that one of ours has, is an error as soon as it is asked for: no package's code
replaces another's silently. Each folder of `sys.path` is searched once in a process: that takes tens of milliseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points


def names(group: str) -> list[str]:
    """What can be asked for, sorted. Loads nothing."""
    return sorted({point.name for point in _offered(group, tuple(sys.path))})


def find(group: str, name: str, ours: Collection[str] = ()) -> EntryPoint | None:
    """None: no package offers it. Raises ValueError where it is offered twice, or is among `ours` too."""
    offered = [point for point in _offered(group, tuple(sys.path)) if point.name == name]
    if len(offered) + (name in ours) > 1:
        who = [point.value for point in offered] + ["tapforge's own"] * (name in ours)
        raise ValueError(f"{name!r} of {group} is offered more than once: {', '.join(who)}; uninstall or rename one")
    return offered[0] if offered else None


@lru_cache(maxsize=16)
def _offered(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """What packages in these folders offer."""
    return tuple(entry_points(group=group))
