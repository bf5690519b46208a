"""`tapforge agent`: what a model adapter asks and understands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .reading import LOCAL_PATH, file_option, overridable, read_run
from .waiting import saying

if TYPE_CHECKING:
    from tapforge_api import TrainingRun
    from tapforge_envs.protocol import Observation


@click.group()
def agent() -> None:
    """Model adapters: prompts, actions, coordinates."""


@agent.command()
@click.argument("model", type=LOCAL_PATH, required=False)
@file_option("TrainingRun whose model and adapter count; - reads it from stdin", required=False)
@overridable
@click.option("--task", default="Open the Clock", show_default=True, help="what the agent is asked to do")
@click.option("--adapter", help="adapter; default: the file's, or the one of the model's makers")
@click.option("--prompt-file", type=LOCAL_PATH, help="Jinja file instead of the adapter's prompt")
@click.option("--context", help="entry point of tapforge.contexts that adds to the prompt")
@click.option("--image", type=LOCAL_PATH, help="PNG, JPEG or WebP of a screen; default: simulated phone")
@click.option("--width", type=click.IntRange(32, 4096), help="of the simulated phone; default: the file's, or 1080")
@click.option("--height", type=click.IntRange(32, 4096), help="of the simulated phone; default: the file's, or 2400")
@click.option("--step", type=click.IntRange(1, 200), default=1, show_default=True, help="step of the episode")
@click.option("--history-images", type=click.IntRange(1, 64), help="images in a prompt; default: the file's, or 1")
@click.option("--min-pixels", type=click.IntRange(1), help="of a frame as the model sees it")
@click.option("--max-pixels", type=click.IntRange(1), help="of a frame as the model sees it")
@click.option("--ids", is_flag=True, help="print the token ids too")
def show(model: Path | None, file: Path | None, overrides: tuple[str, ...], ids: bool, **given: Any) -> None:
    """Print one step's prompt, its token counts, and a canonical answer for each action.

    MODEL is a model folder; without it the model is the file's, of which all but the weights are fetched.
    """
    from tapforge_api import SpecError
    from tapforge_envs.protocol import EnvironmentFault

    from ..model_source.ref import ModelError, ModelRefused
    from ..run.assembly import ConfigurationError

    try:
        with saying("reading the model's tokenizer and texts"):
            text = _shown(model, file, overrides, ids=ids, **given)
        click.echo(text)
    except (SpecError, ConfigurationError, ModelRefused, ValueError, OSError, EnvironmentFault) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except ModelError as error:
        raise click.ClickException(str(error)) from error


def _shown(
    model: Path | None,
    file: Path | None,
    overrides: tuple[str, ...],
    *,
    ids: bool,
    task: str,
    adapter: str | None,
    image: Path | None,
    width: int | None,
    height: int | None,
    step: int,
    **given: Any,
) -> str:
    from ..agents.chat_agent import ChatAgent
    from ..agents.registry import make_agent
    from ..agents.show import history_of, render, shown
    from ..run.adapters import adapter_options

    run = _run(file, overrides)
    folder = model if model is not None else _folder(run, file)
    options = adapter_options(run) | {name: value for name, value in given.items() if value is not None}
    name = adapter or (run.spec.model.adapter.name if file is not None else _adapter(folder))
    made = make_agent(name, folder, **options)
    if not isinstance(made, ChatAgent):
        raise ValueError(f"the adapter {name} is another package's, which shows its prompts itself")
    screen = run.spec.environment.screen
    size = (screen.width, screen.height) if file is not None else (1080, 2400)
    screens = _screens(image, width or size[0], height or size[1], step)
    history = history_of(made, screens[:-1]) if step > 1 else []
    return render(shown(made, task, history, screens[-1]), ids=ids)


def _run(file: Path | None, overrides: tuple[str, ...]) -> TrainingRun:
    from tapforge_api import load

    if file is not None:
        return read_run(file, overrides)
    text = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: shown}\nspec: {}\n"
    return load(text, overrides=overrides)


def _folder(run: TrainingRun, file: Path | None) -> Path:
    if file is None:
        raise ValueError("name a model folder, or a TrainingRun with -f")
    from ..model_source.resolve import pin, resolve

    return resolve(pin(run.spec.model.source), weights=False)


def _adapter(folder: Path) -> str:
    from ..agents.registry import agent_names, model_type
    from ..learner.families import families

    if not folder.is_dir():
        raise ValueError(f"the model folder {folder} does not exist")
    found = model_type(folder)
    family = families().get(found)
    if family is not None and family.adapter is not None:
        return family.adapter
    raise ValueError(
        f"--adapter is needed: config.json of {folder} says {found or 'nothing'!r}, for which several adapters may be "
        f"right; known are {', '.join(agent_names())}"
    )


def _screens(image: Path | None, width: int, height: int, step: int) -> list[Observation]:
    """One for each step up to this one."""
    from tapforge_envs.protocol import Frame, Observation

    if image is not None:
        from PIL import Image, UnidentifiedImageError

        try:
            data = image.read_bytes()
            with Image.open(image) as opened:
                size = opened.size
                kind = Image.MIME.get(opened.format or "", "image/png")
        except OSError as error:
            why = "is not a PNG, JPEG or WebP" if isinstance(error, UnidentifiedImageError) else error.strerror
            raise ValueError(f"--image: {image}: {why}") from error
        return [Observation(Frame.of(data, *size, kind))] * step
    from tapforge_envs.phone import catalog
    from tapforge_envs.protocol import Tap

    phone = catalog.phone_for("standard", width, height)
    task = catalog.tasks("standard", "train").sample(0, 0)
    seen = [phone.reset(task.seed, catalog.rules_of(task))]
    while len(seen) < step:
        seen.append(phone.step(Tap(x=0.5, y=0.5)).observation)
    return seen
