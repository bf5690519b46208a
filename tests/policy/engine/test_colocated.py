"""Learner and engines that take turns on the same GPUs: who does what in which order, and what becomes of it when one
of them fails. The engines and the learner are made up; what vLLM makes of the calls is in
`tests/families/test_family_engines.py`, as far as a CPU shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import END, FORM, SETTINGS, Actor, asking, until

from tapforge_trainer.engine import pool as engines
from tapforge_trainer.engine.client import EngineClient, EngineDied
from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.frames.handles import FramesLost
from tapforge_trainer.learner.client import LearnerError, RanksLost
from tapforge_trainer.placement.placement import Placement
from tapforge_trainer.placement.settings import LearnerSettings, LoraSettings
from tapforge_trainer.policy import Policy, PolicySettings
from tapforge_trainer.sync import sync

SHARED = replace(SETTINGS, device="cuda", dtype="bfloat16", transfer="ipc", colocated=True)


class Ranks:
    """A learner's part of a sync."""

    def __init__(self, log: list[str]):
        self.log = log
        self.dead = False
        self.lost: RanksLost | None = None
        #: called when they send
        self.sending: Callable[[], None] = lambda: None

    def lose(self, why: str) -> RanksLost:
        self.lost = RanksLost(why)
        return self.lost

    async def run(self, function: str, *arguments: Any, deadline: float | None = None) -> list[int]:
        assert deadline == END or function.endswith("refer_to"), "a sync's, not an update's"
        if self.dead:
            raise LearnerError("a rank died during run")
        self.log.append(function.rsplit(":")[-1])
        if function.endswith(":send"):
            self.sending()
        return [1000, 1000]

    async def weights(self, deadline: float, *, adapters: bool) -> bytes:
        assert adapters and deadline == END
        self.log.append("weights")
        return bytes(10)

    async def address(self, deadline: float) -> str:
        assert deadline == END
        return "tcp://127.0.0.1:1"

    async def ready(self) -> None:
        self.log.append("ranks start")

    async def close(self) -> None:
        self.log.append("ranks end")


class House:
    """A policy whose engines are made up, started and awake."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replicas: int):
        self.log: list[str] = []
        self.actors: list[Actor] = []
        monkeypatch.setattr(engines, "start_engine", lambda settings, place, number: self.start())
        monkeypatch.setattr(engines, "kill_engine", lambda actor: actor.kill())

        async def verify(*_: Any) -> sync.Proof:
            self.log.append("probe")
            if self.mismatches:
                raise self.mismatches.pop(0)
            return sync.Proof({"gap_max": 0.125, "gap_mean": self.mean})

        self.mismatches: list[sync.SyncMismatch] = []
        self.mean = 0.01
        monkeypatch.setattr(sync, "verify", verify)
        self.policy = Policy(PolicySettings(SHARED, None, replicas, sync_seconds=END))
        self.engines = Engines(SHARED, FORM, 99, replicas=replicas)
        self.ranks = Ranks(self.log)
        self.client = EngineClient(self.engines.connection)
        self.engines.follow(self.client.use)
        for name, value in (("_engines", self.engines), ("_learner", self.ranks), ("_probe", object())):
            setattr(self.policy, name, value)

    def start(self) -> Actor:
        actor = Actor()
        actor.rounds = self.log
        actor.started.set()
        self.actors.append(actor)
        return actor


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @asynccontextmanager
    async def made(replicas: int = 1) -> AsyncIterator[House]:
        house = House(monkeypatch, replicas)
        house.policy._engines_ready = asyncio.create_task(house.engines.ready())
        await house.policy._engines_ready
        house.policy._feeding = asyncio.create_task(house.policy._feed())
        try:
            yield house
        finally:
            house.policy._feeding.cancel()
            await house.engines.close()

    return made


#: of a round that has arrived; ranks keep nothing of their pass for the proof
PROVED = ["probe", "give_back_memory", "release"]
WOKEN = ["give_back_memory", "pause", "wake weights", "send", "wake kv_cache", "proceed", *PROVED]


async def test_engines_sleep_while_the_learner_works_and_wake_with_its_weights(house: Any) -> None:
    async with house() as h:
        (task,) = asking(h.client)
        await until(lambda: h.actors[0].asked)
        async with h.policy.learning(1):
            h.log.append("update")
        assert h.log == ["sleep", "update"] and h.engines.asleep
        assert await h.policy.sync(1) == 0.125
        assert h.log == ["sleep", "update", *WOKEN] and not h.engines.asleep
        h.actors[0].answer()
        assert list((await task).versions) == [1, 1], "what was asked before the sleep was kept"
        figures = h.policy.engine_metrics
        assert figures["sync_bytes"] == 1000 and figures["seconds_sync_probe"] >= 0
        assert figures["sync_gigabytes_per_second"] > 0
        h.log.clear()
        await h.policy.sync(2)
        assert h.log == ["pause", "send", "proceed", *PROVED], "they were awake"


async def test_adapters_that_come_alone_come_to_engines_that_are_awake(house: Any) -> None:
    """They lie beside weights that only the engine's own copy brings back, and are gathered while ranks have room."""
    async with house() as h:
        h.engines.settings = replace(SHARED, lora=LoraSettings(4, 8.0))
        async with h.policy.learning(1):
            pass
        await h.policy.sync(1)
        woken = ["weights", "give_back_memory", "pause", "wake weights", "wake kv_cache", "renew", *PROVED]
        assert h.log == ["sleep", *woken] and not h.engines.asleep
        assert h.policy.engine_metrics["sync_bytes"] == 10
        h.log.clear()
        await h.policy.sync(2)
        assert h.log == ["weights", "renew", *PROVED], "they were awake"


