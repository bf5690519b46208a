"""CPU that the driver spends per environment step, with many episodes at once over real sockets.

    python bench/driver.py [--episodes 256] [--batches 2] [--processes 4]

The real scheduler, adapter, client, recorder and staleness bound; the engine answers at once from a script, and the
phones are simulated ones in server processes of their own, slow enough (log-normal, median one second) that all
episodes are under way together. Counted is the CPU time of all threads of the driver's process, none of the servers',
from the first admission to the last batch on disk, divided by executed steps: admission, prompts, parsing, HTTP, frame
checks, recording, fsync. Writes bench-results/driver.json.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from load.machine import machine, peak_mib, show, write
from load.phones import SameLength, SlowPhones
from load.policy import SAMPLING, ScriptedEngine, adapter

from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.recorder import Recorder
from tapforge_trainer.rollout.scheduler import Scheduler
from tapforge_trainer.tasks.source import TaskSource

GROUP, MAX_STEPS = 8, 12


async def measure(episodes: int, batches: int, processes: int, median: float, folder: Path) -> dict[str, Any]:
    agent = adapter(folder / "model")
    slots = SlowPhones(episodes, processes, median, sigma=0.5)
    await slots.start()
    recorder = Recorder(folder / "recording")
    most = 0
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        scheduler = Scheduler(
            slots,
            agent,
            ScriptedEngine(agent),
            SAMPLING,
            tasks=TaskSource(SameLength(MAX_STEPS), seed=0),
            groups=GroupLimits(GROUP, max(1, episodes // GROUP), max_staleness=1, deadline_seconds=None),
            recorder=recorder,
        )

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, scheduler.running)
                await asyncio.sleep(0.5)

        watcher = asyncio.create_task(watch())
        for version in range(1, batches + 1):
            await scheduler.next_batch()
            scheduler.set_version(version)
        stats, steps = scheduler.stats(), slots.steps
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        watcher.cancel()
        await scheduler.close()
    finally:
        recorder.close()
        await slots.close()
    return {
        "episodes": most,
        "cpu_ms_per_step": round(1000 * cpu / steps, 3),
        "peak_mib": peak_mib(),
        "episodes_played": stats.episodes,
        "env_steps": steps,
        "invalid": sum(stats.invalid.values()),
        "seconds": round(wall, 1),
        "steps_per_second": round(steps / wall, 1),
        "driver_cpu_share": round(cpu / wall, 3),
        "server_processes": processes,
        "median_step_seconds": median,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=256, help="at once; as many slots")
    parser.add_argument("--batches", type=int, default=3, help="of as many episodes each")
    parser.add_argument("--processes", type=int, default=2, help="phone servers")
    parser.add_argument("--median", type=float, default=1.0, help="median latency of a phone's step, seconds")
    parser.add_argument("--out", type=Path, default=Path("bench-results/driver.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(args.episodes, args.batches, args.processes, args.median, Path(folder)))
    write(args.out, figures)
    shown = ("episodes", "env_steps", "invalid", "cpu_ms_per_step", "steps_per_second", "driver_cpu_share", "peak_mib")
    show(f"Driver, {figures['cores']} cores", shown, [[figures[name] for name in shown]])


if __name__ == "__main__":
    main()
