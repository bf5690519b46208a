"""Whether the operator lives and serves, for the kubelet and for Prometheus: plain HTTP on a port of its own.

| path | answer |
|---|---|
| /healthz | 200, or 503 with the reason: the process should be started again |
| /readyz | 200 with what it is ready for: to lead, or to stand by; or 503 with the reason: send no callers here |
| /metrics | Prometheus text, rendered once in `FRESH` seconds for all callers; `access` checks the readers |

A loop that hangs answers nothing at all, which the kubelet takes as a failure too. Nothing here asks the API server: a
process is not killed because the cluster can't be reached, unless it stays silent for longer than `silence` allows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from tapforge_operator.observability.metrics import CONTENT_TYPE, Telemetry

#: "" when all is well, else what is wrong
Verdict = Callable[[], str]
#: why the caller may not read the metrics; None: it may
Access = Callable[[web.Request], Awaitable[web.Response | None]]

FRESH: Final = 5.0


def silence(telemetry: Telemetry, limit_seconds: float) -> Verdict:
    """Finds fault with watches that have said nothing for so long, once this process leads. One that stands by may
    receive nothing for days, where the leader's Lease is not in its scope, and lists everything when its turn comes."""

    def verdict() -> str:
        age = telemetry.event_age() if telemetry.leads else 0.0
        return (
            f"no watch has said anything for {age:.0f} s, the limit is {limit_seconds:g} s"
            if age > limit_seconds
            else ""
        )

    return verdict


def application(
    telemetry: Telemetry,
    alive: Verdict,
    ready: Verdict,
    role: Callable[[], str] = lambda: "ok",
    access: Access | None = None,
) -> web.Application:
    """`access` None: any caller that reaches the port may read the metrics."""
    rendered = Rendered(telemetry.render)

    async def metrics(request: web.Request) -> web.Response:
        if access is not None and (refusal := await access(request)) is not None:
            return refusal
        return web.Response(body=await rendered.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", _judge(alive)), web.get("/readyz", _judge(ready, role)), web.get("/metrics", metrics)]
    )
    return app


class Rendered:
    """The metrics as text, the same for all callers within `FRESH` seconds."""

    def __init__(self, render: Callable[[], bytes], monotonic: Callable[[], float] = time.monotonic):
        self._render = render
        self._monotonic = monotonic
        self._since = 0.0
        self._task: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """Raises what rendering raised."""
        if self._task is None or (self._task.done() and self._monotonic() - self._since >= FRESH):
            self._since = self._monotonic()
            # In a thread: with hundreds of pools it takes a good part of a second, in which claims are asked for.
            self._task = asyncio.create_task(asyncio.to_thread(self._render))
        return await asyncio.shield(self._task)


def _judge(
    verdict: Verdict, well: Callable[[], str] = lambda: "ok"
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        reason = verdict()
        return web.Response(status=503 if reason else 200, text=f"{reason or well()}\n")

    return answer
