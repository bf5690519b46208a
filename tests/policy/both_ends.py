"""Prompts for an engine and what its learner says of the answers; and a hand on the engine: with it a test decides what
is in flight, however fast or slow the machine is, and whatever was sampled."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tiny_samples import Tiny, at_hand, frame, of_generation

from tapforge_trainer.engine.client import EngineClient
from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.records import Generation, Prompt, Sampling

TOLERANCE = 1e-4
SHOTS = [frame(96, 160, k) for k in range(4)]
#: seconds after which something that must happen is taken for something that never will
END = 300.0


def shake(rank: Any, size: float, part: str, seed: int = 0) -> None:
    """Adds noise to the weights whose name holds `part`; the same on every rank."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in rank.policy.model.named_parameters():
            if part in name:
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                changed = whole + size * torch.randn_like(whole)
                if hasattr(parameter, "full_tensor"):
                    from torch.distributed.tensor import distribute_tensor

                    changed = distribute_tensor(changed, parameter.device_mesh, parameter.placements)
                parameter.copy_(changed)


async def gap(tiny: Tiny, learner: Learner, prompts: Sequence[Prompt], said: Sequence[Generation], **how: Any) -> float:
    samples = [of_generation(prompt, generation) for prompt, generation in zip(prompts, said, strict=True)]
    frames = {f.name: f for prompt in prompts for f in prompt.frames}
    mine = await learner.logprobs(samples, at_hand(samples, frames), **how)
    return max(float(np.abs(np.subtract(a, g.logprobs)).max()) for a, g in zip(mine, said, strict=True))


def prompts_of(tiny: Tiny, count: int = 12) -> list[Prompt]:
    shown: list[list[FittedFrame]] = [[SHOTS[0]], [], [SHOTS[1], SHOTS[2]], [SHOTS[3]], [frame(64, 128, 9), SHOTS[0]]]
    return [tiny.prompt(shown[k % 5], k, before=3 + 13 * (k % 11)) for k in range(count)]


_clients: weakref.WeakKeyDictionary[Engines, EngineClient] = weakref.WeakKeyDictionary()


def client_of(engines: Engines) -> EngineClient:
    """The one client that the tests share."""
    if engines not in _clients:
        _clients[engines] = new_client(engines)
    return _clients[engines]


def new_client(engines: Engines, **changes: Any) -> EngineClient:
    client = EngineClient(replace(engines.connection, **changes))
    engines.follow(client.use)
    return client


async def ask(engines: Engines, prompts: Sequence[Prompt], **how: Any) -> list[Generation]:
    options = {"max_tokens": 12} | how
    client = client_of(engines)
    return list(await asyncio.gather(*(client.generate(prompt, Sampling(**options)) for prompt in prompts)))


@dataclass(frozen=True)
class Seen:
    """What is in an engine, between two of its steps."""

    #: keys of all requests that came since the engine was held, without those of probes
    came: frozenset[str]
    in_flight: frozenset[str]
    #: keys of those that wait until new weights are proven
    queued: frozenset[str]


class Hand:
    """On the first engine."""

    def __init__(self, engines: Engines):
        self._actor = engines._engines[0].actor

    async def hold(self) -> None:
        """From here on the engine takes requests and makes no step of its own accord, and no answer ends before its
        last token. New weights let it go."""
        await self._actor.__ray_call__.remote(_hold)

    async def endless(self) -> None:
        """No answer ends before its last token."""
        await self._actor.__ray_call__.remote(_endless)

    async def step(self, count: int) -> None:
        await self._actor.__ray_call__.remote(_step, count)

    async def let_go(self) -> None:
        """As it was, stops included."""
        await self._actor.__ray_call__.remote(_let_go)

    async def look(self) -> Seen:
        return Seen(*await self._actor.__ray_call__.remote(_look))

    async def until(self, condition: Callable[[Seen], bool]) -> Seen:
        async with asyncio.timeout(END):
            while not condition(seen := await self.look()):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.02)
        return seen


# --- in the engine's process ------------------------------------------------------------------------------------------


def _endless(actor: Any) -> None:
    from dataclasses import replace

    sampler = actor._sampler
    if not hasattr(sampler, "first_settings"):
        sampler.first_settings = sampler.settings
    sampler.settings = replace(sampler.settings, stop_ids=())


def _hold(actor: Any) -> None:
    sampler = actor._sampler
    _endless(actor)

    def hold() -> None:
        sampler.came = set()
        add = type(sampler)._add

        def watched(prepared: Any) -> None:
            keys = (one.request.key for one in prepared)
            sampler.came.update(key for key in keys if not key.startswith("probe-"))
            add(sampler, prepared)

        sampler._add = watched
        sampler._paused = True

    sampler.call(hold).result(END)


def _let_go(actor: Any) -> None:
    sampler = actor._sampler

    def let_go() -> None:
        vars(sampler).pop("_add", None)
        sampler.settings = vars(sampler).pop("first_settings", sampler.settings)
        sampler._paused = False

    sampler.call(let_go).result(END)


def _step(actor: Any, count: int) -> None:
    sampler = actor._sampler
    sampler.call(lambda: [sampler._step() for _ in range(count)]).result(END)


def _look(actor: Any) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    sampler = actor._sampler

    def look() -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        assert sampler._llm.has_unfinished_requests() == bool(sampler._unfinished)
        queued = frozenset(one.request.key for one in sampler._queued)
        return frozenset(sampler.came), frozenset(sampler._unfinished), queued

    return sampler.call(look).result(END)


class Player:
    """Has played episodes and returns their frames."""

    def __init__(self, frames: dict[str, FittedFrame]):
        self._frames = frames

    def frames(self, names: Sequence[str], guard: Any) -> dict[str, Any]:
        return {name: self._frames[name] for name in names} | {"guard": guard}


class Elsewhere:
    """Can't be read in the process that made it."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() == state["process"] and state.get("twice"):
            raise AssertionError("the driver fetched an episode's frames")
        self.__dict__ |= state | {"twice": True}
