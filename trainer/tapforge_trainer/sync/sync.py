"""New weights for the engines, with proof.

`synchronize` does, in this order: gather the learner's weights; in each engine, between two steps, load them, name
the version and drop the prefix, multimodal and encoder caches; then ask the engine for tokens and compare their
log-probabilities with the learner's. Until the comparison holds, nothing that an engine samples leaves it; if it does
not hold, every request in flight fails and `SyncMismatch` names the worst token. What may differ is in `proof.py`.

Between GPUs the ranks send while the engines receive. Engines that sleep (`Engines.sleep`) wake on the way: ranks give
back what memory they keep for later, engines take that of their weights, weights come, engines take that of their
caches.

Whoever fails in the middle leaves engines that answer nobody. On CPUs the next full set mends them. Between GPUs a
failed transfer is the end of the run (`LearnerError`), also where only one engine died in it: ranks and engines are one
group, in which ranks may wait for ever, and engines that got a part of the weights take no other set.

What a round took is in `Engines.round_metrics`: `seconds_sync_gather` (weights of all ranks in one place; between GPUs
that is part of the transfer), `seconds_sync_transfer`, `seconds_sync_probe`, `sync_bytes` that each engine got, and
`sync_gigabytes_per_second` of gathering and transfer together.

The probe (`proof.py`) is the same every time: a stale image embedding, a stale prefix or a stale packed weight shows.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tapforge_trainer.frames.handles import BatchFrames
from tapforge_trainer.records import ResponseSpan, Sample

from ..engine.client import EngineError
from ..engine.pool import Engines
from ..learner.client import Learner
from ..placement.settings import PauseMode
from .proof import PROBE_TOKENS, Probe, disagreement

#: by name: the module imports torch and vLLM, which the driver's event loop would wait for
_SENDER = "tapforge_trainer.sync.gpu"


class SyncMismatch(RuntimeError):
    """An engine does not answer with the weights that it was given."""


async def synchronize(
    learner: Learner,
    engines: Engines,
    probe: Probe,
    version: int,
    *,
    mode: PauseMode = "keep",
    tolerance: float | None = None,
    deadline: float = 1200.0,
) -> float:
    """Returns the largest difference of a log-probability that the probe saw. `tolerance`: what it may be at most;
    None: what the engine's number format allows (`proof.py:disagreement`). `deadline`, seconds, is each step's. Raises
    `SyncMismatch`."""
    try:
        figures = await _transfer(learner, engines, version, mode, deadline)
        started = time.monotonic()
        worst = await verify(learner, engines, probe, version, tolerance, deadline)
    except (SyncMismatch, EngineError) as error:
        await engines.discard(str(error), deadline)
        raise
    await engines.release(version, deadline)
    engines.round_metrics = figures | {"seconds_sync_probe": time.monotonic() - started}
    return worst


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
) -> float:
    """The part of `synchronize` that compares. Raises `SyncMismatch`."""
    requests = [
        (f"{version}-{index}", ids, names, PROBE_TOKENS, 1.0, None, True)
        for index, (ids, names) in enumerate(probe.prompts)
    ]
    frames = {name: frame.data for name, frame in probe.frames.items()}
    answers = await engines.probe(requests, frames, deadline)
    samples = [_sample(probe, index, row, version) for rows in answers for index, row in enumerate(rows)]
    mine = await learner.logprobs(samples, BatchFrames({sample.episode: probe.frames for sample in samples}))
    worst = 0.0
    for sample, logprobs in zip(samples, mine, strict=True):
        gaps = np.abs(np.asarray(sample.spans[0].logprobs) - np.asarray(logprobs))
        at = int(np.argmax(gaps)) if np.all(np.isfinite(gaps)) else int(np.flatnonzero(~np.isfinite(gaps))[0])
        if why := disagreement(gaps, engines.settings.dtype, tolerance):
            token = sample.ids[sample.spans[0].start + at]
            raise SyncMismatch(
                f"after the sync to version {version} engine and learner differ by {gaps[at]:.3g} ({why}) at token "
                f"{at} (id {token}) of {sample.episode}: {sample.spans[0].logprobs[at]:.5f} against "
                f"{logprobs[at]:.5f}; the engine does not answer with the new weights"
            )
        worst = max(worst, float(gaps[at]))
    return worst


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
