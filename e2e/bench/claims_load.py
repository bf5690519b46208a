"""Claims as an open loop, in a process of its own: `python -m e2e.bench.claims_load < load.json`.

The n-th acquire is sent n / rate seconds after the first, by the next caller in turn. What is sent in the warm-up is
not counted. Prints seconds: of each acquire from the time at which it was meant to be sent until its answer, of each
release, and how late each acquire was sent; and errors by kind. A slot that is handed out while it is held ends the
run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field

import aiohttp

from .claiming import Broker, Refused


@dataclass(frozen=True, slots=True)
class Load:
    url: str
    authority: str
    path: str
    tokens: list[str]
    rate: float
    #: without the warm-up
    seconds: float
    hold: float = 0.1
    warm_up: float = 3.0

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Measured:
    seconds: float
    acquired: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    def failed(self, kind: str, counted: bool) -> None:
        if counted:
            self.errors[kind] = self.errors.get(kind, 0) + 1


async def run(load: Load) -> Measured:
    measured = Measured(load.seconds)
    held: set[str] = set()
    name = f"load-{os.getpid()}"
    async with Broker(load.url, load.authority) as broker:

        async def one(number: int, token: str, intended: float, counted: bool) -> None:
            late = time.monotonic() - intended
            try:
                claims = await broker.acquire(load.path, token, f"{name}-{number}")
                took = time.monotonic() - intended
                if len(claims) != 1:
                    measured.failed("no slot", counted)
                    return
                slot = claims[0].slot
                if slot in held:
                    raise SystemExit(f"slot {slot} was handed out twice")
                held.add(slot)
                await asyncio.sleep(load.hold)
                held.discard(slot)
                began = time.monotonic()
                await broker.release(claims)
            except Refused as refused:
                measured.failed(f"{refused.status} {refused.reason}", counted)
            except (aiohttp.ClientError, TimeoutError) as error:
                measured.failed(type(error).__name__, counted)
            else:
                if counted:
                    measured.acquired.append(took)
                    measured.released.append(time.monotonic() - began)
                    measured.late.append(late)

        began = time.monotonic()
        tokens = itertools.cycle(load.tokens)
        async with asyncio.TaskGroup() as group:
            for number in range(int(load.rate * (load.warm_up + load.seconds))):
                intended = began + number / load.rate
                await asyncio.sleep(max(0.0, intended - time.monotonic()))
                group.create_task(one(number, next(tokens), intended, intended - began >= load.warm_up))
    return measured


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(run(Load(**json.load(sys.stdin)))))))
