"""What is advised where a package is missing: one place says it, and it works as it is written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tapforge_api import installing, shipped
from tapforge_trainer.cli.main import cli

ROOT = Path(__file__).parents[2]
CODE = [path for part in ("crds", "operator", "trainer") for path in (ROOT / part).rglob("*.py")]


def test_every_advice_to_install_a_package_comes_from_one_module() -> None:
    pattern = re.compile(r"pip install|uv add|tapforge\[")
    elsewhere = [path.name for path in CODE if pattern.search(path.read_text()) and path.name != "installing.py"]
    assert not elsewhere, "tapforge_api.installing has install_extra, install_package and install_trainer"


@pytest.mark.parametrize("extra", ["cluster", "data", "mlflow", "storage", "swanlab", "tensorboard", "wandb", "web"])
def test_an_extra_is_installed_by_its_requirements_into_this_environment(extra: str) -> None:
    import tomllib

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    words = shlex.split(installing.install_extra(extra))
    assert sorted(words[-len(wanted) :]) == sorted(wanted)
    assert sys.executable in words


def test_each_extra_that_an_error_names_exists() -> None:
    named = {name for path in CODE for name in re.findall(r"install_extra\(['\"](\w+)['\"]\)", path.read_text())}
    assert {"cluster", "storage", "web"} <= named
    for extra in (*named, *installing._EXTRA_OF.values()):
        installing.install_extra(extra)


def test_pip_is_named_where_this_environment_has_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TAPFORGE_CACHE", str(tmp_path / "a cache"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(installing, "find_spec", lambda name: object())
    assert installing.install_package("jinja2") == f"{sys.executable} -m pip install 'jinja2>=3.1'"
    monkeypatch.setattr(installing, "find_spec", lambda name: None)
    assert installing.install_package("nosuch") == f"uv pip install --python {sys.executable} nosuch"
    # The uv of `make setup`, where PATH has none.
    uv = tmp_path / "a cache" / "uv-0.1.2" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.touch()
    assert installing.install_package("nosuch") == f"'{uv}' pip install --python {sys.executable} nosuch"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_trainer_is_installed_from_the_lock(monkeypatch, device) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    *words, lock = shlex.split(installing.install_trainer(device))
    assert words[-2:] == ["--no-deps", "-r"]
    assert re.search(r"^torch==", Path(lock).read_text(), re.MULTILINE)
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    assert "environment of Python 3.11: training is not tested on 3.13" in installing.install_trainer(device)


@pytest.mark.parametrize(
    ("module", "python", "has"),
    [
        ("vllm.engine", 11, "--no-deps -r"),
        ("vllm.engine", 13, "environment of Python 3.11"),
        ("tokenizers", 11, "--no-deps -r"),
        ("tokenizers", 13, "'tokenizers>="),
        ("pyarrow", 12, "pyarrow>="),
        ("tapforge_trainer.nosuch", 11, None),
    ],
)
def test_a_command_whose_package_is_missing_ends_with_the_remedy(
    monkeypatch, module: str, python: int, has: str | None
) -> None:
    def missing(kind: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(shipped, "files", missing)
    monkeypatch.setattr(sys, "version_info", (3, python, 7, "final", 0))
    done = CliRunner().invoke(cli, ["samples"])
    if has is None:
        assert isinstance(done.exception, ModuleNotFoundError), "an error of ours keeps its traceback"
    else:
        assert (done.exit_code, f"{module} is not installed here" in done.output, has in done.output) == (2, True, True)


def test_samples_are_listed_and_printed_as_they_are() -> None:
    listed = CliRunner().invoke(cli, ["samples"]).output
    for name, path in (shipped.files("samples") | shipped.files("crds")).items():
        assert name in listed
        assert CliRunner().invoke(cli, ["samples", name]).output == path.read_text()
    assert "there is no sample nosuch" in CliRunner().invoke(cli, ["samples", "nosuch"]).output


@pytest.mark.skipif(sys.version_info[:2] != installing.TRAINER_PYTHON, reason="training is for another Python")
def test_the_package_that_an_environment_lacks_is_named_also_where_a_run_starts(tmp_path) -> None:
    """With torch hidden from a process of its own."""
    script = (
        "import sys; sys.modules['tokenizers'] = None; sys.modules['torch'] = None\n"
        "from tapforge_trainer.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "run", "-f", str(shipped.files("samples")["quickstart.yaml"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "is not installed here" in done.stderr and "trainer-cpu.txt" in done.stderr
