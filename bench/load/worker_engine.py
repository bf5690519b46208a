"""An engine stand-in inside a rollout worker's process, and what it sees there: bytes of frames, stalls of the loop.

Every second it writes them to a file, one JSON object that replaces the one before. Where the file was removed, it
begins to count anew.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from load.policy import ScriptedEngine
from tapforge_trainer.agents.agent import Agent
from tapforge_trainer.records import Generation, Generator, Prompt, Sampling
from tapforge_trainer.rollout.stall import StallMonitor

EVERY = 1.0


class CountingEngine(ScriptedEngine):
    """Counts the bytes of the frames that it is sent: of a prompt, the newest; it has the others already."""

    def __init__(self, agent: Agent, seconds: float, end: float, path: Path):
        super().__init__(agent, seconds, end)
        self._path = path
        self._bytes = self._frames = 0
        self._watch: asyncio.Task[None] | None = None

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._report())
        self._bytes += len(prompt.frames[-1].data)
        self._frames += 1
        return await super().generate(prompt, sampling)

    async def _report(self) -> None:
        monitor = StallMonitor()
        while True:
            await asyncio.sleep(EVERY)
            if not self._path.exists():
                self._bytes = self._frames = 0
                monitor.stalls()
            found = {"bytes": self._bytes, "frames": self._frames, **asdict(monitor.stalls(anew=False))}
            self._path.write_text(json.dumps(found))


def policies(path: Path, seconds: float, end: float, agent: Agent) -> dict[str, Generator]:
    """For `start_rollout_actor`, with `functools.partial`."""
    return {"": CountingEngine(agent, seconds, end, path)}
