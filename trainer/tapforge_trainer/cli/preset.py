"""`tapforge preset`: learning rules by name, and what each of them sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from .reading import PRESET

if TYPE_CHECKING:
    from tapforge_api import TrainingRun

    from ..algorithms.presets import Preset


@click.command()
@click.argument("name", required=False)
def preset(name: str | None) -> None:
    """List learning rules, or print what NAME sets as a part of a file, each value with its source. On this machine
    `--preset NAME` of plan, run, doctor and cluster submit does the same; what the file says itself wins."""
    from ..algorithms.presets import PRESETS, UnknownPreset
    from ..algorithms.presets import preset as named

    if name is None:
        width = max(map(len, PRESETS))
        for one, found in PRESETS.items():
            click.echo(f"{one.ljust(width)}  {found.about}")
        return
    try:
        click.echo("\n".join(as_yaml(named(name))))
    except UnknownPreset as error:
        raise click.UsageError(str(error)) from error


def as_yaml(chosen: Preset) -> Iterator[str]:
    """Lines of a file's part."""
    yield f"# {chosen.about}"
    for one in chosen.left_out:
        yield f"# left out: {one}"
    tree: dict[str, Any] = {}
    for value in chosen.values:
        here, (*above, last) = tree, value.path.split(".")
        for part in above:
            here = here.setdefault(part, {})
        here[last] = f"{value.value}  # {value.source}"
    yield "spec:"
    yield from _lines(tree, 1)


def _lines(tree: dict[str, Any], depth: int) -> Iterator[str]:
    for key, below in tree.items():
        if isinstance(below, dict):
            yield f"{'  ' * depth}{key}:"
            yield from _lines(below, depth + 1)
        else:
            yield f"{'  ' * depth}{key}: {below}"


def in_plan(load: Callable[[tuple[str, ...]], TrainingRun], overrides: tuple[str, ...]) -> str:
    """What the command's preset sets in a run, line by line; "" without one. `load` reads the run with overrides."""
    from tapforge_api import TrainingRun, dump_set
    from tapforge_api.overrides import is_said

    from ..algorithms.presets import preset as named

    if (name := click.get_current_context().meta[PRESET]) is None:
        return ""
    chosen = named(name)
    beneath = {value.override for value in chosen.values}
    said = dump_set(load(tuple(one for one in overrides if one not in beneath)))
    lines = [f"preset {name}: {chosen.about}"]
    for value in chosen.values:
        instead = ": not taken, the file says something itself" if is_said(TrainingRun, said, value.override) else ""
        lines.append(f"  {value.path} {value.value} ({value.source}){instead}")
    return "\n".join([*lines, *(f"  left out: {one}" for one in chosen.left_out), "", ""])
