"""How long a command that waits for a run bears a cluster that doesn't answer, or refuses by now.

1. No answer: `_AWAY` seconds, from the first one that was missed.
2. A refusal: `_REFUSED` seconds. A login that has expired is renewed elsewhere, and an API server that starts knows no
   rights at first.
3. Everything else is borne not at all: it is as true in a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

from .api import ClusterError, NotReached
from .status import RunStatus

T = TypeVar("T")
Told = Callable[[ClusterError], None]

#: between two tries, seconds
_POLL: Final = 2.0
_AWAY: Final = 3600.0
_REFUSED: Final = 300.0
_UNAUTHORIZED, _FORBIDDEN = 401, 403


class Patience:
    """`end`: of time.monotonic(); the error of the moment is raised then."""

    def __init__(self, end: float = math.inf):
        self._end = end
        self._away: float | None = None
        self._refused: float | None = None

    def answered(self) -> None:
        self._away = self._refused = None

    def bear(self, error: ClusterError) -> None:
        """Pauses before the next try, or raises the error."""
        now = time.monotonic()
        if isinstance(error, NotReached):
            self._refused = None
        elif error.code in (_UNAUTHORIZED, _FORBIDDEN):
            self._refused = now if self._refused is None else self._refused
        else:
            raise error
        self._away = now if self._away is None else self._away
        refused = self._refused is not None and now - self._refused >= _REFUSED
        if refused or now - self._away >= _AWAY or now >= self._end:
            raise error
        time.sleep(max(0.0, min(_POLL, self._end - now)))


def patiently(ask: Callable[[], T], end: float = math.inf, told: Told | None = None) -> T:
    """The answer. `told`: of each error that is borne."""
    patience = Patience(end)
    while True:
        try:
            return ask()
        except ClusterError as error:
            if told is not None:
                told(error)
            patience.bear(error)


def next_status(
    ask: Callable[[], RunStatus], before: RunStatus, end: float = math.inf, told: Told | None = None
) -> RunStatus:
    """Of the run whose status was `before`. Raises ClusterError: another one has its name by now."""
    status = patiently(ask, end, told)
    if status.uid != before.uid:
        raise ClusterError(f"run {before.namespace}/{before.name} was deleted, and made again under its name")
    return status
