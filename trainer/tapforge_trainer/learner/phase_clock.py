"""Seconds of a rank's phases. On a GPU they are the device's own, between events in its queue: nothing waits for the
device until the seconds are read, which is when an update has ended anyway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PhaseClock:
    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        #: the maker's, of a GPU
        self.device_name: str = torch.cuda.get_device_name(device) if self._cuda else ""
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def device(self, phase: str) -> Iterator[None]:
        """What the block gives the device to do."""
        if not self._cuda:
            with self.host(phase):
                yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((phase, begin, end))

    @contextmanager
    def host(self, phase: str) -> Iterator[None]:
        """What the block takes on this thread."""
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def read(self) -> dict[str, float]:
        """By phase, since the last reading. Waits for the device."""
        if self._events:
            self._events[-1][2].synchronize()
        seconds, self._seconds = self._seconds, {}
        events, self._events = self._events, []
        for phase, begin, end in events:
            seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1000
        return seconds


def peak_mib(device: torch.device) -> float:
    """The most memory that this process has had: of its GPU, or of the host's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
