"""What claims are compared with: the two writes of each, by a client that needs no broker to know which Pod is free.

    python -m e2e.bench.patch_load < load.json

The same open loop as claims_load: the n-th pair is begun n / rate seconds after the first, the second write follows the
first after `hold` seconds (0: there is none). A write says as much as the operator's does, of labels and annotations of
its own, and asks for as much in return. Prints seconds of each first write from the time at which it was meant to be
sent until its answer; one that failed is counted by its error and with the time that it took.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import uvloop

from .raw import Job, session

_MERGE = "application/merge-patch+json"
HEADERS = {"Content-Type": _MERGE}
#: as much as a claim writes
_LABELS = {"example.com/claimed": "true", "example.com/run": "a-run"}
_NOTES = {
    "example.com/claim": "x" * 250,
    "example.com/fence": "1000",
    "example.com/safe": "false",
    "example.com/a": "b",
}


@dataclass(frozen=True, slots=True)
class Load:
    #: its requests are left out
    job: Job
    #: path and UID
    pods: list[tuple[str, str]]
    rate: float
    seconds: float
    hold: float = 0.1
    warm_up: float = 3.0
    #: the peer that the writes go through, and its authority; "": straight to the API server
    relay: str = ""
    relay_authority: str = ""


def patch(there: bool, uid: str) -> bytes:
    fill = {"labels": _LABELS, "annotations": _NOTES}
    metadata = fill if there else {kind: dict.fromkeys(values) for kind, values in fill.items()}
    return json.dumps({"metadata": {"uid": uid, "managedFields": [{}], **metadata}}).encode()


async def run(load: Load) -> dict[str, Any]:
    took: list[float] = []
    errors: dict[str, int] = {}
    async with _calls(load) as calls:

        async def write(path: str, body: bytes) -> None:
            async with calls.patch(path, data=body, headers=HEADERS) as answer:
                await answer.read()
                answer.raise_for_status()

        async def tried(path: str, body: bytes) -> None:
            try:
                await write(path, body)
            except (aiohttp.ClientError, TimeoutError) as error:
                errors[type(error).__name__] = errors.get(type(error).__name__, 0) + 1

        async def pair(path: str, uid: str, intended: float, counted: bool) -> None:
            await tried(path, patch(True, uid))
            if counted:
                took.append(time.monotonic() - intended)
            if load.hold:
                await asyncio.sleep(load.hold)
                await tried(path, patch(False, uid))

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(int(load.rate * (load.warm_up + load.seconds))):
                intended = began + number / load.rate
                await asyncio.sleep(max(0.0, intended - time.monotonic()))
                path, uid = load.pods[number % len(load.pods)]
                group.create_task(pair(path, uid, intended, intended - began >= load.warm_up))
    return {"took": took, "errors": errors}


def _calls(load: Load) -> aiohttp.ClientSession:
    if not load.relay:
        return session(load.job)
    tls = ssl.create_default_context(cadata=load.relay_authority)
    return aiohttp.ClientSession(
        load.relay,
        connector=aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=30.0),
    )


def as_json(load: Load) -> str:
    return json.dumps(asdict(load))


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(uvloop.run(run(Load(**{**given, "job": Job(**given["job"])})))))
