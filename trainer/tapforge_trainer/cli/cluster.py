"""`tapforge cluster`: runs on a Kubernetes cluster, without kubectl. A thin shell over `remote`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .reading import LOCAL_PATH, FileCommand, file_option, overridable, source_of
from .waiting import saying

if TYPE_CHECKING:
    from ..remote import Cluster, Run, RunStatus

F = TypeVar("F", bound=Callable[..., Any])

_INTERRUPTED = 130


class _Wrong(click.ClickException):
    exit_code = 2


def _where(command: F) -> F:
    """The options that every command has."""
    command = click.option("-n", "--namespace", help="default: the context's")(command)
    return click.option("--context", help="of the kubeconfig; default: the current one")(command)


@click.group()
def cluster() -> None:
    """Runs on a Kubernetes cluster, from here. Credentials are kubectl's: KUBECONFIG or ~/.kube/config."""


@cluster.command(cls=FileCommand)
@file_option("file of the run; - reads it from stdin")
@overridable
@click.option("--watch", "watching", is_flag=True, help="then watch it to its end")
@_where
def submit(file: Path, overrides: tuple[str, ...], watching: bool, context: str | None, namespace: str | None) -> None:
    """Start the run of a file, with the pools and other objects beside it in the file (server-side apply)."""
    with _as_message():
        found = _cluster(context, namespace)
        source = source_of(file)
        with saying("asking the API server"):
            run, applied = found.apply(source, overrides)
        for one in applied:
            click.echo(one)
        if watching:
            sys.exit(_watch(run))


@cluster.command(name="list")
@_where
def list_runs(context: str | None, namespace: str | None) -> None:
    """The runs of the namespace, the newest last."""
    with _as_message():
        found = _cluster(context, namespace)
        rows: list[tuple[str, ...]] = [("NAME", "STATUS", "UPDATE", "SUCCESS", "PHONES", "ATTEMPT")]
        with saying("asking the API server"):
            rows += [_row(status) for status in found.runs()]
    if len(rows) == 1:
        click.echo(f"no runs in namespace {found.namespace}", err=True)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@cluster.command()
@click.argument("name")
@_where
def watch(name: str, context: str | None, namespace: str | None) -> None:
    """Show a run as `tapforge run` does, to its end; then exit as that does. Ctrl-C leaves the run running.

    Exit codes: 0 complete, 1 failed, 2 its file can't work, 75 suspended."""
    with _as_message():
        sys.exit(_watch(_cluster(context, namespace).run(name)))


@cluster.command()
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="until the run ends")
@click.option("--attempt", type=click.IntRange(min=1), help="only of this attempt")
@_where
def logs(name: str, follow: bool, attempt: int | None, context: str | None, namespace: str | None) -> None:
    """Print the log of a run's driver, attempt after attempt."""
    with _as_message():
        for line in _cluster(context, namespace).run(name).logs(follow, attempt):
            click.echo(line)


@cluster.command()
@click.argument("name")
@click.option("--wait", "seconds", type=click.FloatRange(0), default=0.0, help="until it has stopped, seconds at most")
@_where
def suspend(name: str, seconds: float, context: str | None, namespace: str | None) -> None:
    """Have a run make a checkpoint, and give its phones and machines back."""
    with _as_message(), saying(f"waiting for {name} to stop" if seconds else "asking the API server"):
        status = _cluster(context, namespace).run(name).suspend(seconds)
    click.echo(f"{name} {'is suspended' if status.suspended else 'stops after a checkpoint'}")


@cluster.command()
@click.argument("name")
@click.option("--wait", "seconds", type=click.FloatRange(0), default=0.0, help="until it runs, seconds at most")
@_where
def resume(name: str, seconds: float, context: str | None, namespace: str | None) -> None:
    """Have a suspended run go on from its newest checkpoint."""
    with _as_message(), saying(f"waiting for {name} to run" if seconds else "asking the API server"):
        status = _cluster(context, namespace).run(name).resume(seconds)
    at = "from the beginning" if status.checkpoint is None else f"after update {status.checkpoint}"
    click.echo(f"{name} {'runs' if status.word == 'Running' else f'resumes {at}'}")


