"""What real screens cost the driver and the rollout workers: CPU, memory, stalls of their loops, bytes.

    python bench/driver.py [--phones 64 256] [--seconds 90] [--rate STEPS_PER_SECOND]

As on a cluster: rollout workers and the recorder are Ray actors, one worker for 64 phones. The real scheduler, adapter,
client, recorder and batch building, over real sockets; screens of the standard phone at 1080x2400, canned
(`load/canned.py`), each step another one; three screens of history, at most one megapixel each; an engine stand-in in
the workers that answers after a fixed time, from a script. Episodes have at most 30 steps; each answer ends one with a
probability of 1/12. Latencies are log-normal; their median is such that all phones together ask for about half of what
the cores can take (`--rate`; by default from the cost of fitting a frame: a step is taken to cost one and a half of
it).

A run of one size is a process of its own. Counted is from the first batch on, for `--seconds`: CPU of all threads of
the driver's process, of the workers' and of the recorder's, divided by the steps that phones have answered in that
time; `driver_idle_ms_per_second` is what the driver takes while all processes are up and idle, mostly Ray's own
threads. Each batch is made into the learner's token batch, and the sizes of its frames' objects are asked for, as what
the learner's node would fetch. `fit_ms` is the CPU of one thread for a frame from the phone's PNG to what is handed on;
`bare_fit_ms` decodes and resizes the same PNG to the same pixels with the fastest library found (torchvision, torch)
and nothing else. `bytes_per_step` is what one consumer of frames (the engine, the learner) is sent for a step;
`frame_bytes` the stored size of a new frame. `longest_stall_ms` and `stall_p999_ms` are of the driver's loop; an idle
loop in a process of its own runs beside it. Memory is what no other process shares. Writes bench-results/driver.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import ray
from load.canned import HEIGHT, WIDTH, Screen, draw
from load.children import child
from load.machine import machine, show, write
from load.phones import DEADLINES, SameLength
from load.usage import Usage, thread_seconds
from load.worker_engine import policies

from tapforge_api.algorithm import Algorithm
from tapforge_envs.protocol import Observation
from tapforge_envs.slots.urls import UrlSlots, parse_urls
from tapforge_trainer.agents import make_agent
from tapforge_trainer.agents.agent import Agent
from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.learner.batches import Vocabulary, token_batch
from tapforge_trainer.placement.machine import PHONES_PER_WORKER
from tapforge_trainer.placement.ray_start import start_ray
from tapforge_trainer.recording.actor import RecorderProcess
from tapforge_trainer.recording.queue import RecordWriter
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.records import GroupRecord, Sampling
from tapforge_trainer.rollout.actor import RayCarrier, start_rollout_actor
from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.remote_players import RemotePlayers
from tapforge_trainer.rollout.scheduler import Scheduler
from tapforge_trainer.rollout.stall import StallMonitor
from tapforge_trainer.tasks.source import TaskSource
from tapforge_trainer.tiny.folder import write_processor
from tapforge_trainer.tiny.tokenizer import write_tokenizer

GROUP, MAX_STEPS, END = 8, 30, 1 / 12
#: so that late members of a group leave no phone idle
STALENESS = 3
HISTORY_IMAGES, MAX_PIXELS, CONTEXT = 3, 1_000_000, 8192
ENGINE_SECONDS, SIGMA = 0.5, 0.5
SCREENS = 32
#: with all processes up and no episode running
IDLE_SECONDS = 10.0
#: between two looks at steps and memory, which cost CPU of the driver's process
LOOK_SECONDS = 5.0
#: until the first batch is there
PATIENCE = 900.0


def adapter(folder: Path) -> Agent:
    """Writes tokenizer and processor settings (no weights) and reads them as a run would."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_processor(folder)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings["size"]["longest_edge"] = MAX_PIXELS
    path.write_text(json.dumps(settings))
    return read_adapter(folder)


