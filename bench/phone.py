"""Steps per second of the simulated phone over HTTP: one server process, one client that taps at random.

    python bench/phone.py [--slots 8] [--steps 4000] [--suite quickstart]

Every step carries a new screen across the wire and is read to the last byte. Prints the figures and writes
bench-results/phone.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import aiohttp

from tapforge_envs.phone import catalog
from tapforge_envs.wire import decode_step

DEADLINE = aiohttp.ClientTimeout(total=30)


async def _episodes(session: aiohttp.ClientSession, url: str, slot: int, steps: int, suite: str) -> list[float]:
    """Random taps on one slot; seconds per call."""
    rng = Random(slot)
    tasks = catalog.tasks(suite, "train")
    seconds: list[float] = []
    while len(seconds) < steps:
        episode = f"{slot}-{len(seconds)}"
        body = {"episode": episode, "task": tasks.sample(slot, len(seconds)).model_dump()}
        async with session.post(f"{url}/slot/{slot}/reset", json=body) as answer:
            decode_step(await answer.read())
        for index in range(min(20, steps - len(seconds))):
            if rng.random() < 0.2:
                action: dict[str, object] = {"type": "home"}
            else:
                action = {"type": "tap", "x": rng.random(), "y": rng.random()}
            start = time.perf_counter()
            async with session.post(
                f"{url}/slot/{slot}/step", json={"episode": episode, "index": index, "action": action}
            ) as answer:
                decode_step(await answer.read())
            seconds.append(time.perf_counter() - start)
    return seconds


async def _load(url: str, slots: int, steps: int, suite: str) -> tuple[float, list[float]]:
    async with aiohttp.ClientSession(timeout=DEADLINE) as session:
        start = time.perf_counter()
        parts = await asyncio.gather(*(_episodes(session, url, s, steps // slots, suite) for s in range(slots)))
        return time.perf_counter() - start, sorted(value for part in parts for value in part)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4000, help="over all slots")
    parser.add_argument("--suite", default="quickstart")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--height", type=int, default=160)
    parser.add_argument("--out", type=Path, default=Path("bench-results/phone.json"))
    args = parser.parse_args()
    command = [sys.executable, "-m", "tapforge_envs.phone.server", "--slots", str(args.slots)]
    command += ["--width", str(args.width), "--height", str(args.height)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = json.loads(server.stdout.readline())["port"]
            before = _cpu_seconds(server.pid)
            wall, seconds = asyncio.run(_load(f"http://127.0.0.1:{port}", args.slots, args.steps, args.suite))
            cpu = _cpu_seconds(server.pid) - before
        finally:
            server.terminate()
    figures = {
        "suite": args.suite,
        "width": args.width,
        "height": args.height,
        "slots": args.slots,
        "steps": len(seconds),
        "steps_per_second": round(len(seconds) / wall, 1),
        #: what one core would do if the client cost nothing
        "steps_per_server_cpu_second": round(len(seconds) / cpu, 1),
        "milliseconds_p50": round(seconds[len(seconds) // 2] * 1000, 2),
        "milliseconds_p99": round(seconds[int(len(seconds) * 0.99)] * 1000, 2),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