async def test_engines_that_slept_while_nothing_was_learned_wake_with_the_weights_as_they_are(house: Any) -> None:
    async with house() as h:
        (task,) = asking(h.client)
        await until(lambda: h.actors[0].asked)
        async with h.policy.learning():
            pass
        assert h.engines.asleep
        h.policy.wake_engines()
        await until(lambda: not h.engines.asleep)
        await until(lambda: h.log == ["sleep", *WOKEN])
        h.actors[0].answer()
        assert list((await task).versions) == [0, 0]


async def test_engines_sleep_again_before_a_full_set_is_sent_once_more(house: Any) -> None:
    """Ranks gather weights in memory that awake engines have taken."""
    async with house() as h:
        (task,) = asking(h.client)
        await until(lambda: h.actors[0].asked)
        async with h.policy.learning(1):
            pass
        h.mismatches.append(sync.SyncMismatch("layer 3 is stale", {"gap_mean": 0.5}))
        assert await h.policy.sync(1) == 0.125
        assert h.log == ["sleep", *WOKEN[:-2], "discard", "sleep", *WOKEN] and not h.engines.asleep
        await until(lambda: h.actors[0].asked)
        h.actors[0].answer()
        assert list((await task).versions) == [1, 1], "it was asked again"
        assert h.policy.engine_metrics["sync_resends"] == 1 and h.policy.engine_metrics["failed_gap_mean"] == 0.5
        await h.policy.sync(2)
        assert h.policy.engine_metrics["sync_resends"] == 0 and "failed_gap_mean" not in h.policy.engine_metrics
        h.mismatches += [sync.SyncMismatch("layer 3 is stale", {"gap_mean": 0.5}), sync.SyncMismatch("and layer 4")]
        with pytest.raises(sync.SyncMismatch, match=r"layer 3 is stale \(gap_mean 0.5\).*once more: and layer 4"):
            await h.policy.sync(3)
        assert h.log[-2:] == ["probe", "discard"] and h.engines.version == 2


@pytest.mark.parametrize(
    "mean, bound, alarm", [(0.05, None, 0), (0.06, None, 1), (0.06, 0.07, 0), (float("nan"), 9, 1)]
)
async def test_a_mean_over_its_bound_raises_the_alarm(
    house: Any, mean: float, bound: float | None, alarm: float
) -> None:
    async with house() as h:
        h.mean, h.policy.settings = mean, replace(h.policy.settings, gap_alarm=bound)
        await h.policy.sync(1)
        assert h.policy.engine_metrics["gap_alarm"] == alarm


