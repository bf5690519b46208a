"""Parts of `bench/gpu.py` that come first: the machine, and what correct engines and learners differ by in bf16.

- `doctor`: what is there
- `proof`: heads in fp32 and heads in bf16, each with syncs after the weights have moved by more and more: RMS, mean,
  90th percentile, k3 and largest of the proof's gaps, and the slope of the engine's change
- `transfer`: seconds and GB/s of syncs, by CUDA IPC on one GPU and by NCCL on two
- `lora`: what merged adapters keep of the learner's change after 1, 5, 20 and 100 updates of one direction
- `tensor_parallel`: a proof of an engine on two GPUs

Weights are random, with a head that makes logits as large as trained models have them (about 24); `--folder` names a
real model's. Nothing is refused for its gaps, only for bytes and caches: these parts say what gaps there are. What is
measured is printed after each sync.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: of a weight's own size, by which it is moved before a sync
MOVES = (0.0, 1e-3, 3e-3, 1e-2)
#: updates in one direction, and the learning rate of each (manifests/samples/run-qwen2.5-vl-7b.yaml)
UPDATES, RATE = (0, 1, 5, 20, 100), 2e-5
#: by which the output layer's random weights are multiplied
_HEAD = 6.0
#: tokens of the context, and width and height of the largest screen, pixels
_CONTEXT, _SCREEN = 8192, (832, 1472)
#: no gap is larger
_ANYTHING = 1e9

Tell = Callable[[dict[str, Any]], None]


@dataclass
class Fleet:
    """An engine, a learner and their proofs."""

    engines: Any
    learner: Any
    probe: Any
    history: Any
    version: int = 0

    async def sync(self) -> dict[str, float]:
        """Figures of the proof."""
        from tapforge_trainer.sync.agreement import slope_of
        from tapforge_trainer.sync.sync import synchronize

        self.version += 1
        await synchronize(
            self.learner, self.engines, self.probe, self.version, tolerance=_ANYTHING, history=self.history
        )
        last, first = self.history.last, self.history.scores
        found = {name: value for name, value in last.figures.items() if not name.startswith("gap_slope")}
        if self.version > 1:
            slope = slope_of(first, last.scores)
            found |= {"slope": slope.value, "slope_error": slope.error, "signal": slope.signal}
        return {name: round(value, 6) for name, value in found.items()}

    @property
    def took(self) -> dict[str, float]:
        return {name: value for name, value in self.engines.round_metrics.items() if "sync_" in name}


@asynccontextmanager
async def fleet(folder: Path, device: str, scale: int, **how: Any) -> AsyncIterator[Fleet]:
    """`how`: `gpus` that there are to be used, `workers` of the engine, `lora`, and `heads`: bf16 or fp32. On a CPU
    weights travel through Ray. The learner is apart where an engine leaves it a GPU; else ranks share the engine's."""
    from tapforge_trainer.agents.tokens import Tokens
    from tapforge_trainer.engine.pool import Engines
    from tapforge_trainer.learner.client import Learner
    from tapforge_trainer.learner.frame_store import PixelFormat
    from tapforge_trainer.placement.placement import placed
    from tapforge_trainer.placement.ray_start import start_ray
    from tapforge_trainer.placement.settings import EngineSettings, LearnerSettings
    from tapforge_trainer.sync.history import ProofHistory
    from tapforge_trainer.sync.proof import probe_of

    tokens, form = Tokens.load(folder), PixelFormat.of_folder(folder)
    workers, gpus = how.get("workers", 1), how.get("gpus", 1)
    turns = device == "cuda" and gpus <= workers
    shared: dict[str, Any] = {
        "device": device,
        "dtype": "bfloat16",
        "colocated": turns,
        "transfer": "tapforge-cpu" if device == "cpu" else "ipc" if turns else "nccl",
    }
    context = max(512, _CONTEXT // scale)
    engine = EngineSettings(
        str(folder),
        tokens.allowed_ids,
        tokens.stop_ids,
        context_tokens=context,
        max_sequences=32,
        gpu_memory_share=0.5 if turns else 0.9,
        tensor_parallel=workers,
        enforce_eager=True,
        largest_frame=(max(64, _SCREEN[0] // scale // 32 * 32), max(64, _SCREEN[1] // scale // 32 * 32)),
        **shared,
    )
    rank = LearnerSettings(
        str(folder), tokens.allowed_ids, ranks=workers if turns else 1, lora=how.get("lora"), **shared
    )
    start_ray()
    import ray

    try:
        placement = await placed(engine, 1, rank, lambda words: print(words, file=sys.stderr))
        engines = Engines(engine, form, tokens.image_pad, places=placement.engines)
        learner = Learner(rank, placement.ranks)
        try:
            if how.get("heads") == "bf16":
                for one in engines._engines:
                    await one.actor.__ray_call__.remote(narrow_engine_head)
            # Where they share a GPU, an engine that starts has to see what memory the learner leaves it.
            await (engines.ready() if not turns else learner.ready())
            await (learner.ready() if not turns else engines.ready())
            if how.get("heads") == "bf16":
                await learner.run(narrow_head)
            yield Fleet(engines, learner, probe_of(engine, form), ProofHistory())
        finally:
            await engines.close()
            await learner.close()
    finally:
        ray.shutdown()


async def proof(folder: Path, device: str, scale: int, tell: Tell, *, real: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for heads in ("fp32", "bf16"):
        async with fleet(folder, device, scale, heads=heads) as both:
            if not real:
                await both.learner.run(larger_head, _HEAD)
            for move in MOVES:
                await both.learner.run(moved, move)
                for name, value in (await both.sync()).items():
                    found.setdefault(f"{heads} {name.removeprefix('gap_')}", []).append(value)
                tell(found | {"moves": MOVES})
    return found | {"moves": MOVES}


async def transfer(folder: Path, device: str, scale: int, gpus: int, tell: Tell) -> dict[str, Any]:
    found: dict[str, Any] = {} if gpus != 1 else {"nccl": "not run: it needs two GPUs"}
    ways = {"tapforge-cpu": 1} if device == "cpu" else {"ipc": 1} | ({"nccl": 2} if gpus > 1 else {})
    for way, used in ways.items():
        async with fleet(folder, device, scale, gpus=used) as both:
            seconds, took = [], []
            for _ in range(5):
                await both.learner.run(moved, 1e-3)
                started = time.perf_counter()
                await both.sync()
                seconds.append(time.perf_counter() - started)
                took.append(both.took)
                found[way] = {
                    "first_seconds": round(seconds[0], 3),
                    "seconds": round(statistics.median(seconds[1:] or seconds), 3),
                    **{name: round(statistics.median(one[name] for one in took), 4) for name in took[0]},
                }
                tell(found)
    return found


async def lora(folder: Path, device: str, scale: int, tell: Tell) -> dict[str, Any]:
    from tapforge_trainer.placement.settings import LoraSettings

    found: dict[str, Any] = {"updates": UPDATES}
    async with fleet(folder, device, scale, lora=LoraSettings(64, 128.0)) as both:
        before = 0
        for updates in UPDATES:
            await both.learner.run(stepped, RATE * (updates - before))
            before = updates
            for name, value in (await both.sync()).items():
                found.setdefault(name.removeprefix("gap_"), []).append(value)
            tell(found)
    return found


async def tensor_parallel(folder: Path, device: str, scale: int, tell: Tell) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with fleet(folder, device, scale, workers=2, gpus=2) as both:
        for move in MOVES[:2]:
            await both.learner.run(moved, move)
            for name, value in (await both.sync()).items():
                found.setdefault(name.removeprefix("gap_"), []).append(value)
            tell(found)
    return found


def doctor() -> dict[str, Any]:
    """Of this machine alone, without a run."""
    from tapforge_trainer.doctor.command import examine
    from tapforge_trainer.doctor.findings import as_json, worst

    found = examine(None, Path("runs"))
    return {"worst": worst(found), "findings": json.loads(as_json(found))}


def run(part: str, folder: Path, device: str, scale: int, gpus: int, tell: Tell, *, real: bool) -> dict[str, Any]:
    """`tell` gets the figures that there are, each time that there are more."""
    if part == "proof":
        return asyncio.run(proof(folder, device, scale, tell, real=real))
    if part == "transfer":
        return asyncio.run(transfer(folder, device, scale, gpus, tell))
    if part == "lora":
        return asyncio.run(lora(folder, device, scale, tell))
    return asyncio.run(tensor_parallel(folder, device, scale, tell))


# --- in the ranks' and the engine's processes -------------------------------------------------------------------------


def narrow_engine_head(actor: Any) -> None:
    """Before it has started: logits are rounded to bf16."""
    from tapforge_trainer.engine import vllm

    vllm._FULL_LOGITS.clear()


def narrow_head(rank: Any) -> None:
    from tapforge_trainer.learner import head
    from tapforge_trainer.learner.linear import linear

    head._logits = lambda hidden, weight: linear(hidden, weight).float()


def larger_head(rank: Any, factor: float) -> None:
    import torch

    with torch.no_grad():
        found = [p for name, p in rank.policy.model.named_parameters() if "lm_head" in name]
        tied = [p for name, p in rank.policy.model.named_parameters() if "embed_tokens" in name]
        for parameter in found or tied:
            parameter.mul_(factor)


def moved(rank: Any, share: float) -> None:
    """What is trained, by so much of its own size, at random."""
    import torch

    with torch.no_grad():
        for parameter in (p for p in rank.policy.parameters() if p.requires_grad):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.add_(torch.randn_like(local) * local.abs().mean() * share)


def stepped(rank: Any, size: float) -> None:
    """Each trained number by `size`, always in the same direction."""
    import torch

    with torch.no_grad():
        for number, parameter in enumerate(p for p in rank.policy.parameters() if p.requires_grad):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            generator = torch.Generator(local.device).manual_seed(number)
            drawn = torch.randn(local.shape, generator=generator, device=local.device, dtype=local.dtype)
            local.add_(drawn.sign() * size)
