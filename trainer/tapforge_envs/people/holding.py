"""Which page of a browser has a phone in its hands. No I/O; the clock is given.

- One page has it, from the start of a task to its end; another one may take it over, and says so.
- A page that wasn't heard of for `patience` seconds is gone: a browser that was closed, a laptop that sleeps.
- A page that is loaded again is the same one: it keeps its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..serving.claims import Refused


class Holding:
    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic):
        """`patience`: seconds."""
        self._patience, self._clock = patience, clock
        self.holder: str | None = None
        self._heard = 0.0
        #: requests of the holder that are being answered
        self._asking = 0

    @contextmanager
    def heard(self, page: str) -> Iterator[None]:
        """While a request of this page is answered it is there."""
        ours = page == self.holder
        self._heard = self._clock() if ours else self._heard
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1
            if page == self.holder:
                self._heard = self._clock()

    def take(self, page: str) -> None:
        """Also from another page."""
        self.holder, self._heard = page, self._clock()

    def admit(self, page: str) -> None:
        """Raises Refused where another page has it."""
        if self.holder is not None and self.holder != page:
            raise Refused(409, "another page plays on this phone; take it over, or wait until it is closed", "held")

    def gone(self) -> bool:
        """Whether the page that has it was closed."""
        return self.holder is not None and not self._asking and self._clock() - self._heard > self._patience

    def release(self) -> None:
        self.holder = None
