"""What holds for the checkout as a whole: the lock, the start of the command, the documented commands, and that no
tracked file knows the machine it was written on.
"""

from __future__ import annotations

import ast
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "cpu.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "ray", "vllm", "transformers", "matplotlib", "safetensors", "tokenizers")


def _pins() -> list[str]:
    return [line for line in LOCK.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]


def test_the_lock_holds_one_version_per_package_and_no_address() -> None:
    pins = _pins()
    wrong = [line for line in pins if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[0-9][A-Za-z0-9.!+]*", line)]
    assert not wrong, "neither options, addresses nor ranges: `make lock` writes this file"
    assert "://" not in LOCK.read_text()
    names = [line.partition("==")[0] for line in pins]
    assert sorted(set(names)) == sorted(names)


def test_the_lock_satisfies_the_project() -> None:
    versions = dict(line.split("==") for line in _pins())
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(text) for text in [*PROJECT["dependencies"], *extras["trainer-cpu"], *extras["dev"]]]
    unmet = [
        f"{need} (locked: {versions.get(canonicalize_name(need.name), 'nothing')})"
        for need in wanted
        if not need.specifier.contains(versions.get(canonicalize_name(need.name), "0"), prereleases=True)
    ]
    assert not unmet, "run `make lock`"


def _commands() -> list[tuple[str, ...]]:
    """Every command and subcommand of `tapforge`, as words."""
    import click

    from tapforge_trainer.cli.main import cli

    def below(command: click.Command, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        inner = command.commands if isinstance(command, click.Group) else {}
        return [words] + [found for name, child in inner.items() for found in below(child, (*words, name))]

    return below(cli, ())


def test_every_help_text_comes_without_heavy_packages() -> None:
    asked = _commands()
    script = f"""
import sys
from tapforge_trainer.cli.main import cli
for words in {asked!r}:
    try:
        cli.main([*words, "--help"], prog_name="tapforge")
    except SystemExit as end:
        assert not end.code, words
print("loaded:", *sorted(set(sys.modules) & set({HEAVY!r})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: tapforge") == len(asked)
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_importing_the_api_or_a_phone_server_needs_no_trainer() -> None:
    script = f"""
import sys
import tapforge_api, tapforge_envs.check, tapforge_envs.phone.server
print(*sorted(set(sys.modules) & {{*{HEAVY!r}, "tapforge_trainer"}}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == []


def _tracked() -> list[Path]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def _any_of(*names: tuple[str, ...]) -> str:
    """A pattern for names that are given in parts, so that no name stands in this file."""
    return "|".join(re.escape("".join(parts)) for parts in names)


REGISTRIES = _any_of(
    ("py", "pi", ".org"),
    ("python", "hosted", ".org"),
    ("hf-", "mirror"),
    ("arti", "factory"),
    ("/sim", "ple/"),
    ("proxy.", "golang", ".org"),
    ("registry.", "npmjs", ".org"),
    ("deb.", "debian", ".org"),
    ("--index", "-url"),
    ("--extra-index", "-url"),
    ("--find", "-links"),
)
PLACES = _any_of(("wo", "rk/"), ("ro", "ot/"), ("work", "space/"))
FOREIGN = re.compile(
    rf"(?<![\w.$}}~-])/(?:{PLACES}|home/\w+/|Users/\w+/)"  # somebody's machine
    r"|(?<![\w-])(?:shared)/(?:design|reference|golden)"  # what lies beside a checkout
    rf"|{REGISTRIES}",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        ("see /ro" + "ot/x", True),
        ("cd /wo" + "rk/main", True),
        ("uv pip --ind" + "ex-url x", True),
        ("https://py" + "pi.org/project/x", True),
        ("GOPROXY=https://proxy.gol" + "ang.org", True),
        ("registry.npm" + "js.org/x", True),
        ("http://deb.deb" + "ian.org/debian", True),
        ("../sha" + "red/design/x.md", True),
        ("the network/route", False),
        ("frames/root/x", False),
        ("${HOME}/work/x", False),
    ],
)
def test_what_counts_as_foreign(text: str, foreign: bool) -> None:
    assert bool(FOREIGN.search(text)) is foreign


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in _tracked()
        for number, line in enumerate(_lines(path), 1)
        if FOREIGN.search(line)
    ]
    assert not found


def test_a_python_file_stays_readable() -> None:
    names = {str(path.relative_to(ROOT)): path for path in _tracked() if path.suffix == ".py"}
    lengths = {name: len(_lines(path)) for name, path in names.items() if not name.startswith("tests/")}
    assert lengths
    # A kind of the operator has the files that its readers expect, and no others.
    long = {name: n for name, n in lengths.items() if n > (500 if name.startswith("operator/") else 400)}
    assert not long, "one file, one idea"


def _lines(path: Path) -> list[str]:
    """None of a picture or of weights."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []


def test_a_source_of_a_page_stays_readable() -> None:
    """Lines and files as long as Python's may be, for which ruff and the test above are."""
    kinds = (".js", ".css", ".html", ".j2")
    texts = {path.relative_to(ROOT): _lines(path) for path in _tracked() if path.suffix in kinds}
    assert len(texts) > 15
    assert not [f"{name}:{n}" for name, lines in texts.items() for n, line in enumerate(lines, 1) if len(line) > 120]
    assert not [name for name, lines in texts.items() if len(lines) > 400], "one file, one idea"


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by these alone: two of one name end the collection of every job that has both."""
    names = [path.name for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    assert sorted(set(names)) == sorted(names)


def test_the_way_to_the_first_gradient_is_as_the_command_names_it() -> None:
    package = ROOT / "trainer" / "tapforge_trainer"
    named = re.search(r"^ +(cli/main\.py(?: +-> +[\w/]+\.py)+)$", (package / "cli/main.py").read_text(), re.MULTILINE)
    assert named is not None
    way = re.split(r" +-> +", named[1])
    assert len(way) <= 5
    for file, following in itertools.pairwise(way):
        module = following.removesuffix(".py").replace("/", ".").rpartition(".")[2]
        imports = rf"from \.+(?:\w+\.)*{module} import"
        assert re.search(imports, (package / file).read_text()), f"{file} leads to {following}"
    assert ".backward()" in (package / way[-1]).read_text()


@pytest.mark.parametrize("part", ["operator", "trainer"])
def test_what_a_design_page_names_exists(part: str) -> None:
    """Files below the part's package or the checkout, and names in them: `broker/ledger.py:Ledger.assign`."""
    page = (ROOT / "docs" / "design" / f"{part}.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", page))
    assert len(named) > 100
    unknown = []
    for file, name in sorted(named):
        found = [path for path in (ROOT / part / f"tapforge_{part}" / file, ROOT / file) if path.is_file()]
        # `plan.py` alone is a file of a folder that was named before
        if not found and ("/" in file or name or not list((ROOT / part).rglob(file))):
            unknown.append(file)
        elif name and not _defines(ast.parse(found[0].read_text()), name.split(".")):
            unknown.append(f"{file}:{name}")
    assert not unknown, f"docs/design/{part}.md names what is not there"


