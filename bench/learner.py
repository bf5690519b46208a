"""Tokens per second of an update, what it wastes, and a step on a real model's width beside TRL's and transformers'.

    python bench/learner.py [--samples 640] [--updates 6] [--ranks 1] [--freeze-vision]
                            [--only tiny|real|episodes] [--episodes 2] [--steps 15] [--pixels 1310720] [--again]

The tiny Qwen3-VL, FSDP2 ranks as Ray actors, samples of the quickstart's shape with a screen each; the vision tower
learns too unless it is frozen. One update is: check, lay out, plan, send, forward, backward, clip, AdamW. The first one
warms up and is not counted. Also: seconds for the GiGPO advantages of 100,000 steps. Writes bench-results/learner.json.

Before that the same batch at a real width (`load/real_step.py`): our step, TRL's and transformers' own, at equal and at
mixed lengths, each in a process of its own. What is done is kept in bench-results/learner-real.json, and the next call
goes on with the rest; --again measures all.

`episodes`: whole episodes at a real width, each step a sample or joined in blocks, beside TRL's and transformers' own
step (`load/episodes_step.py`). It takes an hour, and only runs when it is asked for; what is done is kept in
bench-results/learner-episodes.json.
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

import numpy as np
from load.machine import machine, show, write
from load.samples import samples

from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.algorithms.registry import estimate
from tapforge_trainer.algorithms.steps import Steps
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.frames.handles import BatchFrames
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.placement.ray_start import start_ray
from tapforge_trainer.placement.settings import LearnerSettings, UpdateSettings
from tapforge_trainer.tiny.folder import write_model

ADVANTAGE_STEPS = 100_000
#: of one contender, seconds
REAL_SECONDS = 600
EPISODES_SECONDS = 7200


async def measure(folder: Path, count: int, updates: int, ranks: int, threads: int, freeze: bool) -> dict[str, Any]:
    start_ray()
    import ray

    settings = LearnerSettings(
        str(folder), Tokens.load(folder).allowed_ids, ranks=ranks, threads=threads, freeze_vision=freeze
    )
    data, found = samples(folder, count)
    handles: dict[str, dict[str, FittedFrame]] = {}
    for sample in data:
        handles.setdefault(sample.episode, {}).update((name, found[name]) for name in sample.frames)
    frames = BatchFrames(handles)
    learner = Learner(settings)
    try:
        started = time.perf_counter()
        await learner.ready()
        start = time.perf_counter() - started
        update = UpdateSettings(learning_rate=1e-4)
        first = await learner.update(data, frames, update, 0)
        figures = [await learner.update(data, frames, update, version) for version in range(1, updates)]
    finally:
        await learner.close()
        ray.shutdown()
    seconds = [f["seconds"] for f in figures]
    return {
        "tokens_per_second": round(figures[0]["tokens"] / statistics.median(seconds), 1),
        "samples_per_second": round(count / statistics.median(seconds), 1),
        "padding_share": round(figures[0]["padding_share"], 4),
        "peak_mib": round(max(f["peak_mib"] for f in [first, *figures]), 1),
        "update_seconds": round(statistics.median(seconds), 3),
        "update_seconds_computing": round(statistics.median(f["seconds_computing"] for f in figures), 3),
        "first_update_seconds": round(first["seconds"], 3),
        "start_seconds": round(start, 1),
        "samples": count,
        "tokens": int(figures[0]["tokens"]),
        "updates": updates - 1,
        "ranks": ranks,
        "threads": threads,
        "freeze_vision": freeze,
    }


def advantages_seconds(steps: int) -> float:
    """GiGPO over groups of 8 episodes of 1 to 20 steps with a few hundred states each."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 21, steps)
    trajectory = np.repeat(np.arange(len(lengths)), lengths)[:steps]
    data = Steps(
        group=trajectory // 8,
        trajectory=trajectory,
        state=rng.integers(0, 200, steps),
        reward=(rng.random(steps) < 0.05).astype(float),
        valid=np.ones(steps, bool),
    )
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        estimate("gigpo", data)
        best = min(best, time.perf_counter() - started)
    return best


