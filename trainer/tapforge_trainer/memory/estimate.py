"""What a TrainingRun takes: GPUs by role, the host's memory, checkpoints; and whether it fits. Pure.

What fits: on each GPU, the largest moment of its role and `RESERVE` of the card beside it. Where engines and ranks
share GPUs they take turns: an engine that samples beside a resting learner, a step beside a sleeping engine, a weight
sync beside an engine that has its weights and no cache, the proof of a sync beside an engine that has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, cast

from tapforge_api import TrainingRun

from ..agents.vision import tokens_per_frame
from ..learner.families import Shape, family_named
from ..learner.planning import ATTENDED
from ..placement.machine import Machine
from ..placement.settings import LearnerSettings, engine_rank
from ..rollout.frame_budget import engine_frames_mib, frame_pixels
from ..run.policy_settings import gpu_share_of, learner_settings
from .engine import EngineLoad, batched_tokens, engine_moment, problem
from .known import GIB, MIB, gpu_bytes
from .learner import LearnerLoad, Moment, bucket_bytes, moments, proof, resident

#: of a card: for the CUDA context, NCCL, CUDA graphs and fragmentation. Not measured
RESERVE: Final = 0.1
#: of a card whose size is not given
DEFAULT_CARD: Final = 80 * GIB
#: text in a sample beside its frames, at least, tokens: fewer text means more frames in a micro-batch
_LEAST_TEXT: Final = 256
#: of the answers and prompts of a sync's proof (`sync/proof.py`), about
_PROOF_TOKENS: Final = 4096
#: of a process with torch and Ray, or with vLLM, without what is counted apart: an engine of the tiny model on a CPU
#: had 2.3 GiB. Not measured on a GPU
_PROCESS: Final = 4 * GIB

Role = Literal["learner", "engine", "colocated"]


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. `source`: who says so, for people."""

    bytes: int
    source: str
    product: str | None = None

    @property
    def reserve(self) -> int:
        return int(self.bytes * RESERVE)

    @property
    def usable(self) -> int:
        return self.bytes - self.reserve


@dataclass(frozen=True, slots=True)
class GpuRole:
    """GPUs that do the same."""

    role: Role
    count: int
    #: the fullest one
    peak: Moment
    #: why it does not fit
    problem: str | None


@dataclass(frozen=True, slots=True)
class Estimate:
    card: Card
    shape: Shape
    roles: tuple[GpuRole, ...]
    learner: LearnerLoad
    engine: EngineLoad
    #: answers at full context that an engine's cache holds
    answers_at_once: int
    checkpoint: int
    #: bytes of all nodes together, by what they are for
    host: Mapping[str, int]

    @property
    def gpus(self) -> int:
        return sum(role.count for role in self.roles)

    @property
    def fits(self) -> bool:
        return all(role.problem is None for role in self.roles)

    @property
    def peak(self) -> int:
        return max(role.peak.total for role in self.roles)


def estimate(
    run: TrainingRun,
    shape: Shape,
    card: Card,
    *,
    held_frames: int = 0,
    teacher: Shape | None = None,
    likely: int = 0,
) -> Estimate:
    """`held_frames`: bytes of frames that wait for an update; `teacher`: of a distillation, and `likely`: bytes of what
    it finds likely in an update's answers. Raises FolderError for a LoRA target that is not a linear layer."""
    learner = settings_of(run)
    frame = visual_tokens(run, shape)
    load = replace(_learner_load(run, shape, learner, frame), teacher=teacher)
    sampling = _engine_load(run, shape, learner, frame, card)
    together = learner.colocated
    at_rest = resident(load)
    share = int(gpu_share_of(run, "cuda") * card.bytes)
    # Beside a learner vLLM takes its share or does not start; alone, the reserve is within its share.
    sampled = engine_moment(sampling, share if together else min(share, card.usable))
    trouble = problem(sampling, sampled)
    if together:
        # In a sync the rank fills a bucket, and the engine's worker copies it.
        handed = 2 * bucket_bytes(load)
        steps = [_beside(moment, sampled, handed if moment.name == "weight sync" else None) for moment in moments(load)]
        awake = (_sum("sampling", at_rest, sampled), _sum("proof of a sync", proof(load, _PROOF_TOKENS), sampled))
        fullest = max([*steps, *awake], key=lambda moment: moment.total)
        roles: tuple[GpuRole, ...] = (_role("colocated", learner.ranks, fullest, trouble, card),)
    else:
        fullest = max(moments(load), key=lambda moment: moment.total)
        roles = (
            _role("learner", learner.ranks, fullest, None, card),
            _role("engine", run.spec.engine.replicas * sampling.tensor_parallel, sampled, trouble, card),
        )
    trained = 3 * 4 * load.trained
    return Estimate(
        card,
        shape,
        roles,
        load,
        sampling,
        sampled.bytes["kv_cache"] // (sampling.context * sampling.kv_bytes_per_token),
        trained,
        _host(run, load, trained, held_frames, likely),
    )


