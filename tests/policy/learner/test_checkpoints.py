"""Checkpoints beside learning, of trained weights alone, and in object storage (moto's S3, through a proxy)."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import real
from tests.s3 import CREDENTIALS, Bucket, Proxy, make_bucket
from tiny_samples import Tiny, at_hand

from tapforge_trainer.algorithms.objective import Objective
from tapforge_trainer.learner import checkpoint_storage, checkpoints, rank_state
from tapforge_trainer.learner import export as exports
from tapforge_trainer.learner.checkpoint_storage import (
    CheckpointError,
    CheckpointFolder,
    CheckpointStore,
    FencedOut,
    Holder,
)
from tapforge_trainer.learner.checkpoints import Checkpoints, WrittenCheckpoint
from tapforge_trainer.learner.client import Learner, LearnerError
from tapforge_trainer.learner.export import export, fetch
from tapforge_trainer.learner.families import ModelConfig, family_of
from tapforge_trainer.learner.rank import Rank
from tapforge_trainer.learner.sharding import pack
from tapforge_trainer.placement.settings import LoraSettings, UpdateSettings
from tapforge_trainer.storage.object_storage import StorageError, Store, open_store

SETTINGS = UpdateSettings(objective=Objective(), learning_rate=1e-3)
HOLDER = Holder(1, 1_795_176_000_000)


async def weights(learner: Learner) -> bytes:
    return bytes(await (await learner.weights()))


async def _update(tiny: Tiny, learner: Learner, version: int = 0) -> None:
    samples, frames = tiny.mixed()
    await learner.update(samples, at_hand(samples, frames), SETTINGS, version)


@pytest.fixture
def store(s3_proxy: Proxy, s3_server: str) -> Iterator[tuple[Bucket, CheckpointStore]]:
    bucket = make_bucket(s3_server)
    place = CheckpointStore(bucket.uri, HOLDER)
    place.take_over()
    yield bucket, place
    s3_proxy.refused = ""
    s3_proxy.open.set()


# --- in object storage ------------------------------------------------------------------------------------------------


async def test_learning_goes_on_while_a_checkpoint_is_written(
    tiny: Tiny, fresh: Learner, s3_proxy: Proxy, store: tuple[Bucket, CheckpointStore]
) -> None:
    """Nothing is let through until two updates are made: what arrives is what was, bit for bit, and so is what is
    learned from there; also the driver's state is of the save."""
    _, place = store
    saving, written, state = Checkpoints(fresh, place), list[WrittenCheckpoint](), {"n": [1]}
    await _update(tiny, fresh)
    before = await weights(fresh)
    s3_proxy.open.clear()
    await saving.save(1, json.loads(json.dumps(state)), written.append)
    state["n"].append(2)
    for version in (1, 2):
        await _update(tiny, fresh, version)
    uninterrupted = await weights(fresh)
    assert written == [] and place.latest() is None
    s3_proxy.open.set()
    await saving.settle()
    (one,) = written
    assert place.latest() == one.path and one.seconds > one.seconds_stalled > 0
    assert await checkpoints.load(fresh, place) == {"n": [1]}
    assert await weights(fresh) == before
    for version in (1, 2):
        await _update(tiny, fresh, version)
    assert await weights(fresh) == uninterrupted


async def test_credentials_that_expire_leave_the_checkpoint_before(
    tiny: Tiny, fresh: Learner, s3_proxy: Proxy, store: tuple[Bucket, CheckpointStore]
) -> None:
    """The learner goes on; the failure is raised once, and the next checkpoint is made when there are new ones."""
    bucket, place = store
    saving = Checkpoints(fresh, place)
    await saving.save(1, {"n": 1})
    await saving.settle()
    s3_proxy.refused = "ExpiredToken"
    await saving.save(2, {"n": 2})
    await _update(tiny, fresh)
    with pytest.raises(
        CheckpointError, match=r"update-00000002.*the credentials have expired.*update-00000001-.*is still there"
    ):
        await saving.save(3, {"n": 3})
    s3_proxy.refused = ""
    await saving.settle()
    await saving.save(3, {"n": 3})
    await saving.settle()
    assert await checkpoints.load(fresh, place) == {"n": 3}
    names = {key.split("/")[1] for key in bucket.names()}
    assert sorted(name[:15] for name in names) == ["latest", "update-00000001", "update-00000003"]


