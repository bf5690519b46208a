"""`tapforge env`: servers of environments, looked at from a terminal, and the one that stands before other people's."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from tapforge_api.pool import Protocol

from .failing import as_message
from .phone import RECORD, Port
from .reading import LOCAL_PATH
from .waiting import saying

if TYPE_CHECKING:
    from tapforge_envs.clients.phones import PhoneAddress
    from tapforge_envs.protocol import Task

PROTOCOL = click.option(
    "--protocol",
    type=click.Choice(get_args(Protocol)),
    default="tapforge",
    show_default=True,
    help="what the server speaks",
)
TASK = click.option("--task", metavar="TASK", help="that is played, as a line of a task file says it: JSON, or a name")
DEADLINE = click.option(
    "--deadline", type=click.FloatRange(0.1), default=60.0, show_default=True, help="of a call, seconds; resets have 5x"
)


class Failed(click.ClickException):
    """The work failed: a message without a traceback."""

    exit_code = 1


@click.group()
def env() -> None:
    """Environments."""


@env.command()
@click.argument("url")
@PROTOCOL
@TASK
@click.option("--seconds", type=click.FloatRange(0.1), default=10.0, show_default=True, help="deadline of a call")
def check(url: str, protocol: Protocol, task: str | None, seconds: float) -> None:
    """Check that the server at URL conforms to its protocol; prints violations, each with the request that showed it.

    With --protocol adb, URL is a serial or HOST:PORT."""
    from tapforge_envs.check import run_check

    wanted = _task(task, protocol)
    with saying(f"checking {url}, each call of at most {seconds:g} s"):
        code = run_check(url, seconds, protocol, wanted)
    sys.exit(code)


@env.command()
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@PROTOCOL
@TASK
@click.option(
    "--seconds", type=click.FloatRange(0.1, 86_400), default=30.0, show_default=True, help="how long it is measured"
)
@click.option("--steps", type=click.IntRange(1, 1000), default=10, show_default=True, help="of an episode, at most")
@click.option("--output", type=LOCAL_PATH, help="file for the figures, as JSON")
@DEADLINE
def bench(
    urls: tuple[str, ...],
    protocol: Protocol,
    task: str | None,
    seconds: float,
    steps: int,
    output: Path | None,
    deadline: float,
) -> None:
    """Measure latency and throughput of the phones at URL...: episodes of harmless actions, on all at the same time."""
    from tapforge_envs.measure import measure
    from tapforge_envs.protocol import EnvironmentFault

    phones = [_phone(url, protocol, deadline) for url in urls]
    if output is not None and not output.absolute().parent.is_dir():
        raise click.UsageError(f"--output: {output} can't be written: the folder {output.parent} doesn't exist")
    try:
        with saying(f"measuring for {seconds:g} s"):
            report = asyncio.run(measure(phones, _task(task, protocol), seconds, steps)).report()
    except EnvironmentFault as fault:
        raise Failed(str(fault)) from fault
    click.echo(_table(report))
    if output is not None:
        try:
            output.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            raise Failed(f"--output: {output} can't be written: {error.strerror}") from error
    sys.exit(0 if report["calls"] else 1)


@env.command()
@click.argument("url")
@PROTOCOL
@TASK
@click.option(
    "--policy", default="random", show_default=True, help="random, or a file with one action as JSON per line"
)
@click.option("--seed", default=0, show_default=True, help="of a random policy")
@click.option("--max-steps", type=click.IntRange(1, 10_000), help="default: the task's")
@click.option("--output", type=LOCAL_PATH, default=Path("played"), show_default=True, help="folder of the replay")
@DEADLINE
def play(
    url: str,
    protocol: Protocol,
    task: str | None,
    policy: str,
    seed: int,
    max_steps: int | None,
    output: Path,
    deadline: float,
) -> None:
    """Play one episode on the phone at URL; prints its steps and writes a replay.

    Exit code 1: the environment or its judge failed; 2: there is nothing to play by."""
    from tapforge_envs.protocol import EnvironmentFault

    from ..recording.reader import RecordingError
    from ..storage.local_path import PathError, local_path
    from .play import PlayError, play, random_policy, read_actions

    phone = _phone(url, protocol, deadline)
    try:
        chosen = random_policy(seed) if policy == "random" else read_actions(local_path(policy))
        wanted = _task(task, protocol)
        with saying(f"waiting for {url}, which has {5 * deadline:g} s for a reset and {deadline:g} s for a step"):
            record = asyncio.run(play(phone, wanted, chosen, output, click.echo, seed=seed, max_steps=max_steps))
    except (PlayError, PathError) as error:
        raise click.UsageError(str(error)) from error
    except (EnvironmentFault, RecordingError, OSError) as error:
        raise Failed(str(error)) from error
    score = "" if record.score is None else f", score {record.score:g}"
    message = f": {record.message}" if record.message else ""
    click.echo(f"{record.outcome.value if record.outcome else 'stopped'} ({record.reason.value}{score}){message}")
    click.echo(output / "replay.html")
    sys.exit(0 if record.valid else 1)


@env.command()
@PROTOCOL
@click.option("--url", "urls", multiple=True, metavar="URL", help="server of a phone; again for more phones")
@click.option("--device", "devices", multiple=True, metavar="SERIAL", help="a phone's serial, HOST:PORT, or auto")
@click.option("--adb-port", type=click.IntRange(1, 65535), help="have an adb server of its own there, for a container")
@click.option(
    "--settle",
    type=click.Choice(["adaptive", "fixed", "none"]),
    default="adaptive",
    show_default=True,
    help="how a phone's screen is waited for after an action (spec.environment.settle.mode)",
)
@click.option("--host", default="127.0.0.1", show_default=True, help=":: is every address, of IPv6 and of IPv4")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one")
@click.option(
    "--token-file",
    type=LOCAL_PATH,
    help="file with the token that callers have to send; default: the environment variable TAPFORGE_TOKEN",
)
@click.option("--tasks", type=LOCAL_PATH, help="JSONL of the tasks that GET /tasks and the page list")
@click.option(
    "--page",
    type=Port(),
    is_flag=False,
    flag_value="8080",
    help="also a page on which a person plays, and keeps episodes as data; alone: at port 8080; 0 a free one",
)
@RECORD
@click.option("--reset-seconds", type=click.FloatRange(1), default=300.0, show_default=True, help="deadline of a reset")
@click.option("--step-seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="deadline of a step")
@click.option(
    "--evaluate-seconds", type=click.FloatRange(1), default=120.0, show_default=True, help="deadline of a verdict"
)
def serve(
    protocol: Protocol,
    urls: tuple[str, ...],
    devices: tuple[str, ...],
    adb_port: int | None,
    settle: Literal["adaptive", "fixed", "none"],
    host: str,
    port: int,
    token_file: Path | None,
    tasks: Path | None,
    page: int | None,
    record: Path,
    reset_seconds: float,
    step_seconds: float,
    evaluate_seconds: float,
) -> None:
    """Serve phones of any protocol as tapforge's own: a bridge.

    The phones answer under /slot/0, /slot/1 and so on, in the order in which they are named. One line of JSON,
    {"port": N, "slots": K}, says that they do; with --page it has the page's address, too."""
    from tapforge_api.claims import SLOT_VARIABLE
    from tapforge_api.environment import Settle
    from tapforge_envs.bridge.adb_server import AdbServerError
    from tapforge_envs.bridge.server import Bridge, PageOptions, read_token, refusal_to_listen
    from tapforge_envs.bridge.server import serve as serve_bridge
    from tapforge_envs.clients.http import Deadlines
    from tapforge_envs.clients.phones import PhoneAddress, PhoneOptions
    from tapforge_envs.slots.source import SlotError
    from tapforge_envs.slots.urls import parse_urls

    from ..run.people import PeopleFolder
    from ..tasks.files import read_tasks
    from ..tasks.source import TaskError

    if (devices and protocol != "adb") or (urls and protocol == "adb"):
        raise click.UsageError("phones of protocol adb are named by --device, others by --url")
    if not (urls or devices):
        raise click.UsageError("name a phone: --url URL, or --device SERIAL with --protocol adb")
    if adb_port is not None and protocol != "adb":
        raise click.UsageError("--adb-port is for phones of protocol adb")
    try:
        addresses = parse_urls(devices or urls, "--device" if devices else "--url", protocol)
        token = ""
        if token_file:
            token = read_token(token_file.read_text(encoding="utf-8"), str(token_file))
        elif "TAPFORGE_TOKEN" in os.environ:
            token = read_token(os.environ["TAPFORGE_TOKEN"], "the environment variable TAPFORGE_TOKEN")
        listed = read_tasks(tasks, protocol).tasks if tasks else ()
    except (SlotError, TaskError, OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if why := refusal_to_listen(host, token):
        raise click.UsageError(why)
    deadlines = Deadlines(reset=reset_seconds, step=step_seconds, evaluate=evaluate_seconds)
    options = PhoneOptions(Settle(mode=settle))
    phones = [PhoneAddress(a.url, a.url, deadlines, protocol=protocol, options=options) for a in addresses]
    bridge = Bridge(phones, listed, host, port, token, os.environ.get(SLOT_VARIABLE, ""))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with as_message(), ExitStack() as stack:
        shown = None
        if page is not None:
            writer = stack.enter_context(closing(PeopleFolder(record, protocol, [a.url for a in addresses])))
            shown = PageOptions(page, writer)
        try:
            code = asyncio.run(serve_bridge(bridge, adb_port, shown))
        except AdbServerError as error:
            raise click.UsageError(str(error)) from error
    sys.exit(code)


def _phone(url: str, protocol: Protocol, deadline: float) -> PhoneAddress:
    from tapforge_envs.clients.http import Deadlines
    from tapforge_envs.clients.phones import PhoneAddress
    from tapforge_envs.slots.source import SlotError
    from tapforge_envs.slots.urls import parse_urls

    try:
        (address,) = parse_urls([url], "URL", protocol)
    except SlotError as error:
        raise click.UsageError(str(error)) from error
    deadlines = Deadlines(deadline, 5 * deadline, deadline, 2 * deadline, deadline)
    return PhoneAddress(address.url, address.url, deadlines, protocol=protocol)


def _table(report: dict[str, Any]) -> str:
    columns = ("count", "p50_ms", "p90_ms", "p99_ms", "max_ms")
    lines = [f"{'call':<10}" + "".join(f"{name.removesuffix('_ms'):>10}" for name in columns) + "   (ms)"]
    for call, spread in report["calls"].items():
        lines.append(f"{call:<10}" + "".join(f"{spread[name]:>10g}" for name in columns))
    rates = f"{report['steps_per_second']} steps/s, {report['episodes_per_second']} episodes/s"
    lines.append(f"{report['phones']} phones, {report['seconds']} s: {rates}, {report['faults']} faults")
    lines += [f"  {count} x {words}" for words, count in report["faults_by_words"].items()]
    return "\n".join(lines)


def _task(text: str | None, protocol: Protocol) -> Task | None:
    from ..tasks.files import read_task
    from ..tasks.source import TaskError

    try:
        return None if text is None else read_task(text, protocol, "--task")
    except TaskError as error:
        raise click.UsageError(str(error)) from error
