"""Checkpoints in object storage, and in a folder: what a crash, an older attempt and a store that fails may leave."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.s3 import Bucket

from tapforge_trainer.learner import checkpoint_storage
from tapforge_trainer.learner.checkpoint_storage import (
    CheckpointError,
    CheckpointStore,
    FencedOut,
    Holder,
    checkpoint_at,
    place_of,
    read_state,
)
from tapforge_trainer.storage import object_storage
from tapforge_trainer.storage.object_storage import StorageError, Store, open_store

FIRST, SECOND = Holder(1, 1_795_176_000_000), Holder(2, 1_795_176_090_000)
FILES = {"__0_0.distcp": 7, "__1_0.distcp": 9}


@pytest.fixture(params=["s3", "file"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("bucket").uri if request.param == "s3" else f"file://{tmp_path}/store"


def _document(update: int) -> dict[str, Any]:
    return {"format": 3, "update": update, "time": 1.0, "counters": {}, "files": FILES, "driver": {"update": update}}


def _save(place: CheckpointStore, update: int, keep: int = 2) -> str:
    """As the driver and two ranks do it."""
    draft = place.draft(update)
    place.begin(draft, _document(update))
    store = open_store(draft.target)
    for name, size in FILES.items():
        store.put(name, b"x" * size)
    place.publish(draft, _document(update), FILES, keep)
    return draft.place


def _updates(uri: str) -> list[int]:
    return [int(name.split("-")[1]) for name in open_store(uri).folders()]


def test_what_is_saved_is_the_latest_and_older_ones_go(uri: str, tmp_path: Path) -> None:
    beside = tmp_path / "checkpoints"
    place = place_of(beside, uri, FIRST)
    assert isinstance(place, CheckpointStore) and place.latest() is None
    place.take_over()
    assert place.latest() is None, "it belongs to somebody, and holds nothing"
    for update in (1, 2, 3, 3):
        newest = _save(place, update)
    assert _updates(uri) == [2, 3] and place.latest() == newest == checkpoint_at(uri)
    assert read_state(newest)["update"] == 3 and checkpoint_at(newest) == newest
    kept = {path.parent.name: json.loads(path.read_text())["update"] for path in beside.glob("*/state.json")}
    assert sorted(kept.values()) == [2, 3] and sorted(kept) == open_store(uri).folders()
    assert CheckpointStore(uri).latest() == newest, "who only reads"


def test_an_older_attempt_can_not_move_latest(uri: str) -> None:
    first, second = CheckpointStore(uri, FIRST), CheckpointStore(uri, SECOND)
    first.take_over()
    one = _save(first, 1)
    draft = first.draft(2)
    open_store(draft.target).put("__0_0.distcp", b"x" * 7)  # it is in the middle of its next one
    second.take_over()
    assert second.latest() == one, "it resumes where the first one stopped"
    open_store(draft.target).put("__1_0.distcp", b"x" * 9)
    with pytest.raises(FencedOut, match="belong to attempt 00000002-1795176090000"):
        first.publish(draft, _document(2), FILES, 2)
    with pytest.raises(FencedOut):
        first.take_over()
    assert second.latest() == one
    two = _save(second, 2)
    assert second.latest() == two and open_store(uri).folders() == sorted(
        place.rpartition("/")[2] for place in (one, two)
    ), "what the first one left incomplete is gone"


def test_an_older_attempt_that_overtakes_itself_in_the_last_moment(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one begins between its look at `latest` and its write."""
    first, second = CheckpointStore(uri, FIRST), CheckpointStore(uri, SECOND)
    first.take_over()
    put = Store.put

    def overtaken(store: Store, path: str, data: bytes, **condition: Any) -> str:
        if path == "latest":
            monkeypatch.setattr(Store, "put", put)
            second.take_over()
        return put(store, path, data, **condition)

    monkeypatch.setattr(Store, "put", overtaken)
    with pytest.raises(FencedOut):
        _save(first, 1)
    assert second.latest() is None
    two = _save(second, 1)
    assert second.latest() == two


