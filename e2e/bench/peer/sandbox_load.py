"""Claims of agent-sandbox as an open loop, in a process of its own.

    python -m e2e.bench.peer.sandbox_load < load.json

The n-th SandboxClaim is created n / rate seconds after the first, again a second later where that failed; one watch
shows when each is Ready. Prints seconds of each from the time at which it was meant to be sent until its condition
Ready was seen; one that is not Ready when its time is over counts with that time. `errors`: tries by what became of
them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import uvloop

from ..raw import Job, session

_AGAIN = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    #: its requests are left out
    job: Job
    #: of the claims
    path: str
    #: without a name
    body: dict[str, Any]
    rate: float
    seconds: float
    warm_up: float
    patience: float = 60.0


@dataclass(slots=True)
class Measured:
    took: list[float] = field(default_factory=list)
    never: int = 0
    errors: dict[str, int] = field(default_factory=dict)


class _Ready:
    """When each claim was observed to be Ready."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def of(self, name: str) -> asyncio.Event:
        return self._events.setdefault(name, asyncio.Event())

    async def watch(self, calls: aiohttp.ClientSession, path: str, begun: asyncio.Event) -> None:
        """Until cancelled. A watch that ends begins anew, with everything that is there."""
        while True:
            try:
                await self._watch_once(calls, path, begun)
            except aiohttp.ClientError as error:
                print(f"the watch of claims begins anew: {error!r}", file=sys.stderr)
            await asyncio.sleep(0.1)

    async def _watch_once(self, calls: aiohttp.ClientSession, path: str, begun: asyncio.Event) -> None:
        rest = b""
        endless = aiohttp.ClientTimeout(total=None)
        async with calls.get(path, params={"watch": "1"}, timeout=endless) as answer:
            answer.raise_for_status()
            begun.set()
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    claim = json.loads(line)["object"]
                    conditions = (claim.get("status") or {}).get("conditions") or ()
                    if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                        self.of(claim["metadata"]["name"]).set()


async def run(load: Load) -> Measured:
    measured, ready = Measured(), _Ready()
    async with session(load.job) as calls:

        async def create(name: str) -> None:
            body = {**load.body, "metadata": {"name": name}}
            while True:
                try:
                    async with calls.post(load.path, json=body) as answer:
                        await answer.read()
                        if answer.status in (201, 409):  # 409: an earlier try came through
                            return
                        kind = str(answer.status)
                except (aiohttp.ClientError, TimeoutError) as error:
                    kind = type(error).__name__
                measured.errors[kind] = measured.errors.get(kind, 0) + 1
                await asyncio.sleep(_AGAIN)

        async def claim(number: int, intended: float) -> None:
            name, there = f"claim-{number}", True
            try:
                async with asyncio.timeout(load.patience):
                    await create(name)
                    await ready.of(name).wait()
            except TimeoutError:
                there = False
            if number >= load.rate * load.warm_up:
                measured.took.append(time.monotonic() - intended)
                measured.never += not there

        begun = asyncio.Event()
        watch = asyncio.create_task(ready.watch(calls, load.path, begun))
        await begun.wait()
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(int(load.rate * (load.warm_up + load.seconds))):
                intended = began + number / load.rate
                await asyncio.sleep(max(0.0, intended - time.monotonic()))
                group.create_task(claim(number, intended))
        watch.cancel()
    return measured


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(asdict(uvloop.run(run(Load(**{**given, "job": Job(**given["job"])}))))))