def contender(module: str, words: list[str], threads: int, seconds: float) -> dict[str, Any]:
    """What it prints, in a process of its own."""
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])}
    environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *words, "--threads", str(threads)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=seconds,
        check=True,
    )
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def whole_episodes(out: Path, threads: int, size: dict[str, int], again: bool) -> None:
    """`A_to_B`: episodes per second of A over B's; `_cpu`: per second of CPU, where others use the machine."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() and not again else {}
    if found.get("size") != size:
        found = {"size": size}
    names = ("separate", "blocks", "trl", "transformers")
    for name in names:
        if name not in found:
            words = [name, *(word for field, value in size.items() for word in (f"--{field}", str(value)))]
            found[name] = contender("load.episodes_step", words, threads, EPISODES_SECONDS)
            print(f"{name}: {found[name]}", flush=True)
            write(out, found | machine())
    for other in ("separate", "trl", "transformers"):
        found[f"blocks_to_{other}"] = round(found[other]["seconds"] / found["blocks"]["seconds"], 2)
        found[f"blocks_to_{other}_cpu"] = round(found[other]["cpu_seconds"] / found["blocks"]["cpu_seconds"], 2)
    write(out, found | machine())
    shown = ("operations", "operations_by_formula", "tokens", "sequences", "seconds", "cpu_seconds", "peak_mib")
    rows = [[name, *(found[name].get(column, "") for column in shown)] for name in names]
    show(f"An episode of {size['steps']} steps, Qwen3-VL-2B at 2 layers with LoRA, fp32", ("contender", *shown), rows)


def real_width(out: Path, threads: int, again: bool) -> None:
    """Each contender at equal and at mixed lengths; ratios are ours, packed, over theirs."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() and not again else {}
    for lengths in ("equal", "mixed"):
        for name in ("packed", "trl", "transformers"):
            if name in found.setdefault(lengths, {}):
                continue
            found[lengths][name] = contender("load.real_step", [name, lengths], threads, REAL_SECONDS)
            print(f"{lengths} lengths, {name}: {found[lengths][name]}", flush=True)
            write(out, found | machine())
    rows = []
    for lengths in ("equal", "mixed"):
        rates = {name: figures["tokens_per_second"] for name, figures in found[lengths].items()}
        ratios = {f"packed / {name}": round(rates["packed"] / rates[name], 2) for name in rates if name != "packed"}
        found[f"ratios_{lengths}"] = ratios
        rows.append([lengths, *rates.values(), *ratios.values()])
    write(out, found)
    columns = ("lengths", *found["equal"], *found["ratios_equal"])
    show("Tokens per second of a step, Qwen3-VL-2B at 2 layers with LoRA, fp32", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=640, help="answers per update")
    parser.add_argument("--updates", type=int, default=7, help="the first is not counted")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None, help="per rank; cores / ranks if not given")
    parser.add_argument("--freeze-vision", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench-results/learner.json"))
    parser.add_argument("--only", choices=["tiny", "real", "episodes"])
    parser.add_argument("--episodes", type=int, default=2, help="of --only episodes, as the next two")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--pixels", type=int, default=1_310_720, help="of a screen as the model sees it, at most")
    parser.add_argument("--again", action="store_true", help="measure what is done, too")
    args = parser.parse_args()
    if args.only == "episodes":
        cores = len(os.sched_getaffinity(0))
        size = {"episodes": args.episodes, "steps": args.steps, "pixels": args.pixels}
        whole_episodes(args.out.with_name("learner-episodes.json"), cores, size, args.again)
        return
    if args.only != "tiny":
        real_width(args.out.with_name("learner-real.json"), len(os.sched_getaffinity(0)), args.again)
    if args.only == "real":
        return
    facts = machine()
    threads = args.threads or max(1, len(os.sched_getaffinity(0)) // args.ranks)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, 0)
        figures = asyncio.run(measure(folder, args.samples, args.updates, args.ranks, threads, args.freeze_vision))
    figures["advantages_100k_seconds"] = round(advantages_seconds(ADVANTAGE_STEPS), 4)
    write(args.out, figures | facts)
    shown = ("tokens_per_second", "samples_per_second", "padding_share", "peak_mib", "advantages_100k_seconds")
    show(f"Learner, {facts['cores']} cores", shown, [[figures[name] for name in shown]])


if __name__ == "__main__":
    main()
