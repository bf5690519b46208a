"""A vLLM engine as a Ray actor. `engine_client.py` is the other end of the wire.

Rules of the wire:
- `submit` takes many requests in one call and answers nothing; `collect` is one long poll that returns all results
  there are as soon as there is one, or nothing after its time. So the price of a Ray call is paid per engine step,
  not per request.
- Frames travel once: later requests name them by content hash. When the bounded store has dropped one, the result says
  `missing` and the client asks again with bytes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .sampler import PROBE, Request, Result, Sampler
from .settings import EngineSettings, PauseMode
from .vllm_start import environment

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class EngineActor:
    """Methods are called by `EngineClient` and `sync` only. One event loop, one engine thread."""

    def __init__(self, settings: EngineSettings):
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: list[Result] = []
        self._some = asyncio.Event()
        self._probes: dict[str, asyncio.Future[Result]] = {}
        self._sampler = Sampler(settings, self._from_engine)

    async def ready(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.wrap_future(self._sampler.ready)

    async def submit(self, requests: Sequence[tuple], frames: dict[str, bytes]) -> None:
        self._sampler.submit([Request(*request) for request in requests], frames)

    async def collect(self, seconds: float) -> list[tuple]:
        if not self._done:
            self._some.clear()
            try:
                await asyncio.wait_for(self._some.wait(), seconds)
            except TimeoutError:
                return []
        done, self._done = self._done, []
        return [_row(result) for result in done]

    async def abort(self, keys: Sequence[str]) -> None:
        self._sampler.abort(keys)

    async def renew(self, payload: Any, version: int, mode: PauseMode) -> None:
        """New weights from `weight_transfer.pack` bytes; results are held back until `release`."""

        def load(llm: Any) -> None:
            llm.collective_rpc("start_weight_update")
            llm.collective_rpc("update_weights", kwargs={"update_info": {"payload": payload}})
            llm.collective_rpc("finish_weight_update")

        await asyncio.wrap_future(self._sampler.renew(mode, load, version))

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.wrap_future(self._sampler.pause(mode))

    async def proceed(self, version: int) -> None:
        """New weights came in by `worker`; results are held back until `release`."""
        await asyncio.wrap_future(self._sampler.proceed(version))

    async def worker(self, method: str, arguments: dict[str, Any]) -> None:
        """One of the weight-transfer methods of vLLM's workers: `gpu_transfer` drives them."""
        await asyncio.wrap_future(self._sampler.collective(method, **arguments))

    async def probe(self, requests: Sequence[tuple], frames: dict[str, bytes], seconds: float) -> list[tuple]:
        """Answers of the engine as it is now, also while results are held back."""
        loop = asyncio.get_running_loop()
        keyed = [Request(PROBE + request[0], *request[1:]) for request in requests]
        futures = [self._probes.setdefault(request.key, loop.create_future()) for request in keyed]
        self._sampler.submit(keyed, frames)
        try:
            async with asyncio.timeout(seconds):
                return [_row(await future) for future in futures]
        finally:
            for request in keyed:
                self._probes.pop(request.key, None)

    async def release(self) -> None:
        await asyncio.wrap_future(self._sampler.release())

    async def discard(self, why: str) -> None:
        await asyncio.wrap_future(self._sampler.discard(why))

    async def peak_mib(self) -> int:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    async def stop(self) -> None:
        await asyncio.to_thread(self._sampler.stop)

    def _from_engine(self, results: list[Result]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._arrived, results)

    def _arrived(self, results: list[Result]) -> None:
        for result in results:
            future = self._probes.get(result.key)
            if future is None:
                self._done.append(result)
            elif not future.done():
                future.set_result(result)
        if self._done:
            self._some.set()


def _row(result: Result) -> tuple:
    return (
        result.key,
        result.prompt_ids,
        result.ids,
        result.logprobs,
        result.versions,
        result.finish_reason,
        result.error,
        result.missing,
    )


def start_engine(settings: EngineSettings) -> ActorHandle:
    """Returns at once; `ready` says when it answers."""
    import ray

    scratch = tempfile.gettempdir()
    gpus = 0.5 if settings.transfer == "ipc" else 1  # IPC: engine and rank share a GPU
    resources: dict[str, Any] = {"num_cpus": 0} if settings.device == "cpu" else {"num_cpus": 1, "num_gpus": gpus}
    actor = ray.remote(EngineActor).options(
        max_concurrency=1000,
        max_restarts=0,
        runtime_env={"env_vars": environment(settings, scratch)},
        **resources,
    )
    return actor.remote(settings)