async def test_engines_wake_after_work_that_failed(house: Any) -> None:
    """Lost frames: the batch comes again, and phones play meanwhile."""
    async with house() as h:
        await h.policy.sync(1)
        h.log.clear()
        with pytest.raises(FramesLost):
            async with h.policy.learning(2):
                raise FramesLost({"e"})
        # A call is in the log before its caller hears of its end.
        await until(lambda: h.log == ["sleep", *WOKEN] and not h.engines.asleep)
        assert h.engines.version == 1 and not h.engines.starved.is_set()


async def test_when_the_learner_dies_while_engines_sleep_whoever_waits_hears_why(house: Any) -> None:
    async with house() as h:
        (task,) = asking(h.client)
        await until(lambda: h.actors[0].asked)
        with pytest.raises(LearnerError):
            async with h.policy.learning(1):
                h.ranks.dead = True
                raise LearnerError("a rank died during update")
        with pytest.raises(EngineDied, match="wait for weights, got none: a rank died"):
            await asyncio.wait_for(task, END)


async def test_an_engine_that_dies_asleep_is_started_when_the_others_wake(house: Any) -> None:
    async with house(2) as h:
        await h.policy.sync(1)
        async with h.policy.learning(2):
            h.actors[0].kill()
            await until(lambda: h.engines.restarts == 1)
            await asyncio.sleep(0.05)
            assert len(h.actors) == 2, "its GPU is the learner's"
        await h.policy.sync(2)
        assert [replica.index for replica in h.engines.replicas.live] == [1]
        await until(lambda: h.engines._engines[0].up)
        h.log.clear()
        async with h.policy.learning(3):
            assert h.log == ["sleep", "sleep"], "one that has no weights yet sleeps as well"
        await h.policy.sync(3)
        assert [replica.index for replica in h.engines.replicas.live] == [0, 1]


async def test_when_the_only_engine_dies_asleep_the_next_weights_start_it_again(house: Any) -> None:
    async with house() as h:
        await h.policy.sync(1)
        async with h.policy.learning(2):
            h.actors[0].kill()
            await until(lambda: h.engines.restarts == 1)
        h.log.clear()
        make, h.start = h.start, lambda: h.log.append("start") or make()
        await asyncio.wait_for(h.policy.sync(2), END)
        assert [(r.index, r.incarnation) for r in h.engines.replicas.live] == [(0, 1)] and h.actors[1].version == 2
        assert h.log.index("give_back_memory") < h.log.index("start"), "it finds its memory free"


async def test_the_learner_waits_for_an_engine_that_is_starting(house: Any) -> None:
    async with house(2) as h:
        await h.policy.sync(1)
        late = Actor()
        late.rounds = h.log
        h.start = lambda: h.actors.append(late) or late
        h.actors[0].kill()
        await until(lambda: len(h.actors) == 3)
        h.log.clear()

        async def learn() -> None:
            async with h.policy.learning(2):
                h.log.append("update")

        learning = asyncio.create_task(learn())
        await asyncio.sleep(0.05)
        assert h.log == []
        late.started.set()
        await asyncio.wait_for(learning, END)
        assert h.log == ["sleep", "sleep", "update"]


@pytest.mark.parametrize("call", ["wake weights", "wake kv_cache"])
async def test_engines_that_do_not_wake_answer_nobody_and_the_sync_says_so(house: Any, call: str) -> None:
    async with house() as h:
        async with h.policy.learning(1):
            pass
        h.actors[0].failing[call] = RuntimeError("CUDA out of memory")
        with pytest.raises(Exception, match="CUDA out of memory"):
            await h.policy.sync(1)
        assert h.engines.version == 0 and h.engines.asleep


