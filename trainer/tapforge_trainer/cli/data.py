"""`tapforge data`: episodes as data."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click

from .failing import as_message
from .reading import LOCAL_PATH
from .waiting import saying

OUT = click.option("-o", "--out", type=LOCAL_PATH, required=True, help="folder of the new data set")


@click.group()
def data() -> None:
    """Data sets: episodes of recordings, people and published files in one format."""


@data.command()
@click.argument("folder", type=LOCAL_PATH)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def inspect(folder: Path, output: str) -> None:
    """Say what the data set FOLDER holds, and what was left out when it was made."""
    from ..data.inspect import inspect as inspected
    from ..data.inspect import lines

    with as_message():
        found = inspected(folder)
    click.echo(json.dumps(asdict(found), indent=2) if output == "json" else "\n".join(lines(found)))


@data.command()
@click.argument("source")
@click.argument("path", type=LOCAL_PATH)
@OUT
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="of the source, as successes=true")
@click.option(
    "--max-bad",
    type=click.FloatRange(0, 1),
    default=0.1,
    show_default=True,
    help="share of rows that may be left out; with more there is no data set",
)
def convert(source: str, path: Path, out: Path, options: tuple[str, ...], max_bad: float) -> None:
    """Make a data set of what lies at PATH. SOURCE: recording (a run's folder), aguvis, android-control, gui-odyssey,
    rico, screenspot, verl, or one of an installed package (tapforge.datasets)."""
    from ..data.convert import convert as converted
    from ..data.sources import read

    given = dict(option.partition("=")[::2] for option in options)
    with as_message(), saying(f"converting {path}"):
        found = converted(
            read(source, path, given), source, out, {"source": source, "path": str(path), **given}, max_bad
        )
    click.echo(f"{out}: {found.episodes:,} episodes, {found.steps:,} steps")
    for line in found.rejected.lines():
        click.echo(f"left out {line}")


@data.command()
@click.argument("folder", type=LOCAL_PATH)
@OUT
@click.option("--held-out", type=LOCAL_PATH, required=True, help="folder of the other part")
@click.option("--share", type=float, default=0.1, show_default=True, help="of the part that is held out")
@click.option("--by", type=click.Choice(["episode", "task", "template"]), default="task", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def split(
    folder: Path, out: Path, held_out: Path, share: float, by: Literal["episode", "task", "template"], seed: int
) -> None:
    """Divide a data set so that no episode, task or template is in both parts."""
    from ..data.sets import split as parts

    with as_message(), saying(f"dividing {folder}"):
        first, second = parts(folder, out, held_out, share=share, by=by, seed=seed)
    click.echo(f"{out}: {first:,} episodes\n{held_out}: {second:,} episodes")


@data.command()
@click.argument("folders", type=LOCAL_PATH, nargs=-1, required=True)
@OUT
def merge(folders: tuple[Path, ...], out: Path) -> None:
    """Make one data set of several; what they have in common comes once."""
    from ..data.sets import merge as merged

    with as_message(), saying(f"merging {len(folders)} data sets"):
        count = merged(folders, out)
    click.echo(f"{out}: {count:,} episodes")


@data.command()
@click.argument("folder", type=LOCAL_PATH)
@click.option("-o", "--out", type=LOCAL_PATH, help="a new folder; default: in place")
@click.option("--text", "texts", multiple=True, metavar="REGEX", help="replaced by [redacted] in all texts")
@click.option("--box", "boxes", multiple=True, metavar="L,T,R,B", help="of every screen, in shares of it: made black")
@click.option("--episode", "only", multiple=True, metavar="ID", help="only in this one")
def redact(
    folder: Path, out: Path | None, texts: tuple[str, ...], boxes: tuple[str, ...], only: tuple[str, ...]
) -> None:
    """Take private words and places of screens out of a data set."""
    from ..data.redact import redact as redacted
    from ..data.redact import rules_of

    if not (texts or boxes):
        raise click.UsageError("give --text or --box: what is to be taken out")
    with as_message(), saying(f"redacting {folder}"):
        found = redacted(folder, out, rules_of(boxes=boxes, texts=texts, only=only))
    click.echo(f"{out or folder}: {found.screens:,} screens and {found.texts:,} texts of {found.episodes:,} episodes")
    if found.named:
        click.echo(
            f"{found.named:,} episodes hold it in their id, suite or template, which stay: delete these episodes"
        )
    _say_shared(found.shared)


@data.command()
@click.argument("folder", type=LOCAL_PATH)
@click.option("--episode", "episodes", multiple=True, required=True, metavar="ID", help="that goes; may be repeated")
def delete(folder: Path, episodes: tuple[str, ...]) -> None:
    """Delete episodes of a data set with their screens, in place."""
    from ..data.redact import redact as redacted
    from ..data.redact import rules_of

    with as_message(), saying(f"deleting from {folder}"):
        found = redacted(folder, None, rules_of(deleted=episodes))
    click.echo(f"{folder}: {found.episodes:,} episodes, {found.deleted:,} are deleted")
    _say_shared(found.shared)


def _say_shared(count: int) -> None:
    if count:
        click.echo(f"{count:,} of these screens stay, because other episodes show them as well")


@data.command()
@click.argument("folder", type=LOCAL_PATH)
@click.option("-o", "--out", type=LOCAL_PATH, required=True, help="the parquet file")
def export(folder: Path, out: Path) -> None:
    """Write a parquet file, a row per step with its screen, that Hugging Face's tools read."""
    from ..data.sets import export as exported

    with as_message(), saying(f"writing {out}"):
        count = exported(folder, out)
    click.echo(f"{out}: {count:,} rows")


@data.command()
@click.option("-o", "--out", type=LOCAL_PATH, required=True, help="a new folder")
@click.option("--episodes", type=click.IntRange(1), default=40, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def demo(out: Path, episodes: int, seed: int) -> None:
    """Make a small data set in verl's form on the simulated phone, to try `convert` with."""
    from ..data.demo import ROWS
    from ..data.demo import demo as made

    with as_message():
        steps = made(out, episodes=episodes, seed=seed)
    click.echo(f"{out / ROWS}: {episodes:,} episodes, {steps:,} steps")
