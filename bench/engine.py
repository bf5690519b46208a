"""Answers per second of an engine behind its client, what the driver pays for one, and what a weight sync takes.

    python bench/engine.py [--concurrency 64] [--requests 512] [--only answers|history]

The tiny Qwen3-VL in vLLM, answers of up to 12 tokens, prompts of the quickstart's shape. `known`: screens that the
engine has seen; `new`: a screen of its own for every request, which travels and is encoded. A sync is everything from
gathering the learner's weights to the proven probe. Writes bench-results/engine.json.

`history`: what an engine computes of the prompts of whole episodes, with a history in blocks and with a window that
slides (`load/history.py`), each in a process of its own. Writes bench-results/engine-history.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from load.machine import machine, show, write
from load.samples import prompt, screen

from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.engine.client import EngineClient
from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.learner.frame_store import PixelFormat
from tapforge_trainer.placement.ray_start import start_ray
from tapforge_trainer.placement.settings import EngineSettings, LearnerSettings
from tapforge_trainer.records import Prompt, Sampling
from tapforge_trainer.sync.proof import make_probe
from tapforge_trainer.sync.sync import synchronize
from tapforge_trainer.tiny.folder import write_model

#: of the episodes of one history, seconds
HISTORY_SECONDS = 900


async def loop(client: EngineClient, prompts: list[Prompt], concurrency: int) -> dict[str, float]:
    """`concurrency` requests at any time until all are answered."""
    todo = iter(prompts)
    latency: list[float] = []
    tokens = 0

    async def worker() -> None:
        nonlocal tokens
        for asked in todo:
            started = time.perf_counter()
            answer = await client.generate(asked, Sampling(12))
            latency.append(time.perf_counter() - started)
            tokens += len(answer.ids)

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "answers_per_second": round(len(prompts) / wall, 1),
        "tokens_per_second": round(tokens / wall, 1),
        "latency_p50": round(statistics.median(latency), 3),
        "latency_p95": round(statistics.quantiles(latency, n=20)[-1], 3),
        "driver_cpu_ms_per_answer": round(1000 * cpu / len(prompts), 3),
    }


async def measure(folder: Path, concurrency: int, requests: int) -> dict[str, Any]:
    tokens, form = Tokens.load(folder), PixelFormat.of_folder(folder)
    screens = [screen(k) for k in range(requests + concurrency)]
    started = time.perf_counter()
    start_ray()
    import ray

    ray_seconds = time.perf_counter() - started
    settings = EngineSettings(str(folder), tokens.allowed_ids, tokens.stop_ids, context_tokens=2048)
    engines = Engines(settings, form, tokens.image_pad)
    learner = Learner(LearnerSettings(str(folder), tokens.allowed_ids, freeze_vision=False))
    try:
        await engines.ready()
        client = EngineClient(engines.connection)
        await client.generate(prompt(tokens, form, screens[0], 0), Sampling(12))
        answer_seconds = time.perf_counter() - started
        await learner.ready()
        both_seconds = time.perf_counter() - started
        few = [prompt(tokens, form, screens[k % concurrency], k) for k in range(requests)]
        many = [prompt(tokens, form, screens[concurrency + k], k) for k in range(requests)]
        await loop(client, few, concurrency)
        known, new = await loop(client, few, concurrency), await loop(client, many, concurrency)
        marks = tokens.image_pad, tokens.vision_start, tokens.vision_end
        probe = make_probe(form, tokens.allowed_ids, *marks, settings.context_tokens)
        syncs = []
        for version in range(1, 7):
            at = time.perf_counter()
            await synchronize(learner, engines, probe, version)
            syncs.append(time.perf_counter() - at)
        peaks = [await actor.peak_mib.remote() for actor in engines.actors]
    finally:
        await engines.close()
        await learner.close()
        ray.shutdown()
    return {
        "known": known,
        "new": new,
        "sync_seconds": round(statistics.median(syncs[1:]), 3),
        "ray_seconds": round(ray_seconds, 1),
        "first_answer_seconds": round(answer_seconds, 1),
        "engine_and_learner_seconds": round(both_seconds, 1),
        "peak_mib": peaks[0],
        "concurrency": concurrency,
        "requests": requests,
    }


def histories(out: Path) -> None:
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), str(here)]), "HF_HUB_OFFLINE": "1"}
    found: dict[str, Any] = machine()
    for mode in ("sliding", "blocks"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "load.history", mode],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=HISTORY_SECONDS,
            check=True,
        )
        found[mode] = json.loads(done.stdout.strip().splitlines()[-1])
    found["blocks_to_sliding"] = round(found["blocks"]["prefilled_tokens"] / found["sliding"]["prefilled_tokens"], 3)
    write(out, found)
    shown = ("prefilled_tokens", "prompt_tokens", "prefix_hit_rate", "frame_hit_rate", "steps_per_s")
    show(
        f"Episodes of {found['blocks']['steps']} steps; blocks compute {found['blocks_to_sliding']} of the tokens",
        ("history", *shown),
        [[mode, *(found[mode][column] for column in shown)] for mode in ("sliding", "blocks")],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("bench-results/engine.json"))
    parser.add_argument("--only", choices=["answers", "history"])
    args = parser.parse_args()
    if args.only != "answers":
        histories(args.out.with_name("engine-history.json"))
    if args.only == "history":
        return
    facts = machine()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, 0)
        figures = asyncio.run(measure(folder, args.concurrency, args.requests))
    write(args.out, figures | facts)
    shown = ("answers_per_second", "tokens_per_second", "latency_p50", "latency_p95", "driver_cpu_ms_per_answer")
    show(
        f"Engine, {facts['cores']} cores; first answer after {figures['first_answer_seconds']} s, a sync takes "
        f"{figures['sync_seconds']} s",
        ("screens", *shown),
        [[name, *(figures[name][column] for column in shown)] for name in ("known", "new")],
    )


if __name__ == "__main__":
    main()
