"""A thousand episodes at once over real sockets: the driver's CPU per step, memory, and file descriptors.

    python bench/episodes.py [--phones 1000] [--steps 100000] [--seconds 600]

As in a run on a cluster: one rollout worker per `--per-worker` phones and the recorder are Ray actors, the driver has
the scheduler, the groups and the leases, and builds each batch. Phones answer at once, from a few server processes
(`load/canned.py` without latency), with one of some canned screens of 96x160, each another one; the engine stand-in
answers after a fixed time, such that all phones together ask for about `--rate` steps a second. Counted is from the
first batch on, until so many steps were answered or so many seconds are over.

`driver_ms_per_step` is the CPU of all threads of the driver's process for a step that a phone answered;
`growth_mib_per_10000_steps` the slope of the later half of the private memory of driver and workers;
`descriptors` how many files and sockets each process has open at the first batch, at most, and at the end: a leak grows
with the steps. Writes bench-results/episodes.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import ray
from load.canned import draw
from load.children import child
from load.machine import machine, show, write
from load.phones import DEADLINES, SameLength
from load.policy import SAMPLING, adapter
from load.usage import Usage
from load.worker_engine import policies

from tapforge_api.algorithm import Algorithm
from tapforge_envs.slots.urls import UrlSlots, parse_urls
from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.placement.ray_start import start_ray
from tapforge_trainer.recording.actor import RecorderProcess
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.rollout.actor import RayCarrier, start_rollout_actor
from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.remote_players import RemotePlayers
from tapforge_trainer.rollout.scheduler import Scheduler
from tapforge_trainer.tasks.source import TaskSource

GROUP, MAX_STEPS, END = 8, 16, 1 / 8
STALENESS = 2
SCREENS, WIDTH, HEIGHT = 32, 96, 160
SERVERS = 2
#: between two looks at steps, memory and descriptors
LOOK_SECONDS = 5.0
PATIENCE = 600.0
RULES = BatchRules.of(Algorithm(), min_valid=2)


class Descriptors:
    """Open files and sockets of some processes."""

    def __init__(self, pids: dict[str, Sequence[int]]):
        self._processes = {name: [psutil.Process(pid) for pid in group] for name, group in pids.items()}
        self.first = self.last = self.now()
        self.most = dict(self.first)

    def now(self) -> dict[str, int]:
        """Raises RuntimeError for a process that is gone."""
        try:
            return {name: sum(process.num_fds() for process in group) for name, group in self._processes.items()}
        except psutil.NoSuchProcess as error:
            raise RuntimeError(
                f"process {error.pid} was replaced, for it gave no answer for too long: other work slows this machine "
                "down; run the benchmark alone, or with a lower --rate"
            ) from error

    def look(self) -> None:
        self.last = self.now()
        self.most = {name: max(self.most[name], number) for name, number in self.last.items()}


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    screens = folder / "screens"
    screens.mkdir()
    for number, png in enumerate(draw(SCREENS, WIDTH, HEIGHT)):
        (screens / f"{number:03}.png").write_bytes(png)
    await asyncio.to_thread(start_ray)
    adapter(folder / "model")
    share = -(-args.phones // SERVERS)
    serving = [str(screens), "--slots", str(share), "--median", "0"]
    servers = [child("load.canned", *serving) for _ in range(SERVERS)]
    try:
        bases = [f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}" for server in servers]
        return await _played(args, bases, share, folder)
    finally:
        for server in servers:
            server.kill()
            server.wait()
        await asyncio.to_thread(ray.shutdown)


async def _played(args: argparse.Namespace, bases: Sequence[str], share: int, folder: Path) -> dict[str, Any]:
    carriers: list[RayCarrier] = []
    seconds = args.phones / args.rate

    async def worker(number: int) -> RayCarrier:
        engine = partial(policies, folder / f"worker-{number}.json", seconds, END)
        make_agent = partial(adapter, folder / "model")
        carriers.append(await start_rollout_actor(make_agent, 120, cpus=0, make_policies=engine))
        return carriers[-1]

    players = RemotePlayers(worker, -(-args.phones // args.per_worker))
    await players.start()
    urls = [f"{bases[k // share]}/slot/{k % share}" for k in range(args.phones)]
    slots = UrlSlots(parse_urls(urls, "bench"), DEADLINES, health=players.health)
    await slots.start()
    process = await RecorderProcess.start()
    recording = await process(folder / "recording", Retention())
    scheduler = Scheduler(
        slots,
        players,
        SAMPLING,
        tasks=TaskSource(SameLength(MAX_STEPS), seed=0),
        groups=GroupLimits(GROUP, max(1, args.phones // GROUP // 2), max_staleness=STALENESS),
        recorder=recording,
    )
    try:
        workers = [await carrier.process() for carrier in carriers]
        return await _watched(args, bases, scheduler, workers, process.process)
    finally:
        await scheduler.close()
        await players.close()
        await recording.close()
        await process.close()
        await slots.close()


async def _watched(
    args: argparse.Namespace, bases: Sequence[str], scheduler: Scheduler, workers: Sequence[int], recorder: int
) -> dict[str, Any]:
    driver, played = Usage([os.getpid()]), Usage(workers)
    version = 0

    async def update() -> None:
        nonlocal version
        groups = await scheduler.next_batch()
        await asyncio.to_thread(build_batch, groups, RULES)
        version += 1
        scheduler.set_version(version)

    async with aiohttp.ClientSession() as session:

        async def steps() -> int:
            found = 0
            for base in bases:
                async with session.get(f"{base}/steps") as answer:
                    found += (await answer.json())["steps"]
            return found

        async with asyncio.timeout(PATIENCE):
            await update()
        first, begun, updates, at_once = await steps(), time.perf_counter(), version, 0
        descriptors = Descriptors({"driver": [os.getpid()], "workers": workers, "recorder": [recorder]})
        for usage in (driver, played):
            usage.begin()
        done, updating = 0, asyncio.create_task(update())
        while done < args.steps and time.perf_counter() - begun < args.seconds:
            await asyncio.wait([updating], timeout=LOOK_SECONDS)
            if updating.done():
                updating.result()
                updating = asyncio.create_task(update())
            done = await steps() - first
            at_once = max(at_once, scheduler.running)
            descriptors.look()
            for usage in (driver, played):
                usage.look(done)
        wall, cpu, worker_cpu = time.perf_counter() - begun, driver.cpu_seconds, played.cpu_seconds
        updating.cancel()
        await asyncio.wait([updating])
    stats = scheduler.stats()
    return {
        "driver_ms_per_step": round(1000 * cpu / done, 3),
        "worker_ms_per_step": round(1000 * worker_cpu / done, 3),
        "driver_mib": round(driver.peak_mib, 1),
        "worker_mib": round(played.peak_mib, 1),
        "driver_growth_mib_per_10000_steps": round(driver.growth(10_000), 2),
        "worker_growth_mib_per_10000_steps": round(played.growth(10_000), 2),
        "descriptors": {
            name: [descriptors.first[name], descriptors.most[name], n] for name, n in descriptors.last.items()
        },
        "episodes_at_once": at_once,
        "steps": done,
        "seconds": round(wall, 1),
        "steps_per_second": round(done / wall, 1),
        "updates": version - updates,
        "invalid": dict(stats.invalid),
        "phones": args.phones,
        "workers": len(workers),
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phones", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000, help="that are counted")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which it ends with fewer")
    parser.add_argument("--rate", type=float, default=300.0, help="steps a second that phones ask for together")
    parser.add_argument("--per-worker", type=int, default=500, help="phones of a rollout worker")
    parser.add_argument("--out", type=Path, default=Path("bench-results/episodes.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(measure(args, Path(scratch)))
    write(args.out, found)
    shown = ("driver_ms_per_step", "worker_ms_per_step", "driver_mib", "driver_growth_mib_per_10000_steps")
    shown += ("descriptors", "episodes_at_once", "steps", "steps_per_second", "invalid")
    show(f"{args.phones} phones, {found['cores']} cores", ("", "found"), [[name, found[name]] for name in shown])


if __name__ == "__main__":
    main()
