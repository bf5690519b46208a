"""The `tapforge` command. Each subcommand parses its arguments and calls one function, which imports the rest.

From here to the first gradient of `tapforge run`, in the order of reading:

    cli/main.py  ->  session.py  ->  loop.py  ->  learner/client.py  ->  learner/rank.py

(arguments; the life of a command; one update after another; the plan of an update; forward, backward and optimizer on
one rank). With spec.warmStart, run/warm_start.py comes in place of loop.py; on a cluster, cluster/driver.py comes
between the first two.

Exit codes: 0 done · 1 the work failed (the message names what and the remedy) · 2 the arguments, the file or what it
names are wrong, and will be the next time · 75 stopped by SIGTERM or by the operator · 130 stopped by Ctrl-C. A run
that is stopped leaves a checkpoint and resumes when it is started again. Only a programming error shows a traceback.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from .agent import agent
from .cluster import cluster
from .collect import collect, teacher
from .data import data
from .doctor import doctor
from .env import env
from .explain import explain
from .failing import Problem, Wrong, as_message
from .init import init
from .judge import judge
from .phone import phone
from .preset import in_plan, preset
from .reading import LOCAL_PATH, RUNS, Commands, FileCommand, file_option, overridable, read_run
from .relearn import compare, relearn, rescore
from .sample_files import samples
from .stoppable import checked, loaded_run, log, stoppable, with_its_data
from .tasks import REGIMES, tasks
from .view import list_runs, show, view
from .waiting import saying

if TYPE_CHECKING:
    from tapforge_api import TrainingRun

    from ..cluster.attempt import RunAttempt
    from ..tasks.regimes import Regime

FILE = file_option()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tapforge")
def cli() -> None:
    """Train GUI agents by online reinforcement learning."""


def main() -> None:
    from ..run.shutdown import become_subreaper

    become_subreaper()
    cli()


#: options of `plan` that only one of its other plans takes
_OF_MEMORY: Final = ("gpu_memory", "config", "trace", "disk_rate", "tokens_per_second", "measured")
_OF_SPEED: Final = ("gpu_memory", "config", "steps", "answer_tokens", "phones", "phone_seconds")


def _check_used(options: Mapping[str, Any], memory: bool, speed: bool) -> None:
    takes = _OF_MEMORY if memory else _OF_SPEED if speed else ()
    for name, value in options.items():
        if value is not None and value is not False and name not in takes:
            plans = [plan for plan, names in (("memory", _OF_MEMORY), ("speed", _OF_SPEED)) if name in names]
            given, add = f"--{name.replace('_', '-')}", " or ".join(f"--{plan}" for plan in plans)
            raise click.UsageError(f"{given} is about {' and '.join(plans)}: add {add}, or leave it out")


@cli.command(cls=FileCommand)
@FILE
@overridable
@RUNS
@click.option(
    "--memory", is_flag=True, help="say how much memory the run takes on each GPU instead; exit code 2: too much"
)
@click.option("--speed", is_flag=True, help="say how long an update takes on GPUs instead: an estimate")
@click.option(
    "--gpu-memory",
    metavar="SIZE|NAME",
    help="with --memory, --speed: of a GPU, such as 80GiB or H200; default: by spec.cluster",
)
@click.option("--config", type=LOCAL_PATH, help="with --memory, --speed: config.json of a model that is not known here")
@click.option("--steps", type=click.IntRange(1), help="with --speed: of an episode; default: half of what tasks allow")
@click.option("--answer-tokens", type=click.IntRange(1), help="with --speed: of an answer; default: 100")
@click.option("--phones", type=click.IntRange(1), help="with --speed: that play at once; default: as the file says")
@click.option("--phone-seconds", type=click.FloatRange(0), help="with --speed: of a step of a phone; default: 1.5")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--trace", is_flag=True, help="with --memory: also trace the learner's step on fake tensors, a minute")
@click.option(
    "--disk-rate",
    type=click.FloatRange(0, min_open=True),
    metavar="MB/S",
    help="with --memory: of checkpoints, as measured",
)
@click.option(
    "--tokens-per-second", type=click.FloatRange(0, min_open=True), help="with --memory: of the learner, as measured"
)
@click.option("--measured", type=LOCAL_PATH, help="with --memory: folder of a run whose speed is shown")
def plan(
    file: Path,
    overrides: tuple[str, ...],
    runs: Path,
    memory: bool,
    speed: bool,
    output: Literal["text", "json"],
    **options: Any,
) -> None:
    """Check a file, resolve its defaults and say what would run, how much memory that takes, or how long."""
    if memory and speed:
        raise click.UsageError("--memory and --speed are two plans: ask for one of them")
    _check_used(options, memory, speed)
    if speed:
        from ..run.local_files import inspect_files
        from ..speed.command import SpeedOptions, plan_speed

        loaded, asked = loaded_run(file, overrides), {name: options[name] for name in _OF_SPEED}
        with as_message(), saying("counting operations"):
            click.echo(plan_speed(loaded, SpeedOptions(output=output, **asked), inspect_files(loaded, runs)))
        return
    if memory:
        from ..memory.command import MemoryOptions, plan_memory

        loaded = loaded_run(file, overrides)
        with as_message(), saying("adding up the memory" + (" and tracing a step" if options["trace"] else "")):
            text, fits = plan_memory(
                loaded, MemoryOptions(output=output, **{name: options[name] for name in _OF_MEMORY})
            )
        click.echo(text)
        sys.exit(0 if fits else Wrong.exit_code)
    from tapforge_api.gpus import cluster_gpus_error

    from ..run.plan import as_json, render

    loaded = with_its_data(loaded_run(file, overrides), runs)
    found = checked(loaded, runs)
    if wrong := cluster_gpus_error(loaded.spec):  # `run` on this machine pays no attention to the cluster's
        raise Wrong(wrong)
    preset_lines = in_plan(lambda words: loaded_run(file, words), overrides)
    click.echo(as_json(found) if output == "json" else preset_lines + render(found))


@cli.command(cls=FileCommand)
@FILE
@overridable
@RUNS
@click.option(
    "--restarts",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    help="restart the run in place, from its last checkpoint, at most so often after a crash",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    envvar="TAPFORGE_GRACE_SECONDS",
    help="seconds from a SIGTERM to the end, also without a checkpoint",
)
def run(file: Path, overrides: tuple[str, ...], runs: Path, restarts: int, grace: float) -> None:
    """Train: warm start, reinforcement, measurement, replay. Started again, it resumes from the last checkpoint."""
    if restarts:
        arguments = ["--file", str(file), "--runs", str(runs), "--grace", str(grace)]
        sys.exit(_supervised(["run", *arguments, *(a for o in overrides for a in ("--set", o))], restarts, file))
    from ..cluster.attempt import RunAttempt
    from ..run.supervisor import beginning

    with as_message():
        attempt = RunAttempt.of(beginning(os.environ))
    if attempt is not None:
        sys.exit(_driven(attempt, lambda: read_run(file, overrides), grace))
    loaded = with_its_data(loaded_run(file, overrides), runs)
    for note in checked(loaded, runs).notes:
        click.echo(f"note: {note}", err=True)
    from ..session import run_session
    from ..telemetry.telemetry import ProgressView

    sys.exit(stoppable(lambda stop: run_session(loaded, runs, stop, ProgressView(loaded.metadata.name, 0)), grace))


@cli.command(hidden=True)
@click.option("--seconds", type=click.FloatRange(0), required=True, help="how long to wait at most")
def prestop(seconds: float) -> None:
    """The preStop hook of a Ray Pod: have the driver stop after a checkpoint, and wait for it."""
    from ..cluster.prestop import prestop

    if not prestop(os.environ, seconds):
        raise Problem(f"the run has not stopped within {seconds:g} s")


@cli.command(cls=FileCommand)
@FILE
@overridable
@RUNS
@click.option("--from", "recorded", type=LOCAL_PATH, help="folder of a run whose recording is imitated")
@click.option("--successes", is_flag=True, help="with --from: of it only what succeeded")
@click.option("--balance", is_flag=True, help="with --from: templates and lengths alike")
def sft(
    file: Path, overrides: tuple[str, ...], runs: Path, recorded: Path | None, successes: bool, balance: bool
) -> None:
    """Only the supervised warm start of a run; writes the model to RUNS/NAME/sft."""
    loaded = with_its_data(loaded_run(file, overrides), runs)
    if recorded is None and (successes or balance):
        raise Wrong("--successes and --balance choose among what --from names: give it, too")
    from ..run.sft import imitating, sft_session

    if recorded is not None:
        with as_message(), saying(f"reading what {recorded} has recorded"):
            loaded, found = imitating(loaded, runs, recorded, successes=successes, balance=balance)
        click.echo(found)
    checked(loaded, runs)

    sys.exit(stoppable(lambda stop: sft_session(loaded, runs, stop)))


@cli.command(name="eval", cls=FileCommand)
@FILE
@overridable
@RUNS
@click.option("--model", type=LOCAL_PATH, help="folder of the weights; default: the run's export")
@REGIMES
@click.option("--passes", type=click.IntRange(1, 100), help="with --regimes: over all of them, one after another")
def evaluate(
    file: Path,
    overrides: tuple[str, ...],
    runs: Path,
    model: Path | None,
    regimes: tuple[Regime, ...],
    passes: int | None,
) -> None:
    """Measure success on the run's evaluation tasks; prints JSON."""
    if passes is not None and not regimes:
        raise click.UsageError("--passes is about --regimes: add it, or leave --passes out")
    loaded = with_its_data(loaded_run(file, overrides), runs)
    checked(loaded, runs)
    from ..session import eval_session

    sys.exit(stoppable(lambda stop: eval_session(loaded, runs, model, stop, regimes, passes or 1)))


