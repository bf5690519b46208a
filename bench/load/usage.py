"""CPU and memory of processes, this one or others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import psutil


class Usage:
    """Of some processes together, from `begin` on; `look` is called now and then, with the work done so far."""

    def __init__(self, pids: Sequence[int]):
        self._processes = [psutil.Process(pid) for pid in pids]
        self._cpu = 0.0
        self._seen: list[tuple[float, float]] = []
        self.peak_mib = 0.0

    def begin(self) -> None:
        self._cpu = self._cpu_seconds()
        self._seen.clear()

    def look(self, steps: int) -> None:
        found = [process.memory_info() for process in self._processes]
        # What is shared (libraries, Ray's object store) is not the process's own.
        mib = sum(memory.rss - memory.shared for memory in found) / 2**20
        self.peak_mib = max(self.peak_mib, mib)
        self._seen.append((steps, mib))

    @property
    def cpu_seconds(self) -> float:
        return self._cpu_seconds() - self._cpu

    def growth(self, per_steps: int) -> float:
        """MiB that so many steps add: the slope of the later half of all looks. In the earlier one, buffers fill."""
        later = self._seen[len(self._seen) // 2 :]
        if len(later) < 2 or later[0][0] == later[-1][0]:
            return 0.0
        steps, mib = np.asarray(later).T
        return float(np.polyfit(steps, mib, 1)[0]) * per_steps

    def _cpu_seconds(self) -> float:
        """By the scheduler's clock of each process (its id is the CPUCLOCK_SCHED of clock_getcpuclockid(3)): what
        /proc says of user and system time is counted in ticks, and a third too much for threads that wake up often."""
        return sum(time.clock_gettime(~process.pid << 3 | 2) for process in self._processes)


def thread_seconds(work: Callable[[], object], times: int) -> float:
    """CPU of this thread for one call, the median of several."""
    found = []
    for _ in range(times):
        begun = time.thread_time()
        work()
        found.append(time.thread_time() - begun)
    return sorted(found)[len(found) // 2]
