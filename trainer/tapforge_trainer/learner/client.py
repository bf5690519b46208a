"""The learner as the driver sees it: FSDP2 ranks as Ray actors, one call per update.

The driver checks samples, plans micro-batches and adds up what the ranks saw; ranks only compute (`rank.py`). Samples
go into Ray's object store once, whatever the number of ranks; of frames the driver passes on references, and each rank
fetches what it needs. Every call has a deadline; nothing that takes long runs on the driver's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import pkgutil
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tapforge_trainer.algorithms.objective import Counts
from tapforge_trainer.frames.handles import BatchFrames, FrameHandle, FramesLost
from tapforge_trainer.recording.frames import FrameStore
from tapforge_trainer.records import Facts, Sample

from ..placement.actor_log import keep_output
from ..placement.actors import reason
from ..placement.placement import ANYWHERE, ActorPlacement
from ..placement.settings import LearnerSettings, UpdateSettings, on_this_node
from .answers import answers, by_step, read_answers
from .batches import MicroBatchPlan, TokenBatch, Vocabulary, split_groups, token_batch
from .families import ModelConfig, family_of
from .frame_source import StoredFrames
from .frame_store import PixelFormat
from .metrics import UpdateMetrics, summary
from .planning import padding_share, plan_samples
from .token_readings import KeepTokens, by_episode, merged
from .work import SampleWork

if TYPE_CHECKING:
    from .rank import MiniBatch

_log = logging.getLogger(__name__)

#: that a rank waits for another one at the process group's store; torch.distributed's own number
_STORE_TIMEOUT = timedelta(minutes=30)
#: Ray's name for the thread of what goes on beside other calls
_BESIDE = "beside"
#: seconds after which a failed call was not the death of another rank
_DEATH_IS_KNOWN = 30.0


class LearnerError(RuntimeError):
    """A rank failed, died or did not answer in time."""


class RanksLost(LearnerError):
    """A rank died, or one waits for what never comes: the others can't be used again either."""


class RankActor:
    """`Rank` behind Ray. One call at a time."""

    def __init__(self, settings: LearnerSettings, rank: int):
        keep_output(settings.log, rank)
        self._settings, self._index = settings, rank
        self._rank: Any = None
        self._store: Any = None
        self._recordings: dict[Path, FrameStore] = {}

    def address(self) -> str:
        """A port that is free on this rank's node just now."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def open_store(self) -> tuple[str, int]:
        """Of the first rank: opens the process group's store and returns its place, at which it listens already."""
        import ray
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        return host, self._store.port

    def fetch(self) -> None:
        """Before the ranks wait for one another: a node may have to download the model first."""
        self._settings = on_this_node(self._settings)

    def start(self, place: tuple[str, int]) -> None:
        from torch.distributed import TCPStore

        from .rank import Rank

        if self._store is None:
            self._store = TCPStore(*place, is_master=False, timeout=_STORE_TIMEOUT)
        self._rank = Rank(self._settings, self._index, self._store)

    def update(self, job: _Job, settings: UpdateSettings, version: int | None) -> UpdateMetrics:
        mine, frames = [_mini_batch(step, self._index) for step in job.steps], self._frames(job)
        if version is None:
            return self._rank.supervised(job.data, frames, mine, settings)
        return self._rank.update(job.data, frames, mine, settings, version)

    def logprobs(self, job: _Job, temperature: float, masked: bool) -> np.ndarray:
        (step,) = job.steps
        plans = step.plans[self._index]
        return self._rank.logprobs(job.data, self._frames(job), plans, temperature, masked=masked)

    def answers(self, job: _Job, temperature: float, reads: Collection[str]) -> tuple[np.ndarray | None, ...]:
        (step,) = job.steps
        frames, plans = self._frames(job), step.plans[self._index]
        return read_answers(self._rank, job.data, frames, plans, temperature, reads)

    def _frames(self, job: _Job) -> StoredFrames:
        if job.recorded is not None and job.recorded not in self._recordings:
            self._recordings[job.recorded] = FrameStore(job.recorded)
        recorded = None if job.recorded is None else self._recordings[job.recorded]
        return StoredFrames(job.references, job.foreign, recorded)

    def weights(self, adapters: bool) -> bytes | None:
        from .sharding import adapters as adapters_of
        from .sharding import pack

        found = adapters_of(self._rank) if adapters else self._rank.weights()
        return pack(found) if self._index == 0 else None

    def run(self, function: Any, *arguments: Any) -> Any:
        """Calls `function(rank, ...)`: checkpoints, exports and transfers, which have their own files."""
        if isinstance(function, str):
            function = pkgutil.resolve_name(function)
        return function(self._rank, *arguments)

    def run_concurrently(self, function: Any, *arguments: Any) -> Any:
        """Likewise, in a thread of its own, while the rank does something else."""
        return self.run(function, *arguments)


