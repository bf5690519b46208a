"""The operator is killed (SIGKILL) at 5,000 slots with 100 claims held, and started again at once with the same
identity: how long until it grants?

The time begins when the new process is started and ends when a caller that asks all the while has a claim that is
right: of a slot without a holder, written on its Pod with that fence. Then all claims of before the kill are renewed.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import aiohttp

from tapforge_operator import labels

from . import pools
from .claiming import Broker, Claim, Refused
from .testbed import NAMESPACE, Run, Testbed

_AGAIN = 0.02
_SECONDS = 60.0


def run(options: Run) -> dict[str, Any]:
    slots, held, kills = (100, 10, 1) if options.quick else (5000, 100, 3)
    with Testbed(options, nodes=-(-slots // pools.PER_NODE), qps=1000) as bed:
        bed.start_operator()
        bed.make_fleet("phones", slots)
        tokens, authority = bed.claimers(2), bed.broker_ca()
        took = [asyncio.run(_kill(bed, tokens, authority, held, number)) for number in range(kills)]
    return {
        "first_grant_after_kill_s": round(max(took), 2),
        "first_grant_after_kill_each_s": [round(seconds, 2) for seconds in took],
        "claims_held": held,
        "of_slots": slots,
    }


async def _kill(bed: Testbed, tokens: list[str], authority: str, held: int, number: int) -> float:
    path = bed.claims_path.format("phones")
    async with Broker(bed.broker, authority) as broker:
        before: list[Claim] = []
        while len(before) < held:
            got = await broker.acquire(path, tokens[0], f"held-{number}-{len(before)}", min(50, held - len(before)))
            if not got:
                raise RuntimeError(f"only {len(before)} of {held} claims were granted before the kill")
            before += got
    await asyncio.to_thread(bed.stop_operator, signal.SIGKILL)
    began = time.monotonic()
    await asyncio.to_thread(bed.launch_operator)
    async with Broker(bed.broker, authority, deadline=10) as broker:
        claim = await _first(broker, path, tokens[1], number)
        seconds = time.monotonic() - began
        await asyncio.to_thread(_check, bed, claim, before)
        if (states := set(await broker.renew(before))) != {"held"}:
            raise RuntimeError(f"claims of before the kill are {states} after it")
        await broker.release([claim, *before])
    return seconds


async def _first(broker: Broker, path: str, token: str, number: int) -> Claim:
    said = "nothing"
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        try:
            if claims := await broker.acquire(path, token, f"after-the-kill-{number}"):
                return claims[0]
            said = "no slot"
        except Refused as refused:
            if refused.status not in (404, 503):  # the pool is not known before everything was read
                raise
            said = str(refused)
        except (aiohttp.ClientError, TimeoutError) as error:
            said = repr(error)
        await asyncio.sleep(_AGAIN)
    raise TimeoutError(f"no grant within {_SECONDS:g} s of the restart; the last answer was {said}")


def _check(bed: Testbed, claim: Claim, before: list[Claim]) -> None:
    if claim.slot in {old.slot for old in before}:
        raise RuntimeError(f"slot {claim.slot} has two holders")
    pod = bed.cluster.api("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{claim.slot}")["metadata"]
    written = pod["annotations"].get(labels.FENCE)
    if written != str(claim.fence) or labels.CLAIM not in pod["annotations"]:
        raise RuntimeError(f"the claim {claim.id} was answered, and its slot says fence {written}")
