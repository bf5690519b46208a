"""The engine's actor, and the driver's hold on engines that die and start again, with engines of this process. What
vLLM and Ray make of it is in `test_in_flight.py` and `test_replicas.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import END, FORM, SETTINGS, Actor, asking, until

from tapforge_trainer.engine import actor as engine
from tapforge_trainer.engine import pool as engines
from tapforge_trainer.engine.actor import EngineActor
from tapforge_trainer.engine.client import EngineClient, EngineDied
from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.engine.sampler import Sampler, clear_scratch
from tapforge_trainer.engine.wire import GenerateRequest, GenerateResult
from tapforge_trainer.placement.settings import EngineSettings

# --- the engine's actor -----------------------------------------------------------------------------------------------


class Silent:
    """A sampler that answers nothing."""

    def __init__(self, settings: EngineSettings, on_done: Callable[[list[GenerateResult]], None]):
        self.ready: Future[None] = Future()
        self.ready.set_result(None)
        self.dead: Future[str] = Future()
        self.aborted: list[str] = []
        self.work: Future[None] = Future()

    def submit(self, requests: Sequence[GenerateRequest], frames: dict[str, bytes]) -> None:
        """They are sampled for ever."""

    def abort(self, keys: Sequence[str]) -> None:
        self.aborted += keys

    def renew(self, *_: Any) -> Future[None]:
        return self.work

    def discard(self, why: str, again: bool) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


async def test_the_engine_aborts_what_a_client_asked_for_that_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Sampler", Silent)
    monkeypatch.setattr(engine, "CLIENT_SECONDS", 0.01)
    monkeypatch.setattr(engine, "SWEEP_SECONDS", 0.005)
    actor = EngineActor(SETTINGS)
    await actor.ready()
    poll = asyncio.create_task(actor.collect("a", END))
    await asyncio.sleep(0)
    for client in ("a", "b"):
        await actor.submit(client, [("0", (1,), (), 4, 1.0, None)], {})
    sampler: Any = actor._sampler
    await until(lambda: sampler.aborted)
    await asyncio.sleep(0.05)
    assert sampler.aborted == ["b/0"], "a polls, however long it takes"
    poll.cancel()
    await until(lambda: sampler.aborted == ["b/0", "a/0"])


async def test_an_engine_stands_still_from_the_first_step_of_a_sync_to_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a step fails: `discard` comes after it."""

    monkeypatch.setattr(engine, "Sampler", Silent)
    actor = EngineActor(SETTINGS)
    await actor.ready()
    sampler: Any = actor._sampler
    await actor.submit("a", [("0", (1,), (), 4, 1.0, None)], {})
    poll = asyncio.create_task(actor.collect("a", END))
    await asyncio.sleep(0)
    renewing = asyncio.create_task(actor.renew(b"", 1, "keep"))
    said = await asyncio.wait_for(poll, END)
    assert said is not None and said[:2] == ([], True)
    sampler.work.set_result(None)
    await renewing
    poll = asyncio.create_task(actor.collect("a", END))
    await asyncio.sleep(0.01)
    assert not poll.done()
    await actor.discard("they differ")
    said = await asyncio.wait_for(poll, END)
    assert said is not None and said[1] is False and said[2] > 0
    sampler.work = Future()
    sampler.work.set_exception(ValueError("no weights"))
    with pytest.raises(ValueError, match="no weights"):
        await actor.renew(b"", 2, "keep")
    assert not actor._boxes._pauses.paused
    sampler.dead.set_result("out of memory")
    assert await actor.watch(END) == "out of memory"


def test_what_is_in_flight_has_the_time_of_an_answer_to_end_before_new_weights() -> None:
    sampler = Sampler.__new__(Sampler)  # without its thread and its engine
    sampler.settings = replace(SETTINGS, answer_seconds=0.0)
    sampler._llm = SimpleNamespace(has_unfinished_requests=lambda: True)
    sampler._queued, sampler._unfinished = [], {"a/0"}
    with pytest.raises(TimeoutError, match="1 requests did not finish within 0 s before a weight sync"):
        sampler._pause("wait")
    assert not sampler._draining


