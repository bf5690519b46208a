"""`tapforge tasks`: task files, made and tried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from .failing import Wrong, as_message
from .reading import LOCAL_PATH
from .waiting import saying

if TYPE_CHECKING:
    from ..tasks.walked import Walked

OUTPUT: Final = click.option(
    "--output", "-o", "path", type=LOCAL_PATH, required=True, help="task file (JSONL); gone on with where it is there"
)
#: tasks between two lines that say how far it is
_STRIDE: Final = 50


@click.group()
def tasks() -> None:
    """Tasks: made from what a phone can do or what a model proposes, and tried."""


@tasks.command()
@OUTPUT
@click.option("--suite", type=click.Choice(["quickstart", "standard"]), default="quickstart", show_default=True)
@click.option("--count", type=click.IntRange(1, 1_000_000), default=500, show_default=True, help="tasks in the file")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="of phones and walks")
@click.option("--operations", type=click.IntRange(1, 6), default=3, show_default=True, help="of a walk, at most")
@click.option("--app", "apps", multiple=True, metavar="NAME", help="only this app's; may be given several times")
@click.option(
    "--rollouts", type=click.IntRange(8, 1024), default=64, show_default=True, help="empty and random ones, per phone"
)
@click.option("--json", "as_json", is_flag=True, help="say what became of the walks as JSON")
def walk(
    path: Path, suite: str, count: int, seed: int, operations: int, apps: tuple[str, ...], rollouts: int, as_json: bool
) -> None:
    """Make tasks with checks by playing forward on the simulated phone: a walk of its operations, the difference that
    it made as the check, a sentence for it as the goal. Each can be done, is done by no random rollout, and its check
    is right about every state that it is tried on."""
    from ..tasks.walked import summary, write_walked

    shown = 0

    def report(found: Walked) -> None:
        nonlocal shown
        if found.tasks // _STRIDE > shown:
            shown = found.tasks // _STRIDE
            click.echo(f"{found.tasks:,} of {count:,} tasks", err=True)

    with as_message(), _wrong(), saying(f"walking on phones of the suite {suite}"):
        _writable(path)
        found = write_walked(
            path, suite=suite, count=count, seed=seed, most=operations, apps=apps, rollouts=rollouts, report=report
        )
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return
    for line in summary(found):
        click.echo(line)
    click.echo(path)


@contextmanager
def _wrong() -> Iterator[None]:
    """What is wrong with tasks is wrong the next time, too."""
    from ..tasks.source import TaskError

    try:
        yield
    except TaskError as error:
        raise Wrong(str(error)) from error


def _writable(path: Path) -> None:
    """Raises TaskError."""
    from ..tasks.source import TaskError

    if not path.absolute().parent.is_dir():
        raise TaskError(f"--output: {path} can't be written: the folder {path.parent} doesn't exist")
    if path.is_dir():
        raise TaskError(f"--output: {path} is a folder; name a file")
