"""Data sets that a URI names: pinned by the first command of a run, fetched once, and refused where they changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.model_source.fake_hub import FakeHub, Repository, commit_of
from tests.s3 import Bucket, bucket, s3_server

from tapforge_api import TrainingRun, load
from tapforge_trainer.data.convert import convert
from tapforge_trainer.data.demo import ROWS, demo
from tapforge_trainer.data.folder import DataFolder
from tapforge_trainer.data.remote import identity
from tapforge_trainer.data.sources import read
from tapforge_trainer.run.assembly import ConfigurationError, SetupError
from tapforge_trainer.run.data_pin import PINNED, with_data

__all__ = ["bucket", "s3_server"]

SPEC = """\
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: r}
spec:
  environment: {source: {dataset: {path: "PLACE/part", heldOut: "PLACE/rest"}}}
  warmStart: {data: {path: "PLACE/part"}}
"""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("sets"), {}
    for name, seed in (("part", 0), ("rest", 1), ("other", 2)):
        demo(folder / f"demo-{name}", episodes=3, seed=seed)
        rows = read("verl", folder / f"demo-{name}" / ROWS, {})
        convert(rows, "verl", folder / name, {}, 0.1)
        found[name] = folder / name
    return found


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".unfinished")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def upload(bucket: Bucket, name: str, folder: Path) -> None:
    for path, data in files(folder).items():
        bucket.client.put_object(Bucket=bucket.name, Key=f"sets/{name}/{path}", Body=data)


def run_of(place: str) -> TrainingRun:
    return load(SPEC.replace("PLACE", place))


def ids(path: str) -> list[str]:
    return [episode.content for episode in DataFolder(Path(path))]


def test_object_storage_is_pinned_and_fetched_once(
    bucket: Bucket, sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAPFORGE_CACHE", str(tmp_path / "cache"))
    upload(bucket, "part", sets["part"])
    upload(bucket, "rest", sets["rest"])
    asked = run_of(f"s3://{bucket.name}/sets")
    run = with_data(asked, tmp_path / "runs")
    source = run.spec.environment.source.dataset
    assert ids(source.path) == ids(str(sets["part"])) and ids(source.held_out) == ids(str(sets["rest"]))
    assert run.spec.warm_start.data.path == source.path  # the same one is there once
    assert len(list((tmp_path / "cache" / "data-sets").glob("*-????????????????"))) == 2
    pinned = json.loads((tmp_path / "runs" / "r" / PINNED).read_text())
    assert set(pinned) == {f"s3://{bucket.name}/sets/part", f"s3://{bucket.name}/sets/rest"}

    upload(bucket, "part", sets["other"])
    again = with_data(asked, tmp_path / "runs").spec.environment.source.dataset
    assert again.path == source.path, "a run goes on with the rows it began with"
    monkeypatch.setenv("TAPFORGE_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigurationError, match=r"dataset\.path: s3://.*has changed since the run began"):
        with_data(asked, tmp_path / "runs")
    new = with_data(asked, tmp_path / "other-runs").spec.environment.source.dataset
    assert ids(new.path) == ids(str(sets["other"]))
    assert identity(new.path) != identity(source.path) and identity(new.held_out) == identity(source.held_out)

    assert identity("/one/data-sets/mine") != identity("/other/data-sets/mine"), "a person's own folders"

    bucket.client.delete_object(Bucket=bucket.name, Key="sets/rest/data.json")
    with pytest.raises(ConfigurationError, match=r"dataset\.heldOut: s3://.* lacks data\.json: it is not a finished"):
        with_data(asked, tmp_path / "third-runs")
    (tmp_path / "runs" / "r" / PINNED).write_text("[")
    with pytest.raises(SetupError, match="can't be read .*: restore it, or delete it"):
        with_data(asked, tmp_path / "runs")


def test_what_a_repository_needs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{identity.__module__}.find_spec", lambda name: None)
    for place, library in (("hf://datasets/maker/steps", "huggingface_hub"), ("s3://bucket/sets", "fsspec")):
        with pytest.raises(ConfigurationError, match=rf"dataset\.path: {place}.* needs {library}"):
            with_data(run_of(place), tmp_path)


@pytest.fixture
def hub() -> Iterator[tuple[FakeHub, str]]:
    fake = FakeHub()
    endpoint = fake.start()
    yield fake, endpoint
    fake.stop()


def planned(place: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(place / "hf"), "HF_TOKEN": "secret", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "tapforge_trainer.cli.main", "plan", "-f", "r.yaml"]
    return subprocess.run(
        command, cwd=place, env=os.environ | hub, check=False, capture_output=True, text=True, timeout=120
    )


def test_a_repository_of_hugging_face_is_pinned_to_its_commit(
    hub: tuple[FakeHub, str], sets: dict[str, Path], tmp_path: Path
) -> None:
    fake, endpoint = hub
    both = {f"{name}/{path}": data for name in ("part", "rest") for path, data in files(sets[name]).items()}
    first, second = commit_of("1"), commit_of("2")
    fake.repositories["datasets/maker/steps"] = Repository({**both, "README.md": b"x"}, {"v1": first}, token="secret")
    (tmp_path / "r.yaml").write_text(SPEC.replace("PLACE", "hf://datasets/maker/steps@v1"))
    done = planned(tmp_path, endpoint)
    assert done.returncode == 0, done.stderr
    assert f"snapshots/{first}/part" in done.stdout and not fake.sent["README.md"]
    sent = sum(fake.sent.values())
    fake.repositories["datasets/maker/steps"].revisions["v1"] = second
    again = planned(tmp_path, endpoint)
    assert again.returncode == 0 and f"snapshots/{first}/part" in again.stdout, again.stderr
    assert sum(fake.sent.values()) == sent, "what is there is not fetched again"

    shutil.rmtree(tmp_path / "runs")
    others = {"datasets/maker/none": "has no such repository", "maker/steps": "is not a data set of Hugging Face"}
    for wrong, said in others.items():
        (tmp_path / "r.yaml").write_text(SPEC.replace("PLACE", f"hf://{wrong}"))
        refused = planned(tmp_path, endpoint)
        assert refused.returncode == 2 and said in refused.stderr and "secret" not in refused.stderr, refused.stderr