@pytest.mark.parametrize("device, said", [("cpu", []), ("cuda", ["synchronize_device"])])
def test_no_step_is_in_flight_on_a_gpu_when_weights_come(device: str, said: list[str]) -> None:
    """vLLM schedules a step ahead there, whose collectives would meet those that bring the weights."""
    from vllm.v1.worker.worker_base import WorkerBase

    asked: list[str] = []
    sampler = Sampler.__new__(Sampler)
    sampler.settings = replace(SETTINGS, device=device)
    sampler._llm = SimpleNamespace(collective_rpc=asked.append)
    sampler._pause("keep")
    assert sampler._paused and asked == said and all(hasattr(WorkerBase, method) for method in asked)


def test_what_vllm_does_not_put_back_on_waking_is_as_it_takes_it_to_be() -> None:
    """Of vLLM's own model, without its layers: a step without frames adds these tensors to the first layers' inputs,
    and a GPU that slept holds there what its memory holds. They are neither parameters nor buffers."""
    import torch
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Model

    model = Model.__new__(Model)
    torch.nn.Module.__init__(model)
    model.deepstack_num_level = 3
    model.deepstack_input_embeds = [torch.zeros(16, 8) for _ in range(3)]
    assert not list(model.named_buffers()) + list(model.named_parameters())
    worker, said = SimpleNamespace(get_model=lambda: model), []

    def wake_up(tags: list[str]) -> None:
        said.append(tags)
        if tags == ["weights"]:
            for tensor in model.deepstack_input_embeds:
                tensor.fill_(float("nan"))

    sampler = Sampler.__new__(Sampler)
    sampler._llm = SimpleNamespace(wake_up=wake_up, collective_rpc=lambda function: function(worker))
    sampler._wake("weights")
    sampler._wake("kv_cache")
    assert said == [["weights"], ["kv_cache"]]
    taken = model._get_deepstack_input_embeds(16).tensors
    assert len(taken) == 3 and all(bool((tensor == 0).all()) for tensor in taken.values())
    clear_scratch(SimpleNamespace(get_model=torch.nn.Module))  # another family's


def test_an_engine_that_sleeps_is_not_put_to_sleep_again() -> None:
    """Each step of a warm start asks for it, and vLLM would drop its caches and say so each time."""
    said: list[str] = []

    def sleep(level: int, mode: str) -> None:
        said.append(f"sleep {level}")

    def wake_up(tags: list[str]) -> None:
        said.extend(tags)

    llm = SimpleNamespace(sleep=sleep, wake_up=wake_up, collective_rpc=lambda function: None)
    sampler = Sampler.__new__(Sampler)
    sampler.settings, sampler._llm, sampler._asleep = SETTINGS, llm, False
    for _ in range(3):
        sampler._sleep("keep")
    sampler._wake("weights")
    sampler._wake("kv_cache")
    sampler._sleep("keep")
    assert said == ["sleep 2", "weights", "kv_cache", "sleep 2"] and sampler._paused


# --- the driver's hold ------------------------------------------------------------------------------------------------


