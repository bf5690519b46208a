"""A plain client of the API server for tests and for setting clusters up: one connection per call, blocking, any
thread, every call with a deadline. What the operator uses is another one; this one must not share its mistakes.

A call that the server puts off (429 with Retry-After, as it does while the storage of a kind whose definition has just
changed begins anew) is made again when the server says, as kubectl does, while its time lasts. A 429 without it is an
answer, such as that to an eviction which a budget forbids.
"""

from __future__ import annotations

import base64
import json
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

import yaml

from .certificates import Pair

MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
APPLY: Final = "application/apply-patch+yaml"


class Refused(RuntimeError):
    """The API server's answer was no success."""

    def __init__(self, method: str, path: str, status: int, text: str) -> None:
        self.status = status
        try:
            self.body: dict[str, Any] = json.loads(text)
        except ValueError:
            self.body = {}
        self.reason = str(self.body.get("reason", ""))
        super().__init__(f"{method} {path}: {status} {self.body.get('message', text)}")


class Api:
    """One user's access to one API server."""

    def __init__(self, server: str, authority: Path, certificate: Path, key: Path) -> None:
        self._server = server
        self._tls = ssl.create_default_context(cafile=str(authority))
        self._tls.load_cert_chain(certificate, key)

    def __call__(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", seconds: float = 30.0
    ) -> dict[str, Any]:
        """`path` begins with a slash and may have a query."""
        return json.loads(self.text(method, path, body, content_type, seconds))

    def text(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", seconds: float = 30.0
    ) -> str:
        request = urllib.request.Request(
            self._server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Accept": "application/json", **({} if body is None else {"Content-Type": content_type})},
        )
        end = time.monotonic() + seconds
        while True:
            try:
                left = max(0.1, end - time.monotonic())
                with urllib.request.urlopen(request, timeout=left, context=self._tls) as answer:
                    return answer.read().decode()
            except urllib.error.HTTPError as error:
                refused = Refused(method, path, error.code, error.read().decode(errors="replace"))
                after = error.headers.get("Retry-After") or ""
                pause = float(after) if after.isdigit() else 0.0
            if refused.status != 429 or not pause or time.monotonic() + pause >= end:
                raise refused
            time.sleep(pause)


def kubeconfig(server: str, authority: bytes, *, pair: Pair | None = None, token: str = "") -> str:
    """A kubeconfig with everything in it, for a user with a certificate or a token."""
    user: dict[str, str] = {"token": token} if token else {}
    if pair is not None:
        user = {"client-certificate-data": _inline(pair.certificate), "client-key-data": _inline(pair.key)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "cluster", "cluster": {"server": server, "certificate-authority-data": _inline(authority)}}
        ],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "context", "context": {"cluster": "cluster", "user": "user"}}],
        "current-context": "context",
    }
    return yaml.safe_dump(document)


def _inline(pem: bytes) -> str:
    return base64.b64encode(pem).decode()
