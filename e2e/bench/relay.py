"""A peer that does what a broker of claims has to do on the wire, and nothing else: `python -m e2e.bench.relay`.

It takes each request over TLS, sends its body to the API server over TLS, reads the Pod that comes back, and answers
some hundred bytes, with the HTTP server, client and JSON parser that the operator has. It knows no slots, fences,
queues or callers, and follows no watch. What claims take longer than writes through it is the operator's doing; what
writes through it take longer than the raw client's own is what a second process on the same machine costs.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson
import uvloop
from aiohttp import web

from e2e.cluster.processes import free_ports
from tapforge_operator.broker.certificates import new_authority, new_server

from .raw import Job, session

#: about as much as the answer to an acquire has
_ANSWER = b'{"claims": [{"id": "' + b"x" * 400 + b'"}]}'
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Relay:
    """Where it is, and by which authority it is verified."""

    url: str
    authority: str


@contextmanager
def relaying(job: Job) -> Iterator[Relay]:
    """The process works inside the block. `job`: whose writes they are; its requests are left out."""
    (port,) = free_ports(1)
    now = datetime.now(UTC)
    authority, key = new_authority(now)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("tls.crt", "tls.key")]
        for file, content in zip(files, new_server(authority, key, ["127.0.0.1"], now), strict=True):
            file.write_bytes(content)
        given = {"job": asdict(job), "port": port, "certificate": str(files[0]), "private_key": str(files[1])}
        with subprocess.Popen([sys.executable, "-m", "e2e.bench.relay"], stdin=subprocess.PIPE) as process:
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(given).encode())
                process.stdin.close()
                _wait(port)
                yield Relay(f"https://127.0.0.1:{port}", authority.decode())
            finally:
                process.kill()


def _wait(port: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


async def _serve(job: Job, port: int, certificate: str, private_key: str) -> None:
    async with session(job) as calls:

        async def relay(request: web.Request) -> web.Response:
            body, kind = await request.read(), request.content_type
            async with calls.patch(request.path, data=body, headers={"Content-Type": kind}) as answer:
                said, status = await answer.read(), answer.status
            # An overloaded API server says so in plain text.
            if status < 400:
                orjson.loads(said)
            return web.Response(status=status, body=_ANSWER, content_type="application/json")

        app = web.Application()
        app.router.add_patch("/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, private_key)
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context, backlog=1024).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    given = json.load(sys.stdin)
    uvloop.run(_serve(Job(**given.pop("job")), **given))
