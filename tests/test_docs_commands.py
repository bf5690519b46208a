"""Commands of README and docs, found by their fences, do what the pages say as far as that can be tried here.

- `tapforge` commands that plan, show, explain, print or convert are run, page by page, in a temporary folder.
- All others of `tapforge` and `tapforge-operator` have their names, options and values read by click's own parser, and
  their `--set` by the API: on the file that they name, or on the quickstart's where a page's reader writes the file.
- `python -m` and `make` name modules, options and targets that exist.
- Files of the checkout that any command names exist. Every other program is in `ELSEWHERE`, with what it needs.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import click
import pytest
from click.testing import CliRunner
from tests.fenced import Command, commands

from tapforge_api.errors import SpecError
from tapforge_api.loading import load
from tapforge_operator.main import main as operator
from tapforge_trainer.algorithms.presets import preset
from tapforge_trainer.cli.main import cli

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "charts/tapforge/README.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "reference"),
]
COMMANDS: Final = {page: list(commands(page, ROOT)) for page in PAGES}
ALL: Final = [one for found in COMMANDS.values() for one in found]

#: commands that are run: they start no phones, engines or servers, and ask nothing of another machine
RUN: Final = {
    "agent show",
    "data convert",
    "data demo",
    "data inspect",
    "data split",
    "explain",
    "init",
    "judge prompt",
    "plan",
    "preset",
}
#: programs that are not run, and what they need
ELSEWHERE: Final = {
    "adb": "a phone",
    "apt-get": "root",
    "cd": "",
    "cosign": "a registry",
    "cp": "",
    "ctr": "a node",
    "curl": "a server",
    "crane": "a registry",
    "echo": "",
    "docker": "a registry",
    "export": "",
    "git": "a network",
    "gpg": "a key",
    "grep": "",
    "head": "",
    "helm": "a cluster",
    "kubectl": "a cluster",
    "openssl": "",
    "pip": "a network",
    "podman": "a registry",
    "pipx": "a network",
    "python3": "",
    "ray": "GPUs",
    "sbatch": "Slurm",
    "sha256sum": "",
    "skopeo": "a registry",
    "tar": "",
    "uv": "a network",
}
#: commands that a page shows for their error
REFUSED: Final = {
    ("docs/gpus.md", "tapforge plan -f manifests/samples/run-qwen3-vl-8b.yaml --set spec.engine.replicas=5")
}
_FILES: Final = re.compile(r"^(?:manifests|charts|crds|bench|operator|trainer|tests)/[\w./-]+$")


def _command(words: tuple[str, ...]) -> tuple[str, click.Command, list[str]]:
    """Name, command and arguments of a `tapforge` line."""
    command, names, rest = cli, [], list(words[1:])
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        names.append(rest.pop(0))
        found = command.commands.get(names[-1])
        assert found is not None, f"there is no command {' '.join(names)}"
        command = found
    return " ".join(names), command, rest


def _parsed(command: click.Command, rest: list[str]) -> dict[str, Any]:
    """Values by parameter, of their types but for files, which need not be there. Raises UsageError."""
    context = click.Context(command)
    values, left, _ = command.make_parser(context).parse_args(list(rest))
    if "--help" not in rest and left and not context.allow_extra_args:
        raise click.UsageError(f"too many arguments: {left}")
    for param in command.get_params(context):
        value = values.get(param.name)
        missing = value is None or repr(value) == "Sentinel.UNSET"
        if repr(value) == "Sentinel.FLAG_NEEDS_VALUE":  # an option that may stand alone
            value = param.flag_value if isinstance(param, click.Option) else value
        if param.required and missing and param.name not in ("file", "help"):
            raise click.MissingParameter(param=param, ctx=context)
        if missing or isinstance(param.type, click.Path | click.File):
            continue
        if not (isinstance(value, str) and "SUBSTITUTED" in value):
            param.type_cast_value(context, value)
    return values


def test_there_are_commands() -> None:
    assert len(ALL) > 200 and sum(one.program == "tapforge" for one in ALL) > 80
    assert {(one.page, " ".join(one.words)) for one in ALL} >= REFUSED


@pytest.mark.parametrize("command", [one for one in ALL if one.program == "tapforge"], ids=str)
def test_names_and_options_are_those_of_the_command(command: Command) -> None:
    _, found, rest = _command(command.words)
    values = _parsed(found, rest)
    overrides = values.get("overrides")
    if isinstance(overrides, list | tuple) and overrides:
        file = values.get("file")
        there = ROOT / file if isinstance(file, str) else None
        sample = there if there and there.is_file() else ROOT / "manifests" / "samples" / "quickstart.yaml"
        try:
            load(sample, [one for one in overrides if "SUBSTITUTED" not in one])
        except SpecError as error:  # a rule between fields that the reader's own file keeps
            assert there is None or not there.is_file(), str(error)
            assert not [str(problem) for problem in error.problems if str(problem).startswith("--set")]
    if isinstance(name := values.get("preset"), str):
        preset(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_inside_of_sentences_are_there(page: Path) -> None:
    """Their names and options; values and files are often left out there."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for said in re.findall(r"`(?:\.venv/bin/)?(tapforge [a-z][^`]*)`", text):
        words = tuple(said.split())
        _, command, rest = _command(tuple(word for word in words if re.fullmatch(r"-{0,2}[a-z][a-z-]*|-[a-z]", word)))
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
        assert not {word for word in rest if word.startswith("--")} - known, said


@pytest.mark.parametrize("command", [one for one in ALL if one.program == "tapforge-operator"], ids=str)
def test_flags_of_the_operator_are_there(command: Command) -> None:
    _parsed(operator, list(command.words[1:]))


@pytest.mark.parametrize("page", [page for page in PAGES if COMMANDS[page]], ids=lambda page: page.stem)
def test_what_plans_shows_and_converts_does(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order, with the samples that it copies; a line that reads what an earlier one, not run here, would
    have written is left out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manifests").symlink_to(ROOT / "manifests")
    for command in COMMANDS[page]:
        if command.program == "cp" and len(command.words) == 3 and Path(command.words[1]).is_file():
            shutil.copy(command.words[1], Path(command.words[2]).name)
        if command.program != "tapforge":
            continue
        name, _, rest = _command(command.words)
        if name in RUN and all((tmp_path / file).exists() for file in _read(name, rest)):
            done = CliRunner().invoke(cli, list(command.words[1:]), input="\n\n\n\n")
            refused = (command.page, " ".join(command.words)) in REFUSED
            assert done.exit_code == (2 if refused else 0), f"{command}\n{done.output}"


def _read(name: str, rest: list[str]) -> Iterator[str]:
    """Files and folders that a command reads."""
    yield from (word for before, word in itertools.pairwise(rest) if before in ("-f", "--file"))
    if name in ("data inspect", "data split"):
        yield rest[0]
    if name == "data convert":
        yield rest[1]


@pytest.mark.parametrize("command", [one for one in ALL if one.program == "python" and "-m" in one.words], ids=str)
def test_modules_and_their_options_are_there(command: Command) -> None:
    module, *rest = command.words[command.words.index("-m") + 1 :]
    assert importlib.util.find_spec(module) is not None
    options = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert module == "pytest" or not options or not {one for one in options if one not in _help(module)}


@cache
def _help(module: str) -> str:
    words = [sys.executable, "-m", module, "--help"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout


def test_every_make_target_of_a_page_is_there() -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    rules |= {f"bench-{script.stem}" for script in (ROOT / "bench").glob("*.py")}
    asked = {(str(one), word) for one in ALL if one.program == "make" for word in one.words[1:] if "=" not in word}
    assert asked and not [name for name, word in asked if word not in rules]


@pytest.mark.parametrize("command", [one for one in ALL if one.words[:2] == ("make", "demo")], ids=str)
def test_what_make_demo_gets_is_a_run(command: Command) -> None:
    """ARGS are split once more, by the shell of the rule."""
    given = [shlex.split(word.removeprefix("ARGS=")) for word in command.words[2:] if word.startswith("ARGS=")]
    sample = "manifests/samples/quickstart.yaml"
    _, found, rest = _command(("tapforge", "run", "-f", sample, *(given[0] if given else ())))
    load(ROOT / sample, _parsed(found, rest).get("overrides") or ())


def test_every_file_of_the_checkout_that_is_named_is_there() -> None:
    named = {(str(one), word) for one in ALL for word in one.words if _FILES.match(word)}
    assert named and not [name for name, word in named if not (ROOT / word).exists()]


def test_every_other_program_is_known_not_to_be_run_here() -> None:
    known = {"tapforge", "tapforge-operator", "python", "make", *ELSEWHERE}
    assert not [str(one) for one in ALL if one.program not in known]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tapforge plan -f run.yaml --memory", None),
        ("tapforge plan -f run.yaml --memori", "--memori"),
        ("tapforge plan -f run.yaml --output yaml", "yaml"),
        ("tapforge env chek http://127.0.0.1:8000", "chek"),
        ("tapforge export runs/first", "target"),
        ("tapforge show runs/first runs/second", "too many"),
    ],
)
def test_this_finds_what_is_wrong(tmp_path: Path, line: str, found: str | None) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```sh\nKEY=1 {line}   # why\n```\n")
    (command,) = commands(page, tmp_path)
    if found is None:
        _, known, rest = _command(command.words)
        _parsed(known, rest)
        return
    with pytest.raises((click.UsageError, AssertionError), match=found) as wrong:
        _, known, rest = _command(command.words)
        _parsed(known, rest)
    assert wrong
