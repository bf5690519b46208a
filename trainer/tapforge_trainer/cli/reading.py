"""How every command reads the files and paths that it is given.

- `LOCAL_PATH` is the type of each argument that names a file or folder: `storage/local_path.py` says what it means.
- `read_run` reads a TrainingRun from a file or, with `-`, from standard input, whatever comes there, and reads the
  paths in it. Raises SpecError.
- A command that needs a file says how it is named when it is named without `-f`; a command that is called otherwise
  elsewhere (`train`) is answered with ours.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from .failing import Wrong

if TYPE_CHECKING:
    from tapforge_api import Source, TrainingRun

F = TypeVar("F", bound=Callable[..., Any])

#: in a context's `meta`: the preset that was asked for, or None
PRESET: Final = "tapforge.preset"
#: there, too: what standard input said; it can be read once
_STDIN_TEXT: Final = "tapforge.stdin"

_STDIN: Final = "-"
_NAMES: Final = ("-f", "--file")
#: of files that a person may mean by a bare word
_SUFFIXES: Final = (".yaml", ".yml", ".json")


class _LocalPath(click.ParamType):
    name = "path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from ..storage.local_path import PathError, local_path

        try:
            return value if isinstance(value, Path) else local_path(str(value))
        except PathError as error:
            self.fail(str(error), param, ctx)


LOCAL_PATH: Final = _LocalPath()


#: what people call a command that is called otherwise here
_MEANT: Final[Mapping[str, str]] = {
    "bench": "env bench",
    "build": "tiny build",
    "calibrate": "judge calibrate",
    "check": "plan",
    "dry-run": "plan",
    "eval-only": "eval",
    "evaluate": "eval",
    "fetch": "cluster fetch",
    "fit": "run",
    "generate": "tasks generate",
    "dashboard": "view --serve",
    "list": "ls",
    "logs": "cluster logs",
    "memory": "plan --memory",
    "play": "env play",
    "replay": "view",
    "report": "view",
    "resume": "run",
    "serve": "phone serve",
    "start": "run",
    "status": "top",
    "submit": "cluster submit",
    "test": "eval",
    "train": "run",
    "validate": "plan",
    "watch": "top",
}


class Commands(click.Group):
    """The commands; one that is called otherwise here is named by what it does, not by how it is spelt. A package
    that a command needs and this environment lacks is an error with the command that installs it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        meant = _MEANT.get(args[0].lower()) if args and args[0] not in self.commands else None
        if meant is not None and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean `{ctx.command_path} {meant}`?", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            from tapforge_api.installing import how_to_install

            if (command := how_to_install(error.name or "")) is None:
                raise
            raise Wrong(f"{error.name} is not installed here: {command}") from error


class FileCommand(click.Command):
    """A command with -f: its error says to write it where a file is named without."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if (word := _bare_file(given, self.params)) is not None:
                rest = shlex.join(one for one in given if one != word)
                typed = f"{ctx.command_path} -f {word}" + (f" {rest}" if rest else "")
                raise click.UsageError(f"name the file {word} with -f: {typed}", ctx) from error
            raise


def _bare_file(words: Sequence[str], params: Sequence[click.Parameter]) -> str | None:
    """The word that names a file without -f; None: there is none, or -f is there."""
    if any(word in _NAMES or word.startswith(("--file=", "-f")) for word in words):
        return None
    valued = {name for param in params if isinstance(param, click.Option) and not param.is_flag for name in param.opts}
    named = (
        word
        for word, last in zip(words, ["", *words], strict=False)
        if last not in valued and (word == _STDIN or (word.endswith(_SUFFIXES) and not word.startswith("-")))
    )
    return next(named, None)


def file_option(words: str = "TrainingRun as YAML; - reads it from stdin", required: bool = True) -> Callable[[F], F]:
    return click.option(*_NAMES, "file", required=required, type=LOCAL_PATH, help=words)


def overridable(command: F) -> F:
    """`--set` and `--preset`, as one list of overrides; a preset's give way to the file and to `--set`."""

    @wraps(command)
    def with_preset(*args: Any, overrides: tuple[str, ...], preset: str | None, **options: Any) -> Any:
        from ..algorithms.presets import UnknownPreset
        from ..algorithms.presets import preset as named

        try:
            beneath = () if preset is None else tuple(value.override for value in named(preset).values)
        except UnknownPreset as error:
            raise click.BadParameter(str(error), param_hint="--preset") from error
        click.get_current_context().meta[PRESET] = preset
        return command(*args, overrides=(*overrides, *beneath), **options)

    what = "learning rule whose values stand wherever the file says nothing: tapforge preset"
    added = click.option("--preset", metavar="NAME", help=what)(with_preset)
    words = "override a field: spec.seed=3; PATH?=VALUE: unless the file says it"
    return cast(F, click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help=words)(added))


RUNS = click.option("--runs", type=LOCAL_PATH, default=Path("runs"), show_default=True, help="folder of all runs")


def source_of(file: Path) -> Source:
    """What `load` reads. Raises SpecError for standard input that is not text."""
    from tapforge_api import Problem, SpecError, Text

    if str(file) != _STDIN:
        return file
    name = "standard input"
    meta = context.meta if (context := click.get_current_context(silent=True)) is not None else {}
    if _STDIN_TEXT not in meta:
        if sys.stdin.isatty():
            click.echo("reading the file from standard input, until Ctrl-D", err=True)
        meta[_STDIN_TEXT] = sys.stdin.buffer.read()
    try:
        return Text(meta[_STDIN_TEXT].decode(), name)
    except UnicodeDecodeError as error:
        raise SpecError(name, [Problem(f"is not UTF-8 text: {error.reason} at byte {error.start}")]) from error


def read_run(file: Path, overrides: Sequence[str]) -> TrainingRun:
    """A file with a cluster may name what is in its Pods only, where Ray's address is. Raises SpecError."""
    from tapforge_api import load

    from ..run.named_paths import with_named_paths

    run = load(source_of(file), overrides)
    source = "standard input" if str(file) == _STDIN else str(file)
    elsewhere = run.spec.cluster is not None and not os.environ.get("RAY_ADDRESS")
    return with_named_paths(run, source, elsewhere=elsewhere)
