"""One history's episodes against a vLLM engine, in a process of its own: prints a line of JSON.

    python -m load.history sliding|blocks

Qwen3-VL at width 256 with 2 language layers, 2 vision blocks and the published vocabulary and chat template, in vLLM's
CPU build; prompts as the 8B sample's file makes them, in blocks as it is, and with a window that slides over three
screens in a context of 8,192 tokens. `EPISODES` episodes play at once, each of `STEPS` steps with a new screen of
1080x2400. Answers are `ANSWER` tokens that the engine samples; a word is a token, so that an answer that is encoded
again has as many. How much of a prompt is in a cache doesn't depend on width and weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from tests.agents.drawn import draw_frame
from tests.families import real

from tapforge_api import load
from tapforge_envs.protocol import Observation, Tap
from tapforge_trainer.agents import make_agent
from tapforge_trainer.agents.agent import Turn
from tapforge_trainer.agents.chat_agent import ChatAgent
from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.engine.client import EngineClient
from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.learner.frame_store import PixelFormat
from tapforge_trainer.placement.ray_start import start_ray
from tapforge_trainer.placement.settings import EngineSettings
from tapforge_trainer.records import Prompt, Sampling
from tapforge_trainer.run.adapters import adapter_options

MODEL = "qwen3-vl-8b-tiny"
SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "run-qwen3-vl-8b.yaml"
MODES: dict[str, tuple[str, ...]] = {
    "sliding": (
        "spec.model.adapter.history=null",
        "spec.model.adapter.historyImages=3",
        "spec.model.contextTokens=8192",
    ),
    "blocks": (),
}
EPISODES, STEPS, ANSWER = 2, 15, 80
_WORD = re.compile(r" [a-z]{3,}")


def words(agent: ChatAgent, tokens: Tokens) -> tuple[int, ...]:
    """Tokens that are a word each."""
    return tuple(id for id in agent.allowed_ids if _WORD.fullmatch(tokens.decode([id])))


async def episode(agent: ChatAgent, client: EngineClient, number: int) -> tuple[int, int]:
    """(tokens of prompts, screens in them) of its steps."""
    history: list[Turn] = []
    asked = shown = 0
    for step in range(STEPS):
        seen, _ = agent.prepare(Observation(draw_frame(1080, 2400, seed=1000 * number + step)))
        prompt = agent.prompt(f"Open the settings and turn on switch {number}", history, seen)
        assert isinstance(prompt, Prompt), prompt
        answer = await client.generate(prompt, Sampling(ANSWER, seed=100 * number + step))
        assert len(answer.ids) == ANSWER
        asked, shown = asked + answer.prompt_length, shown + len(prompt.frames)
        history.append(Turn(seen, agent.decode(answer.ids), Tap(x=0.5, y=0.5), tuple(answer.ids)))
    return asked, shown


async def measure(mode: str) -> dict[str, Any]:
    folder = real.folder(MODEL)
    run = load(SAMPLE, MODES[mode])
    agent = make_agent(run.spec.model.adapter.name, folder, **adapter_options(run))
    assert isinstance(agent, ChatAgent)
    tokens, form = Tokens.load(folder), PixelFormat.of_folder(folder)
    settings = EngineSettings(
        str(folder),
        words(agent, tokens),
        (),
        context_tokens=run.spec.model.context_tokens,
        max_sequences=EPISODES,
        images_per_prompt=run.spec.model.adapter.images,
        kv_cache_mib=512,
    )
    start_ray()
    import ray

    engines = Engines(settings, form, tokens.image_pad)
    try:
        await engines.ready()
        client = EngineClient(engines.connection)
        started = time.perf_counter()
        done = await asyncio.gather(*(episode(agent, client, number) for number in range(EPISODES)))
        seconds = time.perf_counter() - started
        counts = await engines.actors[0].release.remote()
    finally:
        await engines.close()
        ray.shutdown()
    assert counts.prefix_queries == sum(asked for asked, _ in done)
    return {
        "prefilled_tokens": counts.prefix_queries - counts.prefix_hits,
        "prompt_tokens": counts.prefix_queries,
        "prefix_hit_rate": round(counts.prefix_hits / counts.prefix_queries, 4),
        "frame_hit_rate": round(counts.mm_hits / counts.mm_queries, 4),
        "screens": sum(shown for _, shown in done),
        "steps_per_s": round(EPISODES * STEPS / seconds, 3),
        "seconds": round(seconds, 1),
        "episodes": EPISODES,
        "steps": STEPS,
        "answer_tokens": ANSWER,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=list(MODES))
    found = asyncio.run(measure(parser.parse_args().mode))
    print(json.dumps(found), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
