"""A checkpoint comes from a bucket in the layout that a folder has, whole."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from tests.s3 import Bucket

from tapforge_trainer.learner.checkpoint_storage import (
    CheckpointFolder,
    CheckpointStore,
    Holder,
    missing_files,
    read_state,
)
from tapforge_trainer.remote import ClusterError
from tapforge_trainer.remote.fetch import fetch_checkpoint, fetched
from tapforge_trainer.remote.target import opened
from tapforge_trainer.storage.object_storage import open_store

WEIGHTS = b"w" * 100_000


def _save(uri: str, update: int, weights: bytes = WEIGHTS) -> str:
    store = CheckpointStore(uri, Holder(1, 1795176000000))
    store.take_over()
    draft = store.draft(update)
    open_store(draft.target).put("__0_0.distcp", weights)
    files = {"__0_0.distcp": len(weights)}
    store.publish(draft, {"format": 3, "update": update, "files": files}, files, keep=2)
    return draft.place


def _fetch(uri: str, folder: Path, publish: bool = True) -> set[str]:
    with opened(folder, "u") as target:
        paths = fetch_checkpoint(uri, target, lambda there, total: None)
        if publish:
            target.publish(["checkpoint"], paths)
    return paths


def test_the_newest_checkpoint_of_a_bucket_becomes_one_of_a_folder(bucket: Bucket, tmp_path: Path) -> None:
    uri = f"{bucket.uri}/lab/u/quick"
    _save(uri, 2)
    _save(uri, 4)
    open_store(uri).put("export/config.json", b"{}")
    paths = _fetch(uri, tmp_path / "quick")
    newest = CheckpointFolder(tmp_path / "quick" / "checkpoints").latest()
    assert newest == str(tmp_path / "quick" / "checkpoints" / "update-00000004")
    state = read_state(newest)
    assert state["update"] == 4 and missing_files(newest, state["files"]) == []
    assert (tmp_path / "quick" / "export" / "config.json").read_text() == "{}"
    assert fetched(tmp_path / "quick", paths, ["checkpoint"]).checkpoint == 4
    assert not (tmp_path / "quick" / "checkpoints" / "update-00000002").exists()


def test_one_that_is_not_whole_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    uri = f"{bucket.uri}/lab/u/quick"
    place = _save(uri, 2)
    open_store(place).put("__0_0.distcp", WEIGHTS[1:])
    with pytest.raises(ClusterError, match="99999 bytes"):
        _fetch(uri, tmp_path / "quick")
    assert not (tmp_path / "quick").exists()


def test_a_run_without_a_checkpoint_has_none(bucket: Bucket, tmp_path: Path) -> None:
    uri = f"{bucket.uri}/lab/u/quick"
    CheckpointStore(uri, Holder(1, 1)).take_over()
    assert _fetch(uri, tmp_path / "quick", publish=False) == set()


def test_files_of_another_checkpoint_are_never_mixed_in(bucket: Bucket, tmp_path: Path) -> None:
    """Two attempts save the same update: names and sizes are the same, and the weights are not."""
    uri = f"{bucket.uri}/lab/u/quick"
    _save(uri, 2)
    open_store(uri).put("export/model.safetensors", WEIGHTS)
    _fetch(uri, tmp_path / "quick", publish=False)
    _save(uri, 2, WEIGHTS.upper())
    open_store(uri).put("export/model.safetensors", WEIGHTS.upper())
    _fetch(uri, tmp_path / "quick")
    weights = tmp_path / "quick" / "checkpoints" / "update-00000002" / "__0_0.distcp"
    assert weights.read_bytes() == WEIGHTS.upper()
    assert (tmp_path / "quick" / "export" / "model.safetensors").read_bytes() == WEIGHTS.upper()


def test_what_has_not_changed_in_the_bucket_is_not_fetched_again(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{bucket.uri}/lab/u/quick"
    _save(uri, 2)
    _fetch(uri, tmp_path / "quick", publish=False)
    fetched_again: list[str] = []
    monkeypatch.setattr(
        "tapforge_trainer.storage.object_storage.Store.get", lambda self, path, place: fetched_again.append(path)
    )
    _fetch(uri, tmp_path / "quick")
    _fetch(uri, tmp_path / "quick")
    assert fetched_again == []
    assert (tmp_path / "quick" / "checkpoints" / "update-00000002" / "__0_0.distcp").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["export/../../../evil.txt", "export//x", "export/./x", "export/a/b"])
def test_a_name_that_is_no_files_is_refused(bucket: Bucket, tmp_path: Path, name: str) -> None:
    uri = f"{bucket.uri}/lab/u/quick"
    _save(uri, 2)
    for key in ("export/a", name):
        bucket.client.put_object(Bucket=bucket.name, Key=f"runs/lab/u/quick/{key}", Body=b"evil")
    with pytest.raises(ClusterError, match="the run's storage has a file"):
        _fetch(uri, tmp_path / "there" / "runs" / "quick")
    assert not list(tmp_path.rglob("evil.txt")) and not (tmp_path / "there" / "runs" / "quick").exists()


def test_a_full_disk_is_not_the_buckets_fault(bucket: Bucket, tmp_path: Path) -> None:
    uri = f"{bucket.uri}/lab/u/quick"
    _save(uri, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ClusterError, match="files can't be brought to .*quick: .*File too large"):
            _fetch(uri, tmp_path / "quick")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