class Fleet:
    """Engines whose starts and deaths a test decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replicas: int):
        self.actors: list[Actor] = []
        monkeypatch.setattr(engines, "start_engine", lambda settings, place, number: self.start())
        monkeypatch.setattr(engines, "kill_engine", lambda actor: actor.kill())
        self.engines = Engines(SETTINGS, FORM, 99, replicas=replicas)
        self.client = EngineClient(self.engines.connection)
        self.engines.follow(self.client.use)

    def start(self) -> Actor:
        self.actors.append(Actor())
        return self.actors[-1]

    async def up(self) -> Fleet:
        for actor in self.actors:
            actor.started.set()
        await self.engines.ready()
        return self

    async def renewed(self, version: int) -> None:
        await self.engines.renew(b"", version, "keep", END)
        await self.engines.release(version, END)

    @property
    def live(self) -> list[tuple[int, int]]:
        return [(replica.index, replica.incarnation) for replica in self.engines.replicas.live]


async def test_until_an_engine_is_up_it_says_what_it_does_and_its_last_word_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await asyncio.to_thread(import_module, "ray.exceptions")  # the fakes import it at the first call
    monkeypatch.setattr(engines, "_STAGE_SECONDS", 1.0)
    fleet = Fleet(monkeypatch, 2)
    fleet.actors[1].deaf = True
    assert await fleet.engines.waiting() == ["an engine (loading weights)", "an engine (its process)"]
    fleet.actors[0].deaf, fleet.actors[1].deaf = True, False
    assert await fleet.engines.waiting() == ["an engine (loading weights)"] * 2
    fleet.actors[0].deaf = False
    await fleet.up()
    assert await fleet.engines.waiting() == []
    await fleet.engines.close()


async def test_a_dead_engine_starts_again_beside_the_others_and_joins_with_the_next_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await Fleet(monkeypatch, 2).up()
    await fleet.renewed(1)
    rates = {"prefix_cache_hit_rate": 0.4, "mm_cache_hit_rate": 0.5, "encoder_cache_hit_rate": 0.75}
    assert fleet.engines.metrics == {**rates, "sync_dropped_tokens": 2 * 48, "engine_restarts": 0}
    tasks = asking(fleet.client, 3, engine=1)
    await until(lambda: len(fleet.actors[1].asked) == 3)
    fleet.actors[1].kill()
    await until(lambda: len(fleet.actors[0].asked) == 3)
    fleet.actors[0].answer()
    assert {v for g in await asyncio.gather(*tasks) for v in g.versions} == {1}
    await until(lambda: len(fleet.actors) == 3)
    assert fleet.live == [(0, 0)]
    fleet.actors[2].started.set()
    await until(lambda: fleet.engines._engines[1].up)
    assert fleet.live == [(0, 0)] and not fleet.engines.starved.is_set(), "it has old weights"
    await fleet.renewed(2)
    assert fleet.live == [(0, 0), (1, 1)]
    (task,) = asking(fleet.client, 1, engine=1)
    await until(lambda: fleet.actors[2].asked)
    fleet.actors[2].answer()
    assert list((await task).versions) == [2, 2]
    await fleet.engines.close()


async def test_an_engine_that_dies_between_weights_and_their_proof_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = await Fleet(monkeypatch, 2).up()
    await fleet.engines.renew(b"", 1, "keep", END)
    fleet.actors[0].kill()
    await fleet.engines.release(1, END)
    assert fleet.live == [(1, 0)] and fleet.engines.version == 1
    await fleet.engines.renew(b"", 2, "keep", END)
    fleet.actors[1].kill()
    with pytest.raises(EngineDied):
        await fleet.engines.release(2, END)
    assert fleet.live == [] and fleet.engines.version == 1
    await fleet.engines.close()


async def test_a_sole_engine_asks_for_weights_when_it_is_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = await Fleet(monkeypatch, 1).up()
    await fleet.renewed(1)
    (task,) = asking(fleet.client)
    await until(lambda: fleet.actors[0].asked)
    fleet.actors[0].kill()
    await until(lambda: len(fleet.actors) == 2)
    assert not fleet.engines.starved.is_set() and not task.done()
    fleet.actors[1].started.set()
    await asyncio.wait_for(fleet.engines.starved.wait(), END)
    await fleet.renewed(1)
    assert not fleet.engines.starved.is_set()
    await until(lambda: fleet.actors[1].asked)
    fleet.actors[1].answer()
    assert list((await task).versions) == [1, 1]
    await fleet.engines.close()


async def test_an_engine_that_dies_again_and_again_ends_the_run_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await Fleet(monkeypatch, 1).up()
    await fleet.renewed(1)
    (task,) = asking(fleet.client)
    for start in range(3):
        await until(lambda: len(fleet.actors) == start + 1)  # noqa: B023 - awaited at once
        fleet.actors[-1].kill()  # the later ones while they start
    with pytest.raises(EngineDied, match=r"engine 0 died during ready.*started again 2 times within an hour"):
        await asyncio.wait_for(task, END)
    with pytest.raises(EngineDied, match="within an hour"):
        await fleet.engines.any_up()
    with pytest.raises(EngineDied, match="within an hour"):
        await fleet.engines.renew(b"", 2, "keep", END)
    await fleet.engines.close()


async def test_without_weights_of_a_learner_an_engine_is_there_as_soon_as_it_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await Fleet(monkeypatch, 1).up()
    fleet.actors[0].kill()
    await until(lambda: len(fleet.actors) == 2)
    fleet.actors[1].started.set()
    await until(lambda: fleet.live == [(0, 1)])
    await fleet.engines.close()