def _role(role: Role, count: int, fullest: Moment, trouble: str | None, card: Card) -> GpuRole:
    if trouble is None and fullest.total > card.usable:
        trouble = f"{fullest.total / GIB:.1f} GiB ({fullest.name}) of {card.usable / GIB:.1f} that the reserve leaves"
    return GpuRole(role, count, fullest, trouble)


def _beside(moment: Moment, engine: Moment, handed: int | None) -> Moment:
    """A learner's moment on a GPU whose engine sleeps; in a weight sync (`handed`: bytes of what weights travel in) it
    has its weights."""
    if handed is None:
        return moment
    return moment.plus(moment.name, weights=engine.bytes["weights"], temporary=handed)


def _sum(name: str, one: Moment, other: Moment) -> Moment:
    return one.plus(name, **other.bytes)


# --- from a run -------------------------------------------------------------------------------------------------------


class _NoTokens:
    """Stands for an agent: sizes don't depend on which tokens may be said."""

    allowed_ids: tuple[int, ...] = ()


def settings_of(run: TrainingRun) -> LearnerSettings:
    """As ranks on GPUs get them, with every default."""
    from ..agents import Agent

    return learner_settings(run, Path("model"), cast(Agent, _NoTokens()), Machine(1, 1), "cuda")


def visual_tokens(run: TrainingRun, shape: Shape) -> int:
    """Of the largest frame."""
    model = run.spec.model
    cells = frame_pixels(run) // shape.vision.cell**2
    if not (model.max_pixels or model.adapter.max_pixels):
        fitting = tokens_per_frame(model.context_tokens, run.spec.rollout.response_tokens, model.adapter.images)
        cells = min(fitting, cells)
    return max(1, cells)


