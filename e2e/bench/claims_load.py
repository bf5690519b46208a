"""Claims as an open loop, in a process of its own: `python -m e2e.bench.claims_load < load.json`.

The n-th acquire is sent n / rate seconds after the first, by the next caller in turn. Prints seconds, of what was meant
to be sent after the warm-up:

- `acquired`: of each acquire from the time at which it was meant to be sent until its claim is granted. One that is
  refused, fails or is answered without a slot is sent again as the answer asks (Retry-After, otherwise after a second),
  and counts all the while; one that is never granted counts with the time until its caller gave up. So there are as
  many of them as there were acquires, whatever happened.
- `refused`: acquires that were not granted at their first try; `never`: those that never were.
- `released`: of each release until it was taken; `late`: how late each acquire was sent; `errors`: tries by what became
  of them.

A slot that is handed out while it is held ends the run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import aiohttp
import uvloop

from .claiming import Broker, Claim, Refused

_AGAIN = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    url: str
    authority: str
    path: str
    tokens: list[str]
    rate: float
    #: without the warm-up
    seconds: float
    #: 0: claims are kept
    hold: float = 0.1
    warm_up: float = 3.0
    #: after its time a caller gives up
    patience: float = 120.0

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Measured:
    seconds: float
    acquired: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    refused: int = 0
    never: int = 0
    errors: dict[str, int] = field(default_factory=dict)


async def insist(call: Callable[[], Awaitable[T]], until: float, errors: Counter[str]) -> T | None:
    """What the call gives as soon as that is something; None when the time is over. `errors` counts the other tries."""
    while True:
        pause = _AGAIN
        try:
            if found := await call():
                return found
            errors["no slot"] += 1
        except Refused as refused:
            errors[f"{refused.status} {refused.reason}"] += 1
            pause = refused.retry_after or _AGAIN
        except (aiohttp.ClientError, TimeoutError) as error:
            errors[type(error).__name__] += 1
        if time.monotonic() + pause > until:
            return None
        await asyncio.sleep(pause)


async def run(load: Load) -> Measured:
    measured, errors = Measured(load.seconds), Counter[str]()
    held: set[str] = set()
    name = f"load-{os.getpid()}"
    async with Broker(load.url, load.authority) as broker:

        async def acquire(number: int, token: str, intended: float, counted: bool) -> list[Claim] | None:
            late, troubles = time.monotonic() - intended, Counter[str]()
            request = f"{name}-{number}"
            claims = await insist(lambda: broker.acquire(load.path, token, request), intended + load.patience, troubles)
            if counted:
                measured.acquired.append(time.monotonic() - intended)
                measured.late.append(late)
                measured.refused += bool(troubles)
                measured.never += claims is None
                errors.update(troubles)
            return claims

        async def release(claims: list[Claim], counted: bool) -> None:
            async def once() -> bool:
                await broker.release(claims)
                return True

            began, troubles = time.monotonic(), Counter[str]()
            done = await insist(once, began + load.patience, troubles)
            if counted and done:
                measured.released.append(time.monotonic() - began)
            if counted:
                errors.update({f"release: {kind}": count for kind, count in troubles.items()})

        async def one(number: int, token: str, intended: float, counted: bool) -> None:
            claims = await acquire(number, token, intended, counted)
            if claims is None:
                return
            slot = claims[0].slot
            if slot in held:
                raise SystemExit(f"slot {slot} was handed out twice")
            held.add(slot)
            if load.hold:
                await asyncio.sleep(load.hold)
                held.discard(slot)
                await release(claims, counted)

        began = time.monotonic()
        tokens = itertools.cycle(load.tokens)
        async with asyncio.TaskGroup() as group:
            for number in range(int(load.rate * (load.warm_up + load.seconds))):
                intended = began + number / load.rate
                await asyncio.sleep(max(0.0, intended - time.monotonic()))
                group.create_task(one(number, next(tokens), intended, intended - began >= load.warm_up))
    measured.errors = dict(errors)
    return measured


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(run(Load(**json.load(sys.stdin)))))))