async def test_an_engine_that_dies_in_a_transfer_is_the_end_of_all_and_they_start_anew(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs are given back in between, and who waits for an answer gets one."""
    from tapforge_trainer import policy as driver
    from tapforge_trainer.learner import client as learner

    async with house(2) as h:
        await h.policy.sync(1)
        (task,) = asking(h.client, engine=0)
        await until(lambda: h.actors[0].asked)

        def die() -> None:
            h.actors[1].kill()
            raise LearnerError("send failed on a rank: ncclRemoteError")

        h.ranks.sending = die
        with pytest.raises(RanksLost, match="an engine died while it got its weights: send failed on a rank"):
            await h.policy.sync(2)
        assert h.policy.lost is h.ranks.lost is not None
        h.policy._feeding.cancel()
        h.policy.settings = replace(h.policy.settings, learner=LearnerSettings("nowhere", (1,)))
        fresh, places = Ranks(h.log), list[str]()
        monkeypatch.setattr(learner, "Learner", lambda settings, given: fresh)

        async def placed(*_: Any) -> Any:
            places.append("placed")
            return Placement()

        async def start_ray() -> None:
            pass

        monkeypatch.setattr(driver, "placed", placed)
        monkeypatch.setattr(h.policy, "start_ray", start_ray)
        h.policy._placement = SimpleNamespace(close=lambda: places.append("given back"))
        h.policy._reference = Path("reference")
        h.log.clear()
        await asyncio.wait_for(h.policy.restart(), END)
        assert places == ["given back", "placed"] and h.log == ["ranks end", "ranks start", "refer_to"]
        assert all(actor.killed for actor in h.actors[:3]) and h.policy.lost is None
        assert all(replica.incarnation > 0 for replica in h.engines.replicas.live)
        await h.policy.sync(1)
        assert {actor.version for actor in h.actors[-2:]} == {1}
        await until(lambda: any(actor.asked for actor in h.actors[-2:]))
        for actor in h.actors[-2:]:
            actor.answer()
        assert list((await asyncio.wait_for(task, END)).versions) == [1, 1]


async def test_a_transfer_that_fails_while_all_live_is_the_end_of_the_run(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_DEATH_IS_KNOWN", 0.05)
    async with house(2) as h:

        def refuse() -> None:
            raise LearnerError("send failed on a rank: weights can't be handed over within a GPU")

        h.ranks.sending = refuse
        with pytest.raises(LearnerError, match="within a GPU"):
            await h.policy.sync(1)
        assert h.policy.lost is None, "it would fail the same way again"


async def test_learner_and_engines_start_one_after_another_where_they_share_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine measures how much memory is free, and takes its share of that."""
    from tapforge_trainer import policy as driver
    from tapforge_trainer.engine import client as engine_client
    from tapforge_trainer.learner import client as learner
    from tapforge_trainer.learner import frame_store as frames

    log: list[str] = []

    def starting(name: str) -> Any:
        async def ready() -> None:
            log.append(f"{name} starts")
            await asyncio.sleep(0.01)
            log.append(f"{name} is ready")

        starved = asyncio.Event()
        return lambda *_, **__: SimpleNamespace(ready=ready, connection=None, follow=lambda _: None, starved=starved)

    async def nothing(*_: Any) -> Any:
        return SimpleNamespace(ranks=(), engines=())

    monkeypatch.setattr(learner, "Learner", starting("learner"))
    monkeypatch.setattr(engines, "Engines", starting("engine"))
    monkeypatch.setattr(engine_client, "EngineClient", lambda _: SimpleNamespace(use=None))
    monkeypatch.setattr(driver.ModelConfig, "of_folder", lambda _: SimpleNamespace(image_token=9))
    monkeypatch.setattr(frames.PixelFormat, "of_folder", lambda _: FORM)
    for shared, first in (
        (True, ["learner starts", "learner is ready"]),
        (False, ["learner starts", "engine starts"]),
    ):
        log.clear()
        settings = PolicySettings(replace(SHARED, colocated=shared), LearnerSettings("nowhere", (1,)))
        policy = Policy(settings)
        monkeypatch.setattr(policy, "start_ray", nothing)
        monkeypatch.setattr(driver, "placed", nothing)
        await policy.start()
        await until(lambda: len(log) == 4)
        assert log[:2] == first
        assert policy._feeding is not None
        policy._feeding.cancel()
