"""Two replicas with default flags behind a Service: for how long is no claim renewed, and no slot granted, while they
are exchanged, drained and killed?

Holders renew their claims and callers ask for a slot, give it back and ask again, all the while and each for itself;
each keeps its connection as long as it is good. A gap is the time between two answers of one of them: all claims held,
or a slot granted. The longest of all callers counts.

| what | how |
|---|---|
| update | a third replica starts, the leader is deleted; a fourth starts, the other old one is deleted |
| drain | the leader is evicted and a replacement starts at the same time |
| kill | the leader dies of SIGKILL and its container starts again a second later |
| lost | the leader dies of SIGKILL and doesn't come back: the Lease has to run out |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import aiohttp

from . import pools
from .claiming import Broker, Claim, Refused
from .replicas import Replicas, Service
from .testbed import Run, Testbed

_AGAIN = 0.1
#: of a call; a holder that waits longer asks anew
_DEADLINE = 5.0
_CALLERS = 4
_HELD = 20
#: before and after each trouble
_CALM = 5.0
_SETTLED = 60.0
_RESTART = 1.0


def run(options: Run) -> dict[str, Any]:
    slots, rounds = (100, 1) if options.quick else (500, 3)
    with Testbed(options, nodes=-(-slots // pools.PER_NODE), qps=1000) as bed:
        return asyncio.run(_measure(bed, slots, rounds))


async def _measure(bed: Testbed, slots: int, rounds: int) -> dict[str, Any]:
    async with Service() as service, Replicas(bed, service) as replicas, AsyncExitStack() as stack:
        await replicas.add()
        await replicas.add()
        await replicas.leader()
        await asyncio.to_thread(bed.make_fleet, "phones", slots)
        tokens, authority = await asyncio.to_thread(bed.claimers, 2 * _CALLERS), await asyncio.to_thread(bed.broker_ca)
        path = bed.claims_path.format("phones")
        callers: list[_Caller] = []
        for number, token in enumerate(tokens):
            broker = Broker(f"https://127.0.0.1:{service.port}", authority, _DEADLINE)
            await stack.enter_async_context(broker)
            callers.append(_Caller(broker, path, token, grants=number % 2 == 1))
        found: dict[str, list[tuple[float, float]]] = {}
        async with asyncio.TaskGroup() as group:
            for caller in callers:
                group.create_task(caller.go())
            for trouble in (_update, _drain, _kill, _lost):
                found[trouble.__name__[1:]] = [await _under(callers, trouble, replicas) for _ in range(rounds)]
            for caller in callers:
                caller.over = True
    return _figures(found)


def _figures(found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """The longest gap of all rounds, and each."""
    figures: dict[str, Any] = {}
    for name, gaps in found.items():
        for what, values in zip(("renew", "grant"), zip(*gaps, strict=True), strict=True):
            figures[f"{name}_longest_gap_{what}_s"] = round(max(values), 2)
            figures[f"{name}_longest_gap_{what}_each_s"] = [round(value, 2) for value in values]
    return figures


async def _under(
    callers: Sequence[_Caller], trouble: Callable[[Replicas], Awaitable[None]], replicas: Replicas
) -> tuple[float, float]:
    """Longest gaps in renewals and in grants, from before the trouble until every caller was answered after it."""
    await asyncio.sleep(_CALM)
    began = time.monotonic()
    await trouble(replicas)
    over = time.monotonic()
    while not all(caller.answers and caller.answers[-1] > over + _CALM for caller in callers):
        if time.monotonic() > over + _SETTLED:
            raise TimeoutError(
                f"a caller was not answered for {_SETTLED:g} s; the last answers: {[c.said for c in callers]}"
            )
        await asyncio.sleep(_AGAIN)
    longest = [
        max(
            longest_gap([at for at in caller.answers if at > began - _CALM])
            for caller in callers
            if caller.grants is grants
        )
        for grants in (False, True)
    ]
    return longest[0], longest[1]


def longest_gap(times: Sequence[float]) -> float:
    """Between two that follow each other."""
    return max(after - before for before, after in pairwise(times))


# --- trouble ----------------------------------------------------------------------------------------------------------


async def _update(replicas: Replicas) -> None:
    first = await replicas.leader()
    (second,) = [one for one in replicas.present if one is not first]
    await replicas.add()
    ends = asyncio.create_task(replicas.delete(first))
    await replicas.add()
    await asyncio.gather(ends, replicas.delete(second))


async def _drain(replicas: Replicas) -> None:
    await asyncio.gather(replicas.delete(await replicas.leader()), replicas.add())


async def _kill(replicas: Replicas) -> None:
    leader = await replicas.leader()
    await replicas.kill(leader)
    await asyncio.sleep(_RESTART)
    await replicas.restart(leader)


async def _lost(replicas: Replicas) -> None:
    lost = await replicas.leader()
    await replicas.kill(lost)
    await replicas.leader()
    replicas.forget(lost)
    await replicas.add()


# --- callers ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Caller:
    """One that asks again until it is answered."""

    broker: Broker
    path: str
    token: str
    #: it asks for slots; otherwise it renews those that it has
    grants: bool
    #: when it was answered as it hoped
    answers: list[float] = field(default_factory=list)
    said: str = ""
    over: bool = False
    _requests: int = 0

    async def go(self) -> None:
        held = [] if self.grants else await self._slots(_HELD)
        while not self.over:
            if self.grants:
                claims = await self._slots(1)
                self.answers.append(time.monotonic())
                await self._persist(partial(self.broker.release, claims))
            else:
                states = set(await self._persist(partial(self.broker.renew, held)))
                if states != {"held"}:
                    raise RuntimeError(f"claims that their holder renewed all the while are {states}")
                self.answers.append(time.monotonic())
            await asyncio.sleep(_AGAIN)
        if held:
            await self._persist(partial(self.broker.release, held))

    async def _slots(self, count: int) -> list[Claim]:
        claims: list[Claim] = []
        while missing := count - len(claims):
            self._requests += 1
            request, wait = f"request-{id(self)}-{self._requests}", _DEADLINE / 2
            claims += await self._persist(
                partial(self.broker.acquire, self.path, self.token, request, missing, wait=wait)
            )
        return claims

    async def _persist(self, call: Callable[[], Awaitable[Any]]) -> Any:
        end = time.monotonic() + _SETTLED
        while True:
            try:
                return await call()
            except Refused as error:
                if error.status < 500 and error.status != 404:  # the pool isn't known before everything was read
                    raise
                self.said = str(error)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.said = repr(error)
            if time.monotonic() > end:
                raise TimeoutError(f"no answer for {_SETTLED:g} s; the last one was {self.said}")
            await asyncio.sleep(_AGAIN)
