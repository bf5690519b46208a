"""`tapforge init`: a run's first file from three questions."""

from __future__ import annotations

from pathlib import Path

import click

from ..run.first_file import ENVIRONMENTS, TASKS, TINY, Asked, NoFile, first_file
from .reading import LOCAL_PATH


@click.command()
@click.argument("file", type=LOCAL_PATH, default=Path("run.yaml"))
@click.option(
    "--environment",
    type=click.Choice(ENVIRONMENTS),
    prompt="Environment",
    default="simulated",
    help="what the model acts on",
)
@click.option(
    "--model", prompt="Model (tiny, OWNER/NAME of Hugging Face or a folder)", default=TINY, help="initial weights"
)
@click.option(
    "--gpus", type=click.IntRange(0, 1024), prompt="GPUs", default=0, help="for learner and engines together; 0: none"
)
@click.option("--cluster", is_flag=True, help="for Kubernetes, rather than for this machine")
@click.option("--force", is_flag=True, help="replace what is there")
def init(file: Path, environment: str, model: str, gpus: int, cluster: bool, force: bool) -> None:
    """Write a commented FILE of a run (default: run.yaml) that `tapforge plan` takes, and tasks.jsonl beside it where
    the environment needs tasks of yours. Asks for what no option says."""
    name = file.stem.lower().replace("_", "-").replace(".", "-")
    name = "".join(letter for letter in name if letter.isascii() and (letter.isalnum() or letter == "-")).strip("-")
    beside = file.parent / "tasks.jsonl"
    try:
        text = first_file(Asked(name or "run", environment, model, gpus, cluster, str(beside)))  # type: ignore[arg-type]
    except NoFile as error:
        raise click.UsageError(str(error)) from error
    written = {file: text}
    if tasks := TASKS.get(environment):
        written[beside] = tasks
    for path in written:
        if path.exists() and not force:
            raise click.UsageError(f"{path} is there already: name another file, or add --force")
    for path, content in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        click.echo(f"wrote {path}")
    click.echo(f"next: tapforge plan -f {file}" + (f", tapforge plan --memory -f {file}" if gpus else ""))