async def test_another_number_of_ranks_resumes_from_object_storage(
    tiny: Tiny, fresh: Learner, store: tuple[Bucket, CheckpointStore]
) -> None:
    """Written by two, read by one."""
    _, place = store
    await _update(tiny, fresh)
    written = await checkpoints.save(fresh, place, 1, {})
    assert written.bytes > 0
    expected = await weights(fresh)
    one = Rank(tiny.learner_settings(ranks=1), 0, torch.distributed.HashStore())
    try:
        rank_state.load(one, written.path, checkpoints.read_state(written.path), moments=True)
        assert pack(one.weights()) == expected and one.steps == 1 and one.optimizer.state
    finally:
        torch.distributed.destroy_process_group()


async def test_a_part_that_is_cut_short_later_is_named(fresh: Learner, store: tuple[Bucket, CheckpointStore]) -> None:
    bucket, place = store
    written = await checkpoints.save(fresh, place, 1, {})
    key = next(key for key in bucket.names() if key.endswith("__0_0.distcp"))
    bucket.client.put_object(Bucket=bucket.name, Key=key, Body=b"short")
    with pytest.raises(CheckpointError, match=r"update-00000001.*__0_0.distcp has 5 bytes instead of"):
        await checkpoints.load(fresh, place)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        await checkpoints.load(fresh, place, written.path + "x")


