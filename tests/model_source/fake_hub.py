"""A hub on this machine, as much of it as huggingface_hub's client asks for: revisions, trees, files in ranges; and
refusals as the real one words them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    files: dict[str, bytes]
    revisions: dict[str, str]
    #: who may read it; None: everybody
    token: str | None = None
    gated: bool = False


@dataclass
class FakeHub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    #: downloads by file name, as far as bytes were sent
    sent: Counter[str] = field(default_factory=Counter)
    #: files whose next transfer breaks off in the middle
    break_off: set[str] = field(default_factory=set)
    #: requests that are answered by 503
    busy: int = 0
    asked: int = 0

    def start(self) -> str:
        hub = self

        class Handler(_Handler):
            fake = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def commit_of(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeHub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *arguments: Any) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        fake = self.fake
        fake.asked += 1
        if fake.busy > 0:
            fake.busy -= 1
            return self._say(503, b"busy", body)
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        api = parts[:1] == ["api"]
        of_data = parts[1 if api else 0] == "datasets"
        parts = parts[1:] if of_data and not api else parts
        name = "/".join(parts[2:4] if api else parts[:2])
        found = fake.repositories.get(f"datasets/{name}" if of_data else name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if found is None:
            return self._say(404 if token else 401, b"", body, {"X-Error-Code": "RepoNotFound"})
        if found.token is not None and token != found.token:
            if found.gated and token:
                return self._say(403, b"", body, {"X-Error-Code": "GatedRepo"})
            return self._say(401, b"", body, {"X-Error-Code": "RepoNotFound"})
        revision = parts[5] if api else parts[3]
        commit = found.revisions.get(revision, revision if len(revision) == 40 else "")
        if not commit:
            return self._say(404, b"", body, {"X-Error-Code": "RevisionNotFound"})
        if api and parts[4] == "revision":
            siblings = [{"rfilename": path, "size": len(data)} for path, data in found.files.items()]
            return self._json({"id": name, "sha": commit, "siblings": siblings, "tags": []}, body)
        if api and parts[4] == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(data), "oid": commit_of(path)}
                for path, data in found.files.items()
            ]
            return self._json(tree, body)
        path = "/".join(parts[4:])
        if path not in found.files:
            return self._say(404, b"", body, {"X-Error-Code": "EntryNotFound"})
        return self._file(path, found.files[path], commit, body)

    def _file(self, path: str, data: bytes, commit: str, body: bool) -> None:
        about = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, whole = 200, len(data)
        if (given := self.headers.get("Range", "")).startswith("bytes="):
            first, _, last = given.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1 if last else whole, whole)
            status, data = 206, data[start:end]
            about["Content-Range"] = f"bytes {start}-{end - 1}/{whole}"
        if body and path in self.fake.break_off:
            self.fake.break_off.discard(path)
            self.send_response(status)
            for key, value in {**about, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        if body:
            self.fake.sent[path] += 1
        self._say(status, data, body, about)

    def _json(self, value: Any, body: bool) -> None:
        self._say(200, json.dumps(value).encode(), body, {"Content-Type": "application/json"})

    def _say(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)
