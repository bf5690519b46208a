"""A way to the API server that behaves badly when it is told to: what networks, proxies and busy servers do.

Plain HTTP to the one who uses it, TLS to the API server; tokens pass through. It runs in a thread of its own.

A fault is taken by the next requests that fit its method and path:

    500, 429, 409, ...   that answer; the API server never hears of the request
    lost                 the request is carried out, and the connection ends without an answer
    refused              the connection ends, and the API server never hears of the request
    hangs                nothing ever comes back, and the API server never hears of the request
    late                 the request is carried out, and nothing ever comes back
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web
from e2e.cluster import Cluster

_HOP_BY_HOP = {"connection", "host", "transfer-encoding", "content-length", "keep-alive", "accept-encoding"}
_SESSION = web.AppKey("session", aiohttp.ClientSession)
_WORDS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


@dataclass
class Fault:
    method: str
    #: searched for in path and query
    path: re.Pattern[str]
    does: int | str
    times: int
    #: requests that fit and are let through before the first one that is met
    after: int = 0
    met: int = 0


@dataclass(frozen=True)
class Seen:
    """A request that the API server got."""

    method: str
    path: str
    status: int

    @property
    def writes(self) -> bool:
        return self.method not in ("GET", "HEAD")


class FaultyProxy:
    def __init__(self, cluster: Cluster) -> None:
        self._upstream = cluster.server
        self._tls = ssl.create_default_context(cafile=str(cluster.ca))
        self._folder = cluster.folder
        self.port = 0
        self.seen: list[Seen] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._streams: set[asyncio.Task[Any]] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faulty proxy", daemon=True)

    # --- what tests do ------------------------------------------------------------------------------------------------

    def fault(self, method: str, path: str, does: int | str, times: int = 1, after: int = 0) -> Fault:
        """`path` is a regular expression; `does` one of the words above or a status."""
        made = Fault(method, re.compile(path), does, times, after)
        with self._lock:
            self._faults.append(made)
        return made

    def clear(self) -> None:
        """From now on everything goes through."""
        with self._lock:
            self._faults.clear()

    def cut_watches(self) -> int:
        """Ends the streams that are open now, in the middle. Returns how many."""
        return asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(60)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Nothing passes inside the block, in neither direction, and no connection ends: a cut cable. What was on its
        way arrives afterwards."""
        self._loop.call_soon_threadsafe(self._open.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._open.set)

    def kubeconfig(self, source: Path) -> Path:
        """The same user's, over this way."""
        document = yaml.safe_load(source.read_text())
        document["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self.port}"}
        made = self._folder / f"proxy-{self.port}-{source.name}"
        made.write_text(yaml.safe_dump(document))
        return made

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(60):
            raise RuntimeError("the proxy did not start within 60 s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner, session = self._loop.run_until_complete(self._serve())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._end(runner, session))
        self._loop.close()

    async def _serve(self) -> tuple[web.AppRunner, aiohttp.ClientSession]:
        self._open.set()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app[_SESSION] = session
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        return runner, session

    @staticmethod
    async def _end(runner: web.AppRunner, session: aiohttp.ClientSession) -> None:
        await runner.cleanup()
        await session.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _cut(self) -> int:
        streams = list(self._streams)
        for task in streams:
            task.cancel()
        return len(streams)

    def _next(self, method: str, path: str) -> int | str | None:
        with self._lock:
            for fault in self._faults:
                if fault.method != method or not fault.path.search(path) or fault.met == fault.times:
                    continue
                if fault.after:
                    fault.after -= 1
                    continue
                fault.met += 1
                return fault.does
        return None

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path
        body = await request.read()
        await self._open.wait()
        fault = self._next(request.method, path)
        if isinstance(fault, int):
            return _refusal(fault)
        if fault == "expired":
            event = {"type": "ERROR", "object": _status(410)}
            return web.Response(body=json.dumps(event).encode() + b"\n", content_type="application/json")
        if fault == "refused":
            return _hang_up(request)
        if fault == "hangs":
            await asyncio.sleep(3600)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        session = request.app[_SESSION]
        try:
            async with session.request(
                request.method, self._upstream + path, data=body, headers=headers, skip_auto_headers=("Content-Type",)
            ) as answer:
                self.seen.append(Seen(request.method, path, answer.status))
                if "watch=" in path and answer.status == 200:
                    return await self._stream(request, answer)
                text = await answer.read()
                kept = {k: v for k, v in answer.headers.items() if k.lower() in ("content-type", "retry-after")}
                status = answer.status
        except aiohttp.ClientError:
            return _hang_up(request)
        if fault == "late":
            await asyncio.sleep(3600)
        await self._open.wait()
        return _hang_up(request) if fault == "lost" else web.Response(status=status, body=text, headers=kept)

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await self._open.wait()
                await response.write(chunk)
        except asyncio.CancelledError:
            return _hang_up(request)
        except (aiohttp.ClientError, ConnectionError):
            return _hang_up(request)
        finally:
            self._streams.discard(task)
        return response


def _status(code: int) -> dict[str, Any]:
    said = "the way to the API server is faulty"
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": _WORDS.get(code, "Unknown"),
        "message": said,
        "code": code,
    }


def _refusal(status: int) -> web.Response:
    return web.json_response(_status(status), status=status, headers={"Retry-After": "1"} if status == 429 else {})


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