async def test_an_export_is_kept_in_object_storage(
    tiny: Tiny, fresh: Learner, store: tuple[Bucket, CheckpointStore], tmp_path: Path
) -> None:
    """By the first rank, which may be on another node than the driver; a later session may fetch it."""
    _, place = store
    assert not fetch(f"{place.root}/export", tmp_path / "nothing")
    await export(fresh, tmp_path / "export", place)
    await export(fresh, tmp_path / "plain")
    assert fetch(f"{place.root}/export", tmp_path / "again")
    names = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    for folder in ("export", "again"):
        found = {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        assert found == names, folder


# --- a folder ---------------------------------------------------------------------------------------------------------


async def test_a_disk_that_fills_beside_learning_is_reported_by_the_next_save(
    tiny: Tiny, fresh: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Checkpoints(fresh, CheckpointFolder(tmp_path))
    await saving.save(1, {"n": 1})
    await saving.settle()

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_storage, "flush", full)
        await saving.save(2, {"n": 2})
        await _update(tiny, fresh)
        with pytest.raises(CheckpointError, match=r"update-00000002.*disk is full.*update-00000001 is still there"):
            await saving.save(3, {"n": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "update-00000001"]
    await saving.save(3, {"n": 3})
    await saving.settle()
    assert await checkpoints.load(fresh, tmp_path) == {"n": 3}


async def test_one_is_written_at_a_time(fresh: Learner, tmp_path: Path) -> None:
    saving, written = Checkpoints(fresh, CheckpointFolder(tmp_path), keep=5), list[WrittenCheckpoint]()
    for update in range(1, 4):
        await saving.save(update, {"n": update}, written.append)
    await saving.settle()
    assert [one.update for one in written] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.glob("update-*")) == [f"update-{n:08d}" for n in (1, 2, 3)]


# --- what is frozen ---------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tiny: Tiny) -> Iterator[Any]:
    """Makes single ranks in this process, one after the other."""

    def make(folder: Path | None = None, **changes: Any) -> Rank:
        nonlocal made
        if made:
            torch.distributed.destroy_process_group()
        made = True
        settings = tiny.learner_settings(ranks=1, **changes)
        if folder is not None:
            settings = type(settings)(**{f: getattr(settings, f) for f in settings.__slots__} | {"model": str(folder)})
        return Rank(settings, 0, torch.distributed.HashStore())

    made = False
    yield make
    if made:
        torch.distributed.destroy_process_group()


def _write(rank: Rank, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    found = rank_state.stage(rank, str(folder))
    files = rank_state.written(rank, str(folder), 60.0)
    return {"format": 3, "counters": {k: found[k] for k in ("steps", "moments")}, "base": found["base"], "files": files}


def _names(folder: Path) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def _shift(rank: Rank) -> None:
    """As an update does it, to what is trained."""
    for parameter in rank.policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    rank.optimizer.step()


def test_what_is_frozen_is_not_in_a_checkpoint(alone: Any, tiny: Tiny, tmp_path: Path) -> None:
    rank = alone(freeze_vision=True)
    _shift(rank)
    expected = {name: value.clone() for name, value in rank.weights().items()}
    document = _write(rank, tmp_path / "a")
    assert document["base"] is not None
    assert not any("visual" in name for name in _names(tmp_path / "a"))
    trained = sum(p.numel() for p in rank.policy.parameters() if p.requires_grad)
    held = sum(document["files"].values())
    assert 12 * trained <= held <= 18 * trained, "master weights, two moments; and headers, large beside tiny weights"
    again = alone(freeze_vision=True)
    rank_state.load(again, str(tmp_path / "a"), document, moments=True)
    for name, value in again.weights().items():
        assert torch.equal(value, expected[name]), name
    assert again.optimizer.state


def test_of_adapters_only_their_matrices_are_in_a_checkpoint(alone: Any, tiny: Tiny, tmp_path: Path) -> None:
    """In a store that is named by a URI, as in a folder."""
    rank = alone(freeze_vision=True, lora=LoraSettings(4, 8.0))
    _shift(rank)
    expected = {name: value.clone() for name, value in rank.policy.state_dict().items() if "lora" in name}
    place = f"file://{tmp_path}/store"
    found = rank_state.stage(rank, place)
    files = rank_state.written(rank, place, 60.0)
    assert {name.partition(".")[0] for name in _names(tmp_path / "store")} == {"model", "optimizer"}
    held = {name for name in _names(tmp_path / "store") if name.startswith("model.")}
    assert held and all("lora_A" in name or "lora_B" in name for name in held)
    counters = {name: found[name] for name in ("steps", "moments")}
    document = {"format": 3, "counters": counters, "base": found["base"], "files": files}
    assert not checkpoint_storage.missing_files(place, files)
    again = alone(freeze_vision=True, lora=LoraSettings(4, 8.0))
    rank_state.load(again, place, document, moments=True)
    for name, value in again.policy.state_dict().items():
        assert "lora" not in name or torch.equal(_local(value), _local(expected[name])), name
    assert again.optimizer.state and len(expected) == len(held)
    plain = alone(freeze_vision=True)
    with pytest.raises(ValueError, match=r"holds \d+ parameters that the model of this run has not: .*lora"):
        rank_state.load(plain, place, document, moments=False)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_what_a_store_refuses_a_rank_is_told_in_words(
    alone: Any, s3_proxy: Proxy, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch wraps it in an exception of its own, which is no Exception."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_proxy.endpoint}.items():
        monkeypatch.setenv(name, value)
    rank, bucket = alone(freeze_vision=True), make_bucket(s3_server)
    monkeypatch.setattr(s3_proxy, "refused", "ExpiredToken")
    rank_state.stage(rank, f"{bucket.uri}/a")
    with pytest.raises(StorageError, match=r"runs/a: the credentials have expired.*give new ones"):
        rank_state.written(rank, f"{bucket.uri}/a", 60.0)
    monkeypatch.setattr(s3_proxy, "refused", "")
    rank_state.stage(rank, f"{bucket.uri}/b")
    files = rank_state.written(rank, f"{bucket.uri}/b", 60.0)
    assert not checkpoint_storage.missing_files(f"{bucket.uri}/b", files)
    with pytest.raises((StorageError, FileNotFoundError), match=r"runs/c"):
        rank_state.load(rank, f"{bucket.uri}/c", {"counters": {"steps": 0, "moments": False}}, moments=True)


def test_nothing_is_staged_while_a_late_checkpoint_is_written(
    alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer goes on after the deadline, with the same copy and process group; when it has ended, saving works
    again."""
    from torch.distributed.checkpoint import FileSystemWriter

    go_on, write = threading.Event(), FileSystemWriter.write_data

    def slow(writer: Any, plan: Any, planner: Any) -> Any:
        assert go_on.wait(60)
        return write(writer, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", slow)
    rank = alone(freeze_vision=True)
    (tmp_path / "a").mkdir()
    rank_state.stage(rank, str(tmp_path / "a"))
    future = rank.saving.future
    try:
        with pytest.raises(rank_state.StillWriting, match=r"/a was not written within 0 s"):
            rank_state.written(rank, str(tmp_path / "a"), 0.1)
        (tmp_path / "b").mkdir()
        with pytest.raises(rank_state.StillWriting, match=r"/b is not begun.*/a, is still being written"):
            rank_state.stage(rank, str(tmp_path / "b"))
        assert rank.saving.future is future
    finally:
        go_on.set()
    future.result(60)
    assert _write(rank, tmp_path / "c")["files"]
    assert checkpoint_storage.missing_files(str(tmp_path / "b"), {"__0_0.distcp": 1}), "nothing was written there"


class _Late:
    """One rank that writes past the deadline, as the driver sees it."""

    settings = SimpleNamespace(update_seconds=1.0)
    writing = True

    async def run(self, function: str, target: str) -> list[Any]:
        if self.writing and function.endswith("check_idle"):
            failed = RuntimeError()
            failed.cause = rank_state.StillWriting("still being written")  # type: ignore[attr-defined]
            raise LearnerError(f"run failed on a rank: {failed.cause}") from failed  # type: ignore[attr-defined]
        if function.endswith("stage"):
            Path(target, "__0_0.distcp").write_bytes(b"x")
        return [{"steps": 1, "moments": False, "base": None}]

    async def run_concurrently(self, function: str, target: str, seconds: float) -> list[Any]:
        if self.writing:
            raise LearnerError("took longer than 1 s") from TimeoutError()
        return [{"__0_0.distcp": 1}]


async def test_what_is_still_being_written_is_left_alone(tmp_path: Path) -> None:
    late = _Late()
    saving = Checkpoints(late, CheckpointFolder(tmp_path))  # type: ignore[arg-type]
    await saving.save(1, {})
    with pytest.raises(CheckpointError, match="took longer than 1 s"):
        await saving.settle()
    (draft,) = tmp_path.iterdir()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="still being written"):
            await saving.save(1, {})
        assert (draft / "__0_0.distcp").is_file()
    late.writing = False
    await saving.save(1, {})
    await saving.settle()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "update-00000001"]


def test_an_older_attempt_does_not_replace_what_a_later_one_exported(
    alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it wakes up before it writes, nor between two files."""
    uri = f"file://{tmp_path}/store"
    first, second = CheckpointStore(uri, HOLDER), CheckpointStore(uri, Holder(2, HOLDER.started + 1))
    rank, upload, uploads = alone(), Store.upload, list[str]()
    first.take_over()

    def overtaken(store: Store, path: str, source: Path) -> None:
        upload(store, path, source)
        uploads.append(path)
        if len(uploads) == 1:
            second.take_over()

    monkeypatch.setattr(Store, "upload", overtaken)
    with pytest.raises(FencedOut):
        exports._export_to(rank, first, "reference", False)
    assert len(uploads) == 1 and not fetch(f"{uri}/reference", tmp_path / "half")
    exports._export_to(rank, second, "reference", False)
    before = open_store(uri).list("reference")
    with pytest.raises(FencedOut):
        exports._export_to(rank, first, "reference", False)
    assert open_store(uri).list("reference") == before and fetch(f"{uri}/reference", tmp_path / "whole")


def test_another_base_model_is_refused(alone: Any, tiny: Tiny, tmp_path: Path) -> None:
    """Of the same shapes: only its frozen weights differ."""
    document = _write(alone(freeze_vision=True), tmp_path / "a")
    other = tmp_path / "other"
    shutil.copytree(tiny.folder, other)
    found = load_file(other / "model.safetensors")
    name = next(name for name in found if "visual" in name)
    found[name] = found[name] + 1
    save_file(found, other / "model.safetensors", {"format": "pt"})
    rank = alone(other, freeze_vision=True)
    with pytest.raises(
        ValueError, match=r"of another base model than the one in .*other: .*frozen tensors.*spec.model"
    ):
        rank_state.load(rank, str(tmp_path / "a"), document, moments=True)


def test_a_whole_checkpoint_needs_no_base(alone: Any, tiny: Tiny, tmp_path: Path) -> None:
    """Nor do those of an earlier version, which held what was frozen as well."""
    rank = alone(freeze_vision=False)
    _shift(rank)
    expected = {name: value.clone() for name, value in rank.weights().items()}
    document = _write(rank, tmp_path / "a")
    assert document["base"] is None
    again = alone(freeze_vision=True)
    rank_state.load(again, str(tmp_path / "a"), document | {"format": 2}, moments=False)
    for name, value in again.weights().items():
        assert torch.equal(value, expected[name]), name
    assert not again.optimizer.state and again.steps == 0


def test_what_is_trained_now_and_was_not_saved_is_named(alone: Any, tmp_path: Path) -> None:
    document = _write(alone(freeze_vision=True), tmp_path / "a")
    rank = alone(freeze_vision=False)
    with pytest.raises(ValueError, match=r"lacks \d+ parameters that this run trains: .*visual.*freezeVision"):
        rank_state.load(rank, str(tmp_path / "a"), document, moments=True)


def test_a_fingerprint_is_of_numbers_and_not_of_files(tiny: Tiny, tmp_path: Path) -> None:
    """A folder that was exported anew, in another number format and several files, is the same base model."""
    first = rank_state.fingerprint(tiny.folder, ())
    shutil.copytree(tiny.folder, tmp_path / "same")
    found = {name: value.double() for name, value in load_file(tiny.folder / "model.safetensors").items()}
    (tmp_path / "same" / "model.safetensors").unlink()
    for number, name in enumerate(found):
        save_file({name: found[name]}, tmp_path / "same" / f"model-{number}.safetensors", {"format": "pt"})
    assert rank_state.fingerprint(tmp_path / "same", ()) == first
    for name, value in found.items():
        save_file({name: value + 1}, tmp_path / "same" / "model-0.safetensors", {"format": "pt"})
        (tmp_path / "same" / "model-0.safetensors").rename(tmp_path / "same" / "model-x.safetensors")
        assert rank_state.fingerprint(tmp_path / "same", ()) != first
        assert rank_state.fingerprint(tmp_path / "same", {name}) == rank_state.fingerprint(tiny.folder, {name})
        break


@pytest.mark.parametrize("name", ["qwen2-vl-7b-tiny", "qwen2.5-vl-7b-tiny"])
def test_a_fingerprint_is_the_same_under_published_and_under_parameters_names(name: str, tmp_path: Path) -> None:
    """Also of what is frozen alone: the trained part is known by its parameters' names."""
    published = real.folder(name, 1, 1, flat=True)
    family = family_of(ModelConfig.of_folder(published))
    found = {family.parameter_of(k): v for k, v in load_file(published / "model.safetensors").items()}
    assert found.keys() != load_file(published / "model.safetensors").keys()
    shutil.copy(real.folder(name, 1, 1) / "config.json", tmp_path)
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    trained = {parameter for parameter in found if ".visual." not in parameter}
    for known in (set[str](), trained):
        first = rank_state.fingerprint(published, known)
        assert first == rank_state.fingerprint(tmp_path, known) and first["tensors"] == len(found) - len(known)
    for parameter in (next(p for p in found if ".visual." in p), next(iter(trained))):
        save_file(found | {parameter: found[parameter] + 1}, tmp_path / "model.safetensors", {"format": "pt"})
        same = rank_state.fingerprint(tmp_path, trained) == rank_state.fingerprint(published, trained)
        assert same == (parameter in trained)
