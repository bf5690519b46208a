"""Stores by their URIs: the same promises from S3 (moto), from a folder and from memory."""

from __future__ import annotations

import socket
import threading
import uuid
from pathlib import Path

import pytest
from s3fs import S3FileSystem
from tests.s3 import Bucket

from tapforge_trainer.storage.object_storage import Conflict, StorageError, Store, open_store, uri_error


@pytest.fixture(params=["s3", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return open_store(request.getfixturevalue("bucket").uri)
    if request.param == "file":
        return open_store(f"file://{tmp_path}/store")
    return open_store(f"memory://{uuid.uuid4().hex}/store")


def test_what_is_put_is_read_listed_and_deleted(store: Store, tmp_path: Path) -> None:
    assert (store.list(), store.read("a"), store.etag("a"), store.folders()) == ([], None, None, [])
    etag = store.put("a", b"one")
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    store.upload("deep/er/b", tmp_path / "file")
    with pytest.raises(Conflict, match="deep/er/b has been written by another process"):
        store.upload("deep/er/b", tmp_path / "file")
    assert store.read("a") == (b"one", etag) and store.etag("a") == etag
    assert [(one.path, one.size) for one in store.list()] == [("a", 3), ("deep/er/b", 100_000)]
    assert store.list()[0].etag == etag
    assert [one.path for one in store.list("deep")] == ["deep/er/b"] and store.folders() == ["deep"]
    store.get("deep/er/b", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"x" * 100_000
    store.delete_folder("deep")
    assert [one.path for one in store.list()] == ["a"] and store.folders() == []
    store.delete(["a", "never"])
    assert store.list() == []
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "copy", "store"}, "no part of a file is left"


def test_a_conditional_write_happens_only_while_the_object_is_as_it_was_known(store: Store) -> None:
    first = store.put("latest", b"1", if_none_match=True)
    with pytest.raises(Conflict, match="latest has been written by another process"):
        store.put("latest", b"2", if_none_match=True)
    second = store.put("latest", b"2", if_match=first)
    assert second != first
    with pytest.raises(Conflict):
        store.put("latest", b"3", if_match=first)
    store.delete(["latest"])
    with pytest.raises(Conflict):
        store.put("latest", b"3", if_match=second)
    assert store.read("latest") is None
    store.check_conditions("probe")
    assert store.list() == []


def test_an_answer_that_was_lost_is_found_again(store: Store) -> None:
    """The first try was carried out, its answer lost, and a library's second try refused."""
    first = store.put("latest", b"1", if_none_match=True)
    second = store.put("latest", b"2", if_match=first)
    assert store.put("latest", b"2", if_match=first) == second


def test_of_many_that_write_at_once_one_wins(store: Store) -> None:
    etag, won = store.put("latest", b"0"), []

    def write(number: int) -> None:
        try:
            open_store(store.uri).put("latest", b"%d" % number, if_match=etag)
        except Conflict:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = store.read("latest")
    assert found is not None and [b"%d" % number for number in won] == [found[0]]


def test_what_is_not_there_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nothing is not there"):
        store.get("nothing", tmp_path / "x")
    assert list(tmp_path.glob("*x*")) == []


def test_a_bucket_that_is_not_there(bucket: Bucket, tmp_path: Path) -> None:
    store = open_store("s3://nobodys-bucket/runs")
    for call in (
        lambda: store.put("a", b""),
        lambda: store.read("a"),
        store.list,
        lambda: store.get("a", tmp_path / "a"),
    ):
        with pytest.raises(StorageError, match="there is no bucket nobodys-bucket"):
            call()


def test_a_server_that_is_not_there(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(StorageError, match="s3://elsewhere/a.*[Cc]onnect"):
        open_store("s3://elsewhere").read("a")


def test_no_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="there are no credentials"):
        open_store(bucket.uri).put("a", b"")


@pytest.mark.parametrize(
    ("uri", "writable", "words"),
    [
        ("s3://", False, "names no bucket"),
        ("runs/x", False, "is not a URI"),
        ("nobody://x/y", False, "no library here knows nobody://"),
        ("http://x/y", True, "conditional writes"),
        ("http://x/y", False, None),
        ("s3://b/x", True, None),
        ("s3a://b/x", True, None),
        ("gs://b/x", True, None),
    ],
)
def test_uris(uri: str, writable: bool, words: str | None) -> None:
    error = uri_error(uri, writable=writable)
    assert (error is None) if words is None else (error is not None and words in error)
