"""An S3-compatible server on this machine, moto's, with a bucket for each test; before it a proxy that refuses or holds
requests. A folder whose tests want it imports the fixtures in its conftest."""

from __future__ import annotations

import http.client
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class Bucket:
    """`client`: botocore's own, to look behind the back of what is tested."""

    name: str
    endpoint: str
    client: Any

    @property
    def uri(self) -> str:
        return f"s3://{self.name}/runs"

    def names(self, prefix: str = "") -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return [one["Key"] for one in found.get("Contents", ())]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_server}.items():
        monkeypatch.setenv(name, value)
    return make_bucket(s3_server)


def make_bucket(endpoint: str) -> Bucket:
    S3FileSystem.clear_instance_cache()
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **_KEYS)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    return Bucket(name, endpoint, client)


_KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}


# --- a proxy ----------------------------------------------------------------------------------------------------------


@dataclass
class Proxy:
    """`refused`: the code that every PUT and POST is answered with, as a 403; "": none. `open`: what is written waits
    for it."""

    endpoint: str = ""
    refused: str = ""
    open: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.open.set()


@pytest.fixture(scope="session")
def s3_proxy(s3_server: str) -> Iterator[Proxy]:
    """To `s3_server`."""
    proxy, behind = Proxy(), s3_server.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.command in ("PUT", "POST") and not proxy.open.wait(120):
                raise TimeoutError("nobody opened the proxy")
            if self.command in ("PUT", "POST") and proxy.refused:
                text = f"<Error><Code>{proxy.refused}</Code><Message>The provided token has expired.</Message></Error>"
                return self._answer(403, {"Content-Type": "application/xml"}, text.encode())
            connection = http.client.HTTPConnection(behind, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            data = answer.read()
            kept = {k: v for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")}
            connection.close()
            return self._answer(answer.status, kept, data)

        def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield proxy
    proxy.open.set()
    server.shutdown()
    server.server_close()