def test_the_first_one_does_not_delete_what_the_second_one_is_writing(uri: str) -> None:
    """The second begins after the first has moved `latest` for the last time."""
    first, second = CheckpointStore(uri, FIRST), CheckpointStore(uri, SECOND)
    first.take_over()
    draft = second.draft(5)
    open_store(draft.target).put("__0_0.distcp", b"x" * 7)
    _save(first, 1)
    assert draft.place.rpartition("/")[2] in open_store(uri).folders()


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("saves", [0, 1, 2])
def test_an_older_attempt_that_wakes_up_before_it_deletes(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, saves: int
) -> None:
    """It has moved `latest`, and sleeps while the other one resumes from there and saves."""
    beside = tmp_path / "checkpoints"
    first, second = CheckpointStore(uri, FIRST, beside), CheckpointStore(uri, SECOND, beside)
    first.take_over()
    _save(first, 30, keep)
    prune, saved = CheckpointStore._prune, list[str]()

    def asleep(place: CheckpointStore, store: Store, newest: str, keep: int) -> None:
        monkeypatch.setattr(CheckpointStore, "_prune", prune)
        second.take_over()
        saved.extend(_save(second, 40, keep) for _ in range(saves))
        prune(place, store, newest, keep)

    monkeypatch.setattr(CheckpointStore, "_prune", asleep)
    one = _save(first, 40, keep)
    newest = saved[-1] if saved else one
    assert second.latest() == newest and read_state(newest)["update"] == 40
    assert (beside / newest.rpartition("/")[2] / "state.json").is_file()
    assert not checkpoint_storage.missing_files(newest, FILES)


