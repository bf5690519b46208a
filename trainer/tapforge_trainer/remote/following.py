"""A run of a cluster as it grows, in a folder of this machine: fetched again and again while something reads there.

- Each time only what is new is sent (`fetch.py`), through the same exec into the run's Pod: no other port, no other
  right.
- A fetch that fails is reported and tried again later; what was fetched before stays.
- It ends with its block, or after the fetch that follows the run's end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from .api import ClusterError
from .fetch import Fetched
from .status import RunStatus

log = logging.getLogger(__name__)

#: parts that a page shows
SHOWN: Final = ("summary", "replay")
#: for a fetch that is under way at the end, seconds
_ENDS: Final = 30.0


class Fetchable(Protocol):
    """A `cluster.Run`."""

    def fetch(self, to: str | Path = "runs", what: Sequence[str] = ()) -> Fetched: ...
    def status(self) -> RunStatus: ...


@contextmanager
def following(run: Fetchable, to: Path, every: float) -> Iterator[Path]:
    """The run's folder, after the first fetch. `every`: seconds between two. Raises ClusterError of the first one."""
    folder = run.fetch(to, SHOWN).folder
    ending = threading.Event()
    thread = threading.Thread(target=_fetch_again, args=(run, to, every, ending), name="fetch", daemon=True)
    thread.start()
    try:
        yield folder
    finally:
        ending.set()
        thread.join(_ENDS)


def _fetch_again(run: Fetchable, to: Path, every: float, ending: threading.Event) -> None:
    while not ending.wait(every):
        try:
            over = run.status().exit_code is not None
            run.fetch(to, SHOWN)
        except ClusterError as error:
            log.warning("%s; it is tried again in %g s", error, every)
            continue
        if over:
            return
