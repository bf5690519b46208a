"""Stalls of an idle event loop, for comparison: `python -m load.stalls` ends when stdin does, with one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

from tapforge_trainer.rollout.stall import StallMonitor


async def _idle() -> None:
    monitor = StallMonitor()
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(asdict(monitor.stalls())))


if __name__ == "__main__":
    asyncio.run(_idle())
