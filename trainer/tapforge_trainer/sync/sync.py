"""New weights for the engines, with proof.

`synchronize` does, in this order: gather the learner's weights; in each engine, between two steps, load them, name
the version and drop the prefix, multimodal and encoder caches; then compare digests of the weights, ask the engine for
tokens and compare their log-probabilities with the learner's. Until the comparison holds, nothing that an engine
samples leaves it; if it does not hold in the end, every request in flight fails and `SyncMismatch` names the tensor or
the worst token. What log-probabilities may differ by is in `proof.py`.

A proof that failed is not the end: requests in flight are thrown away and asked again, a full set is sent once more,
and nothing is sampled for clients until its proof holds. If it does not either, `SyncMismatch` has the figures of both.

Between GPUs the ranks send while the engines receive. Engines that sleep (`Engines.sleep`) wake on the way: ranks give
back what memory they keep for later, engines take that of their weights, weights come, engines take that of their
caches.

Whoever fails in the middle leaves engines that answer nobody. On CPUs the next full set mends them. Between GPUs a
failed transfer is the end of the run (`LearnerError`), also where only one engine died in it: ranks and engines are one
group, in which ranks may wait for ever, and engines that got a part of the weights take no other set.

What a round took is in `Engines.round_metrics`: `seconds_sync_gather` (weights of all ranks in one place; between GPUs
that is part of the transfer), `seconds_sync_transfer`, `seconds_sync_probe`, `sync_bytes` that each engine got,
`sync_gigabytes_per_second` of gathering and transfer together, `sync_unread_tensors`, `sync_resends` (1: the first
proof failed), `gap_alarm`, and `proof.py:figures` but for the largest, which is returned; as `failed_gap_*` those of
the proof that failed, where it came to answers. They are the monitor of engine against learner: the same prompts after
each sync, answered by the very weights, whatever a busy learner's own batches were sampled with.

The proof has two parts: the bytes that arrived and are held (`received.py`), by which a weight that is stale, another's
or without its adapter shows however little it differs; and the probe (`proof.py`), which is the same every time, by
which a stale image embedding or a stale prefix shows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapforge_trainer.frames.handles import BatchFrames
from tapforge_trainer.records import ResponseSpan, Sample

from ..engine.client import EngineError
from ..engine.pool import Engines
from ..learner.client import Learner
from ..placement.settings import GAP_ALARM, PauseMode
from .proof import PROBE_TOKENS, Probe, disagreement, figures
from .received import difference, unread

log = logging.getLogger(__name__)

#: by name: the module imports torch and vLLM, which the driver's event loop would wait for
_SENDER = "tapforge_trainer.sync.gpu"
_SENT = "tapforge_trainer.learner.sharding:sent"


class SyncMismatch(RuntimeError):
    """An engine does not hold the weights that it was given, or does not answer with them."""

    def __init__(self, why: str, figures: Mapping[str, float] | None = None):
        """`figures`: `proof.py:figures` of the answers, where it came to answers."""
        super().__init__(why)
        self.figures = dict(figures or {})


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a round of weights whose proof held."""

    #: `proof.py:figures`
    figures: Mapping[str, float]
    #: by name of the tensors that engines keep in a way that can't be read, why; the probe alone is about them
    unread: Mapping[str, str] = field(default_factory=dict)


