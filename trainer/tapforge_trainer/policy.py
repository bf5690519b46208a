"""The policy as the loop sees it: one object with a learner, engines that sample, and what goes on between them.

    learner.supervised -> sync -> generate ... learner.update -> sync -> ...; save, resume, export; close

An engine that dies is started again while the run goes on (`engine/pool.py`); when no other one lives, it gets the
learner's weights as soon as the learner has a moment, that is between two updates. Where ranks can't be used again
(`lost`), `restart` ends them and all engines, and starts all of them anew: `run/restarting.py` says with which weights.

Where learner and engines share GPUs (`EngineSettings.colocated`) they take turns: the engines sleep before the learner
works, and wake with its next weights; what was asked of them waits. They start one after another, so that an engine
sees what memory the learner leaves it. After work that failed the engines wake with the weights that there are.

Else learner and engines start side by side; `start` returns when the learner can work, and the first caller that needs
an engine waits for it, so that a warm start runs while the engines are still loading.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .engine.restart_budget import RestartBudget
from .learner.checkpoint_storage import CheckpointBackend, CheckpointError, CheckpointFolder
from .learner.checkpoints import Checkpoints, WrittenCheckpoint, load
from .learner.export import export, fetch
from .learner.families import ModelConfig
from .placement.placement import Placement, placed
from .placement.ray_start import own_signals, start_ray
from .placement.settings import EngineSettings, LearnerSettings, PauseMode
from .records import Generator, Prompt
from .storage.object_storage import is_uri
from .sync.history import ProofHistory

if TYPE_CHECKING:
    from .learner.client import Learner

log = logging.getLogger(__name__)


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
    keep_ray: bool = False  #: for the next policy of this process, until `placement.ray_kept` ends


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
        #: of the KL term; None: there is none
        self._reference: Path | None = None
        #: of the run itself, by which syncs are proved, and a name for them; (): a made-up episode
        self.recorded_prompts: tuple[Prompt, ...] = ()
        self.proof_prompts = ""
        self._restarts = RestartBudget(settings.engine.restarts_per_hour if settings.engine is not None else 0)

    async def start_ray(self) -> None:
        """For callers that need it before learner and engines; may be called again."""
        with own_signals():
            if self._ray is None:
                self._ray = asyncio.create_task(asyncio.to_thread(start_ray, self.settings.keep_ray))
            await asyncio.shield(self._ray)

    async def start(self, report: Callable[[str], None] = lambda words: None) -> None:
        """Starts Ray, the learner ranks and the engines; `report` gets what is waited for. Raises what their own start
        raises, and PlacementError; may be cancelled."""
        await self.start_ray()
        from .learner.client import Learner

        engine, learner = self.settings.engine, self.settings.learner
        self._placement = await placed(engine, self.settings.replicas, learner, report)
        turns = engine is not None and engine.colocated
        if learner is not None and turns:
            self._learner = Learner(learner, self._placement.ranks)
            await self._learner.ready()
        if engine is not None:
            self._start_engines(engine)
            self._engines_ready = asyncio.create_task(self._engines.ready())
            self._feeding = asyncio.create_task(self._feed(), name="feed-engines")
        if learner is not None and not turns:
            self._learner = Learner(learner, self._placement.ranks)
            await self._learner.ready()
        elif self._engines_ready is not None:
            await self._engines_ready

    def _start_engines(self, engine: EngineSettings) -> None:
        from .engine.client import EngineClient
        from .engine.pool import Engines
        from .learner.frame_store import PixelFormat

        if self._engines is not None:  # they are the ones that clients know
            self._engines.start(self._placement.engines)
            return
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

    @property
    def lost(self) -> Exception | None:
        """Why the ranks, and with them the engines, can't be used again; None: they can."""
        return self._learner.lost if self._learner is not None else None

    def may_restart(self) -> bool:
        """Whether learner and engines may be started anew once more, which counts from here on."""
        return self._restarts.spend(time.monotonic())

    async def restart(self, report: Callable[[str], None] = lambda words: None) -> None:
        """Ends ranks and engines, gives their GPUs back and starts all of them anew, with the weights that a run begins
        with: `resume` and `sync` are next. Clients and what was said of the reference stay. Raises as `start` does."""
        await self._stop_feeding()
        if self._learner is not None:
            await self._learner.close()
            self._learner = None
        with suppress(CheckpointError):  # without its ranks it ends at once, and complete if they had written it
            await self.settle()
        self._checkpoints = None
        if self._engines is not None:
            await self._engines.stop()
        self._placement.close()
        await self.start(report)
        if self._reference is not None:
            await self.refer_to(self._reference)

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
                if shared and self.lost is None:
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

    def prove_with(self, prompts: tuple[Prompt, ...], name: str) -> None:
        """The next sync, and those after it, are proved by these recorded prompts."""
        self.recorded_prompts, self.proof_prompts, self._probe = prompts, name, None

    @property
    def longest_proof_prompt(self) -> int:
        """Tokens, as the engine sees it."""
        from .learner.frame_store import PixelFormat
        from .sync.proof import longest_prompt

        engine = self.settings.engine
        assert engine is not None
        return longest_prompt(engine, PixelFormat.of_folder(Path(engine.model)))

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
            except Exception as error:  # noqa: BLE001 - callers that wait for answers get it, and the run ends
                self._engines.fail(f"the engines, which wait for weights, got none: {error}")
                return

    async def _synchronize(self) -> float:
        from .sync.proof import probe_of
        from .sync.sync import synchronize

        engine = self.settings.engine
        assert engine is not None
        if self._probe is None:
            self._probe = probe_of(engine, self._learner.form, self.settings.episode, self.recorded_prompts)
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
        return bool(stored := self._stored(folder)) and await asyncio.to_thread(fetch, stored, folder)

    def _stored(self, folder: Path) -> str:
        root = self.settings.place.root
        return f"{root}/{folder.name}" if is_uri(root) else ""

    async def refer_to(self, folder: Path) -> None:
        """From here on the KL term pulls towards the weights in `folder` (written by `export`)."""
        async with self._learning:
            await self._learner.run(
                "tapforge_trainer.learner.export:refer_to", str(folder.absolute()), self._stored(folder)
            )
            self._reference = folder

    async def close(self) -> None:
        """Ends what `start` started, however far it came."""
        import ray

        if self._ray is not None:  # a thread can't be cancelled: a Ray that comes up late would be left behind
            await asyncio.gather(self._ray, return_exceptions=True)
        if self._checkpoints is not None:
            self._checkpoints.abandon()
        await self._stop_feeding()
        if self._engines is not None:
            await self._engines.close()
        if self._learner is not None:
            await self._learner.close()
        self._placement.close()
        if self._ray and not self.settings.keep_ray and ray.is_initialized():  # one that others use stays
            await asyncio.to_thread(ray.shutdown)

    async def _stop_feeding(self) -> None:
        tasks = [task for task in (self._engines_ready, self._feeding) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _fresh_optimizer(rank: Any) -> None:
    rank.optimizer.state.clear()
    if rank.critic is not None:
        rank.critic.optimizer.state.clear()
    rank.steps = 0
