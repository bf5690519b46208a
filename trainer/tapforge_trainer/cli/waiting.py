"""What a command says while nothing else is printed: a terminal is never silent for more than two seconds.

Said on stderr of a terminal only: what another program reads has the results and nothing else.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

#: seconds of silence
_AFTER: Final = 1.5


@contextmanager
def saying(what: str, after: float = _AFTER, *, always: bool = False) -> Iterator[None]:
    """Says `what` is being waited for, once, when the block takes longer than `after` seconds. `always`: also where
    stderr is not a terminal."""
    if not (always or sys.stderr.isatty()):
        yield
        return
    ended = threading.Event()

    def wait() -> None:
        if not ended.wait(after):
            click.echo(f"{what} ...", err=True)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    try:
        yield
    finally:
        ended.set()
        waiting.join()
