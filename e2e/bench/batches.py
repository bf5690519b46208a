"""One call for 1, 16 and 100 slots, beside a raw client's as many writes at once.

The two take turns, call by call in one process (`python -m e2e.bench.batches < load.json`), so that a machine that
becomes slower does so for both. A call counts from its begin until its answer, which has to have all its slots: what is
missing in it is counted, not asked for again. The raw client's writes are those of claims (patch_load.py), on Pods of
another pool; it counts until the last of them is answered. Then both give back what they have, which is not counted.
Nothing else happens: scheduler, controllers and fake kubelets are stopped when the slots are ready.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from e2e.cluster import CONTROLLER_MANAGER, KWOK, SCHEDULER

from . import pools
from .claiming import Broker
from .claims import forget_fields
from .figures import ratios, spread
from .patch_load import HEADERS, patch
from .raw import Job, job, session
from .targets import SIZES
from .testbed import NAMESPACE, Run, Testbed

_CALLS = 50
#: connections are opened and codes are warm afterwards
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Load:
    url: str
    authority: str
    path: str
    token: str
    #: the raw client's; its requests are left out
    job: Job
    #: path and UID of the Pods that it writes
    pods: list[tuple[str, str]]
    sizes: list[int]
    calls: int


def run(options: Run) -> dict[str, Any]:
    sizes, calls = (SIZES[:2], 3) if options.quick else (SIZES, _CALLS)
    slots = max(sizes)
    with Testbed(options, nodes=2 * -(-slots // pools.PER_NODE), qps=1000) as bed:
        bed.start_operator()
        bed.make_fleet("phones", slots)
        bed.make_fleet("raw", slots)
        (token,), authority = bed.claimers(1), bed.broker_ca()
        for component in (SCHEDULER, CONTROLLER_MANAGER, KWOK):
            bed.cluster.stop_component(component)
        forget_fields(bed)
        raw = [pod for pod in bed.pods() if pod["metadata"]["name"].startswith("raw-")]
        where = [(f"/api/v1/namespaces/{NAMESPACE}/pods/{p['metadata']['name']}", p["metadata"]["uid"]) for p in raw]
        path = bed.claims_path.format("phones")
        load = Load(bed.broker, authority, path, token, job(bed.cluster, "bench-raw", ()), where, list(sizes), calls)
        cpu = bed.cpu_seconds()
        done = subprocess.run(
            [sys.executable, "-m", "e2e.bench.batches"],
            input=json.dumps(asdict(load)).encode(),
            stdout=subprocess.PIPE,
            timeout=600,
            check=True,
        )
        cpu = bed.cpu_seconds() - cpu
    found: dict[str, Any] = {"batch_calls": calls, "batch_operator_cpu_s": round(cpu, 2)}
    for size, said in json.loads(done.stdout).items():
        found |= {
            **spread(said["ours"], f"batch_{size}_"),
            **spread(said["raw"], f"batch_{size}_raw_"),
            **{f"batch_{size}_{name}": value for name, value in ratios(said["ours"], said["raw"]).items()},
            f"batch_{size}_incomplete": said["incomplete"],
        }
    return {**found, "batch_load": round(os.getloadavg()[0], 2)}


async def _play(load: Load) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    async with Broker(load.url, load.authority) as broker, session(load.job) as calls:

        async def ours(size: int, number: int) -> tuple[float, int]:
            began = time.monotonic()
            claims = await broker.acquire(load.path, load.token, f"batch-{os.getpid()}-{size}-{number}", size)
            took = time.monotonic() - began
            await broker.release(claims)
            return took, size - len(claims)

        async def write(path: str, body: bytes) -> None:
            async with calls.patch(path, data=body, headers=HEADERS) as answer:
                await answer.read()
                answer.raise_for_status()

        async def raw(size: int, _: int) -> tuple[float, int]:
            took = 0.0
            for there in (True, False):
                bodies = [(path, patch(there, uid)) for path, uid in load.pods[:size]]
                began = time.monotonic()
                await asyncio.gather(*(write(path, body) for path, body in bodies))
                took = took or time.monotonic() - began
            return took, 0

        sides: list[Callable[[int, int], Coroutine[Any, Any, tuple[float, int]]]] = [ours, raw]
        for size in load.sizes:
            said: dict[str, Any] = {"ours": [], "raw": [], "incomplete": 0}
            for number in range(_WARM_UP + load.calls):
                for side in sides if number % 2 else sides[::-1]:
                    took, missing = await side(size, number)
                    if number >= _WARM_UP:
                        said[side.__name__].append(took)
                        said["incomplete"] += bool(missing)
            found[size] = said
    return found


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(uvloop.run(_play(Load(**{**given, "job": Job(**given["job"])})))))
