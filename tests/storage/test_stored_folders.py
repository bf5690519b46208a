"""Exports and KL references in object storage: whole, and of one attempt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapforge_trainer.learner.checkpoint_storage import CheckpointStore, FencedOut, Holder
from tapforge_trainer.learner.export import LISTED, get_folder, put_folder
from tapforge_trainer.storage.object_storage import Conflict, StorageError, Store, open_store

FIRST, SECOND = Holder(1, 1_795_176_000_000), Holder(2, 1_795_176_090_000)


@pytest.fixture(params=["s3", "file"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("bucket").uri if request.param == "s3" else f"file://{tmp_path}/store"


def test_a_folder_is_there_whole_or_not_at_all(uri: str, tmp_path: Path) -> None:
    store = open_store(uri)
    (tmp_path / "model" / "adapter").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "adapter" / "weights").write_bytes(b"x" * 1000)
    store.put("export/old", b"of an earlier one")
    (tmp_path / "copy").mkdir()
    assert not get_folder(store, "export", tmp_path / "copy"), "nobody has put it whole"
    put_folder(store, "export", tmp_path / "model", lambda: None)
    assert get_folder(store, "export", tmp_path / "copy")
    assert (tmp_path / "copy" / "adapter" / "weights").read_bytes() == b"x" * 1000
    assert not (tmp_path / "copy" / "old").exists() and store.etag("export/old") is None
    store.put("export/config.json", b"{ }")
    with pytest.raises(StorageError, match=r"export/config.json has 3 bytes instead of 2"):
        get_folder(store, "export", tmp_path / "copy")


@pytest.mark.parametrize("name", ["model.safetensors", LISTED])
@pytest.mark.parametrize("wakes", ["after it is whole", "before its file is there"])
def test_an_export_is_of_one_attempt(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wakes: str, name: str
) -> None:
    """The first attempt sleeps inside one write, while the second one begins, and exports as much under the same
    names."""
    first, second = CheckpointStore(uri, FIRST), CheckpointStore(uri, SECOND)
    first.take_over()
    models = [tmp_path / "1", tmp_path / "2"]
    for number, folder in enumerate(models):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"%d" % number * 1000)
    calls = list[Callable[[], object]]()

    def woken() -> None:
        """Every write of the first attempt's that is under way is carried out, whatever becomes of it."""
        while calls:
            with contextlib.suppress(Conflict):
                calls.pop()()

    def slept(method: str) -> None:
        real, seen = getattr(Store, method), list[int]()

        def call(store: Store, path: str, *arguments: Any, **named: Any) -> Any:
            if path == f"export/{name}":
                seen.append(len(seen))
                if len(seen) == 1:
                    calls.append(lambda: real(open_store(uri), path, *arguments, **named))
                    second.take_over()
                    put_folder(open_store(uri), "export", models[1], second.check)
                    woken()
                    raise Conflict("what became of it")
                if wakes == "before its file is there":
                    woken()
            return real(store, path, *arguments, **named)

        monkeypatch.setattr(Store, method, call)

    slept("put" if name == LISTED else "upload")
    with pytest.raises(FencedOut):
        put_folder(open_store(uri), "export", models[0], first.check)
    (tmp_path / "found").mkdir()
    assert get_folder(open_store(uri), "export", tmp_path / "found")
    assert (tmp_path / "found" / "model.safetensors").read_bytes() == b"1" * 1000
