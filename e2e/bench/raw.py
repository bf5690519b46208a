"""A client that only sends writes, as fast as it can, in a process of its own: what creates are compared with, and what
kills Pods and makes storms.

    python -m e2e.bench.raw < job.json

It keeps `in_flight` requests under way over HTTP/1.1 connections that stay open, by TLS with a service account's token,
as the operator does. Bodies are made before the clock starts, and answers are read to their end but not parsed: it
costs less than any controller could. With `every` it does the same again and again until `seconds` are over.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import uvloop

from e2e.cluster import Cluster

IN_FLIGHT = 64
#: namespace and name of the service account that everything but the operator is done as (testbed.py)
CLIENT = ("tapforge-system", "bench-client")
_DEADLINE = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    body: Any
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Job:
    server: str
    authority: str
    token: str
    #: shows in the audit log
    agent: str
    requests: tuple[Request, ...]
    in_flight: int = IN_FLIGHT
    #: seconds from one round to the next; 0: one round only
    every: float = 0.0
    #: no round begins after this time
    seconds: float = 0.0


@dataclass(slots=True)
class Done:
    seconds: float
    rounds: int
    #: answers that were no success, by status
    refused: dict[str, int]
    #: without starting and preparing
    cpu_seconds: float


def job(cluster: Cluster, agent: str, requests: Sequence[Request], **options: float) -> Job:
    made = Job(cluster.server, str(cluster.ca), cluster.token(*CLIENT), agent, tuple(requests))
    return Job(**{**{name: getattr(made, name) for name in made.__slots__}, **options})


def send(work: Job) -> Done:
    """Blocks until everything was answered. Raises RuntimeError where anything was refused."""
    with sending(work) as process:
        said, _ = process.communicate(timeout=600)
    done = Done(**json.loads(said))
    if done.refused:
        raise RuntimeError(f"{work.agent}: {done.refused} of {len(work.requests)} requests were refused, by status")
    return done


@contextmanager
def sending(work: Job) -> Iterator[subprocess.Popen[bytes]]:
    """The process works inside the block; it ends at the latest with the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "e2e.bench.raw"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(asdict(work)).encode())
            process.stdin.close()
            process.stdin = None
            yield process
        finally:
            process.kill()


def session(work: Job) -> aiohttp.ClientSession:
    """With as many connections as there are requests under way. To be called in an event loop."""
    tls = ssl.create_default_context(cafile=work.authority)
    return aiohttp.ClientSession(
        work.server,
        connector=aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=_DEADLINE),
        headers={"User-Agent": work.agent, "Accept": "application/json", "Authorization": f"Bearer {work.token}"},
    )


async def _run(work: Job) -> Done:
    refused: dict[str, int] = {}
    ready = [(r.method, r.path, json.dumps(r.body).encode(), r.content_type) for r in work.requests]
    rounds, began, cpu = 0, time.monotonic(), time.process_time()
    async with session(work) as calls:

        async def worker(waiting: Iterator[tuple[str, str, bytes, str]]) -> None:
            for method, url, body, kind in waiting:
                async with calls.request(method, url, data=body, headers={"Content-Type": kind}) as answer:
                    await answer.read()
                    if answer.status >= 300:
                        refused[str(answer.status)] = refused.get(str(answer.status), 0) + 1

        while rounds == 0 or (work.every and time.monotonic() - began < work.seconds):
            waiting = iter(ready)
            await asyncio.gather(*(worker(waiting) for _ in range(work.in_flight)))
            rounds += 1
            if work.every:
                await asyncio.sleep(max(0.0, began + rounds * work.every - time.monotonic()))
    return Done(time.monotonic() - began, rounds, refused, time.process_time() - cpu)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    given["requests"] = tuple(Request(**request) for request in given["requests"])
    print(json.dumps(asdict(uvloop.run(_run(Job(**given))))))