@dataclass(frozen=True, slots=True)
class _Step:
    """One optimizer step of all ranks: micro-batches by rank, and what its loss is divided by."""

    plans: list[list[MicroBatchPlan]]
    counts: Counts


@dataclass(frozen=True, slots=True)
class _Job:
    """What every rank gets of an update: no pixels, but references to them (`StoredFrames`)."""

    data: TokenBatch
    steps: list[_Step]
    references: Mapping[str, Any]
    foreign: frozenset[str]
    recorded: Path | None


def _mini_batch(step: _Step, index: int) -> MiniBatch:
    from .rank import MiniBatch

    return MiniBatch(tuple(step.plans[index]), step.counts)


class Learner:
    """Belongs to one event loop; calls come one after another."""

    def __init__(self, settings: LearnerSettings, places: Sequence[ActorPlacement] = ()):
        """`places`: of the ranks, in their order; without any, Ray's choice."""
        import ray

        self.settings = settings
        #: why its ranks can't be used again; None: they can
        self.lost: RanksLost | None = None
        #: what its ranks do until they can work; "" from then on
        self.stage = "fetching the model"
        self._deadline = settings.update_seconds
        folder = Path(settings.model)
        self.form = PixelFormat.of_folder(folder)
        config = ModelConfig.of_folder(folder)
        #: from the folder's config alone, so that the driver needs no torch
        self.vocabulary = Vocabulary.of(config.vocabulary, config.image_token, settings.allowed_ids)
        self._work = SampleWork.of(config, settings)  # an architecture that is not known is refused before ranks start
        self._shares = family_of(config).shares_prompts
        environment = {
            "OMP_NUM_THREADS": str(settings.threads),
            # Shapes vary from batch to batch; each kernel that oneDNN compiles is kept until the cache is full.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        }
        actor = ray.remote(concurrency_groups={_BESIDE: 1})(RankActor)
        self._ranks = []
        for index, place in enumerate(places or [ANYWHERE] * settings.ranks):
            found = {"env_vars": environment | dict(place.environment)}
            options = actor.options(max_restarts=0, runtime_env=found, **place.options)
            self._ranks.append(options.remote(settings, index))

    async def ready(self) -> None:
        deadline = self.settings.start_seconds
        await self._all("fetch", deadline=deadline)
        self.stage = "loading weights"
        (place,) = await self._call([self._ranks[0].open_store.remote()], "open_store", deadline)
        await self._all("start", place, deadline=deadline)
        self.stage = ""

    async def update(
        self,
        samples: Sequence[Sample],
        frames: BatchFrames,
        settings: UpdateSettings,
        version: int,
        keep_tokens: KeepTokens | None = None,
    ) -> dict[str, float]:
        """`version` is that of the learner's weights before the update. Returns the update's metrics; `keep_tokens`
        gets what the ranks computed of its tokens. Raises FramesLost, after which another update may be made."""
        figures, found = await self._learn(samples, frames, settings, version)
        if keep_tokens is not None:
            keep_tokens(await asyncio.to_thread(by_episode, samples, [one.tokens for one in found if one.tokens]))
        return figures

    async def supervised(
        self, samples: Sequence[Sample], frames: BatchFrames, settings: UpdateSettings
    ) -> dict[str, float]:
        """Learns the samples' response tokens by cross-entropy, weighted by their spans' weights."""
        return (await self._learn(samples, frames, settings, None))[0]

    async def _learn(
        self, samples: Sequence[Sample], frames: BatchFrames, settings: UpdateSettings, version: int | None
    ) -> tuple[dict[str, float], list[UpdateMetrics]]:
        started = time.perf_counter()
        job, padding = await asyncio.to_thread(self._prepare, samples, frames, settings)
        prepared = time.perf_counter() - started
        found: list[UpdateMetrics] = await self._all("update", job, settings, version)
        figures = summary(found, time.perf_counter() - started, padding)
        figures["seconds_prepare"] = prepared + figures.get("seconds_prepare", 0.0)
        return figures, found

    def _prepare(self, samples: Sequence[Sample], frames: BatchFrames, settings: UpdateSettings) -> tuple[Any, float]:
        """A reference to the job, and its share of padding. In a thread: a full object store lets it wait."""
        data = self._laid_out(samples)
        steps = [self._step(data, chosen) for chosen in split_groups(samples, settings.mini_batches, settings.seed)]
        plans = [plan for step in steps for rank in step.plans for plan in rank]
        return _put_job(data, steps, frames), padding_share(data, plans)

    def _to_read(self, samples: Sequence[Sample], frames: BatchFrames) -> tuple[TokenBatch, Any]:
        """Samples that nothing is learned from, and a reference to their job. In a thread, as `_prepare` is."""
        data = self._laid_out(samples)
        return data, _put_job(data, [self._step(data, np.arange(len(samples)))], frames)

    def _laid_out(self, samples: Sequence[Sample]) -> TokenBatch:
        return token_batch(samples, self.vocabulary, share=self._shares)

    def _step(self, data: TokenBatch, chosen: np.ndarray) -> _Step:
        budget, work = self.settings.tokens_per_micro_batch, (self._work(data), self._work.of_prompts(data))
        plans = plan_samples(data, chosen, self.settings.ranks, budget, work)
        counted = np.isin(data.sample, chosen)
        _, first = np.unique(data.span[counted], return_index=True)
        weight = data.weight[counted].astype(np.float64)
        return _Step(plans, Counts(float(weight.sum()), float(weight[first].sum())))

    async def logprobs(
        self,
        samples: Sequence[Sample],
        frames: BatchFrames,
        temperature: float = 1.0,
        *,
        masked: bool = True,
        deadline: float | None = None,
    ) -> list[tuple[float, ...]]:
        """Log-probabilities of each sample's response tokens under the learner's weights. `masked`: over the tokens
        that the policy may say; else over the whole vocabulary. `deadline`: as of `run`."""
        data, job = await asyncio.to_thread(self._to_read, samples, frames)
        logprobs = merged(await self._all("logprobs", job, temperature, masked, deadline=deadline))
        return [tuple(logprobs[data.sample == k].tolist()) for k in range(len(samples))]

    async def answers(
        self, samples: Sequence[Sample], frames: BatchFrames, temperature: float, reads: Collection[str]
    ) -> Facts:
        """What is to be known of answers before they have advantages: `reads` are names of `AnswerFacts`. Raises
        FramesLost."""
        data, job = await asyncio.to_thread(self._to_read, samples, frames)
        found = await self._all("answers", job, temperature, reads)
        return by_step(samples, answers(data, *map(merged, zip(*found, strict=True))))

    async def keep(self, frames: BatchFrames) -> BatchFrames:
        """The same frames in the object store, for several updates."""
        return BatchFrames(await asyncio.to_thread(_put_frames, frames.handles), frames.recorded)

    async def weights(self, deadline: float | None = None, *, adapters: bool = False) -> Any:
        """A reference to the packed weights, or adapters alone, in Ray's object store, for `Engines.renew`. `deadline`:
        as of `run`."""
        seconds = deadline or self._deadline
        references = [rank.weights.remote(adapters) for rank in self._ranks]
        await self._call(references[1:], "weights", seconds)
        import ray

        done, _ = await asyncio.to_thread(ray.wait, references[:1], timeout=seconds, fetch_local=False)
        if not done:
            raise self.lose(f"rank 0 did not gather its weights within {seconds:.0f} s")
        return references[0]

    async def address(self, deadline: float | None = None) -> str:
        """A port that is free on the first rank's node just now, as tcp://HOST:PORT. `deadline`: as of `run`."""
        return (await self._call([self._ranks[0].address.remote()], "address", deadline or self._deadline))[0]

    async def run(self, function: Any, *arguments: Any, deadline: float | None = None) -> list[Any]:
        """Calls `function(rank, *arguments)` on every rank. `function` is a MODULE:NAME where the driver must not
        import its module. `deadline`: seconds; None: an update's."""
        return await self._all("run", function, *arguments, deadline=deadline)

    async def run_concurrently(self, function: str, *arguments: Any) -> list[Any]:
        """Likewise, while other calls are carried out."""
        references = [
            rank.run_concurrently.options(concurrency_group=_BESIDE).remote(function, *arguments)
            for rank in self._ranks
        ]
        return await self._call(references, function, self._deadline, beside=True)

    def lose(self, why: str) -> RanksLost:
        """From here on nothing is to be asked of the ranks. Returns the error to raise."""
        self.lost = RanksLost(why)
        return self.lost

    async def close(self) -> None:
        import ray

        for rank in self._ranks:
            ray.kill(rank)

    async def _all(self, method: str, *arguments: Any, deadline: float | None = None) -> list[Any]:
        references = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        return await self._call(references, method, deadline or self._deadline)

    async def _call(
        self, references: Sequence[Any], method: str, deadline: float, *, beside: bool = False
    ) -> list[Any]:
        """`beside`: what is late there holds up nothing."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            async with asyncio.timeout(deadline):
                return await _all_of(references)
        except TimeoutError as error:
            late = f"{method} took longer than {deadline:.0f} s on {len(references)} ranks"
            raise (LearnerError(late) if beside else self.lose(late)) from error
        except RayActorError as error:
            raise self.lose(f"a rank died during {method}: {reason(error)}") from error
        except RayTaskError as error:
            if isinstance(error.cause, FramesLost):
                raise error.cause from None
            raise LearnerError(f"{method} failed on a rank: {reason(error)}") from error


async def _all_of(references: Sequence[Any]) -> list[Any]:
    """Their results, or the first failure. Where a rank dies, the others' connections to it break, and they may say so
    before the death itself is known; it has precedence, because it is the cause."""
    from ray.exceptions import RayActorError, RayTaskError

    calls = [asyncio.ensure_future(reference) for reference in references]
    try:
        return await asyncio.gather(*calls)
    except RayTaskError:
        loop = asyncio.get_running_loop()
        end = loop.time() + _DEATH_IS_KNOWN
        while True:
            for call in calls:
                if call.done() and isinstance(death := call.exception(), RayActorError):
                    raise death from None
            pending = [call for call in calls if not call.done()]
            if not pending or loop.time() >= end:
                raise
            await asyncio.wait(pending, timeout=end - loop.time(), return_when=asyncio.FIRST_EXCEPTION)


def _put_job(data: TokenBatch, steps: list[_Step], frames: BatchFrames) -> Any:
    import ray

    handles = {episode: frames.handles[episode] for episode in data.episodes if episode in frames.handles}
    foreign = frozenset(episode for episode, handle in handles.items() if isinstance(handle, ray.ObjectRef))
    return ray.put(_Job(data, steps, _put_frames(handles), foreign, frames.recorded))


def _put_frames(handles: Mapping[str, FrameHandle]) -> dict[str, Any]:
    """References instead of plain mappings. A mapping that several episodes have is one object."""
    import ray

    seen: dict[int, Any] = {}
    references = {}
    for episode, handle in handles.items():
        if not isinstance(handle, ray.ObjectRef):
            if id(handle) not in seen:
                seen[id(handle)] = ray.put(dict(handle))
            handle = seen[id(handle)]
        references[episode] = handle
    return references
