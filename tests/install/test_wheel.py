"""What is in the wheel, and what it says of itself. Built by hatchling from this checkout; nothing is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from release import check_wheel

ROOT = Path(__file__).parents[2]
PACKAGES = ("tapforge_api", "tapforge_envs", "tapforge_operator", "tapforge_trainer")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(name))


def test_every_package_is_typed_and_none_is_left_out(wheel) -> None:
    names = set(wheel.namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    for folder in ("crds", "operator", "trainer"):
        for path in (ROOT / folder).glob("tapforge_*/**/*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(ROOT / folder)) in names


def test_samples_crds_and_locks_are_in_it_and_found_there(wheel, tmp_path: Path) -> None:
    """By the package of the wheel itself, unpacked: without this checkout."""
    wheel.extractall(tmp_path, [name for name in wheel.namelist() if name.startswith("tapforge_api/")])
    script = (
        "from tapforge_api import shipped\n"
        "for kind in ('samples', 'crds', 'locks'):\n"
        "    for name, path in shipped.files(kind).items(): print(kind, name, path)"
    )
    asked = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, *{sys.path!r}]\n{script}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
    )
    found = {(kind, name): Path(path) for kind, name, path in (line.split() for line in asked.stdout.splitlines())}
    places = {"samples": ROOT / "manifests/samples", "crds": ROOT / "crds"}
    wanted = {(kind, path.name): path for kind, folder in places.items() for path in folder.glob("*.yaml")}
    wanted |= {("locks", f"trainer-{one}.txt"): ROOT / f"requirements/trainer-{one}.txt" for one in ("cpu", "gpu")}
    assert found.keys() == wanted.keys()
    for key, path in found.items():
        assert path.is_relative_to(tmp_path)
        assert path.read_bytes() == wanted[key].read_bytes()


def test_it_says_which_pythons_it_is_for(metadata) -> None:
    known = {line.rpartition(" ")[2] for line in metadata.get_all("Classifier") if ":: Python :: 3." in line}
    assert known == {check_wheel.TRAINER_PYTHON, *check_wheel.PYTHONS}
    allowed = SpecifierSet(metadata["Requires-Python"])
    every = {f"3.{minor}" for minor in range(8, 20)}
    assert {version for version in every if allowed.contains(f"{version}.99")} == known


def test_its_check_knows_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*check_wheel.EXTRAS, *check_wheel.NOT_RESOLVED} == set(extras)
    assert all((ROOT / path).exists() for path in check_wheel.TESTS)
