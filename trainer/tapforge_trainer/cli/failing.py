"""What can fail though the program is right becomes a message and an exit code, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click


class Problem(click.ClickException):
    """The work failed: a message without a traceback."""

    exit_code = 1


class Wrong(Problem):
    """The arguments or the file are wrong."""

    exit_code = 2


@contextmanager
def as_message() -> Iterator[None]:
    """What can fail though the program is right becomes a message and an exit code."""
    try:
        yield
    except Exception as error:
        from ..run.shutdown import failure_of

        failure = failure_of(error)
        if failure is None:
            raise
        code, message = failure
        raise (Wrong if code == Wrong.exit_code else Problem)(message) from error
