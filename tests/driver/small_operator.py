"""The operator as a driver meets it: over TLS it takes reports, keeps them, and answers with orders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from pydantic import ValidationError
from small_broker import NAMESPACE, Authority

from tapforge_api.claims import Refusal
from tapforge_api.progress import REPORT, Orders, Progress

RUN = "tiny"


@dataclass
class SmallOperator:
    orders: Orders = field(default_factory=lambda: Orders(report_seconds=1))
    tokens: set[str] = field(default_factory=lambda: {"first-token"})
    port: int = 0
    reports: list[Progress] = field(default_factory=list)
    #: status and body for so many calls to come, instead of an answer
    refusing: list[tuple[int, bytes]] = field(default_factory=list)
    #: calls that were made, refused ones too
    calls: int = 0
    #: cleared: answers are kept back until it is set
    talks: asyncio.Event = field(default_factory=asyncio.Event)
    #: whoever sent something else than a report
    broken: list[str] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, holds: Callable[[], bool], seconds: float = 120.0) -> None:
        async with asyncio.timeout(seconds), self.changed:
            await self.changed.wait_for(holds)

    def __post_init__(self) -> None:
        self.talks.set()

    @property
    def finals(self) -> list[Progress]:
        return [report for report in self.reports if report.final]

    async def report(self, request: web.Request) -> web.Response:
        async with self.changed:
            self.calls += 1
            self.changed.notify_all()
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return _refuse(401, "Unauthorized", "the token is not known")
        if (request.match_info["namespace"], request.match_info["run"]) != (NAMESPACE, RUN):
            return _refuse(404, "RunNotFound", f"no run {request.match_info['run']}")
        if self.refusing:
            status, body = self.refusing.pop(0)
            return web.Response(status=status, body=body)
        try:
            report = Progress.model_validate_json(await request.read())
        except ValidationError as error:
            self.broken.append(str(error))
            return _refuse(400, "BadRequest", str(error))
        await self.talks.wait()
        async with self.changed:
            self.reports.append(report)
            self.changed.notify_all()
        # A newer operator may say more than this driver knows.
        return web.json_response({**self.orders.model_dump(mode="json", by_alias=True), "sinceTheNextVersion": 1})

    @asynccontextmanager
    async def serving(self, authority: Authority) -> AsyncIterator[None]:
        """Again on the same port after the first time."""
        application = web.Application()
        application.add_routes([web.post(REPORT, self.report)])
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=authority.server(), reuse_address=True).start()
        self.port = runner.addresses[0][1]
        try:
            yield
        finally:
            await runner.cleanup()


def _refuse(status: int, reason: str, message: str) -> web.Response:
    return web.json_response(Refusal(reason=reason, message=message).model_dump(), status=status)
