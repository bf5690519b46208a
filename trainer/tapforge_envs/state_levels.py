"""By what an environment's observations tell its states: exact keys, UI trees or frames (docs/states.md), in words."""

from __future__ import annotations

from collections import Counter

from .protocol import Observation
from .ui_tree import ui_key

#: best first
_LEVELS = {"exact": "exact keys", "ui": "UI trees", "frame": "frames"}


class StateLevels:
    """Counts observations."""

    def __init__(self) -> None:
        self._told: Counter[str] = Counter()
        self._apart: set[str] = set()

    def note(self, seen: Observation) -> None:
        ui = seen.ui_tree is not None and ui_key(seen.ui_tree) is not None
        self._told["exact" if seen.state_key is not None else "ui" if ui else "frame"] += 1
        self._apart |= {name for name in ("app", "window") if getattr(seen, name) is not None}

    @property
    def seen(self) -> int:
        """Observations so far."""
        return self._told.total()

    def __str__(self) -> str:
        total = self.seen
        if not total:
            return "states: nothing was observed"
        found = [
            f"{what} ({self._told[level]} of {total} observations)" if self._told[level] < total else what
            for level, what in _LEVELS.items()
            if self._told[level]
        ]
        words = f"states are keyed by {', else by '.join(found)}"
        if self._told["exact"] == total:
            return words
        apart = " and ".join(f"the {name}" for name in sorted(self._apart))
        return f"{words}, within {apart}" if apart else f"{words}; neither app nor window is named"
