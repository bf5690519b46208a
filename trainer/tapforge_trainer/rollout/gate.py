"""The gate before the engine: closed while weights change, so that no answer is being sampled then."""

from __future__ import annotations

import asyncio


class Gate:
    """`async with gate:` around a generation. `close` waits until those inside have left."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.inside = 0

    async def close(self) -> None:
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        self._open.set()

    async def __aenter__(self) -> None:
        # A gate may close again before the one who waited for it runs.
        while not self._open.is_set():
            await self._open.wait()
        self.inside += 1
        self._empty.clear()

    async def __aexit__(self, *exc: object) -> None:
        self.inside -= 1
        if self.inside == 0:
            self._empty.set()
