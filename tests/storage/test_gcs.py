"""Google's store by the requests that gcsfs sends: a server of its JSON API that does what these tests need, and keeps
generations as the real one does. The real one was not to be had here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from gcsfs import GCSFileSystem

from tapforge_trainer.learner.checkpoint_storage import CheckpointStore, FencedOut, Holder
from tapforge_trainer.storage.object_storage import Conflict, StorageError, open_store


class _Objects:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.found: dict[str, tuple[bytes, int]] = {}
        self.generation = 1_000

    def put(self, name: str, data: bytes, expected: str | None) -> int | None:
        with self.lock:
            now = self.found.get(name, (b"", 0))[1]
            if expected is not None and int(expected) != now:
                return None
            self.generation += 1
            self.found[name] = (data, self.generation)
            return self.generation


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Objects]:
    objects = _Objects()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _said(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def _json(self, status: int, document: Any) -> None:
            self._said(status, json.dumps(document).encode(), Content_Type="application/json")

        def _resource(self, name: str) -> dict[str, Any]:
            data, generation = objects.found[name]
            return {"name": name, "bucket": "b", "size": str(len(data)), "generation": str(generation)}

        def do_POST(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if url.path != "/upload/storage/v1/b/b/o" or query.get("uploadType") != "media":
                return self._json(404, {"error": {"message": "no such bucket"}})
            if objects.put(query["name"], data, query.get("ifGenerationMatch")) is None:
                return self._json(412, {"error": {"message": "At least one pre-condition did not hold"}})
            return self._json(200, self._resource(query["name"]))

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            name = unquote(url.path.partition("/o/")[2])
            if not name:
                prefix = query.get("prefix", "")
                items = [self._resource(one) for one in sorted(objects.found) if one.startswith(prefix)]
                return self._json(200, {"items": items[: int(query.get("maxResults", 1000))]})
            if name not in objects.found:
                return self._json(404, {"error": {"message": "no such object"}})
            if query.get("alt") == "media":
                data, generation = objects.found[name]
                return self._said(200, data, X_Goog_Generation=str(generation))
            return self._json(200, self._resource(name))

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    from fsspec.config import conf

    monkeypatch.setitem(conf, "gs", {"token": "anon"})
    GCSFileSystem.clear_instance_cache()
    yield objects
    server.shutdown()
    server.server_close()


def test_conditional_writes_go_by_generations(gcs: _Objects) -> None:
    store = open_store("gs://b/runs")
    assert store.read("latest") is None
    first = store.put("latest", b"1", if_none_match=True)
    assert gcs.found["runs/latest"] == (b"1", int(first)) and store.read("latest") == (b"1", first)
    with pytest.raises(Conflict):
        store.put("latest", b"2", if_none_match=True)
    second = store.put("latest", b"2", if_match=first)
    with pytest.raises(Conflict):
        store.put("latest", b"3", if_match=first)
    assert store.read("latest") == (b"2", second) and store.etag("latest") == second


def test_an_older_attempt_is_refused(gcs: _Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    from tapforge_trainer.storage.object_storage import Store

    monkeypatch.setattr(Store, "delete", lambda store, paths: None)  # its batches are not among what the server does
    first, second = (CheckpointStore("gs://b/runs", Holder(number)) for number in (1, 2))
    first.take_over()
    second.take_over()
    with pytest.raises(FencedOut):
        first.take_over()


def test_a_bucket_that_is_not_there(gcs: _Objects) -> None:
    with pytest.raises(StorageError, match=r"gs://gone/latest"):
        open_store("gs://gone").put("latest", b"")
