"""The real Qwen3-VL adapter with the tiny model's tokenizer, and an engine that answers at once, from the seed alone.

Every answer is canonical (the adapter's own ids for an action): mostly a tap, with a fixed probability the end of the
episode. Equal sampling seeds give equal answers, so two ways of scheduling play the same episodes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from tapforge_envs.protocol import Action, Tap, Terminate
from tapforge_trainer.agents import make_agent
from tapforge_trainer.agents.agent import Agent
from tapforge_trainer.records import Generation, Prompt, Sampling
from tapforge_trainer.tiny.folder import write_processor
from tapforge_trainer.tiny.tokenizer import write_tokenizer

COLUMNS, ROWS = 3, 5
SAMPLING = Sampling(max_tokens=32)


def adapter(folder: Path) -> Agent:
    """Writes tokenizer and processor settings (no weights) and reads them as a run would."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_processor(folder)
    return make_agent(
        "qwen3-vl", folder, prompt="compact", history_images=1, history_steps=8, context_tokens=512, response_tokens=32
    )


class ScriptedEngine:
    """A `Generator`. `seconds` is what every answer takes; `end` the probability that an answer ends the episode."""

    def __init__(self, agent: Agent, seconds: float = 0.0, end: float = 1 / 8):
        self._agent = agent
        self._seconds = seconds
        self._end = end

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        await asyncio.sleep(self._seconds)
        ids = self._agent.answer_ids(self._choose(Random(sampling.seed)), prompt.frames[-1])
        return Generation(prompt.ids, ids, (-0.5,) * len(ids), (0,) * len(ids), "stop", prompt.expanded_length)

    def _choose(self, rng: Random) -> Action:
        if rng.random() < self._end:
            return Terminate(status="success")
        return Tap(x=(rng.randrange(COLUMNS) + 0.5) / COLUMNS, y=(rng.randrange(ROWS) + 0.5) / ROWS)
