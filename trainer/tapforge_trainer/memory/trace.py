"""Memory of one rank's GPU, traced: the learner's own model, sharding and passes, on tensors without memory.

A fake world of the run's ranks, torch's fake tensors and its FSDP memory tracker; everything is on the device "cpu",
because the backward pass of a fake GPU needs a driver. Shapes and lifetimes are those of a GPU; missing are the
rounding to 512 bytes, fragmentation and what kernels allocate within. Takes some tens of seconds and less than a GiB.

- Two optimizer steps: before the second one moments exist.
- The optimizer gets the local shards: under a fake mode DTensor would compute its sharding with global shapes in the
  same mode, and these would be counted.
- What depends on data is computed by `PackedPolicy.inputs` outside of the fake mode.
- Offloading to the host can't be traced: a fake GPU and the host would be the same device.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..learner.batches import MicroBatch
from ..learner.families import ModelConfig
from ..learner.frame_store import Patches, PixelFormat
from ..learner.packed import Inputs
from ..learner.sharding import build_policy, materialize, shard
from ..placement.settings import LearnerSettings, LoraSettings
from .learner import LearnerLoad, Moment

#: what torch's tracker calls them
_NAMES: Final = {
    "Sharded Param": "weights",
    "Unsharded Param": "unsharded",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients",
    "Buffer": "temporary",
    "Inputs": "frames",
    "Activation": "activations",
    "Temp": "temporary",
    "All Gather": "gather",
    "Reduce Scatter": "reduce",
    "OptState": "optimizer",
}


@dataclass(frozen=True, slots=True)
class Traced:
    """`peak` of both steps; `stages`: what is there at the end of passes of the last one."""

    peak: Moment
    stages: tuple[Moment, ...]


def trace(load: LearnerLoad, config: ModelConfig) -> Traced:
    """Of the model of `config`, of which no more than its config.json is needed. A load that accumulates gradients has
    two micro-batches per step. Raises ValueError for one that offloads."""
    if load.cpu_offload:
        raise ValueError("a step that offloads to the host can't be traced: leave --trace or learner.cpuOffload out")
    with tempfile.TemporaryDirectory() as folder, _fake_process_group(load.ranks):
        Path(folder, "config.json").write_text(json.dumps(_document(config, load.shape.tied)))
        return _traced(load, Path(folder), 2 if load.accumulates else 1)


def _document(config: ModelConfig, tied: bool) -> dict[str, Any]:
    """config.json in the nested layout."""
    text = {name: value for name, value in config.text.items() if name not in ("vision_config", "model_type")}
    return {
        "model_type": config.model_type,
        "image_token_id": config.image_token,
        "vision_start_token_id": config.vision_start,
        "vision_end_token_id": config.vision_end,
        "tie_word_embeddings": tied,
        "text_config": text,
        "vision_config": {name: value for name, value in config.vision.items() if name != "model_type"},
    }


@contextmanager
def _fake_process_group(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _traced(load: LearnerLoad, folder: Path, micro_batches: int) -> Traced:
    settings = LearnerSettings(
        model=str(folder),
        allowed_ids=(0,),
        ranks=load.ranks,
        dtype="bfloat16" if load.width == 2 else "float32",
        freeze_vision=load.freeze_vision,
        lora=LoraSettings(load.lora, 2.0 * load.lora, load.targets) if load.lora else None,
        activation_checkpointing=load.activation_checkpointing,
        checkpointed_share=load.checkpointed_share,
        sharded_gradients=load.sharded_gradients,
        reshard_after_forward=load.reshard_after_forward,
    )
    vision = load.shape.vision
    form = PixelFormat(vision.patch, vision.merge, (0.5,) * 3, (0.5,) * 3)
    policy, _ = build_policy(settings, form)
    shard(policy, init_device_mesh("cpu", (load.ranks,)), settings)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        materialize(policy, policy.model, torch.device("cpu"))
    trained = [p for p in policy.parameters() if p.requires_grad]
    with fake:
        local = [nn.Parameter(_local(p.detach())) for p in trained]
        optimizer = torch.optim.AdamW(local, lr=1e-6, fused=True)
    tracker: Any = FSDPMemTracker(policy, optimizer)
    stages = []
    # a frozen tower is not part of FSDP, and the tracker takes it for activations
    tower = sum(p.nbytes for p in policy.visual.parameters()) if load.freeze_vision else 0

    def seen(name: str, when: str) -> Moment:
        return _moment(name, tracker.get_tracker_snapshot(when)).plus(name, weights=tower, activations=-tower)

    with fake, tracker:
        for step in range(2):
            for number in range(micro_batches):
                policy.set_requires_gradient_sync(number + 1 == micro_batches or load.sharded_gradients)
                given = _inputs(policy, load, f"{step}.{number}", fake)
                logp, entropy = policy(given, beside="entropy_with_gradient" if load.entropy_gradient else "entropy")
                stages.append(seen(f"forward {step}.{number}", "current"))
                (logp.sum() + entropy.sum() if load.entropy_gradient else logp.sum()).backward()
                del logp, entropy, given
                stages.append(seen(f"backward {step}.{number}", "current"))
                tracker.reset_mod_stats()
            for mine, parameter in zip(local, trained, strict=True):
                mine.grad = None if parameter.grad is None else _local(parameter.grad)
                parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
            stages.append(seen(f"step {step}", "current"))
    return Traced(seen("traced", "peak"), tuple(stages))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _moment(name: str, snapshot: Mapping[Any, Mapping[Any, int]]) -> Moment:
    found: dict[str, float] = {}
    for parts in snapshot.values():
        for kind, size in parts.items():
            word = str(getattr(kind, "value", kind))
            if word != "Total":
                category = _NAMES[word]
                found[category] = found.get(category, 0) + size
    return Moment("", {}).plus(name, **found)


def _inputs(policy: Any, load: LearnerLoad, name: str, fake: FakeTensorMode) -> Inputs:
    """A micro-batch of the load's sizes, its tensors fake."""
    merge, patch = load.shape.vision.merge, load.shape.vision.patch
    visual = min(load.tokens, load.patches // merge**2)
    frames: dict[str, Patches] = {}
    rows = 64
    left = load.patches // merge**2
    while left:
        columns = min(40, max(1, left // rows))
        rows_here = min(rows, left)
        left -= rows_here * columns
        values = np.zeros((rows_here * columns * merge**2, 3 * patch * patch), np.uint8)
        frames[f"{name}.{len(frames)}"] = Patches(values, rows_here, columns)
    count = min(load.tokens, max(1, load.tokens // 4096))
    cuts = np.linspace(0, load.tokens, count + 1).astype(np.int64)
    batch = MicroBatch(
        ids=np.zeros((1, load.tokens), np.int64),
        positions=np.zeros((3, 1, load.tokens), np.int64),
        lengths=np.diff(cuts),
        frames=tuple(frames),
        visual=np.arange(visual),
        feature=np.arange(visual),
        predict=np.zeros(load.responses, np.int64),
        target=np.zeros(load.responses, np.int64),
        response=np.arange(load.responses),
        padding=False,
        before=(load.attended - 1) * np.diff(cuts) if load.attended > 1 else None,
        keys=np.arange(load.attended * load.tokens) % load.tokens if load.attended > 1 else None,
    )
    with unset_fake_temporarily():
        given: Inputs = policy.inputs(batch, frames)

    def faked(value: Any) -> Any:
        return fake.from_tensor(value) if isinstance(value, Tensor) else value

    made = {field.name: faked(getattr(given, field.name)) for field in fields(given)}
    made["vision"] = {key: faked(value) for key, value in given.vision.items()}
    return replace(given, **made)
