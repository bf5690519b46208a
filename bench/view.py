"""The page of a run with 100,000 episodes of 15 steps, in Chromium: how long its screens take, and how much memory.

    python bench/view.py [--episodes 100000] [--steps 15]

Makes the run (up to 3 GB, removed at the end), serves it with `tapforge view --serve`, waits until its recording is
read and its advantages are computed, and opens screens by their addresses. Each time is from the new address to the
screen in the browser. Prints the figures and writes bench-results/view.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from load.made_run import Shape, make_run

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "phone")]

from chromium import Tab, tab

DEADLINE = aiohttp.ClientTimeout(total=120)
FILTERS = (
    "outcome=failure",
    "template=two_panels&outcome=success",
    "steps=14..15&reason=step_limit",
    "parse_errors=2..",
    "staleness=1..",
    "phone=phone-7",
    "advantage=1..",
    "q=dentist+garden",
    "q=click&sort=-tokens",
    "sort=goal",
    "sort=-advantage",
)
#: resolves when the new screen is painted; its time in ms
OPEN = """(async () => {
  const main = document.querySelector('#main'), start = performance.now();
  const shown = new Promise((done) => new MutationObserver((_, one) => {
    if (!main.hasAttribute('aria-busy')) { one.disconnect(); done(); }
  }).observe(main, { attributes: true, attributeFilter: ['aria-busy'] }));
  location.hash = ADDRESS;
  await shown;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const error = document.querySelector('.error');
  if (error) throw new Error(error.textContent);
  return performance.now() - start;
})()"""


async def opened(page: Tab, address: str) -> float:
    """Seconds."""
    # The same address again would open nothing.
    assert address != await page.value("location.hash"), address
    return (await page.value(OPEN.replace("ADDRESS", json.dumps(address)))) / 1000


def rss(process: int) -> float:
    """MiB."""
    return psutil.Process(process).memory_info().rss / 2**20


async def indexed(session: aiohttp.ClientSession, api: str, server: int) -> tuple[float, float, float]:
    """Seconds until the recording is read, and until every advantage is there; MiB of the server at most."""
    start, read, most = time.perf_counter(), 0.0, 0.0
    while True:
        most = max(most, rss(server))
        async with session.get(f"{api}/episodes", params={"limit": "1"}) as answer:
            found = await answer.json()
        if found["read"] == found["all"] > 0:
            read = read or time.perf_counter() - start
            before = found["changes"]
            await asyncio.sleep(5)
            async with session.get(f"{api}/episodes", params={"limit": "1"}) as answer:
                if (await answer.json())["changes"] == before:
                    return read, time.perf_counter() - start - 5, most
        await asyncio.sleep(0.5)


async def measured(folder: Path, cache: Path, profile: Path) -> dict[str, Any]:
    command = [str(Path(sys.executable).parent / "tapforge"), "view", str(folder), "--serve", "--port", "0", "--json"]
    environment = {**os.environ, "TAPFORGE_CACHE": str(cache)}
    server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environment)
    try:
        assert server.stdout is not None
        url = json.loads(await server.stdout.readline())["page"]
        api = f"{url}api/runs/{folder.name}"
        async with aiohttp.ClientSession(timeout=DEADLINE) as session:
            begin = time.perf_counter()
            async with session.get(api) as answer:
                await answer.read()
            first_answer = time.perf_counter() - begin
            read, credited, most = await indexed(session, api, server.pid)
            async with session.get(f"{api}/episodes", params={"limit": "300", "sort": "goal"}) as answer:
                rows = (await answer.json())["episodes"]
        run = f"#/run/{folder.name}"
        async with tab(url, profile) as page:
            overview = [await opened(page, address) for _ in range(3) for address in (run, "#/")][::2]
            filters = {one: await opened(page, f"{run}/episodes?{one}") for one in FILTERS}
            steps, episodes = [], []
            for row in rows[::15]:
                steps.append(await opened(page, f"{run}/step/{row['recording']}/{row['name']}/2"))
                episodes.append(await opened(page, f"{run}/episode/{row['recording']}/{row['name']}"))
            await opened(page, f"{run}/episodes")
            for at in range(40):  # from the first to the last episode
                await page.value(f"document.querySelector('.body').scrollTop = {at * 85_000}")
                await asyncio.sleep(0.1)
            heap = (await page.value("performance.memory.usedJSHeapSize")) / 2**20
            await page.call("HeapProfiler.collectGarbage")
            after = (await page.value("performance.memory.usedJSHeapSize")) / 2**20
            nodes = await page.value("document.querySelectorAll('*').length")
        return {
            "first_answer_seconds": first_answer,
            "read_seconds": read,
            "advantages_seconds": credited,
            "first_screen_seconds": max(overview),
            "filter_seconds": filters,
            "filter_seconds_max": max(filters.values()),
            "step_seconds_median": sorted(steps)[len(steps) // 2],
            "step_seconds_max": max(steps),
            "episode_seconds_max": max(episodes),
            "server_mib": max(most, rss(server.pid)),
            "page_heap_mib": heap,
            "page_heap_after_collection_mib": after,
            "page_elements": nodes,
        }
    finally:
        server.terminate()
        await asyncio.wait_for(server.wait(), 30)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("bench-results/view.json"))
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="tapforge-bench-view-"))
    try:
        start = time.perf_counter()
        folder = make_run(place / "made", Shape(args.episodes, steps=args.steps))
        made, recording = time.perf_counter() - start, size(folder)
        print(f"made {args.episodes:,} episodes, {recording / 1e9:.2f} GB, in {made:.0f} s", flush=True)
        found = asyncio.run(measured(folder, place / "cache", place / "profile"))
        found = {
            "episodes": args.episodes, "steps": args.steps, "recording_bytes": recording,
            "index_bytes": size(place / "cache"), **found, "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load": os.getloadavg(),
        }  # fmt: skip
    finally:
        shutil.rmtree(place, ignore_errors=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, value in found.items():
        print(f"{name}: {value if not isinstance(value, float) else round(value, 3)}")


if __name__ == "__main__":
    main()