def read_adapter(folder: Path) -> Agent:
    return make_agent(
        "qwen3-vl",
        folder,
        prompt="full",
        history_images=HISTORY_IMAGES,
        history_steps=8,
        context_tokens=CONTEXT,
        response_tokens=64,
    )


# --- who plays --------------------------------------------------------------------------------------------------------


@dataclass
class Play:
    """A rollout that is under way: the driver's part of it is here, the rest in other processes."""

    scheduler: Scheduler
    players: RemotePlayers
    process: RecorderProcess
    recording: RecordWriter
    #: processes that play, and the one that records
    workers: tuple[int, ...]
    recorder: tuple[int, ...]
    folder: Path

    def seen(self) -> list[dict[str, float]]:
        """By the workers, since they began to count."""
        return [json.loads(path.read_text()) for path in self.folder.glob("worker-*.json")]

    def count_anew(self) -> None:
        for path in self.folder.glob("worker-*.json"):
            path.unlink()

    async def close(self) -> None:
        await self.scheduler.close()
        await self.players.close()
        await self.recording.close()
        await self.process.close()


async def start(phones: int, base: str, folder: Path) -> tuple[Play, UrlSlots]:
    """As on a cluster: rollout workers and the recorder are Ray actors, and the driver has references to frames."""
    await asyncio.to_thread(start_ray)
    adapter(folder / "model")

    async def worker(number: int) -> RayCarrier:
        engine = partial(policies, folder / f"worker-{number}.json", ENGINE_SECONDS, END)
        return await start_rollout_actor(partial(read_adapter, folder / "model"), 120, cpus=0, make_policies=engine)

    carriers: list[RayCarrier] = []

    async def noted(number: int) -> RayCarrier:
        carriers.append(await worker(number))
        return carriers[-1]

    players = RemotePlayers(noted, -(-phones // PHONES_PER_WORKER))
    await players.start()
    slots = UrlSlots(parse_urls([f"{base}/slot/{k}" for k in range(phones)], "bench"), DEADLINES, health=players.health)
    await slots.start()
    process = await RecorderProcess.start()
    recording = await process(folder / "recording", Retention())
    scheduler = Scheduler(
        slots,
        players,
        Sampling(max_tokens=64),
        tasks=TaskSource(SameLength(MAX_STEPS), seed=0),
        groups=GroupLimits(GROUP, max(1, phones // GROUP // 2), max_staleness=STALENESS, deadline_seconds=None),
        recorder=recording,
    )
    workers = tuple([await carrier.process() for carrier in carriers])
    return Play(scheduler, players, process, recording, workers, (process.process,), folder), slots


class Learner:
    """What the driver does with a batch before ranks have it, and the bytes that each node of them fetches."""

    def __init__(self, folder: Path, agent: Agent):
        image = next(token for token in agent.banned_ids if token == _image_id(folder / "model"))
        self._vocabulary = Vocabulary.of(len(agent.allowed_ids) + len(agent.banned_ids), image, agent.allowed_ids)
        self._rules = BatchRules.of(Algorithm(), min_valid=2)
        self.bytes = self.frames = 0

    async def take(self, groups: list[GroupRecord], handles: Mapping[str, Any]) -> None:
        batch = await asyncio.to_thread(build_batch, groups, self._rules)
        data = await asyncio.to_thread(token_batch, batch.samples, self._vocabulary)
        await asyncio.to_thread(ray.put, data)
        found = await asyncio.to_thread(ray.experimental.get_object_locations, list(handles.values()))
        self.bytes += sum(where["object_size"] or 0 for where in found.values())
        self.frames += len({name for g in groups for e in g.episodes for s in e.steps for name in s.frames})


def _image_id(folder: Path) -> int:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|image_pad|>")


# --- one size ---------------------------------------------------------------------------------------------------------


async def measure(phones: int, rate: float, seconds: float, screens: Path, folder: Path) -> dict[str, Any]:
    median = (phones / rate - ENGINE_SECONDS) / math.exp(SIGMA**2 / 2)
    if median <= 0:
        raise SystemExit(f"{phones} phones can't ask for {rate:g} steps a second: an answer takes {ENGINE_SECONDS} s")
    serving = [str(screens), "--slots", str(phones), "--median", str(median), "--sigma", str(SIGMA)]
    server = child("load.canned", *serving)
    idle = child("load.stalls")
    try:
        assert server.stdout is not None
        port = json.loads(server.stdout.readline())["port"]
        base = f"http://127.0.0.1:{port}"
        play, slots = await start(phones, base, folder)
        try:
            figures = await _watched(play, base, seconds)
        finally:
            await play.close()
            await slots.close()
        idle_late = json.loads(idle.communicate("")[0])
    finally:
        for process in (server, idle):
            process.kill()
            process.wait()
    return {
        **figures,
        "idle_stall_p999_ms": milliseconds(idle_late["p999"]),
        "phones": phones,
        "median_step_seconds": round(median, 2),
    }


def milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 2)


async def _watched(play: Play, base: str, seconds: float) -> dict[str, Any]:
    learner = Learner(play.folder, adapter(play.folder / "model"))
    driver, worker, stalls = Usage([os.getpid()]), Usage(play.workers), StallMonitor()
    recorder = Usage(play.recorder)
    version = 0

    async def update() -> None:
        nonlocal version
        groups = await play.scheduler.next_batch()
        await learner.take(groups, play.scheduler.frames(groups))
        version += 1
        play.scheduler.set_version(version)

    async with aiohttp.ClientSession() as session:

        async def steps() -> int:
            async with session.get(f"{base}/steps") as answer:
                return (await answer.json())["steps"]

        driver.begin()
        await asyncio.sleep(IDLE_SECONDS)
        idle = driver.cpu_seconds / IDLE_SECONDS
        async with asyncio.timeout(PATIENCE):
            await update()
        first, begun = await steps(), time.perf_counter()
        updates = version
        play.count_anew()
        learner.bytes = learner.frames = 0
        stalls.stalls()
        for usage in (driver, worker, recorder):
            usage.begin()
        updating = asyncio.create_task(update())
        while time.perf_counter() - begun < seconds:
            await asyncio.wait([updating], timeout=LOOK_SECONDS)
            if updating.done():
                updating.result()
                updating = asyncio.create_task(update())
            now = await steps()
            for usage in (driver, worker, recorder):
                usage.look(now)
        done, wall = await steps() - first, time.perf_counter() - begun
        cpu, worker_cpu, recorder_cpu = driver.cpu_seconds, worker.cpu_seconds, recorder.cpu_seconds
        seen = play.seen()
        updating.cancel()
        await asyncio.wait([updating])
    late = stalls.stalls()
    stalls.close()
    to_engine = sum(found["bytes"] for found in seen) / max(1, sum(found["frames"] for found in seen))
    to_learner = learner.bytes / learner.frames if learner.frames else 0.0
    stats = play.scheduler.stats()
    return {
        "driver_ms_per_step": round(1000 * cpu / done, 3),
        "driver_idle_ms_per_second": round(1000 * idle, 2),
        "worker_ms_per_step": round(1000 * worker_cpu / done, 3),
        "recorder_ms_per_step": round(1000 * recorder_cpu / done, 3),
        "longest_stall_ms": milliseconds(late.longest),
        "stall_p999_ms": milliseconds(late.p999),
        "worker_longest_stall_ms": milliseconds(max((found["longest"] for found in seen), default=0.0)),
        "worker_stall_p999_ms": milliseconds(max((found["p999"] for found in seen), default=0.0)),
        "driver_mib": round(driver.peak_mib, 1),
        "worker_mib": round(worker.peak_mib, 1),
        "growth_mib_per_10000_steps": round(driver.growth(10_000) + worker.growth(10_000), 1),
        "bytes_per_step": round(max(to_engine, to_learner)),
        "frame_bytes": round(to_engine),
        "recorder_mib": round(recorder.peak_mib, 1),
        "workers": len(play.workers),
        "steps": done,
        "steps_per_second": round(done / wall, 1),
        "updates": version - updates,
        "invalid": sum(stats.invalid.values()),
    }


# --- a frame ----------------------------------------------------------------------------------------------------------


def fitting(pngs: list[bytes], folder: Path) -> dict[str, float]:
    """Milliseconds of one thread for a frame. The two take turns; each frame is new."""
    import torch
    import torch.nn.functional as F
    from torchvision.io import ImageReadMode, decode_png

    torch.set_num_threads(1)
    agent, dice, screens = adapter(folder / "model"), random.Random(0), [Screen(png) for png in pngs]
    frames = [screen.frame(dice) for screen in screens]
    first = agent.prepare(Observation(frames[0]))[0].frame
    size = (first.height, first.width)

    def bare(data: torch.Tensor) -> torch.Tensor:
        # Channels last, also in the batch's stride: else torch takes its slower kernel.
        pixels = decode_png(data, ImageReadMode.RGB).permute(1, 2, 0).unsqueeze(0).permute(0, 3, 1, 2)
        return F.interpolate(pixels, size=size, mode="bicubic", antialias=True)

    bare(torch.frombuffer(bytearray(frames[0].data), dtype=torch.uint8))
    plain, ours = [], []
    for frame in (screen.frame(dice) for screen in screens for _ in range(3)):
        data = torch.frombuffer(bytearray(frame.data), dtype=torch.uint8)
        plain.append(thread_seconds(lambda data=data: bare(data), 1))
        ours.append(thread_seconds(lambda frame=frame: agent.prepare(Observation(frame)), 1))
    middle = len(plain) // 2
    return {
        "fit_ms": round(1000 * sorted(ours)[middle], 2),
        "bare_fit_ms": round(1000 * sorted(plain)[middle], 2),
        "fitted_width": first.width,
        "fitted_height": first.height,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phones", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=90.0, help="measured per size, after the first batch")
    parser.add_argument("--rate", type=float, help="steps a second of all phones; default: half of what cores can take")
    parser.add_argument("--out", type=Path, default=Path("bench-results/driver.json"))
    parser.add_argument("--screens", type=Path, help=argparse.SUPPRESS)  # one size, in a process of its own
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.screens:
            write(args.out, asyncio.run(measure(args.phones[0], args.rate, args.seconds, args.screens, folder)))
            return
        pngs = draw(SCREENS)
        for number, png in enumerate(pngs):
            (folder / f"{number:03}.png").write_bytes(png)
        frame = fitting(pngs, folder)
        cores = machine()["cores"]
        rate = args.rate or 0.5 * cores / (1.5 * frame["fit_ms"] / 1000)
        sizes = {}
        for phones in args.phones:
            one = folder / f"{phones}.json"
            again = ["--phones", str(phones), "--rate", str(rate), "--seconds", str(args.seconds)]
            command = [sys.executable, __file__, *again, "--screens", str(folder), "--out", str(one)]
            subprocess.run(command, check=True)
            sizes[str(phones)] = {**json.loads(one.read_text()), **frame}
    figures = {"sizes": sizes, "screen": f"{WIDTH}x{HEIGHT}", **machine()}
    write(args.out, figures)
    shown = ("driver_ms_per_step", "worker_ms_per_step", "fit_ms", "bare_fit_ms", "stall_p999_ms")
    shown += ("idle_stall_p999_ms", "longest_stall_ms", "driver_mib", "worker_mib", "steps_per_second")
    rows = [[phones, *(found[name] for name in shown)] for phones, found in sizes.items()]
    show(f"Driver, {cores} cores, screens of {WIDTH}x{HEIGHT}", ("phones", *shown), rows)


if __name__ == "__main__":
    main()