@cluster.command()
@click.argument("name")
@click.option("--to", type=LOCAL_PATH, default=Path("runs"), show_default=True, help="folder of all runs")
@click.option(
    "--what",
    multiple=True,
    type=click.Choice(["summary", "replay", "checkpoint"]),
    help="only that; again for more. checkpoint: the newest one and the exported model",
)
@_where
def fetch(name: str, to: Path, what: tuple[str, ...], context: str | None, namespace: str | None) -> None:
    """Bring a run's checkpoint, summary and recording to the folder TO/NAME. Again, it brings what is new."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(40), DownloadColumn(), TransferSpeedColumn())
    with _as_message():
        with saying("asking the API server"):
            run = _cluster(context, namespace).run(name)
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=None)
            found = run.fetch(to, what, lambda there, total: bar.update(task, completed=there, total=total))
    checkpoint = "" if found.checkpoint is None else f", with the checkpoint of update {found.checkpoint}"
    click.echo(f"{found.folder}: {found.files} files, {found.bytes:,} bytes{checkpoint}")
    for part in found.missing:
        click.echo(f"it has no {part} yet", err=True)
    if "replay" not in found.missing and (not what or "replay" in what):
        click.echo(f"look at it: tapforge view {found.folder}")


@cluster.command()
@click.argument("name")
@click.option("--to", type=LOCAL_PATH, default=Path("runs"), show_default=True, help="folder of all runs")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8090, show_default=True, help="of the page; 0: a free one"
)
@click.option("--every", type=click.FloatRange(1), default=20.0, show_default=True, help="seconds between two fetches")
@_where
def view(name: str, to: Path, port: int, every: float, context: str | None, namespace: str | None) -> None:
    """Serve the page of a run while it is going on: its recording is fetched to TO/NAME again and again."""
    from ..remote.following import following
    from .view import serve_page

    with _as_message():
        with saying("asking the API server"):
            run = _cluster(context, namespace).run(name)
        click.echo(f"fetching the recording of {name}", err=True)
        with following(run, to, every) as folder:
            serve_page((folder,), "127.0.0.1", port)


# --- the rest ---------------------------------------------------------------------------------------------------------


def _cluster(context: str | None, namespace: str | None) -> Cluster:
    from ..remote import Cluster

    return Cluster(context, namespace)


def _watch(run: Run) -> int:
    try:
        status = run.watch()
    except KeyboardInterrupt:
        again = f"tapforge cluster watch {run.name} -n {run.namespace}"
        click.echo(f"{run.name} keeps running; to see it again: {again}", err=True)
        return _INTERRUPTED
    click.echo(f"{status.name}: {status.word}" + (f": {status.message}" if status.message else ""))
    if status.suspended and not status.judges_spent:
        click.echo(f"to go on: tapforge cluster resume {run.name} -n {run.namespace}", err=True)
    code = status.exit_code
    return 1 if code is None else code


def _row(status: RunStatus) -> tuple[str, ...]:
    updates = f"{status.update}/{status.max_updates}" if status.max_updates else str(status.update)
    success = "-" if status.success is None else f"{100 * status.success:.1f} %"
    phones = f"{status.phones_held}/{status.phones_wanted}"
    return status.name, status.word or "-", updates, success, phones, str(status.attempt)


@contextmanager
def _as_message() -> Iterator[None]:
    """What can fail though the program is right becomes a message and an exit code."""
    from tapforge_api import SpecError

    from ..remote import ClusterError, Refused

    try:
        yield
    except (SpecError, Refused) as error:
        raise _Wrong(str(error)) from error
    except ClusterError as error:
        raise click.ClickException(str(error)) from error
