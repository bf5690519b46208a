"""Real phones inside the test's own event loop, for tests that need them by the dozen and at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from tapforge_envs.phone import catalog
from tapforge_envs.phone.server import application
from tapforge_envs.phone.slot import Slot

TASKS = catalog.tasks("quickstart", "train")


@dataclass
class Phones:
    port: int
    slots: list[Slot]

    def url(self, slot: int = 0) -> str:
        return f"http://127.0.0.1:{self.port}/slot/{slot}"

    @property
    def urls(self) -> list[str]:
        return [self.url(i) for i in range(len(self.slots))]

    async def set_faults(self, slot: int, *faults: dict) -> None:
        async with aiohttp.ClientSession() as session, session.post(f"{self.url(slot)}/faults", json=faults) as answer:
            assert answer.status == 200, await answer.text()


@asynccontextmanager
async def phones(count: int = 1, port: int = 0) -> AsyncIterator[Phones]:
    slots = [Slot(96, 160, ["quickstart"]) for _ in range(count)]
    stopping = asyncio.Event()
    runner = web.AppRunner(application(slots, [], stopping), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield Phones(runner.addresses[0][1], slots)
    finally:
        stopping.set()
        await runner.cleanup()
