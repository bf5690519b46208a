"""`tapforge tasks`: task files, made and tried."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from .failing import Problem, Wrong, as_message
from .reading import LOCAL_PATH, RUNS, FileCommand, file_option, overridable
from .waiting import saying

if TYPE_CHECKING:
    from ..tasks.walked import Walked

OUTPUT: Final = click.option(
    "--output", "-o", "path", type=LOCAL_PATH, required=True, help="task file (JSONL); gone on with where it is there"
)


class _Regimes(click.ParamType):
    """Names, separated by commas."""

    name = "regimes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):  # the default
            return value
        known = ("instances", "templates", "apps")
        names = tuple(dict.fromkeys(name.strip() for name in str(value).split(",")))
        if unknown := [name for name in names if name not in known]:
            self.fail(f"{unknown[0]!r} is not a regime; known are {', '.join(known)}", param, ctx)
        return names


REGIMES: Final = click.option(
    "--regimes",
    type=_Regimes(),
    default=(),
    metavar="NAMES",
    help="how tasks are held out, of instances,templates,apps; instead of the run's own measurement",
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
    """What is wrong with tasks is wrong the next time, too; what an endpoint or a phone does need not be."""
    from ..tasks.source import TaskError

    try:
        yield
    except TaskError as error:
        raise (Problem if _may_pass(error.__cause__) else Wrong)(str(error)) from error


def _may_pass(cause: BaseException | None) -> bool:
    """Whether it is an endpoint or a phone that failed, and could do better the next time."""
    from tapforge_envs.protocol import EnvironmentFault

    from ..judges.endpoint import EndpointError

    return isinstance(cause, EnvironmentFault) or (isinstance(cause, EndpointError) and not cause.permanent)


def _writable(path: Path) -> None:
    """Raises TaskError."""
    from ..tasks.source import TaskError

    if not path.absolute().parent.is_dir():
        raise TaskError(f"--output: {path} can't be written: the folder {path.parent} doesn't exist")
    if path.is_dir():
        raise TaskError(f"--output: {path} is a folder; name a file")


@tasks.command(cls=FileCommand)
@file_option("TrainingRun as YAML, whose phones are looked at; default: the simulated phone", required=False)
@overridable
@OUTPUT
@click.option("--url", required=True, help="endpoint up to and with the version, as in http://127.0.0.1:8001/v1")
@click.option("--model", required=True, help="model as the endpoint calls it")
@click.option("--api-key-env", metavar="NAME", help="environment variable that holds the endpoint's key")
@click.option("--suite", type=click.Choice(["quickstart", "standard"]), default="standard", show_default=True)
@click.option(
    "--phones",
    type=click.IntRange(1, 1000),
    default=8,
    show_default=True,
    help="phones, or states of the simulated one",
)
@click.option(
    "--app", "apps", multiple=True, metavar="NAME", help="whose first page is shown; may be given several times"
)
@click.option("--count", type=click.IntRange(1, 100_000), default=100, show_default=True, help="tasks in the file")
@click.option("--per-question", type=click.IntRange(1, 50), default=10, show_default=True, help="goals of a question")
@click.option(
    "--infeasible", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="share that can't be done"
)
@click.option("--max-steps", type=click.IntRange(1), default=20, show_default=True, help="answers of a task")
@click.option("--against", multiple=True, type=LOCAL_PATH, help="task file of an evaluation; no task may be alike")
@click.option(
    "--prompts", type=LOCAL_PATH, help="folder with propose.jinja, rewrite.jinja, check.jinja, or some of them"
)
@click.option("--prompt", type=click.Choice(["simulated-phone"]), help="for `tapforge tasks serve`: data, and no words")
@click.option("--rewrite/--no-rewrite", default=True, show_default=True, help="have each goal said as a person would")
@click.option("--check/--no-check", default=True, show_default=True, help="ask once more whether it can be done")
@click.option("--temperature", type=click.FloatRange(0, 2), default=1.0, show_default=True)
@click.option("--max-requests", type=click.IntRange(1), default=2000, show_default=True, help="in all; then it ends")
@click.option("--max-tokens", type=click.IntRange(1), help="in all; then it ends")
@click.option("--patience", type=click.IntRange(1), default=8, show_default=True, help="rounds without a new task")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def generate(path: Path, file: Path | None, overrides: tuple[str, ...], **options: Any) -> None:
    """Have a model propose tasks from screens and apps. They are goals: a run on them needs a judge. The answers are
    kept in OUTPUT.answers: the same command goes on where it was, and asks for nothing again."""
    import asyncio

    from ..generation.command import GenerateOptions, generate
    from ..run.looking import screens_of
    from .stoppable import loaded_run

    if overrides and file is None:
        raise click.UsageError("--set and --preset are about the run of -f: add it, or leave them out")
    given = GenerateOptions(**options)
    screens, protocol = None, None
    if file is not None:
        run = loaded_run(file, overrides)
        protocol = run.spec.environment.protocol
        screens = partial(screens_of, run, given.suite, given.apps, given.phones, given.seed)
    with as_message(), _wrong():
        _writable(path)
        say = partial(click.echo, err=True)
        for line in asyncio.run(generate(path, given, say, screens, protocol or "tapforge")):
            click.echo(line)
    click.echo(path)


@tasks.command(name="try", cls=FileCommand)
@file_option()
@overridable
@RUNS
@OUTPUT
@click.option("--tries", type=click.IntRange(1, 1000), default=8, show_default=True, help="of each task")
@click.option("--model", type=LOCAL_PATH, help="folder of the weights; default: the run's export")
def try_(file: Path, overrides: tuple[str, ...], runs: Path, path: Path, tries: int, model: Path | None) -> None:
    """Play each task of the run's task file some times, and write the file again with what became of that: how hard a
    task is and, where it was unknown, whether it can be done."""
    from ..session import try_session
    from .stoppable import checked, loaded_run, stoppable

    with as_message(), _wrong():
        _writable(path)
    loaded = loaded_run(file, overrides)
    checked(loaded, runs)
    sys.exit(stoppable(lambda stop: try_session(loaded, runs, model, stop, path, tries)))


@tasks.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8710, show_default=True, help="0 takes a free one")
@click.option("--host", default="127.0.0.1", show_default=True, help="address that it listens on")
@click.option("--model", default="simulated-phone", show_default=True, help="name of the model that it answers as")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--repeat", is_flag=True, help="propose the same few goals again and again")
@click.option("--prose", is_flag=True, help="answer without JSON")
@click.option("--error-rate", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="of its checks")
def serve(port: int, host: str, **options: Any) -> None:
    """Propose tasks for the simulated phone without a model, for `tapforge tasks generate --prompt simulated-phone`.
    Prints one line of JSON with its url."""
    import asyncio

    from ..generation.simulated import ProposerServer
    from ..judges.server import listen

    sys.exit(asyncio.run(listen(ProposerServer(**options), host, port)))
