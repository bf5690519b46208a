"""`tapforge judge`: judges to try with, and how good a judge is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from .failing import Wrong, as_message
from .reading import LOCAL_PATH

#: columns that the tables need
_WIDTH: Final = 130


@click.group()
def judge() -> None:
    """Judges: models that say whether a task was done."""


class _TemplateRate(click.ParamType):
    """TEMPLATE=RATE."""

    name = "template=rate"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        template, _, rate = str(value).partition("=")
        with contextlib.suppress(ValueError):
            if template and 0 <= float(rate) <= 1:
                return template, float(rate)
        return self.fail(f"{value!r} is not TEMPLATE=RATE with a rate from 0 to 1, as in switch=0.3", param, ctx)


@judge.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8700, show_default=True, help="0 takes a free one")
@click.option("--host", default="127.0.0.1", show_default=True, help="address that it listens on")
@click.option("--model", default="simulated-phone", show_default=True, help="name of the model that it answers as")
@click.option("--error-rate", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="of each answer")
@click.option(
    "--error-rate-of", type=_TemplateRate(), multiple=True, metavar="TEMPLATE=RATE", help="instead, for one template"
)
@click.option(
    "--favour-long",
    is_flag=False,
    flag_value=400,
    type=click.IntRange(1),
    metavar="[CHARACTERS]",
    help="take every episode with so many characters of answers for a success; 400 without a number",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="of the errors")
@click.option("--slow", type=click.FloatRange(0, 3600), default=0.0, metavar="SECONDS", help="wait before an answer")
@click.option("--status", type=click.IntRange(300, 599), help="answer with this status instead")
@click.option("--retry-after", type=click.FloatRange(0), metavar="SECONDS", help="with --status: its Retry-After")
@click.option("--html", is_flag=True, help="answer with a page of HTML")
@click.option("--huge", is_flag=True, help="answer with ten megabytes of HTML")
@click.option("--wrong-model", is_flag=True, help="answer as another model")
@click.option("--prose", is_flag=True, help="answer without a score")
@click.option("--first", type=click.IntRange(1), help="faults hold for so many requests; default: for all")
def serve(
    port: int,
    host: str,
    model: str,
    error_rate: float,
    error_rate_of: tuple[tuple[str, float], ...],
    favour_long: int | None,
    seed: int,
    **faults: Any,
) -> None:
    """Answer as a judge of the simulated phone would, without a model: play the actions again, ask the phone, and err
    at a stated rate. For judges with `prompt: simulated-phone`. Prints one line of JSON with its url."""
    from ..judges.server import Faults, JudgeServer, listen
    from ..judges.simulated import Errors

    if faults["retry_after"] is not None and faults["status"] is None:
        raise click.UsageError("--retry-after is about --status: add it, or leave --retry-after out")
    errors = Errors(error_rate, dict(error_rate_of), favour_long, seed)
    server = JudgeServer(model, errors, Faults(**faults))
    sys.exit(asyncio.run(listen(server, host, port)))


@judge.command(name="train-tiny")
@click.option("--output", type=LOCAL_PATH, help="folder; default: the user's cache, from where runs then take it")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--episodes", type=click.IntRange(64), help="that it learns from; default: 4,000")
@click.option("--steps", type=click.IntRange(1), help="optimizer steps; default: all")
def train_tiny(output: Path | None, seed: int, episodes: int | None, steps: int | None) -> None:
    """Train the tiny judge of the simulated phone from the tiny base, and measure it on held-out episodes."""
    import os

    from ..model_source.tiny_base import base_folder, judge_cache
    from ..tiny.judge import EPISODES, EXAM, FURTHER, STEPS, Exam, train_judge
    from ..tiny.judged_episodes import many

    folder = output or judge_cache()
    if folder.exists() and not folder.is_dir():
        raise Wrong(f"{folder} is a file; name a folder")

    def report(step: int, seconds: float, loss: float, exam: Exam | None) -> None:
        click.echo(f"{seconds:6.0f} s  step {step:5d}  loss {loss:.3f}{f'  {exam}' if exam is not None else ''}")

    with as_message():
        folder.mkdir(parents=True, exist_ok=True)
        processes = len(os.sched_getaffinity(0))
        click.echo("playing episodes of the simulated phone")
        lessons = many(seed, "train", episodes or EPISODES, processes)
        further = many(seed + 1, "train", FURTHER, processes)
        unseen = many(seed, "test", EXAM, processes)
        found = train_judge(
            folder, base_folder(), lessons, further, unseen, seed=seed, steps=steps or STEPS, report=report
        )
    click.echo(f"on {EXAM:,} held-out episodes: {found}")
    click.echo(f"the tiny judge is in {folder}")


@judge.command()
@click.argument("name", required=False)
def prompt(name: str | None) -> None:
    """Print the prompt NAME, to begin one of your own with; without NAME, which ones there are."""
    from ..judges.conventions import CONVENTIONS
    from ..judges.prompt_file import our_source

    if name is None:
        for known, convention in CONVENTIONS.items():
            click.echo(f"{known:22} judges a {convention.kind}")
        return
    if name not in CONVENTIONS:
        raise click.BadParameter(f"there is no prompt {name!r}; known are {', '.join(CONVENTIONS)}", param_hint="NAME")
    click.echo(our_source(name), nl=False)


@judge.command()
@click.argument("folder", type=LOCAL_PATH)
@click.option("--judge", "file", type=LOCAL_PATH, help="YAML of a judge, as in spec.rewards.streams[].judge")
@click.option("--url", help="instead: the endpoint, as in http://127.0.0.1:8700/v1")
@click.option("--model", help="with --url: the model")
@click.option("--api-key-env", metavar="NAME", help="with --url: environment variable that holds its key")
@click.option("--prompt", help="with --url: prompt by name; default: task")
@click.option("--samples", type=click.IntRange(1, 64), help="with --url: votes; default: 1")
@click.option("--temperature", type=click.FloatRange(0, 2), help="with --url; default: 0, and 1 for several samples")
@click.option("--voting", type=click.Choice(["unanimous", "majority", "any"]), help="with --url; default: majority")
@click.option(
    "--of",
    type=click.Choice(["rollout", "evaluation"]),
    default="rollout",
    show_default=True,
    help="episodes of training or of measurements",
)
@click.option("--episodes", type=click.IntRange(1), help="judge so many, spread over the run; default: all")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="of the intervals")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def calibrate(
    folder: Path, file: Path | None, of: str, episodes: int | None, seed: int, output: str, **flags: Any
) -> None:
    """Judge the recorded episodes of a run FOLDER and compare with its verifier: precision, recall, kappa, by template,
    voting rule and length, and how much of the gain false verdicts could explain. Also written to
    FOLDER/calibration/calibration.json."""
    from rich.console import Console

    from ..run.calibrate import as_json, judge_spec, tables
    from ..run.calibrate import calibrate as calibrated
    from .waiting import saying

    if (file is None) == (flags["url"] is None):
        raise click.UsageError("name the judge: either --judge FILE, or --url URL with --model NAME")
    given = {name: value for name, value in flags.items() if value is not None}
    if file is not None and given:
        raise click.UsageError(f"--judge says all of it: leave out --{next(iter(given)).replace('_', '-')}")
    if file is None and "model" not in given:
        raise click.UsageError("--url needs --model NAME")
    with as_message():
        spec, say = judge_spec(file, given), partial(click.echo, err=True)
        with saying(f"judging the episodes in {folder}"):
            found = asyncio.run(calibrated(folder, spec, part=of, limit=episodes, seed=seed, say=say))
    if output == "json":
        click.echo(json.dumps(as_json(found), indent=2))
        return
    console = Console(width=max(Console().width, _WIDTH))
    for one in tables(found):
        console.print(one, highlight=False)
