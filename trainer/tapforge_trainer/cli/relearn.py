"""`tapforge relearn`, `rescore` and `compare`: what recorded runs would be under other rules, and beside each other."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from .failing import as_message
from .reading import LOCAL_PATH
from .waiting import saying


@click.command()
@click.argument("folder", type=LOCAL_PATH)
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="an algorithm of yours, too")
@click.option("--gradients", is_flag=True, help="compute gradients as well: loads the model, needs every screen")
@click.option("--weights", type=LOCAL_PATH, metavar="FOLDER", help="of which gradients are; else the run's first ones")
@click.option("--updates", type=click.IntRange(1), help="of so many first updates; else of all")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def relearn(
    folder: Path,
    overrides: tuple[str, ...],
    gradients: bool,
    weights: Path | None,
    updates: int | None,
    output: str,
) -> None:
    """Say what other advantages would have made of the episodes that a run FOLDER has recorded: those of all presets
    (`tapforge preset`), compared with the run's own step by step; with --gradients their gradients as well. Nothing is
    learned."""
    if weights is not None and not gradients:
        raise click.UsageError("--weights is of --gradients: give both")
    from ..run.relearn import lines
    from ..run.relearn import relearn as compared

    with as_message(), saying(f"reading the recording in {folder}"):
        found = compared(folder, overrides, gradients=gradients, weights=weights, updates=updates)
    click.echo(json.dumps(asdict(found), indent=2) if output == "json" else "\n".join(lines(found)))


@click.command()
@click.argument("folder", type=LOCAL_PATH)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="the other rewards, as in spec.rewards.success=judge",
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def rescore(folder: Path, overrides: tuple[str, ...], output: str) -> None:
    """Ask for the rewards of the episodes that a run FOLDER has recorded anew, as --set says, and show what changed.
    The run stays as it is; what judges say is kept in FOLDER/rescored."""
    from ..run.rescore import lines
    from ..run.rescore import rescore as rescored

    with as_message(), saying(f"asking for rewards of the episodes in {folder}"):
        found = asyncio.run(rescored(folder, overrides, say=partial(click.echo, err=True)))
    click.echo(json.dumps(asdict(found), indent=2) if output == "json" else "\n".join(lines(found)))


@click.command()
@click.argument("first", type=LOCAL_PATH)
@click.argument("second", type=LOCAL_PATH)
@click.option("--of", "name", default="after-sampled", show_default=True, help="measurement of both")
@click.option("--of-first", "first_name", help="another one of the first, such as before-sampled")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="of the interval")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def compare(first: Path, second: Path, name: str, first_name: str | None, seed: int, output: str) -> None:
    """Say which of two runs FIRST and SECOND succeeds more, task by task, with the interval of the difference. The same
    folder twice with --of-first before-sampled is a run's gain."""
    from ..run.compare import compare as compared
    from ..run.compare import lines

    with as_message():
        found = compared(first, second, name=first_name or name, other=name, seed=seed)
    click.echo(json.dumps(asdict(found), indent=2) if output == "json" else "\n".join(lines(found)))
