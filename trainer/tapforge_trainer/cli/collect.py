"""`tapforge collect` and `tapforge teacher`: episodes of a stronger model as data."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from .failing import Wrong, as_message
from .reading import LOCAL_PATH, RUNS, FileCommand, file_option, overridable
from .stoppable import checked, loaded_run, stoppable


class _Option(click.ParamType):
    """NAME=VALUE."""

    name = "name=value"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, equals, given = str(value).partition("=")
        if not (name and equals):
            self.fail(f"{value!r} is not NAME=VALUE, as in top_p=0.9", param, ctx)
        return name, given


@click.command(cls=FileCommand)
@file_option()
@overridable
@RUNS
@click.option(
    "--teacher",
    required=True,
    metavar="URL|NAME",
    help="endpoint with its version, as in http://127.0.0.1:9000/v1, or one of spec.models, which is served meanwhile",
)
@click.option("--model", help="model as the endpoint calls it")
@click.option("--served-as", metavar="NAME", help="what its answers call the model, where that is another name")
@click.option("--api-key-env", metavar="NAME", help="environment variable that holds the endpoint's key")
@click.option("--episodes", type=click.IntRange(1, 1_000_000), default=200, show_default=True, help="that are kept")
@click.option(
    "--into", type=LOCAL_PATH, help="folder of the data set, gone on with where it is there; default: RUNS/NAME/teacher"
)
@click.option("--keep", type=click.Choice(["successes", "all"]), default="successes", show_default=True)
@click.option("--adapter", metavar="NAME", help="whose prompt and answers the teacher has; default: the run's")
@click.option("--prompt-file", type=LOCAL_PATH, help="Jinja file in place of the prompt, as adapter.promptFile")
@click.option(
    "--coordinates",
    type=click.Choice(["fraction", "grid", "grid1000", "pixels"]),
    help="what the teacher's numbers of a place mean; default: as the adapter's family has them",
)
@click.option("--tool-calls", is_flag=True, help="name the tool in the request; calls in words are read in any case")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.7, show_default=True)
@click.option("--answer-tokens", type=click.IntRange(16, 65_536), default=1024, show_default=True, help="of an answer")
@click.option(
    "--answer-seconds",
    type=click.FloatRange(1, 3600),
    default=300.0,
    show_default=True,
    help="of an answer, with retries; a request has half of it, or 120",
)
@click.option("--concurrency", type=click.IntRange(1, 4096), default=8, show_default=True, help="requests at once")
@click.option("--max-tokens", type=click.IntRange(1), help="of questions and answers in all; then it ends")
@click.option(
    "--max-episodes", type=click.IntRange(1), help="played in all; then it ends; default: ten times --episodes"
)
@click.option(
    "--option",
    "options",
    type=_Option(),
    multiple=True,
    metavar="NAME=VALUE",
    help="further field of requests, in JSON",
)
def collect(file: Path, overrides: tuple[str, ...], runs: Path, into: Path | None, **given: Any) -> None:
    """Have a model behind an endpoint, or one of `spec.models`, play the run's tasks on the run's phones, and make a
    data set of what went well, for `warmStart.data`. The same command goes on where it was. RUNS has the run's pinned
    models."""
    from ..run.collect import collect_session
    from ..run.collect_options import CollectOptions

    run = loaded_run(file, overrides)
    checked(run, runs)
    options = CollectOptions(into=into or runs / run.metadata.name / "teacher", **given)
    say = partial(click.echo, err=True)
    sys.exit(stoppable(lambda stop: collect_session(run, runs, stop, options, say)))


@click.group()
def teacher() -> None:
    """A teacher to try `tapforge collect` with."""


@teacher.command(cls=FileCommand)
@file_option("TrainingRun as YAML, whose tasks it knows")
@overridable
@click.option("--port", type=click.IntRange(0, 65535), default=8720, show_default=True, help="0 takes a free one")
@click.option("--host", default="127.0.0.1", show_default=True, help="address that it listens on")
@click.option("--model", default="demonstrator", show_default=True, help="name of the model that it answers as")
@click.option("--tasks", type=click.IntRange(1), default=1000, show_default=True, help="the first of the run's")
@click.option("--adapter", default="qwen3-vl", show_default=True, help="in whose words it answers")
@click.option("--error-rate", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="of its decisions")
@click.option("--slow", type=click.FloatRange(0, 3600), default=0.0, metavar="SECONDS", help="wait before an answer")
@click.option("--status", type=click.IntRange(300, 599), help="answer with this status instead")
@click.option("--retry-after", type=click.FloatRange(0), metavar="SECONDS", help="with --status: its Retry-After")
@click.option("--html", is_flag=True, help="answer with a page of HTML")
@click.option("--huge", is_flag=True, help="answer with ten megabytes of HTML")
@click.option("--prose", is_flag=True, help="answer in words")
@click.option("--two-calls", is_flag=True, help="answer with two calls")
@click.option("--pixels", is_flag=True, help="answer with pixels, whatever was asked for")
@click.option("--first", type=click.IntRange(1), help="faults hold for so many requests; default: for all")
def serve(
    file: Path,
    overrides: tuple[str, ...],
    port: int,
    host: str,
    model: str,
    tasks: int,
    adapter: str,
    error_rate: float,
    two_calls: bool,
    pixels: bool,
    **faults: Any,
) -> None:
    """Answer as a model that plays the simulated phone's tasks would, without a model. Prints one line of JSON with its
    url."""
    from ..judges.server import Faults, listen
    from ..tasks.selection import training_tasks
    from ..teachers.simulated import Demonstrator, TeacherFaults, TeacherServer, dialect_named

    run = loaded_run(file, overrides)
    spec = run.spec
    with as_message():
        if spec.tasks.file is not None or spec.environment.protocol != "tapforge":
            raise Wrong("only suites of the simulated phone have demonstrations: name a run with tasks.suite")
        try:
            drawn, screen = training_tasks(run), spec.environment.screen
            sampled = (drawn.sample(spec.seed, number) for number in range(tasks))
            demonstrator = Demonstrator(sampled, screen.width, screen.height, error_rate=error_rate)
            dialect = dialect_named(adapter)
        except ValueError as error:
            raise Wrong(str(error)) from error
    server = TeacherServer(model, demonstrator, dialect, Faults(**faults), TeacherFaults(two_calls, pixels))
    sys.exit(asyncio.run(listen(server, host, port)))
