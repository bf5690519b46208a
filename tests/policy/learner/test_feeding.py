"""Engines that were started again get the learner's weights between two updates; a sync survives the death of all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tapforge_trainer.engine.client import EngineDied
from tapforge_trainer.placement.settings import EngineSettings
from tapforge_trainer.policy import Policy, PolicySettings
from tapforge_trainer.sync import sync

END = 30.0


class Engines:
    def __init__(self) -> None:
        self.starved = asyncio.Event()
        self.failure = ""
        self.waits = 0

    async def any_up(self) -> None:
        self.waits += 1
        if self.failure:
            raise EngineDied(self.failure)

    def fail(self, why: str) -> None:
        self.failure = why
        self.starved.clear()


def policy_of(monkeypatch: pytest.MonkeyPatch, outcomes: list[Any], given: list[int]) -> tuple[Policy, Engines]:
    """`outcomes`: of the rounds of weights; `given`: the versions that they gave."""
    policy = Policy(PolicySettings(EngineSettings("nowhere", (1,), (1,)), None))
    engines = Engines()

    async def synchronize(learner: Any, engines: Engines, probe: Any, version: int, **_: Any) -> float:
        given.append(version)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        engines.starved.clear()
        return outcome

    async def ready() -> None:
        return None

    monkeypatch.setattr(sync, "synchronize", synchronize)
    policy._engines, policy._probe = engines, object()
    policy._engines_ready = asyncio.ensure_future(ready())
    policy._feeding = asyncio.create_task(policy._feed())
    return policy, engines


def test_a_sole_engine_waits_for_the_end_of_the_update_and_gets_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        given: list[int] = []
        policy, engines = policy_of(monkeypatch, [0.0, EngineDied("again"), 0.0], given)
        await policy.sync(4)
        async with policy.learning(5):
            engines.starved.set()
            await asyncio.sleep(0.01)
            assert given == [4]
        async with asyncio.timeout(END):
            while engines.starved.is_set():  # noqa: ASYNC110 - another task
                await asyncio.sleep(0.001)
        assert given == [4, 5, 5], "the first try found it dead once more"
        assert policy._feeding is not None
        policy._feeding.cancel()

    asyncio.run(go())


def test_a_sync_waits_for_engines_that_start_again_and_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        given: list[int] = []
        policy, engines = policy_of(monkeypatch, [EngineDied("once"), 0.5, EngineDied("for ever")], given)
        assert await policy.sync(1) == 0.5
        assert (given, engines.waits) == ([1, 1], 1)
        engines.failure = "three deaths within an hour"
        with pytest.raises(EngineDied, match="three deaths"):
            await policy.sync(2)
        assert policy._feeding is not None
        policy._feeding.cancel()

    asyncio.run(go())


def test_weights_that_do_not_arrive_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        policy, engines = policy_of(monkeypatch, [sync.SyncMismatch("they differ")], [])
        engines.starved.set()
        assert policy._feeding is not None
        await asyncio.wait_for(policy._feeding, END)
        assert "they differ" in engines.failure

    asyncio.run(go())