def test_a_later_attempt_that_begins_while_an_older_one_deletes(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to delete is left to it."""
    first, second = CheckpointStore(uri, FIRST), CheckpointStore(uri, SECOND)
    first.take_over()
    for update in (1, 2, 3):
        _save(first, update, keep=3)
    delete = Store.delete_folder

    def overtaken(store: Store, prefix: str) -> None:
        second.take_over()
        delete(store, prefix)

    monkeypatch.setattr(Store, "delete_folder", overtaken)
    _save(first, 4, keep=1)
    assert _updates(uri) == [2, 3, 4]


def test_a_checkpoint_that_did_not_arrive_whole_is_none(uri: str) -> None:
    place = CheckpointStore(uri, FIRST)
    place.take_over()
    one = _save(place, 1)
    for damage, words in (({"__1_0.distcp": 3}, "has 3 bytes instead of 9"), ({}, "__1_0.distcp is not there")):
        draft = place.draft(2)
        store = open_store(draft.target)
        store.put("__0_0.distcp", b"x" * 7)
        for name, size in damage.items():
            store.put(name, b"x" * size)
        with pytest.raises(StorageError, match=f"did not arrive whole.*{words}"):
            place.publish(draft, _document(2), FILES, 2)
        assert place.latest() == one
        place.discard(draft)
    assert _updates(uri) == [1]


def test_a_pointer_to_nothing_is_named(uri: str) -> None:
    place = CheckpointStore(uri, FIRST)
    place.take_over()
    one = _save(place, 1)
    open_store(uri).delete_folder(one.rpartition("/")[2])
    with pytest.raises(CheckpointError, match=r"latest names 'update-00000001-.*resumeFrom"):
        place.latest()
    open_store(uri).put("latest", b"{")
    with pytest.raises(CheckpointError, match=r"latest can't be read.*resumeFrom"):
        place.latest()


# --- crashes ----------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone."""


class Failing:
    """Counts what changes a store, and lets the `last` one be the last: it is carried out, half carried out, or not;
    and then nothing."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int | None, carried_out: str):
        self.calls = 0
        for name in ("put", "upload", "delete"):
            patch.setattr(Store, name, self._counted(getattr(Store, name), last, carried_out))

    def _counted(self, real: Callable[..., Any], last: int | None, carried_out: str) -> Callable[..., Any]:
        def call(store: Store, what: Any, *arguments: Any, **named: Any) -> Any:
            self.calls += 1
            what = what if isinstance(what, str) else list(what)
            if last is not None and self.calls >= last:
                if self.calls == last and carried_out == "half" and isinstance(what, list):
                    real(store, what[: len(what) // 2])
                elif self.calls == last and carried_out == "yes":
                    real(store, what, *arguments, **named)
                raise Crash
            return real(store, what, *arguments, **named)

        return call


def _three_saves(uri: str) -> Iterator[str]:
    place = CheckpointStore(uri, FIRST)
    place.take_over()
    for update in (1, 2, 3):
        yield _save(place, update)


@pytest.mark.parametrize("carried_out", ["no", "half", "yes"])
def test_a_crash_at_any_write_leaves_a_whole_checkpoint(tmp_path: Path, carried_out: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counted = Failing(patch, None, carried_out)
        assert len(list(_three_saves(f"file://{tmp_path}/all"))) == 3
    assert counted.calls >= 19
    for last in range(1, counted.calls + 1):
        uri, saved = f"file://{tmp_path}/{last}", 0
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
            Failing(patch, last, carried_out)
            for _ in _three_saves(uri):
                saved += 1
        after = CheckpointStore(uri, SECOND)
        after.take_over()
        newest = after.latest()
        # What was reported as saved is there. The one after it is as well if the crash came after `latest` had moved.
        if newest is None:
            assert saved == 0
        else:
            update = read_state(newest)["update"]
            assert update in (saved, saved + 1)
            assert {one.path: one.size for one in open_store(newest).list()}.items() >= FILES.items()
        again = _save(after, 4)
        assert after.latest() == again and len(_updates(uri)) <= 2 and set(_updates(uri)) <= {1, 2, 3, 4}
        for name in open_store(uri).folders():
            assert open_store(f"{uri}/{name}").etag("state.json") is not None, "nothing incomplete is left"


@settings(max_examples=60)
@given(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=12), st.data())
def test_of_attempts_that_overtake_each_other_the_latest_one_writes(order: list[int], data: st.DataObject) -> None:
    """Attempts take over and save in any order: after one began, no earlier one moves `latest` any more."""
    uri = f"memory://{uuid.uuid4().hex}/runs"
    began, pointed = 0, None
    for step, number in enumerate(order):
        place = CheckpointStore(uri, Holder(number))
        try:
            if data.draw(st.booleans()):
                place.take_over()
            else:
                pointed = _save(place, step + 1)
        except FencedOut:
            assert number < began
        else:
            assert number >= began
            began = number
        assert place.latest() == pointed


# --- stores that fail -------------------------------------------------------------------------------------------------


def test_credentials_that_expire(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import ClientError

    place = CheckpointStore(bucket.uri, FIRST)
    place.take_over()
    one = _save(place, 1)
    expired = ClientError(
        {"Error": {"Code": "ExpiredToken", "Message": "The provided token has expired."}}, "PutObject"
    )
    draft = place.draft(2)
    with monkeypatch.context() as patch:
        from s3fs import S3FileSystem

        async def refuse(*_: Any, **__: Any) -> Any:
            raise PermissionError("The provided token has expired.") from expired

        patch.setattr(S3FileSystem, "_call_s3", refuse)
        with pytest.raises(StorageError, match=r"latest: the credentials have expired.*give new ones"):
            place.publish(draft, _document(2), FILES, 2)
    assert place.latest() == one


def test_a_bucket_that_is_not_there_is_known_before_anything_starts(bucket: Bucket) -> None:
    with pytest.raises(StorageError, match=r"there is no bucket gone"):
        CheckpointStore("s3://gone/runs", FIRST).take_over()


def test_a_server_that_ignores_conditions_is_refused(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Store._write

    def ignoring(store: Store, place: str, data: bytes, if_none_match: bool, if_match: str | None) -> str:
        return real(store, place, data, False, None)

    monkeypatch.setattr(object_storage.Store, "_write", ignoring)
    with pytest.raises(StorageError, match="ignores conditional writes"):
        CheckpointStore(bucket.uri, FIRST).take_over()


def test_only_stores_with_conditional_writes_take_checkpoints() -> None:
    with pytest.raises(StorageError, match="conditional writes"):
        CheckpointStore("https://example.org/runs", FIRST)
