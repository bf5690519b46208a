"""How late an event loop is: every few milliseconds a task wants to run, and what it is kept waiting is a stall.

python -m load.stalls     an idle loop, for comparison; ends when stdin does, with one line of JSON: the stalls
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

EVERY = 0.02


class Stalls:
    """Seconds that the loop was late, one number per wish. `clear` begins anew."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="stalls")

    def clear(self) -> None:
        self.late.clear()

    def stop(self) -> list[float]:
        self._task.cancel()
        return self.late

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + EVERY
            await asyncio.sleep(EVERY)
            self.late.append(max(0.0, time.perf_counter() - due))


def milliseconds(late: list[float], share: float) -> float:
    """The stall that this share of all are below. In milliseconds."""
    ordered = sorted(late)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else 0.0


async def _idle() -> None:
    stalls = Stalls()
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(stalls.stop()))


if __name__ == "__main__":
    asyncio.run(_idle())