def _defines(inside: ast.AST, names: list[str]) -> bool:
    """Classes, functions, constants, and attributes that `__init__` sets."""
    for node in ast.iter_child_nodes(inside):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name == names[0] and (not names[1:] or _defines(node, names[1:])):
                    return True
                if name == "__init__" and any(
                    isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and part.attr == names[0]
                    for part in ast.walk(node)
                ):
                    return True
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if [name] == names:
                    return True
    return False


def test_the_design_page_of_the_trainer_has_its_rooms_in_the_order_in_which_they_import_each_other() -> None:
    package = ROOT / "trainer" / "tapforge_trainer"
    page = (ROOT / "docs" / "design" / "trainer.md").read_text()
    levels = {room: int(level) for level, room in re.findall(r"^\| (\d+) \| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE)}
    files = [path.relative_to(package) for path in package.rglob("*.py") if path != package / "__init__.py"]
    assert levels.keys() == {Path(file.parts[0]).stem for file in files}
    wrong = {
        f"{file} imports {room}"
        for file in files
        for room in _imported_rooms(package / file, file.with_suffix("").parts)
        if room != (own := Path(file.parts[0]).stem) and levels[room] >= levels[own]
    }
    assert not wrong, "docs/design/trainer.md has these rooms on levels that don't fit"


def _imported_rooms(path: Path, module: tuple[str, ...]) -> set[str]:
    """What a file of the trainer imports of it, also inside functions: the first part of each module's name."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=None | str() as name, names=names, level=level):
                start = ("tapforge_trainer", *module)[:-level] if level else ()
                found = [(*start, *(name or "").split("."), one.name) for one in names]
            case ast.Import(names=names):
                found = [tuple(one.name.split(".")) for one in names]
            case _:
                continue
        for imported in found:
            parts = [part for part in imported if part]
            if parts[0] == "tapforge_trainer" and len(parts) > 1:
                rooms.add(parts[1])
    return rooms


def test_every_documented_make_target_exists() -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    rules |= {f"bench-{script.stem}" for script in (ROOT / "bench").glob("*.py")}
    named = {
        (page, target)
        for page in ("README.md", "CONTRIBUTING.md", ".ci/run")
        for target in re.findall(r"(?:^|`|&& )make ([a-z][a-z-]*)", (ROOT / page).read_text(), re.MULTILINE)
    }
    assert (".ci/run", "test") in named
    assert not {(page, target) for page, target in named if target not in rules}


def test_every_benchmark_stands_in_the_table() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    listed = set(re.findall(r"^\| `make bench-([a-z-]+)` \|", page, re.MULTILINE))
    assert {script.stem for script in (ROOT / "bench").glob("*.py")} <= listed
