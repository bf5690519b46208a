"""What to change so that a run fits, found by trying: each change is made to the run and the run estimated again. Pure.

- Changes are tried in the order of what they cost: first those that cost time only, then those that use other GPUs of
  the run's Pods, then those that change what is learned, then those that need more GPUs than the Pods ask for. That is
  counted of the changed run and said.
- A change has several strengths; the mildest that fits is named.
- One change is named where one is enough; else the smallest combination, and nothing where none of up to `MOST` fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from tapforge_api import SpecError, TrainingRun, dump_set
from tapforge_api.gpus import cluster_gpus_error, gpus_needed, gpus_offered
from tapforge_api.loading import from_object
from tapforge_api.overrides import apply_override

from ..learner.families import FolderError
from .estimate import Estimate

#: changes of one combination
MOST: Final = 4
#: of the layers whose activations are computed again, that are tried beside all and none
SHARES: Final = (0.25, 0.5, 0.75)
#: tokens of a prompt that its text keeps where its context is made shorter: system prompt, goal, earlier answers
TEXT: Final = 1000
#: of an answer, where it may be longer: a thought and a call
ANSWER: Final = 100
#: of a micro-batch's budget, that has to stay empty for another one to be proposed, in multiples of so many tokens
_EMPTY, _ROUND = 0.25, 512
#: of a screen whose text can still be read
_LEAST_PIXELS: Final = 401_408
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
    search = _Search(run, again)
    within, beyond = search.sorted(changes(run, now))
    for number in range(1, MOST + 1):
        for options, wanted in ((within, True), ([*within, *beyond], False)):
            for chosen in combinations(options, number):
                if found := search.mildest(chosen, within=wanted):
                    so = "" if number == 1 else "no single change is enough; "
                    return (f"{so}it fits with {search.said(found)}",)
    return (
        f"nothing that was tried makes it fit ({MOST} changes at once at most): use a smaller model, or larger GPUs",
    )


def faster(run: TrainingRun, now: Estimate, again: Estimator) -> tuple[str, ...]:
    """Overrides with which a run that fits computes less again and fits all the same, the least; empty: none."""
    load = now.learner
    if not (now.fits and load.activation_checkpointing):
        return ()
    search = _Search(run, again)
    none = (("learner.activationCheckpointing=false",), 0.0)
    passes = (2 if load.lora else 3) + load.checkpointed_share  # in forward passes: itself, what comes back, backward
    options = [none, *(((f"learner.checkpointedShare={one:g}",), one) for one in SHARES)]
    for overrides, share in options:
        if share < load.checkpointed_share and search.fits(overrides):
            less = (load.checkpointed_share - share) / passes
            return (f"it also fits with {search.said(overrides)}, which computes about {less:.0%} less in an update",)
    return ()


def fuller(run: TrainingRun, now: Estimate, again: Estimator) -> tuple[str, ...]:
    """A budget of tokens that whole windows of a history in blocks fill, where the run's leaves a good part empty."""
    model, budget = run.spec.model, run.spec.learner.tokens_per_micro_batch
    if not now.fits or model.adapter.history.blocks is None:
        return ()
    answer = min(ANSWER, run.spec.rollout.response_tokens)
    window = min(model.context_tokens, model.adapter.images * (now.engine.frame_tokens + answer) + TEXT)
    fitting = budget // window
    empty = 1 - fitting * window / budget
    wanted = -(-(fitting + 1) * window // _ROUND) * _ROUND
    search, change = _Search(run, again), (f"learner.tokensPerMicroBatch={wanted}",)
    if not fitting or empty < _EMPTY or not search.fits(change):
        return ()
    filled = f"which {fitting + 1} sequences of a whole window (about {window:,} tokens each) fill"
    left = f"{budget:,} tokens have room for {fitting}, and {empty:.0%} of them stay empty"
    return (f"it also fits with {search.said(change)}, {filled}; {left}",)


def changes(run: TrainingRun, now: Estimate) -> Iterator[Change]:
    """Those that change something in this run, in the order in which they are tried."""
    spec, load = run.spec, now.learner
    share = load.checkpointed_share if load.activation_checkpointing else 0.0
    on = () if load.activation_checkpointing else ("learner.activationCheckpointing=true",)
    if more := [one for one in (*SHARES, 1.0) if one > share]:
        yield Change(tuple((*on, f"learner.checkpointedShare={one:g}") for one in more))
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
    parallel, sampling = spec.engine.tensor_parallel, spec.engine.replicas * spec.engine.tensor_parallel
    if spec.placement.mode == "colocated":
        half = sampling // 2
        if half and half % parallel == 0:
            yield Change((("placement.mode=apart", f"learner.ranks={half}", f"engine.replicas={half // parallel}"),))
        yield _one("placement.mode=apart")
    else:
        splits = [n for n in (2, 4, 8) if n > parallel and now.shape.attention.heads % n == 0]
        same = [n for n in splits if sampling % n == 0]
        yield Change(tuple((f"engine.tensorParallel={n}", f"engine.replicas={sampling // n}") for n in same))
        yield _levels("engine.tensorParallel", splits)
    yield _ranks(run, [spec.learner.ranks * n for n in (2, 4, 8, 16)])
    if not load.cpu_offload:
        yield _one("learner.cpuOffload=true")
    if not load.lora:
        yield Change((("model.lora.rank=64", "model.freezeVision=true"),))
    if not load.freeze_vision:
        yield _one("model.freezeVision=true")
    if (pixels := spec.model.max_pixels) is not None:
        yield _levels("model.maxPixels", _halves(pixels, _LEAST_PIXELS))
    floor = max(2048, 4 * spec.rollout.response_tokens)
    yield Change(tuple(said for n in _halves(context, floor) if (said := _shorter(run, now, n))))


def _shorter(run: TrainingRun, now: Estimate, context: int) -> tuple[str, ...]:
    """A context in which the screens that a prompt shows still have room beside text and answer, with smaller ones
    where it needs that; (): the screens would have too few pixels."""
    model, images = run.spec.model, run.spec.model.adapter.images
    said = (f"model.contextTokens={context}", f"learner.tokensPerMicroBatch={context}")
    room = context - run.spec.rollout.response_tokens - TEXT
    if not (model.max_pixels or model.adapter.max_pixels):
        # Screens shrink with the context, to three quarters of it.
        return said if context - run.spec.rollout.response_tokens >= 4 * TEXT else ()
    if now.engine.frame_tokens * images <= room:
        return said
    pixels = room // images * now.shape.vision.cell**2
    return (*said, f"model.maxPixels={pixels}") if pixels >= _LEAST_PIXELS else ()


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


class _Search:
    """Tries changes of one run; each set of overrides is tried once."""

    def __init__(self, run: TrainingRun, again: Estimator):
        self._run, self._again = run, again
        self._tried: dict[tuple[str, ...], tuple[bool, str | None]] = {}

    def sorted(self, options: Iterable[Change]) -> tuple[list[Change], list[Change]]:
        """(strengths for which the run's GPUs are enough, those that need more), without empty changes."""
        within, beyond = [], []
        for change in options:
            more = [overrides for overrides in change.strengths if self._outcome(overrides)[1]]
            within.append(Change(tuple(overrides for overrides in change.strengths if overrides not in more)))
            beyond.append(Change(tuple(more)))
        return [change for change in within if change.strengths], [change for change in beyond if change.strengths]

    def mildest(self, chosen: Sequence[Change], *, within: bool) -> tuple[str, ...] | None:
        """The overrides of these changes together, each as mild as fits; None: they don't fit, contradict each other,
        or need GPUs that are not there (`within`)."""
        levels = [len(change.strengths) - 1 for change in chosen]

        def overrides() -> tuple[str, ...]:
            said = [o for change, level in zip(chosen, levels, strict=True) for o in change.strengths[level]]
            return tuple(dict.fromkeys(said))

        def fits() -> bool:
            fields = [override.partition("=")[0] for override in overrides()]
            if len(set(fields)) < len(fields):
                return False
            fitting, more = self._outcome(overrides())
            return fitting and not (within and more)

        if not fits():
            return None
        for number in range(len(levels)):
            strongest = levels[number]
            for level in range(strongest):
                levels[number] = level
                if fits():
                    break
            else:
                levels[number] = strongest
        return overrides()

    def fits(self, overrides: tuple[str, ...]) -> bool:
        return self._outcome(overrides)[0]

    def said(self, overrides: tuple[str, ...]) -> str:
        said, more = " ".join(f"--set spec.{override}" for override in overrides), self._outcome(overrides)[1]
        return f"{said}; {more}" if more else said

    def _outcome(self, overrides: tuple[str, ...]) -> tuple[bool, str | None]:
        """(whether a run with these fits into its GPUs, which GPUs it lacks)."""
        if overrides not in self._tried:
            self._tried[overrides] = self._try(overrides)
        return self._tried[overrides]

    def _try(self, overrides: tuple[str, ...]) -> tuple[bool, str | None]:
        try:
            changed = with_overrides(self._run, overrides)
            return self._again(changed).fits, more_gpus(self._run, changed)
        except (SpecError, FolderError):  # a rule of the API forbids it beside what the run says
            return False, None


def with_overrides(run: TrainingRun, overrides: Iterable[str]) -> TrainingRun:
    """The run with overrides of its spec, as `--set` takes them after `spec.`. Raises SpecError."""
    data = dump_set(run)
    for override in overrides:
        apply_override(TrainingRun, data, f"spec.{override}")
    return from_object(TrainingRun, data)


def more_gpus(run: TrainingRun, changed: TrainingRun) -> str | None:
    """Which GPUs the changed run lacks: of its Pods, or, where no Pod asks for any, beside those of the run."""
    needed, before = gpus_needed(changed.spec), gpus_needed(run.spec)
    asked = sum(gpus_offered(changed.spec.cluster)) if changed.spec.cluster is not None else 0
    if asked:
        more = f"that takes {needed} GPUs, and the run's Pods ask for {asked}"
        return more if needed > asked else cluster_gpus_error(changed.spec)
    return f"that takes {needed} GPUs instead of {before}" if needed > before else None
