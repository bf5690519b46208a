"""Which page of a browser has a phone in its hands. No I/O; the clock is given.

- One page has it, from the start of a task to its end; another one may take it over, and says so.
- A page that wasn't heard of for `timeout` seconds is gone: a browser that was closed, a laptop that sleeps.
- A page that is loaded again is the same one: it keeps its name.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..serving.claims import Refused


class PageLock:
    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic):
        """`timeout`: seconds."""
        self._timeout, self._clock = timeout, clock
        self.owner: str | None = None
        self._heard = 0.0
        #: by page, requests that are being answered
        self._asking = Counter[str]()

    @contextmanager
    def request(self, page: str) -> Iterator[None]:
        """While a request of this page is answered it is there."""
        self._asking[page] += 1
        try:
            yield
        finally:
            self._asking[page] -= 1
            if not self._asking[page]:
                del self._asking[page]
            if page == self.owner:
                self._heard = self._clock()

    def take(self, page: str) -> None:
        """Also from another page."""
        self.owner, self._heard = page, self._clock()

    def admit(self, page: str) -> None:
        """Raises Refused where another page has it."""
        if self.owner is not None and self.owner != page:
            raise Refused(409, "another page plays on this phone; take it over, or wait until it is closed", "held")

    def expired(self) -> bool:
        """Whether the page that has it was closed."""
        if self.owner is None or self._asking[self.owner]:
            return False
        return self._clock() - self._heard > self._timeout

    def release(self) -> None:
        self.owner = None
