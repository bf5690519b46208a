"""`make check-wheel`: the wheel, installed as users do, on every Python that it names.

- Python 3.12 and 3.13: a fresh environment with everything but the trainer's packages, and tests that need none of
  them; the trainer's extras are resolved, not installed.
- Python 3.11: pip installs the wheel with each extra that pip can resolve, and with all of them at once, which then
  agree; the trainer's packages are resolved from the lock, by the command that error messages name.
- Nothing of the trainer's is downloaded: uv resolves by metadata. (From an index that serves none, pip fetches 4 GB for
  a dry run of trainer-gpu.)
- Each step says its seconds, each Python the size of its environment, the end the whole time.
- A Python that is not on this machine is named in the last lines, in capitals; the others are checked all the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .stage import copy

ROOT: Final = Path(__file__).parents[1]
PYTHONS: Final = ("3.12", "3.13")
TRAINER_PYTHON: Final = "3.11"
EXTRAS: Final = ("operator", "web", "cluster", "storage", "data", "tensorboard", "wandb", "swanlab", "mlflow")
#: extras that no resolver takes here: the lock has the one, a URL the other (docs/install.md)
NOT_RESOLVED: Final = ("trainer-cpu", "trainer-gpu", "flash-attn", "dev")
#: what the tests import beside the package
TEST_PACKAGES: Final = ("hypothesis", "jsonschema", "lupa", "moto[s3,server]", "packaging", "pytest", "pytest-asyncio")
TESTS: Final = (
    "tests/api/test_api_load.py",
    "tests/doctor/test_findings.py",
    "tests/install/test_installing.py",
    "tests/kube",
    "tests/loggers/test_figures.py",
    "tests/operator_main/test_operator_config.py",
    "tests/phone/test_server.py",
    "tests/storage",
    "tests/tasks",
)
_SECONDS: Final = 1800


class Failed(RuntimeError):
    """A step failed; says which, and the end of what it printed."""


@dataclass
class Check:
    wheel: Path
    place: Path
    uv: str
    failed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def step(self, what: str, *command: str, cwd: Path = ROOT) -> bool:
        began = time.monotonic()
        done = subprocess.run(
            ["nice", *command],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
            env={**os.environ, "TAPFORGE_SAME_EXAMPLES": "1"},
        )
        last = done.stdout.strip().splitlines()[-1:] or [""]
        state = "ok    " if done.returncode == 0 else "FAILED"
        say(f"{state} {what}, {time.monotonic() - began:.0f} s: {last[0][:120]}")
        if done.returncode != 0:
            self.failed.append(what)
            print(done.stdout[-6000:], flush=True)
        return done.returncode == 0

    def size(self, version: str, folder: Path) -> None:
        """Of files that other environments link to as well, too."""
        files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        say(f"{version}: {sum(path.stat().st_size for path in files) / 1e9:.1f} GB in its environment")

    def python(self, version: str) -> Path | None:
        """The interpreter of that version, which is asked for its version too: a shim may start another one."""
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        found = [*sorted(pyenv.glob(f"{version}.*/bin/python")), shutil.which(f"python{version}")]
        for path in filter(None, found):
            asked = subprocess.run(
                [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            if asked.stdout.strip() == version:
                return Path(path)
        self.missing.append(version)
        say(f"NOT CHECKED ON PYTHON {version}: it is not on this machine (pyenv install {version})")
        return None


def say(line: str) -> None:
    print(f"check-wheel: {line}", flush=True)


def build(place: Path) -> Path:
    """The wheel, built from an unpacked source distribution as package managers do."""
    stage = place / "stage"
    copy(ROOT, stage)
    _built(stage, place / "sdist", "sdist")
    (archive,) = (place / "sdist").glob("*.tar.gz")
    shutil.unpack_archive(archive, place / "unpacked", filter="data")
    (source,) = (place / "unpacked").iterdir()
    _built(source, place / "wheel", "wheel")
    (wheel,) = (place / "wheel").glob("*.whl")
    return wheel


def _built(source: Path, target: Path, kind: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise Failed(f"the {kind} can't be built: {done.stderr.strip()[-2000:]}")


def light(check: Check, version: str, interpreter: Path) -> None:
    """Everything but the trainer's packages, with tests."""
    folder = check.place / f"python{version}"
    python = str(folder / "bin" / "python")
    # Bytecode is written at the installation: with PYTHONDONTWRITEBYTECODE each process of the tests compiles anew.
    install = (check.uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python)
    installed = check.step(
        f"{version}: environment", check.uv, "venv", "--quiet", "--python", str(interpreter), str(folder)
    ) and check.step(
        f"{version}: the wheel with {len(EXTRAS)} extras", *install, _with_extras(check.wheel), *TEST_PACKAGES
    )
    if installed:
        check.step(f"{version}: the commands start", python, "-m", "tapforge_trainer.cli.main", "--help")
        pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long and not width", *TESTS)
        check.step(f"{version}: tests without the trainer's packages", *pytest)
    for extra in ("trainer-cpu", "trainer-gpu"):
        check.step(f"{version}: {extra} resolves", *_resolve(check.uv, version, extra))
    check.size(version, folder)


