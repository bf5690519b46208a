"""New weights for the engines, with proof.

`synchronize` does, in this order: gather the learner's weights; in each engine, between two steps, load them, name
the version and drop the prefix, multimodal and encoder caches; then compare digests of the weights, ask the engine for
tokens and compare their log-probabilities with the learner's. Until the comparison holds, nothing that an engine
samples leaves it; if it does not hold in the end, every request in flight fails and `SyncMismatch` names the tensor or
the worst token. What log-probabilities may differ by is in `agreement.py`.

A proof that failed is not the end: requests in flight are thrown away and asked again, a full set is sent once more,
and nothing is sampled for clients until its proof holds. If it does not either, `SyncMismatch` has the figures of both.

Between GPUs the ranks send while the engines receive. Engines that sleep (`Engines.sleep`) wake on the way: ranks give
back what memory they keep for later, engines take that of their weights, weights come, engines take that of their
caches.

A failure in the middle leaves engines that answer no request. On CPUs the next full set mends them. Between GPUs a
transfer in which a process died, or that didn't end in time, is the end of all ranks and engines (`RanksLost`), also
where only one engine died in it: they are one group, in which ranks may wait for ever, and engines that got a part of
the weights take no other set. So is a dead rank anywhere. `policy.py:Policy.restart` starts all of them anew.

What a round took is in `Engines.round_metrics`: `seconds_sync_gather` (weights of all ranks in one place; between GPUs
that is part of the transfer), `seconds_sync_transfer`, `seconds_sync_probe`, `sync_bytes` that each engine got,
`sync_gigabytes_per_second` of gathering and transfer together, `sync_unread_tensors`, `sync_resends` (1: the first
proof failed), `gap_alarm`, and `agreement.py:figures` but for the largest, which is returned; `gap_slope` where there
is one; as `failed_gap_*` the figures of the proof that failed, where it came to answers. They are the monitor of
engine against learner: the same prompts after each sync, answered by the very weights, whatever a busy learner's own
batches were sampled with.

The proof has three detectors, asked in this order:
- the bytes that arrived and are held (`received.py`), by which a weight that is stale, another's or without its adapter
  shows however little it differs;
- caches (`Sampler.kept`): none may have an entry of the time before the new weights;
- log-probabilities (`proof.py` asks, `agreement.py` judges, each engine for itself): whether both compute the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapforge_trainer.frames.handles import BatchFrames
from tapforge_trainer.records import ResponseSpan, Sample

from ..engine.client import EngineError
from ..engine.pool import Engines
from ..learner.client import Learner, LearnerError
from ..placement.settings import GAP_ALARM, PauseMode
from .agreement import Slope, disagreement, figures, slope_of
from .history import Proof, ProofHistory
from .proof import Probe
from .received import difference, unread

log = logging.getLogger(__name__)

#: seconds after which a transfer that failed was not an engine's death
_DEATH_IS_KNOWN = 30.0
#: by name: the module imports torch and vLLM, which the driver's event loop would wait for
_SENDER = "tapforge_trainer.sync.gpu"
_SENT = "tapforge_trainer.learner.sharding:sent"


class SyncMismatch(RuntimeError):
    """An engine does not hold the weights that it was given, or does not answer with them."""

    def __init__(self, why: str, figures: Mapping[str, float] | None = None):
        """`figures`: `agreement.py:figures` of the answers, where it came to answers."""
        super().__init__(why)
        self.figures = dict(figures or {})


async def synchronize(
    learner: Learner,
    engines: Engines,
    probe: Probe,
    version: int,
    *,
    mode: PauseMode = "keep",
    tolerance: float | None = None,
    gap_alarm: float | None = None,
    history: ProofHistory | None = None,
    deadline: float = 1200.0,
) -> float:
    """Returns the largest difference of a log-probability that the probe saw. `tolerance`: what it may be at most;
    None: what the engine's number format allows (`agreement.py:disagreement`). `gap_alarm`: the mean above which the
    metric of that name is 1; None: the number format's. `history`: of the run's proofs, to which this one is added;
    None: this is the first. `deadline`, seconds, is each step's. Raises `SyncMismatch`."""
    history = ProofHistory() if history is None else history

    async def once() -> tuple[dict[str, float], Proof]:
        took = await _transfer(learner, engines, version, mode, deadline)
        started = time.monotonic()
        proof = await verify(learner, engines, probe, version, tolerance, deadline, history)
        if engines.settings.colocated:  # what ranks keep of their pass would be short where engines sample
            await learner.run(f"{_SENDER}:give_back_memory", deadline=deadline)
        return took | {"seconds_sync_probe": time.monotonic() - started}, proof

    failed: SyncMismatch | None = None
    try:
        try:
            took, proof = await once()
        except SyncMismatch as error:
            failed = error
            log.warning("%s; a full set of weights is sent once more", failed)
            await engines.discard(str(failed), deadline, again=True)
            if engines.asleep:  # they are awake by now, and a round begins with those that sleep
                await engines.sleep(mode, deadline)
            took, proof = await once()
    except SyncMismatch as error:
        both = SyncMismatch(f"{_worded(failed)}; after a full set was sent once more: {_worded(error)}", error.figures)
        await engines.discard(str(both), deadline)
        raise both from error
    except EngineError as error:
        await engines.discard(str(error), deadline)
        raise
    await engines.release(version, deadline)
    history.note(proof)
    _warn_of_unread(proof, engines.round_metrics)
    first = (
        {f"failed_{name}": value for name, value in failed.figures.items() if math.isfinite(value)} if failed else {}
    )
    told = {"sync_resends": float(failed is not None), "sync_unread_tensors": float(len(proof.unread))}
    apart = dict(proof.figures)
    largest = apart.pop("gap_max")
    bound = GAP_ALARM[engines.settings.dtype] if gap_alarm is None else gap_alarm
    told["gap_alarm"] = float(not apart["gap_mean"] <= bound)
    engines.round_metrics = took | told | apart | first
    return largest