@cli.command()
@click.argument("folder", type=LOCAL_PATH)
@click.argument("target", type=LOCAL_PATH)
def export(folder: Path, target: Path) -> None:
    """Write the last checkpoint of a run FOLDER as a Hugging Face model to TARGET."""
    from ..session import export_session

    sys.exit(stoppable(lambda stop: export_session(folder, target, stop)))


@cli.command()
@click.argument("folder", type=LOCAL_PATH)
@click.option("--once", is_flag=True, help="print one table and end")
@click.option("--rows", type=click.IntRange(min=1), help="phones that are shown at most; default: what fits")
def top(folder: Path, once: bool, rows: int | None) -> None:
    """Show the phones of the run in FOLDER, those with troubles first, as they change."""
    from ..run.fleet import FleetError, show
    from ..run.folder import run_of

    try:
        show(folder, once=once, rows=rows)
    except FleetError as error:
        with as_message():
            run_of(folder)
        raise Problem(str(error)) from error


for _command in (
    agent,
    cluster,
    collect,
    compare,
    data,
    doctor,
    env,
    explain,
    init,
    judge,
    list_runs,
    phone,
    preset,
    relearn,
    rescore,
    samples,
    show,
    tasks,
    teacher,
    view,
):
    cli.add_command(_command)


@cli.group()
def tiny() -> None:
    """The tiny model."""