def _with_extras(wheel: Path) -> str:
    return f"{wheel}[{','.join(EXTRAS)}]"


def _resolve(uv: str, version: str, extra: str) -> tuple[str, ...]:
    """By metadata alone."""
    compile = (uv, "pip", "compile", "--quiet", "--python-version", version, "--output-file", os.devnull)
    return (*compile, "--extra", extra, str(ROOT / "pyproject.toml"))


def trained(check: Check, interpreter: Path) -> None:
    """pip with each extra, and the lock of the trainer's packages without installing them."""
    version, folder = TRAINER_PYTHON, check.place / f"python{TRAINER_PYTHON}"
    python = str(folder / "bin" / "python")
    if not check.step(f"{version}: environment", str(interpreter), "-m", "venv", str(folder)):
        return
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    for extra in ("", *EXTRAS):
        check.step(
            f"{version}: pip install of the wheel[{extra}]",
            *pip,
            f"{check.wheel}[{extra}]" if extra else str(check.wheel),
        )
    # One extra after the other may leave a package that the last one took back: kubernetes and botocore want different
    # releases of python-dateutil at times.
    if check.step(f"{version}: pip install of the wheel with {len(EXTRAS)} extras", *pip, _with_extras(check.wheel)):
        check.step(f"{version}: its packages agree", python, "-m", "pip", "check")
    for device in ("cpu", "gpu"):
        ask = f"from tapforge_api.installing import install_trainer; print(install_trainer({device!r}))"
        command = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60, check=False, cwd="/")
        check.step(
            f"{version}: lock of trainer-{device}, dry run", "sh", "-c", f"{command.stdout.strip()} --quiet --dry-run"
        )
    check.step(f"{version}: trainer-gpu resolves", *_resolve(check.uv, version, "trainer-gpu"))
    check.size(version, folder)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make check-wheel")
    parser.add_argument("--uv", default=os.environ.get("UV", "uv"))
    parser.add_argument("--python", action="append", choices=(*PYTHONS, TRAINER_PYTHON), help="this one alone")
    given = parser.parse_args(words)
    began = time.monotonic()
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    if forgotten := named - {*EXTRAS, *NOT_RESOLVED}:
        raise Failed(f"EXTRAS in {__file__} lacks {', '.join(sorted(forgotten))}")
    with tempfile.TemporaryDirectory(prefix="tapforge-wheel-") as place:
        check = Check(build(Path(place)), Path(place), given.uv)
        say(f"built {check.wheel.name} from the source distribution, {check.wheel.stat().st_size / 2**20:.1f} MiB")
        for version in given.python or (TRAINER_PYTHON, *PYTHONS):
            if (interpreter := check.python(version)) is not None:
                if version == TRAINER_PYTHON:
                    trained(check, interpreter)
                else:
                    light(check, version, interpreter)
    for version in check.missing:
        say(f"NOT CHECKED ON PYTHON {version}: it is not on this machine (pyenv install {version})")
    took = f"after {(time.monotonic() - began) / 60:.0f} minutes"
    say(f"FAILED {took}: {'; '.join(check.failed)}" if check.failed else f"passed {took}")
    return 1 if check.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failed as error:
        sys.exit(f"check-wheel: {error}")