def _worded(error: SyncMismatch | None) -> str:
    if error is None or not error.figures:
        return str(error)
    return f"{error} ({', '.join(f'{name} {value:.3g}' for name, value in error.figures.items())})"


def _warn_of_unread(proof: Proof, before: Mapping[str, float]) -> None:
    """Where there are more or fewer than in the round before."""
    if proof.unread and before.get("sync_unread_tensors") != len(proof.unread):
        name, why = next(iter(proof.unread.items()))
        log.warning(
            "the bytes of %d tensors can't be compared, and the probe alone is about them; one is %s: %s",
            len(proof.unread),
            name,
            why,
        )


async def _transfer(
    learner: Learner, engines: Engines, version: int, mode: PauseMode, deadline: float
) -> dict[str, float]:
    started = time.monotonic()
    settings = engines.settings
    if settings.transfer == "tapforge-cpu" or settings.lora is not None:
        payload = await learner.weights(deadline, adapters=settings.lora is not None)
        gathered = time.monotonic()
        if engines.asleep:  # with the weights of the folder, which adapters are beside
            await learner.run(f"{_SENDER}:give_back_memory", deadline=deadline)
            await engines.pause(mode, deadline)
            await engines.wake("weights", deadline)
            await engines.wake("kv_cache", deadline)
        size = await engines.renew(payload, version, mode, deadline)
        figures = {"seconds_sync_gather": gathered - started, "seconds_sync_transfer": time.monotonic() - gathered}
    else:
        if engines.asleep:  # first of all: the round starts engines again that died asleep
            await learner.run(f"{_SENDER}:give_back_memory", deadline=deadline)
        await engines.pause(mode, deadline)
        await engines.wake("weights", deadline)
        place = await learner.address(deadline)
        members = engines.members
        try:
            size, *_ = await learner.run(
                f"{_SENDER}:send", members, engines.actors, settings, place, deadline, deadline=deadline
            )
        except LearnerError as error:
            if learner.lost is None and await engines.died(members, _DEATH_IS_KNOWN):
                raise learner.lose(f"an engine died while it got its weights: {error}") from error
            raise
        await engines.wake("kv_cache", deadline)
        await engines.proceed(version, deadline)
        figures = {"seconds_sync_transfer": time.monotonic() - started}
    seconds = max(time.monotonic() - started, 1e-9)
    return figures | {"sync_bytes": float(size), "sync_gigabytes_per_second": size / seconds / 1e9}


