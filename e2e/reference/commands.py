"""docs/reference/cli.md: every command with its arguments and options, as click has them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from tapforge_operator.main import main as operator
from tapforge_trainer.cli.main import cli

from .words import page, plain, table, wrapped

_INTRODUCTION = (
    "`tapforge COMMAND --help` shows the same in a terminal. [Exit codes](../runs.md#stop-and-resume) are the same for "
    "all commands. [Its reference](../operator-reference.md#flags) explains the flags of `tapforge-operator`."
)


def commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Those that do something, in order of their names."""
    if not isinstance(command, click.Group):
        yield words, command
        return
    for name, child in sorted(command.commands.items()):
        if not child.hidden:
            yield from commands(child, (*words, name))


def cli_page() -> str:
    found = [*commands(cli, ("tapforge",)), (("tapforge-operator",), operator)]
    blocks = [block for words, command in found for block in _command(words, command)]
    return page("Commands", _INTRODUCTION, *blocks)


def _command(words: tuple[str, ...], command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(words))
    yield f"## {' '.join(words)}"
    yield f"```\n{' '.join([*words, *command.collect_usage_pieces(context)])}\n```"
    for paragraph in re.split(r"\n\s*\n", (command.help or "").replace("\b", "")):
        if paragraph.strip():
            yield wrapped(plain(paragraph))
    options = [param for param in command.get_params(context) if isinstance(param, click.Option) and not param.hidden]
    rows = [_option(option, context) for option in options if "--help" not in option.opts]
    if rows:
        yield table(("option", "value", ""), rows)


def _option(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    names = "`" + " / ".join([", ".join(option.opts), *filter(None, [", ".join(option.secondary_opts)])]) + "`"
    value = "" if option.is_flag or option.count else f"`{option.make_metavar(context)}`".replace("|", "\\|")
    default = option.default
    shown = (
        isinstance(default, str | int | float)
        and not isinstance(default, bool)
        and default != ""
        and not option.is_flag
        and "default" not in (option.help or "")
    )
    said = [
        plain((option.help or "").rstrip(".")),
        "required" if option.required else "",
        "repeatable" if option.multiple else "",
    ]
    if shown:
        said.append(f"default `{default}`")
    return names, value, "; ".join(filter(None, said))
