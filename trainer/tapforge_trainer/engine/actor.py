"""A vLLM engine as a Ray actor: one engine, many clients. `wire.py` has the rules of what goes to and fro."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..placement.actor_log import keep_output
from ..placement.placement import ANYWHERE, ActorPlacement
from ..placement.settings import EngineSettings, PauseMode, SleepPart, on_this_node
from .mailboxes import Collected, Mailboxes
from .sampler import Sampler
from .vllm import ADAPTER_ID, environment
from .wire import PROBE, CacheCounts, GenerateRequest, GenerateResult, engine_key

if TYPE_CHECKING:
    from ray.actor import ActorHandle

#: seconds without a poll after which a client is gone, and between two looks at that
CLIENT_SECONDS, SWEEP_SECONDS = 60.0, 15.0


class EngineActor:
    """Methods are called by `EngineClient`, `Engines` and `sync` only. One event loop, one engine thread, one thread
    for frames."""

    def __init__(self, settings: EngineSettings, number: int = 0):
        keep_output(settings.log, number)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._boxes = Mailboxes(CLIENT_SECONDS)
        self._probes: dict[str, asyncio.Future[GenerateResult]] = {}
        self._settings = settings
        #: from `ready` on
        self._sampler: Any = None
        self._sweeper: asyncio.Task[None] | None = None
        self._dead: asyncio.Future[str] | None = None

    async def ready(self) -> None:
        self._loop = asyncio.get_running_loop()
        settings = await asyncio.to_thread(on_this_node, self._settings)
        self._sampler = self._sampler or Sampler(settings, self._from_engine)
        await asyncio.wrap_future(self._sampler.ready)
        self._sweeper = self._sweeper or self._loop.create_task(self._sweep())

    async def stage(self) -> str:
        """What it does until `ready`."""
        return self._sampler.stage if self._sampler is not None else "fetching the model"

    # --- for clients --------------------------------------------------------------------------------------------------

    async def submit(self, client: str, requests: Sequence[tuple], frames: dict[str, bytes]) -> None:
        new = self._boxes.expect(client, [request[0] for request in requests])
        asked = [GenerateRequest(engine_key(client, key), *rest) for key, *rest in requests if key in new]
        self._sampler.submit(asked, frames)

    async def collect(self, client: str, seconds: float) -> Collected | None:
        return await self._boxes.collect(client, seconds)

    async def abort(self, client: str, keys: Sequence[str]) -> None:
        self._sampler.abort(self._boxes.withdraw(client, keys))

    # --- new weights --------------------------------------------------------------------------------------------------

    async def renew(self, payload: Any, version: int, mode: PauseMode) -> int:
        """New weights, or adapters alone, packed by `learner/sharding.py`; results are held back until `release`.
        Returns the number of bytes."""

        def load(llm: Any) -> None:
            if self._settings.lora is not None:
                llm.collective_rpc("load_adapter", kwargs={"adapter_id": ADAPTER_ID, "payload": payload})
                return
            llm.collective_rpc("start_weight_update")
            llm.collective_rpc("watch_arrivals")
            llm.collective_rpc("update_weights", kwargs={"update_info": {"payload": payload}})
            llm.collective_rpc("finish_weight_update")

        await self._standing_still(self._sampler.renew(mode, load, version))
        return len(payload)

    async def sleep(self, mode: PauseMode) -> None:
        """It stands still, without memory on its devices, until a round of weights has woken it."""
        await self._standing_still(self._sampler.sleep(mode))

    async def wake(self, part: SleepPart) -> None:
        await asyncio.wrap_future(self._sampler.wake(part))

    async def devices(self) -> list[str]:
        """UUIDs of the GPUs that the engine works on, by worker."""
        return await asyncio.wrap_future(self._sampler.collective(_gpu_of))

    async def pause(self, mode: PauseMode) -> None:
        await self._standing_still(self._sampler.pause(mode))

    async def proceed(self, version: int) -> None:
        """New weights came in by `worker`; results are held back until `release`."""
        await asyncio.wrap_future(self._sampler.proceed(version))

    async def worker(self, method: str, arguments: dict[str, Any]) -> None:
        """One of the weight-transfer methods of vLLM's workers: `sync/gpu.py` drives them."""
        await asyncio.wrap_future(self._sampler.collective(method, **arguments))

    async def arrivals(self) -> list[Any]:
        """What arrived in this round of weights and how it is held, by worker: `sync/received.py:Report`, or None."""
        return await asyncio.wrap_future(self._sampler.collective("take_arrivals"))

    async def kept(self) -> dict[str, int]:
        """What its caches had of the time before this round of weights: `Sampler.kept`."""
        return dict(self._sampler.kept)

    async def probe(self, requests: Sequence[tuple], frames: dict[str, bytes], seconds: float) -> list[tuple]:
        """Answers of the engine as it is now, also while results are held back."""
        loop = asyncio.get_running_loop()
        keyed = [GenerateRequest(PROBE + request[0], *request[1:]) for request in requests]
        futures = [self._probes.setdefault(request.key, loop.create_future()) for request in keyed]
        self._sampler.submit(keyed, frames)
        try:
            async with asyncio.timeout(seconds):
                answers = [await future for future in futures]
                return [answer.row(answer.key) for answer in answers]
        finally:
            for request in keyed:
                self._probes.pop(request.key, None)

    async def release(self) -> CacheCounts:
        """What the caches did up to now."""
        await asyncio.wrap_future(self._sampler.release())
        self._boxes.proceed()
        return self._sampler.cache_counts

    async def discard(self, why: str, again: bool = False) -> None:
        """`again`: the engine stands still until the round of weights that follows has been proven."""
        await asyncio.wrap_future(self._sampler.discard(why, again))
        if not again:
            self._boxes.proceed()

    # --- life ---------------------------------------------------------------------------------------------------------

    async def watch(self, seconds: float) -> str:
        """Why the engine is dead, as soon as it is; nothing after `seconds` of life."""
        if self._dead is None:
            self._dead = asyncio.wrap_future(self._sampler.dead)
        done, _ = await asyncio.wait({self._dead}, timeout=seconds)
        return self._dead.result() if done else ""

    async def peak_mib(self) -> int:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    async def stop(self) -> None:
        await asyncio.to_thread(self._sampler.stop)

    # --- details ------------------------------------------------------------------------------------------------------

    async def _standing_still(self, done: Any) -> None:
        """From here on until the weights are released or discarded."""
        self._boxes.pause()
        try:
            await asyncio.wrap_future(done)
        except BaseException:
            self._boxes.proceed()
            raise

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if keys := self._boxes.expire():
                self._sampler.abort(keys)

    def _from_engine(self, results: list[GenerateResult]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._arrived, results)

    def _arrived(self, results: list[GenerateResult]) -> None:
        for result in results:
            if not result.key.startswith(PROBE):
                self._boxes.deliver([result])
            elif (future := self._probes.get(result.key)) is not None and not future.done():
                future.set_result(result)


def _gpu_of(worker: Any) -> str:
    import torch

    return str(torch.cuda.get_device_properties(worker.device).uuid)


def kill_engine(actor: ActorHandle) -> None:
    """Also of one that is dead already."""
    import ray

    ray.kill(actor)


def start_engine(settings: EngineSettings, place: ActorPlacement = ANYWHERE, number: int = 0) -> ActorHandle:
    """Returns at once; `ready` says when it answers. `number`: among the run's engines."""
    import ray

    scratch = tempfile.gettempdir()
    actor = ray.remote(EngineActor).options(
        max_concurrency=1000,
        max_restarts=0,
        runtime_env={"env_vars": environment(settings, scratch) | dict(place.environment)},
        **place.options,
    )
    return actor.remote(settings, number)