async def verify(
    learner: Learner,
    engines: Engines,
    probe: Probe,
    version: int,
    tolerance: float | None,
    deadline: float,
    history: ProofHistory,
) -> Proof:
    """The part of `synchronize` that compares. Raises `SyncMismatch`."""
    sent, arrivals, kept = await asyncio.gather(
        learner.run(_SENT, deadline=deadline), engines.arrivals(deadline), engines.kept(deadline)
    )
    digests = sent[0][0]  # of the rank that sends
    unmerged = tuple(sorted({name for _, names in sent for name in names}))
    if why := difference(digests, unmerged, arrivals) or stale(kept):
        raise SyncMismatch(f"after the sync to version {version} {why}")
    episode = probe.episode if probe.statistical or history.scores is None else ()
    asked = _Asked(probe, version, (*probe.prompts, *episode))
    frames = {name: frame.data for name, frame in probe.frames.items()}
    answers = await engines.probe(asked.requests, frames, deadline)
    answered = [[asked.sample(index, row) for index, row in enumerate(rows[: len(asked.prompts)])] for rows in answers]
    mine = await _logprobs(learner, probe, [sample for samples in answered for sample in samples], deadline)
    scores = None
    if probe.scored:
        given = [asked.scored(index) for index in range(len(probe.scored))]
        scores = np.concatenate(await _logprobs(learner, probe, given, deadline, masked=False))
    everything: list[np.ndarray] = []
    slopes: list[Slope] = []
    for rows, samples in zip(answers, answered, strict=True):
        theirs = [np.asarray(sample.spans[0].logprobs, np.float64) for sample in samples]
        gaps = [engine - mine.pop(0) for engine in theirs]
        everything += gaps
        found, slope = figures(gaps), None
        if scores is not None and history.scores is not None:
            slope = slope_of(history.scores, (asked.scores(rows), scores))
            slopes.append(slope)
            found |= told(slope)
        if why := disagreement(
            found,
            engines.settings.dtype,
            tolerance=tolerance,
            first=history.first,
            slope=slope,
            exact=learner.settings.lora is None
            or engines.settings.lora is not None
            or engines.settings.dtype == "float32",
        ):
            at = _worst(gaps)
            raise SyncMismatch(f"after the sync to version {version} {_apart(samples, gaps, at, why)}", found)
    together = figures(everything)
    if slopes:
        together |= told(min(slopes, key=lambda slope: slope.value))
    noted = (asked.scores(answers[0]), scores) if scores is not None else (np.empty(0), np.empty(0))
    return Proof(together, unread(arrivals), noted)


def stale(kept: Mapping[int, Mapping[str, int]]) -> str:
    """What is wrong with caches that have so many entries right after new weights, by engine and cache; "" where they
    are empty: a request that hits one of those gets what was computed with the weights before."""
    for index, caches in kept.items():
        for name, entries in caches.items():
            if entries:
                return f"the {name} of engine {index} has {entries} entries of the time before"
    return ""


def told(slope: Slope) -> dict[str, float]:
    """As figures, where it counts."""
    return {"gap_slope": slope.value, "gap_slope_error": slope.error} if slope.counts else {}


async def _logprobs(
    learner: Learner, probe: Probe, samples: Sequence[Sample], deadline: float, *, masked: bool = True
) -> list[np.ndarray]:
    frames = BatchFrames({sample.episode: probe.frames for sample in samples})
    rows = await learner.logprobs(samples, frames, masked=masked, deadline=deadline)
    return [np.asarray(row, np.float64) for row in rows]


