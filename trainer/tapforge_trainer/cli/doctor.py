"""`tapforge doctor`: whether this machine can run what a file asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.option(
    "-f", "--file", "file", type=click.Path(path_type=Path), help="TrainingRun as YAML; without it: the machine alone"
)
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="override a field: spec.seed=3")
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="folder of all runs"
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def doctor(file: Path | None, overrides: tuple[str, ...], runs: Path, output: str) -> None:
    """Check this machine for a run: GPUs, driver, memory, disks, hub, model. Exit code 1 when something can't work."""
    from tapforge_api import SpecError, load

    from ..doctor.command import examine
    from ..doctor.findings import as_json, as_text, worst

    try:
        run = None if file is None else load(sys.stdin.read() if str(file) == "-" else file, overrides=overrides)
    except (SpecError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    findings = examine(run, runs)
    click.echo(as_json(findings) if output == "json" else as_text(findings))
    sys.exit(1 if worst(findings) == "fail" else 0)
