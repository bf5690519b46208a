"""How often something that dies may be started again."""

from __future__ import annotations

from collections import deque

_HOUR = 3600.0


class RestartBudget:
    """So many restarts within an hour."""

    def __init__(self, per_hour: int):
        self._per_hour = per_hour
        self._spent: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Whether there may be one more."""
        while self._spent and now - self._spent[0] >= _HOUR:
            self._spent.popleft()
        if len(self._spent) >= self._per_hour:
            return False
        self._spent.append(now)
        return True
