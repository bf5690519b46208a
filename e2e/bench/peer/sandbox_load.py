"""Claims of agent-sandbox as an open loop, in a process of its own.

    python -m e2e.bench.peer.sandbox_load < load.json

The n-th SandboxClaim is created n / rate seconds after the first; one watch tells when each is Ready. Prints seconds of
each from the time at which it was meant to be sent until its Ready condition was heard of; one that is not Ready when
its time is over counts with that time.
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

from ..raw import Job, connector


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


class _Ready:
    """When each claim was heard to be Ready."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def of(self, name: str) -> asyncio.Event:
        return self._events.setdefault(name, asyncio.Event())

    async def watch(self, session: aiohttp.ClientSession, path: str, begun: asyncio.Event) -> None:
        rest = b""
        endless = aiohttp.ClientTimeout(total=None)
        async with session.get(path, params={"watch": "1"}, timeout=endless) as answer:
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
    async with aiohttp.ClientSession(
        load.job.server,
        connector=connector(load.job),
        timeout=aiohttp.ClientTimeout(total=30),
        headers={"User-Agent": load.job.agent},
    ) as session:

        async def claim(number: int, intended: float) -> None:
            name = f"claim-{number}"
            body = {**load.body, "metadata": {"name": name}}
            there = True
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + load.patience):
                    async with session.post(load.path, json=body) as answer:
                        answer.raise_for_status()
                        await answer.read()
                    await ready.of(name).wait()
            except (aiohttp.ClientError, TimeoutError):
                there = False
            if number >= load.rate * load.warm_up:
                measured.took.append(time.monotonic() - intended if there else load.patience)
                measured.never += not there

        begun = asyncio.Event()
        watch = asyncio.create_task(ready.watch(session, load.path, begun))
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