async def synchronize(
    learner: Learner,
    engines: Engines,
    probe: Probe,
    version: int,
    *,
    mode: PauseMode = "keep",
    tolerance: float | None = None,
    gap_alarm: float | None = None,
    deadline: float = 1200.0,
) -> float:
    """Returns the largest difference of a log-probability that the probe saw. `tolerance`: what it may be at most;
    None: what the engine's number format allows (`proof.py:disagreement`). `gap_alarm`: the mean above which the metric
    of that name is 1; None: the number format's. `deadline`, seconds, is each step's. Raises
    `SyncMismatch`."""

    async def once() -> tuple[dict[str, float], Proof]:
        took = await _transfer(learner, engines, version, mode, deadline)
        started = time.monotonic()
        proof = await verify(learner, engines, probe, version, tolerance, deadline)
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
    if settings.transfer == "tapforge-cpu":
        payload = await learner.weights()
        gathered = time.monotonic()
        size = await engines.renew(payload, version, mode, deadline)
        figures = {"seconds_sync_gather": gathered - started, "seconds_sync_transfer": time.monotonic() - gathered}
    else:
        if engines.asleep:  # first of all: the round starts engines again that died asleep
            await learner.run(f"{_SENDER}:give_back_memory", deadline=deadline)
        await engines.pause(mode, deadline)
        await engines.wake("weights", deadline)
        place = await learner.address()
        size, *_ = await learner.run(
            f"{_SENDER}:send", engines.members, engines.actors, settings, place, deadline, deadline=deadline
        )
        await engines.wake("kv_cache", deadline)
        await engines.proceed(version, deadline)
        figures = {"seconds_sync_transfer": time.monotonic() - started}
    seconds = max(time.monotonic() - started, 1e-9)
    return figures | {"sync_bytes": float(size), "sync_gigabytes_per_second": size / seconds / 1e9}


async def verify(
    learner: Learner, engines: Engines, probe: Probe, version: int, tolerance: float | None, deadline: float
) -> Proof:
    """The part of `synchronize` that compares. Raises `SyncMismatch`."""
    sent, arrivals = await asyncio.gather(learner.run(_SENT, deadline=deadline), engines.arrivals(deadline))
    digests = sent[0][0]  # of the rank that sends
    unmerged = tuple(sorted({name for _, names in sent for name in names}))
    if why := difference(digests, unmerged, arrivals):
        raise SyncMismatch(f"after the sync to version {version} {why}")
    requests = [
        (f"{version}-{index}", ids, names, PROBE_TOKENS, 1.0, None, True)
        for index, (ids, names) in enumerate(probe.prompts)
    ]
    frames = {name: frame.data for name, frame in probe.frames.items()}
    answers = await engines.probe(requests, frames, deadline)
    samples = [_sample(probe, index, row, version) for rows in answers for index, row in enumerate(rows)]
    mine = await learner.logprobs(samples, BatchFrames({sample.episode: probe.frames for sample in samples}))
    gaps = [
        np.asarray(sample.spans[0].logprobs, np.float64) - np.asarray(logprobs, np.float64)
        for sample, logprobs in zip(samples, mine, strict=True)
    ]
    found = figures(gaps)
    for sample, logprobs, signed in zip(samples, mine, gaps, strict=True):
        apart = np.abs(signed)
        at = int(np.argmax(apart)) if np.all(np.isfinite(apart)) else int(np.flatnonzero(~np.isfinite(apart))[0])
        if why := disagreement(apart, engines.settings.dtype, tolerance):
            token = sample.ids[sample.spans[0].start + at]
            raise SyncMismatch(
                f"after the sync to version {version} engine and learner differ by {apart[at]:.3g} ({why}) at token "
                f"{at} (id {token}) of {sample.episode}: {sample.spans[0].logprobs[at]:.5f} against "
                f"{logprobs[at]:.5f}; the engine does not answer with the new weights",
                found,
            )
    return Proof(found, unread(arrivals))


def _sample(probe: Probe, index: int, row: tuple[Any, ...], version: int) -> Sample:
    _, prompt_ids, ids, logprobs, versions, _, error, missing = row
    ids_, names = probe.prompts[index]
    if error or missing:
        raise SyncMismatch(f"the probe's prompt {index} was not answered: {error or missing}")
    prompt = probe.expand(ids_, names)
    if prompt_ids != np.asarray(prompt, np.int32).tobytes():
        raise SyncMismatch(
            f"the engine saw another prompt than the probe's prompt {index}; its image processor resized"
        )
    if versions != ((version, 0, PROBE_TOKENS),):
        raise SyncMismatch(f"the probe's prompt {index} was answered by versions {versions}, not by {version} alone")
    answer = np.frombuffer(ids, np.int32).tolist()
    span = ResponseSpan(
        step=0,
        start=len(ids_),
        end=len(ids_) + len(answer),
        logprobs=tuple(np.frombuffer(logprobs, np.float32).tolist()),
        versions=(version,) * len(answer),
        advantage=0.0,
    )
    return Sample(f"probe {index}", "probe", (*ids_, *answer), len(prompt) + len(answer), names, (span,))
