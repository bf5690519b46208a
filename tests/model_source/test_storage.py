"""A folder of a bucket (moto's S3, asked by s3fs), on nodes that share nothing."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.model_source.conftest import Node, node, pinned, said
from tests.model_source.small_model import WANTED, files
from tests.s3 import Bucket

from tapforge_api import TrainingRun
from tapforge_api.loading import from_object
from tapforge_trainer.run import assembly
from tapforge_trainer.run.model_pin import PINNED, model_of, teacher_of

HEAVY = "model-00001-of-00002.safetensors"


def upload(bucket: Bucket, **changes: bytes) -> dict:
    for name, data in {**files(), **changes}.items():
        bucket.client.put_object(Bucket=bucket.name, Key=f"models/mine/{name}", Body=data)
    return {"objectStorage": {"uri": f"s3://{bucket.name}/models/mine/"}}


def aws(place: Path, **changes: str) -> Node:
    return node(place, **{name: value for name, value in os.environ.items() if name.startswith("AWS_")} | changes)


def test_each_node_has_the_files_that_the_driver_listed(bucket: Bucket, tmp_path: Path) -> None:
    source = upload(bucket)
    ref = pinned(aws(tmp_path / "driver"), source)
    assert {file["name"] for file in ref["files"]} == WANTED and all(file["etag"] for file in ref["files"])
    kind, described = aws(tmp_path / "driver").resolve(ref, weights=False)
    assert kind == "" and not list(Path(described).glob("*.safetensors"))
    here = [aws(tmp_path / "a")] * 3 + [aws(tmp_path / "b")]
    answers = [said(process) for process in [one.start(ref=ref, weights=True, seconds=60.0) for one in here]]
    assert [kind for kind, _ in answers] == [""] * 4, answers
    assert len({folder for _, folder in answers}) == 2
    for _, folder in answers:
        assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == {n: files()[n] for n in WANTED}
    # What is there costs no call.
    assert aws(tmp_path / "a", AWS_ENDPOINT_URL="http://127.0.0.1:1").resolve(ref) == answers[0]


def test_files_that_have_come_are_kept_when_a_download_is_interrupted(bucket: Bucket, tmp_path: Path) -> None:
    source, here = upload(bucket), aws(tmp_path)
    ref = pinned(here, source)
    _, folder = here.resolve(ref)
    # As a kill leaves it: a part of the files, under the name that says so; of one of them only the beginning.
    growing = Path(folder).rename(f"{folder}.partial")
    (growing / HEAVY).unlink()
    (growing / f".{HEAVY}.partial-1").write_bytes(files()[HEAVY][:100])
    kept = {path.name: path.stat().st_mtime_ns for path in growing.iterdir()}
    assert here.resolve(ref) == ("", folder)
    now = {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
    assert set(now) == WANTED and {n for n in WANTED if now[n] != kept.get(n)} == {HEAVY}
    assert (Path(folder) / HEAVY).read_bytes() == files()[HEAVY]


def test_a_file_that_changed_since_the_run_began_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    source, here = upload(bucket), aws(tmp_path)
    ref = pinned(here, source)
    upload(bucket, **{HEAVY: files(1)[HEAVY]})
    kind, words = here.resolve(ref)
    assert kind == "ModelRefused" and f"{HEAVY} has changed since the run began" in words
    assert not [
        path
        for path in (tmp_path / "tapforge" / "models").iterdir()
        if path.suffix != ".lock" and "partial" not in path.name
    ]
    # A later session asks for the files of the first one, too.
    earlier = {
        **{name: ref[name] for name in ("kind", "place", "commit")},
        "files": [[*f.values()] for f in ref["files"]],
    }
    assert here.resolve(pinned(here, source, earlier))[0] == "ModelRefused"
    assert here.resolve(pinned(here, source))[0] == ""


def test_what_is_wrong_with_a_bucket_is_told_at_the_start(bucket: Bucket, tmp_path: Path) -> None:
    here = aws(tmp_path)
    for uri, kind, part in (
        (f"s3://{bucket.name}/nothing", "ModelRefused", "no such folder"),
        (f"s3://{bucket.name}-other/models", "ModelError", "there is no bucket"),
        ("s3://", "ModelError", "names no bucket"),
        ("ftps3://a/b", "ModelError", "no library here knows ftps3://"),
    ):
        found, words = here.pin({"objectStorage": {"uri": uri}}) if uri != "s3://" else (kind, part)
        assert found == kind and part in words, words
    source = upload(bucket)
    bucket.client.delete_object(Bucket=bucket.name, Key="models/mine/tokenizer.json")
    kind, words = here.pin(source)
    assert kind == "ModelRefused" and "lacks a tokenizer" in words


def test_a_shard_that_is_cut_short_is_refused_by_the_node(bucket: Bucket, tmp_path: Path) -> None:
    source = upload(bucket, **{HEAVY: files()[HEAVY][:-10]})
    here = aws(tmp_path)
    kind, words = here.resolve(pinned(here, source))
    assert kind == "ModelRefused" and HEAVY in words and "bytes instead of" in words


def test_a_run_that_is_resumed_begins_with_the_files_of_its_first_session(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAPFORGE_CACHE", str(tmp_path / "cache"))
    about = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}}
    run = from_object(TrainingRun, {**about, "spec": {"model": {"source": upload(bucket)}}})
    first = model_of(run, tmp_path / "run")
    assert (assembly.described(first) / "config.json").is_file()
    upload(bucket, **{HEAVY: files(1)[HEAVY]})
    assert model_of(run, tmp_path / "run") == first
    kept = (tmp_path / "run" / PINNED).read_bytes()
    for name, data in files(1).items():
        bucket.client.put_object(Bucket=bucket.name, Key=f"models/others/{name}", Body=data)
    others = {"objectStorage": {"uri": f"s3://{bucket.name}/models/others/"}}
    other = from_object(TrainingRun, {**about, "spec": {"model": {"source": others}}})
    assert model_of(other, tmp_path / "run") != first  # a measurement's, which only reads
    assert (tmp_path / "run" / PINNED).read_bytes() == kept
    assert model_of(run, tmp_path / "other") != first
    bucket.client.delete_object(Bucket=bucket.name, Key="models/mine/config.json")
    with pytest.raises(assembly.ConfigurationError, match=r"objectStorage\.uri: s3://.* lacks config\.json"):
        model_of(run, tmp_path / "third")


def test_a_run_whose_folder_was_lost_begins_with_the_files_that_lie_beside_its_checkpoints(
    bucket: Bucket, tmp_path: Path
) -> None:
    about = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}}
    checkpoints = {"uri": f"s3://{bucket.name}/runs"}
    spec = {"model": {"source": upload(bucket)}, "checkpoints": checkpoints}
    run = from_object(TrainingRun, {**about, "spec": spec})
    looked = model_of(run, tmp_path / "looked")  # who only reads checkpoints leaves nothing there
    first = model_of(run, tmp_path / "run", keep=True)
    assert first == looked
    upload(bucket, **{HEAVY: files(1)[HEAVY]})
    assert model_of(run, tmp_path / "lost", keep=True) == first
    assert (tmp_path / "lost" / PINNED).read_text() == (tmp_path / "run" / PINNED).read_text()
    bucket.client.put_object(Bucket=bucket.name, Key=f"runs/r/{PINNED}", Body=b"")
    with pytest.raises(assembly.SetupError, match=f"runs/r/{PINNED}, what the model was pinned to, can't be read"):
        model_of(run, tmp_path / "again", keep=True)
    bucket.client.delete_object(Bucket=bucket.name, Key=f"runs/r/{PINNED}")
    assert model_of(run, tmp_path / "new", keep=False) != first


def test_a_teacher_is_pinned_as_the_model_is_and_named_by_its_own_field(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAPFORGE_CACHE", str(tmp_path / "cache"))
    about = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}}
    spec = {"algorithm": {"distillation": {"teacher": upload(bucket)}}}
    run = from_object(TrainingRun, {**about, "spec": spec})
    first = teacher_of(run, tmp_path / "run")
    assert first is not None and (assembly.described(first) / "config.json").is_file()
    upload(bucket, **{HEAVY: files(1)[HEAVY]})
    assert teacher_of(run, tmp_path / "run") == first and teacher_of(run, tmp_path / "other") != first
    assert not (tmp_path / "run" / PINNED).exists(), "the model is the tiny one"
    bucket.client.delete_object(Bucket=bucket.name, Key="models/mine/config.json")
    field = r"spec\.algorithm\.distillation\.teacher\.objectStorage\.uri: s3://.* lacks config\.json"
    with pytest.raises(assembly.ConfigurationError, match=field):
        teacher_of(run, tmp_path / "third")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "storage"}', '{"files": [1]}'])
def test_a_pin_that_cannot_be_read_is_told_and_kept(text: str, tmp_path: Path) -> None:
    about = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}}
    source = {"objectStorage": {"uri": "s3://nowhere/models"}}
    run = from_object(TrainingRun, {**about, "spec": {"model": {"source": source}}})
    (tmp_path / PINNED).write_text(text)
    with pytest.raises(assembly.SetupError, match="can't be read .*: restore it, or delete it to begin"):
        model_of(run, tmp_path)
    assert (tmp_path / PINNED).read_text() == text


class _Expired(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        words = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        self.send_response(400)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(words)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(words)

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


def test_credentials_that_have_expired_are_named(bucket: Bucket, tmp_path: Path) -> None:
    source = upload(bucket)
    ref = pinned(aws(tmp_path), source)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Expired)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    late = aws(tmp_path, AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_address[1]}")
    said_by = [late.pin(source), late.resolve(ref)]
    server.shutdown()
    server.server_close()
    for kind, words in said_by:
        assert kind == "ModelError" and words.count("s3://") == 1 and "objectStorage.uri" in words, words
        assert "the credentials have expired" in words and "renews by itself" in words
