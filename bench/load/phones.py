"""Simulated phones in their own processes, behind real sockets, with a log-normal latency that repeats.

The latency of a call is a function of the episode's name on the wire, the call and the step (`faults.py` of the phone).
Names here are (task, how often it was begun before), so the same work meets the same latencies under every scheduler.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from tapforge_envs.clients.http import Deadlines, new_session
from tapforge_envs.clients.phones import PhoneAddress, PhoneClients
from tapforge_envs.clients.tapforge_http import TapforgeClient
from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Action, Environment, StepResult, Task
from tapforge_envs.slots.processes import ProcessSlots, ServerCommand

DEADLINES = Deadlines(health=30, reset=120, step=120, evaluate=120, close=30)


class SameLength:
    """The quickstart's tasks with one limit of steps."""

    def __init__(self, max_steps: int):
        self._tasks = catalog.tasks("quickstart", "train")
        self._max_steps = max_steps

    def sample(self, seed: int, index: int) -> Task:
        return self._tasks.sample(seed, index).model_copy(update={"max_steps": self._max_steps})


class SlowPhones(ProcessSlots):
    def __init__(self, count: int, processes: int, median_seconds: float, sigma: float):
        slow = {"kind": "slow", "medianSeconds": median_seconds, "sigma": sigma}
        super().__init__(count, processes, ServerCommand(arguments=("--faults", json.dumps([slow]))), DEADLINES)


class MeteredClients(PhoneClients):
    """`working`: seconds in which phones were at work on a call, summed over slots. `steps`: those that were answered,
    also in episodes that have not ended yet."""

    def __init__(self) -> None:
        super().__init__()
        self.working = 0.0
        self.steps = 0
        self._metered = new_session()
        self._begun: Counter[str] = Counter()

    def open(self, phone: PhoneAddress) -> Environment:
        return _Metered(self, phone.url, self._metered, phone.deadlines, phone.slot, None, self._name)

    async def close(self) -> None:
        await super().close()
        await self._metered.close()

    def _name(self, task: Task) -> str:
        self._begun[task.key] += 1
        return f"{task.key}~{self._begun[task.key]}"


class _Metered(TapforgeClient):
    def __init__(self, meter: MeteredClients, *rest: Any):
        super().__init__(*rest)
        self._meter = meter

    async def step(self, action: Action, index: int) -> StepResult:
        result = await super().step(action, index)
        self._meter.steps += 1
        return result

    async def _call(self, *rest: Any, **options: Any) -> bytes:
        begun = time.perf_counter()
        try:
            return await super()._call(*rest, **options)
        finally:
            self._meter.working += time.perf_counter() - begun
