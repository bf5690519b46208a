"""A server of one of `spec.models` as a Ray actor: it fetches the model, starts vLLM's OpenAI server beside itself on
its GPUs, and says how it is. Whatever becomes of the actor, the server ends with it (`guard.py`)."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..model_source.resolve import resolve, stay_offline
from ..placement.actor_log import keep_output
from ..placement.placement import ANYWHERE, ActorPlacement
from .settings import ServerSettings, arguments, environment

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_SERVER: Final = "vllm.entrypoints.openai.api_server"
#: between two looks at a server that starts, and at one that is up, seconds
_LOOK, _PULSE = 0.5, 5.0
#: for its word on how it is; so many in a row that don't come, and it is dead
_HEALTH_SECONDS, _SILENT = 30.0, 3
#: last lines of its output that an error shows
_LINES: Final = 8


class ServerActor:
    """Methods are called by `ModelServers` only."""

    def __init__(self, settings: ServerSettings, number: int):
        keep_output(settings.log, number)
        self._settings = settings
        self._stage = "fetching the model"
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._url = ""
        #: times in a row that it gave no word on how it is
        self._silent = 0

    async def ready(self) -> str:
        """Its url, once it answers."""
        settings = self._settings
        folder = await asyncio.to_thread(resolve, settings.source, seconds=settings.start_seconds, quantized=True)
        stay_offline()
        self._stage = "loading the model"
        host, port = "127.0.0.1" if settings.one_machine else own_address(), 0
        with closing(socket.socket()) as found:
            found.bind((host, 0))
            port = found.getsockname()[1]
        own = arguments(settings, Path(folder), host, port)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tapforge_trainer.serving.guard", _SERVER, *own),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **environment(settings, os.environ)},
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read())
        url = f"http://{host}:{port}"
        while not await _answers(url, 2.0):
            if self._process.returncode is not None:
                raise RuntimeError(await self._ended())
            await asyncio.sleep(_LOOK)
        self._stage, self._url = "", url
        return f"{url}/v1"

    async def stage(self) -> str:
        return self._stage

    async def watch(self, seconds: float) -> str:
        """Why the server is dead, as soon as it is; nothing after `seconds` of life."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PULSE):
                    await self._process.wait()
                    return await self._ended()
            self._silent = 0 if await _answers(self._url, _HEALTH_SECONDS) else self._silent + 1
            if self._silent >= _SILENT:
                return f"it has not said that it is well {_SILENT} times in a row, within {_HEALTH_SECONDS:g} s each"
        return ""

    async def _ended(self) -> str:
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=2.0)
        said = "; ".join(line for line in self._lines if line)
        return f"its server ended; last words: {said[-600:] or 'none'}"

    async def _read(self) -> None:
        """What it writes goes to this process's own output, and what isn't only for information is kept for errors."""
        assert self._process is not None and self._process.stdout is not None
        async for raw in _lines(self._process.stdout):
            text = raw.decode(errors="replace").rstrip()
            print(text, file=sys.stderr, flush=True)
            if " INFO " not in text:
                self._lines.append(" ".join(text.split())[-300:])


async def _lines(stream: asyncio.StreamReader) -> Any:
    while True:
        try:
            raw = await stream.readline()
        except ValueError:  # a line that is longer than the stream's limit
            continue
        if not raw:
            return
        yield raw


async def _answers(url: str, seconds: float) -> bool:
    import aiohttp

    limits = aiohttp.ClientTimeout(total=seconds)
    try:
        async with aiohttp.ClientSession(timeout=limits) as session, session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def own_address() -> str:
    """Of this node, as the other nodes of its Ray reach it."""
    import ray

    return str(ray.util.get_node_ip_address())


def start_server(settings: ServerSettings, place: ActorPlacement = ANYWHERE, number: int = 0) -> ActorHandle:
    """Returns at once; `ready` says where it answers. `number`: among the run's servers."""
    import ray

    actor = ray.remote(ServerActor).options(
        max_concurrency=8,
        max_restarts=0,
        runtime_env={"env_vars": dict(place.environment)},
        **place.options,
    )
    return actor.remote(settings, number)
