"""Whether the operator lives and serves, for the kubelet and for Prometheus: plain HTTP on a port of its own.

| path | answer |
|---|---|
| /healthz | 200, or 503 with the reason: the process should be started again |
| /readyz | 200 with what it is ready for: to lead, or to stand by; or 503 with the reason: nobody should be sent here |
| /metrics | Prometheus text |

A loop that hangs answers nothing at all, which the kubelet takes as a failure too. Nothing here asks the API server: a
cluster that can't be reached is no reason to be killed, unless it stays silent for longer than `silence` allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from tapforge_operator.observability.metrics import CONTENT_TYPE, Telemetry

#: "" when all is well, else what is wrong
Verdict = Callable[[], str]


def silence(telemetry: Telemetry, limit_seconds: float) -> Verdict:
    """Finds fault with watches that have said nothing for so long, once this process leads. One that stands by may hear
    nothing for days, where the leader's Lease is not in its scope, and lists everything when its turn comes."""

    def verdict() -> str:
        age = telemetry.event_age() if telemetry.leads else 0.0
        return (
            f"no watch has said anything for {age:.0f} s, the limit is {limit_seconds:g} s"
            if age > limit_seconds
            else ""
        )

    return verdict


def application(
    telemetry: Telemetry, alive: Verdict, ready: Verdict, role: Callable[[], str] = lambda: "ok"
) -> web.Application:
    async def metrics(_: web.Request) -> web.Response:
        # In a thread: with hundreds of pools it takes a good part of a second, in which claims are asked for.
        text = await asyncio.to_thread(telemetry.render)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", _judge(alive)), web.get("/readyz", _judge(ready, role)), web.get("/metrics", metrics)]
    )
    return app


def _judge(
    verdict: Verdict, well: Callable[[], str] = lambda: "ok"
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        reason = verdict()
        return web.Response(status=503 if reason else 200, text=f"{reason or well()}\n")

    return answer
