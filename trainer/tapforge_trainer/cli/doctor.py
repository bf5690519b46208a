"""`tapforge doctor`: whether this machine can run what a file asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .reading import RUNS, FileCommand, file_option, overridable, read_run
from .waiting import saying


@click.command(cls=FileCommand)
@file_option("TrainingRun as YAML; - reads it from stdin; without it: the machine alone", required=False)
@overridable
@RUNS
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def doctor(file: Path | None, overrides: tuple[str, ...], runs: Path, output: str) -> None:
    """Check this machine for a run: GPUs, driver, memory, disks, hub, model. Exit code 1 when something can't work."""
    from tapforge_api import SpecError

    from ..doctor.command import examine
    from ..doctor.findings import as_json, as_text, worst

    try:
        run = None if file is None else read_run(file, overrides)
    except SpecError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    with saying("looking at this machine, and asking the hub where a model is fetched"):
        findings = examine(run, runs)
    click.echo(as_json(findings) if output == "json" else as_text(findings))
    sys.exit(1 if worst(findings) == "fail" else 0)