def _learner_load(run: TrainingRun, shape: Shape, settings: LearnerSettings, frame: int) -> LearnerLoad:
    """A micro-batch of as many frames and answers as its tokens hold. A sample that is longer goes alone."""
    spec = run.spec
    tokens = max(settings.tokens_per_micro_batch, spec.model.context_tokens)
    shown = min(spec.model.context_tokens, spec.model.adapter.images * frame)
    # Those of a prompt that several share fill a micro-batch by what they attend to.
    attended = ATTENDED if family_named(shape.model_type).shares_prompts else 1
    samples = -(-attended * tokens // (shown + _LEAST_TEXT))
    visual = tokens * shown // (shown + _LEAST_TEXT)
    lora = settings.lora
    targets: tuple[str, ...] = ()
    if lora is not None:
        targets = family_named(shape.model_type).adapted(lora.targets)
    return LearnerLoad(
        shape,
        ranks=settings.ranks,
        tokens=tokens,
        patches=visual * shape.vision.merge**2,
        # A sequence may hold an answer for each screen of its prompt.
        responses=min(tokens, samples * spec.model.adapter.images * spec.rollout.response_tokens),
        width=_WIDTH[settings.dtype],
        lora=0 if lora is None else lora.rank,
        targets=targets,
        freeze_vision=settings.freeze_vision or lora is not None,
        reference=settings.reference,
        entropy_gradient=spec.algorithm.loss.entropy_bonus > 0,
        activation_checkpointing=settings.activation_checkpointing,
        checkpointed_share=settings.checkpointed_share,
        sharded_gradients=settings.sharded_gradients,
        cpu_offload=settings.cpu_offload,
        reshard_after_forward=settings.reshard_after_forward,
        attended=attended,
    )


def _engine_load(run: TrainingRun, shape: Shape, settings: LearnerSettings, frame: int, card: Card) -> EngineLoad:
    engine, lora = run.spec.engine, settings.lora if run.spec.sync.lora == "adapter" else None
    return EngineLoad(
        shape,
        engine.tensor_parallel,
        run.spec.model.context_tokens,
        engine.max_concurrent_sequences,
        batched_tokens(engine.max_batched_tokens, card.bytes, card.product),
        frame,
        _WIDTH[settings.dtype],
        None if engine.kv_cache_mib is None else engine.kv_cache_mib * MIB,
        0 if lora is None else engine_rank(lora.rank),
        () if lora is None else family_named(shape.model_type).adapted(lora.targets),
    )


_WIDTH: Final = {"bfloat16": 2, "float32": 4}


def _host(run: TrainingRun, load: LearnerLoad, checkpoint: int, frames: int, likely: int) -> dict[str, int]:
    """Of all nodes together. Weights are read shard by shard: no rank holds more than one tensor of a file."""
    engine = run.spec.engine
    stores = engine.replicas * (engine.frame_store_mib or engine_frames_mib(run)) * MIB
    sleeping = run.spec.sync.lora == "adapter" and run.spec.placement.mode == "colocated"
    offloaded = 4 * 4 * load.trained + load.width * load.shape.text * (bool(load.lora) or load.reference)
    offloaded += 0 if load.teacher is None else load.width * load.teacher.text
    return {
        "optimizer": offloaded if load.cpu_offload else 0,
        "checkpoint": checkpoint,
        "teacher's tokens": likely,
        # Where adapters come alone, nothing brings back the weights of an engine that sleeps but its own copy.
        "sleeping engines": engine.replicas * load.width * load.shape.parameters if sleeping else 0,
        "loading": load.ranks * (4 + load.width) * load.shape.embedding,
        "frames": frames + stores,
        "processes": (load.ranks + engine.replicas * engine.tensor_parallel) * _PROCESS,
    }


# --- cards ------------------------------------------------------------------------------------------------------------


class UnknownCard(ValueError):
    """A GPU that is neither a size nor a known name."""


def card_of(run: TrainingRun, given: str | None) -> Card:
    """What `--gpu-memory` says; else the nodeSelector of Pods that ask for GPUs; else 80 GiB. Raises UnknownCard."""
    if given is not None:
        if (size := _size(given)) is not None:
            return Card(size, "--gpu-memory")
        if (size := gpu_bytes(given)) is not None:
            return Card(size, f"--gpu-memory: {given}", given)
        raise UnknownCard(f"--gpu-memory {given}: neither a size such as 80GiB nor a GPU that is known here")
    cluster = run.spec.cluster
    products = []
    for group in cluster.workers if cluster is not None else ():
        selector = (group.template.spec.model_extra or {}).get("nodeSelector") or {}
        if product := selector.get("nvidia.com/gpu.product"):
            products.append(str(product))
    known = [(size, product) for product in products if (size := gpu_bytes(product)) is not None]
    if known:
        size, product = min(known)
        return Card(size, f"nodeSelector nvidia.com/gpu.product: {product}", product)
    return Card(DEFAULT_CARD, "assumed; --gpu-memory says another")


def _size(text: str) -> int | None:
    units = {"": GIB, "gib": GIB, "gi": GIB, "g": GIB, "gb": 10**9, "mib": MIB, "mi": MIB, "mb": 10**6}
    number = text.strip().lower().rstrip("bigm").strip()
    unit = text.strip().lower()[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        return None
    return size if size > 0 else None