def _worst(gaps: Sequence[np.ndarray]) -> tuple[int, int]:
    """Answer and token of the largest gap, or of the first that is NaN."""
    found = [np.where(np.isfinite(gap), np.abs(gap), np.inf) for gap in gaps]
    row = int(np.argmax([gap.max() for gap in found]))
    return row, int(np.argmax(found[row]))


def _apart(samples: Sequence[Sample], gaps: Sequence[np.ndarray], at: tuple[int, int], why: str) -> str:
    sample, gap = samples[at[0]], gaps[at[0]][at[1]]
    span, token = sample.spans[0], sample.ids[sample.spans[0].start + at[1]]
    return (
        f"engine and learner differ by {abs(gap):.3g} ({why}) at token {at[1]} (id {token}) of {sample.episode}: "
        f"{span.logprobs[at[1]]:.5f} against {span.logprobs[at[1]] - gap:.5f}; the engine does not answer with the new "
        "weights"
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a proof asks of each engine, and how its answers are read."""

    probe: Probe
    version: int
    prompts: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]

    @property
    def requests(self) -> list[tuple[Any, ...]]:
        """As `GenerateRequest` has them: prompts to answer, then texts to score."""
        answer = self.probe.answer
        return [
            (f"{self.version}-{index}", ids, names, answer, 1.0, None, True)
            for index, (ids, names) in enumerate(self.prompts)
        ] + [
            (f"{self.version}-scored-{index}", ids, names, 1, 1.0, None, True, True)
            for index, (ids, names) in enumerate(self.probe.scored)
        ]

    def sample(self, index: int, row: tuple[Any, ...]) -> Sample:
        """The answer to a prompt."""
        ids_, names = self.prompts[index]
        _, prompt_ids, ids, logprobs, versions, _, error, missing = row
        if error or missing:
            raise SyncMismatch(f"the probe's prompt {index} was not answered: {error or missing}")
        prompt = self.probe.expand(ids_, names)
        if prompt_ids != np.asarray(prompt, np.int32).tobytes():
            raise SyncMismatch(
                f"the engine saw another prompt than the probe's prompt {index}; its image processor resized"
            )
        if versions != ((self.version, 0, self.probe.answer),):
            raise SyncMismatch(
                f"the probe's prompt {index} was answered by versions {versions}, not by {self.version} alone"
            )
        answer = np.frombuffer(ids, np.int32).tolist()
        behavior = np.frombuffer(logprobs, np.float32).tolist()
        return self._spanned(f"probe {index}", (*ids_, *answer), names, len(answer), behavior)

    def scored(self, index: int) -> Sample:
        """A text whose last tokens are scored."""
        ids, names = self.probe.scored[index]
        count = self.probe.scored_tokens
        return self._spanned(f"probe's text {index}", ids, names, count, [0.0] * count)

    def scores(self, rows: Sequence[tuple[Any, ...]]) -> np.ndarray:
        """An engine's log-probabilities of the texts' last tokens, [tokens]."""
        found = []
        for index, (_, _, _, logprobs, _, _, error, missing) in enumerate(rows[len(self.prompts) :]):
            if error or missing:
                raise SyncMismatch(f"the probe's text {index} was not scored: {error or missing}")
            found.append(np.frombuffer(logprobs, np.float32)[-self.probe.scored_tokens :].astype(np.float64))
        return np.concatenate(found)

    def _spanned(
        self, name: str, ids: tuple[int, ...], frames: tuple[str, ...], count: int, logprobs: Sequence[float]
    ) -> Sample:
        """With a span of its last `count` tokens."""
        span = ResponseSpan(
            step=0,
            start=len(ids) - count,
            end=len(ids),
            logprobs=tuple(logprobs),
            versions=(self.version,) * count,
            advantage=0.0,
        )
        return Sample(name, "probe", ids, len(self.probe.expand(ids, frames)), frames, (span,))
