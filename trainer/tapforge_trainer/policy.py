"""The policy as the loop sees it: one object with a learner, engines that sample, and what goes on between them.

    learner.supervised -> sync -> generate ... learner.update -> sync -> ...; save, resume, export; close

An engine that dies is started again while the run goes on (`engine/pool.py`); when no other one lives, it gets the
learner's weights as soon as the learner has a moment, that is between two updates.

Where learner and engines share GPUs (`EngineSettings.colocated`) they take turns: the engines sleep before the learner
works, and wake with its next weights; what was asked of them waits. They start one after another, so that an engine
sees what memory the learner leaves it. After work that failed the engines wake with the weights that there are.

Else learner and engines start side by side; `start` returns when the learner can work, and whoever first needs an
engine waits for it, so that a warm start runs while the engines are still loading.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .learner.checkpoint_storage import CheckpointBackend, CheckpointFolder
from .learner.checkpoints import Checkpoints, WrittenCheckpoint, load
from .learner.export import export, fetch
from .learner.families import ModelConfig
from .placement import ray_environment
from .placement.machine import missing
from .placement.placement import Placement, placed
from .placement.settings import EngineSettings, LearnerSettings, PauseMode
from .records import Generator, Prompt
from .storage.object_storage import is_uri
from .sync.history import ProofHistory

if TYPE_CHECKING:
    from .learner.client import Learner

#: environment variable by which a cluster's job finds its Ray
RAY_ADDRESS = "RAY_ADDRESS"
#: how often Ray is started on this machine: its agents have 15 s and its node 30 s, which can't be set, and a busy
#: machine takes longer while their files are read for the first time
_RAY_STARTS: Final = 5
#: what Ray says then: of its node, and of a port that a part of it has not chosen yet
_RAY_LATE: Final = ("timed out during startup", "Timed out waiting for file")

log = logging.getLogger(__name__)
#: between two looks at what the Ray cluster has
_GPU_LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class PolicySettings:
    #: None: nothing is sampled
    engine: EngineSettings | None
    #: None: nothing is learned; the engines answer with the folder's weights
    learner: LearnerSettings | None
    replicas: int = 1
    #: new weights arrive while answers are being sampled
    mid_episode: bool = True
    #: where checkpoints are
    place: CheckpointBackend = CheckpointFolder(Path("checkpoints"))  # noqa: RUF009 - it is frozen
    keep: int = 2
    #: of a sync's proof; None: that of the engine's number format
    tolerance: float | None = None
    #: mean difference of log-probabilities in a sync's proof from which `gap_alarm` is 1; None: of the number format
    gap_alarm: float | None = None
    sync_seconds: float = 1200.0
    #: prompts of a made-up episode, with which a sync is proved as well
    episode: tuple[Prompt, ...] = ()


class Policy:
    def __init__(self, settings: PolicySettings):
        self.settings = settings
        self._learner: Any = None
        self._engines: Any = None
        self._client: Any = None
        #: the learner does one thing at a time
        self._learning = asyncio.Lock()
        #: policy version of the learner's weights
        self._version = 0
        self._feeding: asyncio.Task[None] | None = None
        self._probe: Any = None
        #: of syncs; the figures of the first one are kept with the run's progress
        self.proofs = ProofHistory()
        self._checkpoints: Checkpoints | None = None
        self._engines_ready: asyncio.Task[None] | None = None
        self._ray: asyncio.Task[None] | None = None
        self._placement = Placement()

    async def start_ray(self) -> None:
        """For who needs it before learner and engines; may be called again."""
        with _own_signals():
            if self._ray is None:
                self._ray = asyncio.create_task(asyncio.to_thread(_start_ray))
            await asyncio.shield(self._ray)

    async def start(self, report: Callable[[str], None] = lambda words: None) -> None:
        """Starts Ray, the learner ranks and the engines; `report` gets what is waited for. Raises what their own start
        raises, and PlacementError; may be cancelled."""
        await self.start_ray()
        from .engine.client import EngineClient
        from .engine.pool import Engines
        from .learner.client import Learner
        from .learner.frame_store import PixelFormat

        engine, learner = self.settings.engine, self.settings.learner
        self._placement = await placed(engine, self.settings.replicas, learner, report)
        turns = engine is not None and engine.colocated
        if learner is not None and turns:
            self._learner = Learner(learner, self._placement.ranks)
            await self._learner.ready()
        if engine is not None:
            folder = Path(engine.model)
            self._engines = Engines(
                engine,
                PixelFormat.of_folder(folder),
                ModelConfig.of_folder(folder).image_token,
                replicas=self.settings.replicas,
                places=self._placement.engines,
            )
            self._client = EngineClient(self._engines.connection)
            self._engines.follow(self._client.use)
            self._engines_ready = asyncio.create_task(self._engines.ready())
            self._feeding = asyncio.create_task(self._feed(), name="feed-engines")
        if learner is not None and not turns:
            self._learner = Learner(learner, self._placement.ranks)
            await self._learner.ready()
        elif self._engines_ready is not None:
            await self._engines_ready

    async def waiting(self) -> list[str]:
        """What has not started yet, in words."""
        late = [f"the learner ({self._learner.stage})"] if self._learner is not None and self._learner.stage else []
        return late + (await self._engines.waiting() if self._engines is not None else [])

    @asynccontextmanager
    async def learning(self, version: int | None = None) -> AsyncIterator[Learner]:
        """The learner, which does nothing else until the block ends: no engine is given weights of half an update.
        `version`: of the weights that the block leaves; None: as before."""
        async with self._learning:
            shared = await self._sleep_engines()
            try:
                yield self._learner
            except Exception:
                if shared:
                    self._engines.call()
                raise
            self._version = self._version if version is None else version

    def wake_engines(self) -> None:
        """After a block of `learning` that no `sync` follows: engines that sleep get the weights as they are."""
        self._engines.call()

    async def _sleep_engines(self) -> bool:
        """Whether the learner has the engines' GPUs for itself from here on."""
        engine = self.settings.engine
        if engine is None or not engine.colocated or self._engines_ready is None:
            return False
        await self._engines_ready
        await self._engines.sleep(self._mode, self.settings.sync_seconds)
        return True

    @property
    def _mode(self) -> PauseMode:
        return "keep" if self.settings.mid_episode else "wait"

    @property
    def generator(self) -> Generator:
        return self._client

    @property
    def engine_connection(self) -> Any:
        """An `EngineConnection`: what another process needs to make an `EngineClient` of its own."""
        return self._engines.connection

    def follow_engines(self, listener: Callable[[Any], None]) -> None:
        """`listener` gets the `Replicas` that may be asked, each time that they change."""
        self._engines.follow(listener)

    def live_engines(self) -> tuple[int, ...]:
        """Indices of the engines that may be asked now."""
        return tuple(replica.index for replica in self._engines.replicas.live) if self._engines is not None else ()

    @property
    def engine_metrics(self) -> dict[str, float]:
        """Cache hit rates between the last two syncs, what the last one took and proved, restarts since the start."""
        return self._engines.metrics

    async def forget_optimizer(self) -> None:
        """The next update is the optimizer's first."""
        async with self._learning:
            await self._learner.run(_fresh_optimizer)

    async def sync(self, version: int) -> float:
        """The engines answer with the learner's weights from here on, proven by a probe. Returns the largest difference
        of a log-probability between engine and learner that the probe saw."""
        from .engine.client import EngineDied

        if self._engines_ready is None:
            raise RuntimeError("there is no engine to give the weights to: start the policy with an engine")
        await self._engines_ready
        async with self._learning:
            self._version = version
            while True:
                try:
                    return await self._synchronize()
                except EngineDied:  # all of them; as often as they may be started again
                    await self._engines.any_up()

    async def _feed(self) -> None:
        """Gives engines weights that were started again while no other one lived, or that sleep for nothing."""
        from .engine.client import EngineDied

        while True:
            await self._engines.starved.wait()
            try:
                async with self._learning:
                    if self._engines.starved.is_set():
                        await self._synchronize()
            except EngineDied as error:
                log.warning("an engine died while it got its weights: %s", error)
            except Exception as error:  # noqa: BLE001 - whoever waits for an answer gets it, and the run ends
                self._engines.fail(f"the engines, which wait for weights, got none: {error}")
                return

    async def _synchronize(self) -> float:
        from .sync.proof import probe_of
        from .sync.sync import synchronize

        engine = self.settings.engine
        assert engine is not None
        if self._probe is None:
            self._probe = probe_of(engine, self._learner.form, self.settings.episode)
        return await synchronize(
            self._learner,
            self._engines,
            self._probe,
            self._version,
            mode=self._mode,
            tolerance=self.settings.tolerance,
            gap_alarm=self.settings.gap_alarm,
            history=self.proofs,
            deadline=self.settings.sync_seconds,
        )

    async def save(self, update: int, state: Mapping[str, Any], report: Callable[[WrittenCheckpoint], None]) -> None:
        """Begins a checkpoint of weights, optimizer and the driver's `state` (plain JSON), and returns when the learner
        may go on. `report` is called when it is complete. Raises CheckpointError, also for the one before."""
        await self.settle()
        async with self._learning:
            if self._checkpoints is None:
                self._checkpoints = Checkpoints(self._learner, self.settings.place, self.settings.keep)
            await self._checkpoints.save(update, dict(state), report)

    async def settle(self) -> None:
        """Returns when no checkpoint is being written. Raises CheckpointError if that failed."""
        if self._checkpoints is not None:
            await self._checkpoints.settle()

    async def resume(self, where: str | None = None, *, moments: bool = True) -> dict[str, Any] | None:
        """Loads `where`, a folder or URI, or the newest checkpoint; returns the driver's state, or None where there is
        none. `moments`: the optimizer's as well; else it begins afresh."""
        async with self._learning:
            return await load(self._learner, self.settings.place, where, moments=moments)

    async def export(self, folder: Path, *, keep: bool = False, adapter: bool = False) -> None:
        """`keep`: also under its name beside the run's checkpoints, where those are in object storage. `adapter`: with
        LoRA not the merged model, as for `refer_to`."""
        async with self._learning:
            await export(self._learner, folder, self.settings.place if keep else None, adapter=adapter)

    async def fetch(self, folder: Path) -> bool:
        """Makes the folder from what an earlier session kept of it; False: there is nothing."""
        stored = self._stored(folder)
        return bool(stored) and await asyncio.to_thread(fetch, stored, folder)

    def _stored(self, folder: Path) -> str:
        root = self.settings.place.root
        return f"{root}/{folder.name}" if is_uri(root) else ""

    async def refer_to(self, folder: Path) -> None:
        """From here on the KL term pulls towards the weights in `folder` (written by `export`)."""
        async with self._learning:
            await self._learner.run(
                "tapforge_trainer.learner.export:refer_to", str(folder.absolute()), self._stored(folder)
            )

    async def close(self) -> None:
        """Ends what `start` started, however far it came."""
        import ray

        if self._ray is not None:  # a thread can't be cancelled: a Ray that comes up late would be left behind
            await asyncio.gather(self._ray, return_exceptions=True)
        if self._checkpoints is not None:
            self._checkpoints.abandon()
        tasks = [task for task in (self._engines_ready, self._feeding) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._engines is not None:
            await self._engines.close()
        if self._learner is not None:
            await self._learner.close()
        self._placement.close()
        if self._ray is not None and ray.is_initialized():  # a Ray that somebody else of this process uses stays
            await asyncio.to_thread(ray.shutdown)


def _fresh_optimizer(rank: Any) -> None:
    rank.optimizer.state.clear()
    rank.steps = 0


def in_cluster() -> bool:
    """This process is a driver in a Ray cluster that somebody else started."""
    return bool(os.environ.get(RAY_ADDRESS))


async def gpus_in_ray() -> int:
    """That the Ray cluster has now, on all its nodes."""
    with _own_signals():
        await asyncio.to_thread(_start_ray)  # once; it is there afterwards
    return int((await asyncio.to_thread(_resources)).get("GPU", 0))


async def wait_for_gpus(needed: int, report: Callable[[str], None], seconds: float) -> None:
    """Until the Ray cluster has so many GPUs, wherever they are: the head has often none, and a Pod that has some may
    just be being replaced. `report` is called with what is missing, each time that it changes. Raises TimeoutError."""
    reported, end = "", asyncio.get_running_loop().time() + seconds
    while words := missing(needed, await gpus_in_ray()):
        if words != reported:
            report(reported := words)
        if asyncio.get_running_loop().time() >= end:
            raise TimeoutError(f"{words}, after {seconds:g} s: look at the Pods of the run's workers")
        await asyncio.sleep(_GPU_LOOK_SECONDS)


def object_store_bytes() -> int:
    """Of all nodes of the Ray that was started."""
    return int(_resources().get("object_store_memory", 0))


def _resources() -> dict[str, float]:
    from ray import cluster_resources

    return dict(cluster_resources())


@contextmanager
def _own_signals() -> Iterator[None]:
    """Handlers of signals are afterwards as they were before, whatever Ray puts in front of them while it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [(number, signal.getsignal(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            if handler is not None:
                signal.signal(number, handler)
                signal.siginterrupt(number, False)  # as asyncio has it


def _start_ray() -> None:
    if not (address := os.environ.get(RAY_ADDRESS)):
        ray_environment.prepare()
    import ray
    from ray._private import ray_constants

    if address and ray.is_initialized():
        return
    # Ray's workers are nice (15) by default: on a machine without an idle core, engines and ranks would hardly run
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"):
        os.environ.setdefault(name, "0")
    # Its handler of SIGTERM prints a stack and aborts what has not ended three seconds later: no time for a checkpoint.
    # Not by the environment variable: workers would have that too, and their crashes shall leave a stack.
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    if not address:
        for tries_left in reversed(range(_RAY_STARTS)):
            try:
                ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
                break
            except Exception as error:  # nothing more special is raised; what is left of it ends with this process
                if not tries_left or not any(words in str(error) for words in _RAY_LATE):
                    raise
                log.warning("Ray did not come up in time on this machine; it is started again")
    else:
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ray_environment.refused(address, error) from error
