"""What to change so that a run fits, found by trying: each change is made to the run and the run estimated again. Pure.

- Changes are tried in the order of what they cost: first those that cost time only, then those that use other GPUs of
  the run's Pods, then those that change what is learned, then those that need more GPUs than the Pods ask for.
- A change has several strengths; the mildest that fits is named.
- One change is named where one is enough; else the smallest combination, and nothing where none of up to `MOST` fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from tapforge_api import SpecError, TrainingRun, dump_set
from tapforge_api.gpus import gpus_offered
from tapforge_api.loading import from_object
from tapforge_api.overrides import apply_override

from ..policy.models import FolderError
from .estimate import Estimate

#: changes of one combination
MOST: Final = 4
#: a run with other settings -> its estimate
Estimator = Callable[[TrainingRun], Estimate]


@dataclass(frozen=True, slots=True)
class Change:
    """Overrides from mild to strong, each as `--set` takes them."""

    strengths: tuple[tuple[str, ...], ...]


def advice(run: TrainingRun, now: Estimate, again: Estimator) -> tuple[str, ...]:
    """Overrides that make the run fit, one line each; empty: it fits as it is."""
    if now.fits:
        return ()
    options = list(changes(run, now))
    single = next((found for change in options if (found := _mildest(run, (change,), again))), None)
    if single is not None:
        return (f"it fits with {_said(run, single)}",)
    for number in range(2, MOST + 1):
        for chosen in combinations(options, number):
            if found := _mildest(run, chosen, again):
                return (f"no single change is enough; it fits with {_said(run, found)}",)
    return (
        f"nothing that was tried makes it fit ({MOST} changes at once at most): use a smaller model, or larger GPUs",
    )


def changes(run: TrainingRun, now: Estimate) -> Iterator[Change]:
    """Those that change something in this run, in the order in which they are tried."""
    spec, load = run.spec, now.learner
    if not load.activation_checkpointing:
        yield _one("learner.activationCheckpointing=true")
    if not load.sharded_gradients:
        yield _one("learner.gradientAccumulation=sharded")
    if not load.reshard_after_forward:
        yield _one("learner.reshardAfterForward=true")
    if spec.engine.kv_cache_mib is not None:
        yield _one("engine.kvCacheMiB=null")
    tokens, context = spec.learner.tokens_per_micro_batch, spec.model.context_tokens
    if tokens > context:
        yield _levels("learner.tokensPerMicroBatch", [n for n in _halves(tokens, context) if n >= context])
    if now.engine.batched > 2048:
        yield _levels("engine.maxBatchedTokens", _halves(now.engine.batched, 2048))
    shares = [s for s in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3) if s != spec.engine.gpu_memory_share]
    yield _levels("engine.gpuMemoryShare", sorted(shares, reverse=spec.placement.mode == "colocated"))
    if spec.placement.mode == "colocated":
        yield _one("placement.mode=apart")
    heads = now.shape.heads
    splits = [n for n in (2, 4, 8) if n > spec.engine.tensor_parallel and heads % n == 0]
    if splits and spec.placement.mode == "apart":
        yield _levels("engine.tensorParallel", splits)
    more = [spec.learner.ranks * n for n in (2, 4, 8, 16)]
    there = sum(gpus_offered(spec.cluster)) if spec.cluster is not None else now.gpus
    yield _ranks(run, [n for n in more if gpus_with(run, n) <= there])
    if not load.cpu_offload:
        yield _one("learner.cpuOffload=true")
    if not load.lora:
        yield Change((("model.lora.rank=64", "model.freezeVision=true"),))
    if not load.freeze_vision:
        yield _one("model.freezeVision=true")
    if (pixels := spec.model.max_pixels) is not None:
        yield _levels("model.maxPixels", _halves(pixels, 401_408))
    floor = max(2048, 4 * spec.rollout.response_tokens)
    yield Change(
        tuple((f"model.contextTokens={n}", f"learner.tokensPerMicroBatch={n}") for n in _halves(context, floor))
    )
    yield _ranks(run, [n for n in more if gpus_with(run, n) > there])


def gpus_with(run: TrainingRun, ranks: int) -> int:
    engine = run.spec.engine
    return ranks + (0 if run.spec.placement.mode == "colocated" else engine.replicas * engine.tensor_parallel)


def _ranks(run: TrainingRun, numbers: Sequence[int]) -> Change:
    if run.spec.placement.mode == "apart":
        return _levels("learner.ranks", numbers)
    return Change(tuple((f"learner.ranks={n}", f"engine.replicas={_engines(run, n)}") for n in numbers))


def _engines(run: TrainingRun, ranks: int) -> int:
    return max(1, ranks // run.spec.engine.tensor_parallel)


def _one(override: str) -> Change:
    return Change(((override,),))


def _levels(field: str, values: Sequence[Any]) -> Change:
    return Change(tuple((f"{field}={value}",) for value in values))


def _halves(value: int, least: int) -> list[int]:
    """Half, a quarter and so on, down to `least`."""
    found = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return found or ([least] if value > least else [])


def _mildest(run: TrainingRun, chosen: Sequence[Change], again: Estimator) -> tuple[str, ...] | None:
    """The overrides of these changes together, each as mild as fits; None: they don't fit, or contradict each other."""
    if any(not change.strengths for change in chosen):
        return None
    levels = [len(change.strengths) - 1 for change in chosen]

    def overrides() -> tuple[str, ...]:
        said = [o for change, level in zip(chosen, levels, strict=True) for o in change.strengths[level]]
        return tuple(dict.fromkeys(said))

    if not _fits(run, overrides(), again):
        return None
    for number in range(len(levels)):
        strongest = levels[number]
        for level in range(strongest):
            levels[number] = level
            if _fits(run, overrides(), again):
                break
        else:
            levels[number] = strongest
    return overrides()


def _fits(run: TrainingRun, overrides: Sequence[str], again: Estimator) -> bool:
    data = dump_set(run)
    try:
        for override in overrides:
            apply_override(TrainingRun, data, f"spec.{override}")
        return again(from_object(TrainingRun, data)).fits
    except (SpecError, FolderError):  # a rule of the API forbids it beside what the run says
        return False


def _said(run: TrainingRun, overrides: Sequence[str]) -> str:
    said = " ".join(f"--set spec.{override}" for override in overrides)
    ranks = next(
        (int(o.partition("=")[2]) for o in overrides if o.startswith("learner.ranks=")), run.spec.learner.ranks
    )
    asked = sum(gpus_offered(run.spec.cluster)) if run.spec.cluster is not None else 0
    if asked and gpus_with(run, ranks) > asked:
        said += f"; that takes {gpus_with(run, ranks)} GPUs, and the run's Pods ask for {asked}"
    return said