@tiny.command(name="build")
@click.option("--output", type=LOCAL_PATH, help="folder; default: the user's cache")
@click.option("--seed", default=0, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="optimizer steps; default: the full 2,500")
def build_tiny(output: Path | None, seed: int, steps: int | None) -> None:
    """Train the tiny base from random weights: supervised grounding, about ten minutes."""
    from ..model_source.tiny_base import cache_folder
    from ..tiny.build import STEPS, build

    folder = output or cache_folder()
    if folder.exists() and not folder.is_dir():
        raise Wrong(f"{folder} is a file; name a folder")

    def report(step: int, seconds: float, accuracy: dict[int, float]) -> None:
        shares = "  ".join(f"{icons}: {share:.2f}" for icons, share in accuracy.items())
        click.echo(f"{seconds:6.0f} s  step {step:5d}  right answers by number of icons  {shares}")

    with as_message():
        folder.mkdir(parents=True, exist_ok=True)  # before ten minutes of training
        build(folder, seed=seed, steps=steps or STEPS, report=report)
    click.echo(f"the tiny base is in {folder}")


def _driven(attempt: RunAttempt, read: Callable[[], TrainingRun], grace: float) -> int:
    """Runs the driver of a run on a cluster."""
    from tapforge_envs.slots.broker_calls import Access

    from ..cluster.driver import NEED, drive
    from ..cluster.prestop import registered
    from ..run.shutdown import StopSignal, force_exit, handling_signals

    async def driving() -> int:
        stop = StopSignal(grace)
        with handling_signals(stop):
            access = Access.of(os.environ, NEED)
            return await drive(attempt, access, read, stop, lambda: force_exit(stop.exit_code))

    log()
    with as_message(), registered(os.environ):
        return asyncio.run(driving())


def _supervised(arguments: list[str], restarts: int, file: Path) -> int:
    """Runs the driver in a process of its own, again after a crash."""
    from ..cluster.prestop import registered
    from ..run.supervisor import driver_command, supervise

    if str(file) == "-":
        raise Wrong("--restarts reads the file again after a crash: name a file instead of -")

    async def report_killed(environment: Mapping[str, str], message: str) -> None:
        from ..cluster.driver import report_killed

        await report_killed(environment, message)

    log()
    with registered(os.environ):
        return asyncio.run(supervise(driver_command(arguments), restarts, os.environ, report_killed=report_killed))


if __name__ == "__main__":
    main()
