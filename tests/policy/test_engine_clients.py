"""Several clients and one engine, deadlines that stand still, engines that die: with actors of this process, so that
each moment is chosen. What vLLM and Ray make of it is in `test_in_flight.py` and `test_replicas.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_trainer.frames import FittedFrame
from tapforge_trainer.policy import engine, engines
from tapforge_trainer.policy.engine import EngineActor
from tapforge_trainer.policy.engine_client import EngineClient, EngineDied, EngineError, called
from tapforge_trainer.policy.engines import Engines, RestartBudget
from tapforge_trainer.policy.frames import PixelFormat
from tapforge_trainer.policy.mailboxes import Mailboxes
from tapforge_trainer.policy.pauses import Deadline, PauseMeter, PauseReading
from tapforge_trainer.policy.sampler import Sampler
from tapforge_trainer.policy.settings import EngineSettings
from tapforge_trainer.policy.wire import (
    DEAD,
    CacheCounts,
    EngineConnection,
    Replica,
    Replicas,
    Request,
    Result,
    engine_key,
)
from tapforge_trainer.records import Generation, Prompt, Sampling

FORM = PixelFormat(16, 2, (0.5,) * 3, (0.5,) * 3)
SETTINGS = EngineSettings("nowhere", (1, 2), (2,), restarts_per_hour=2)
PROMPT = Prompt((5, 6, 7), (), 3)
#: seconds after which something that must happen is taken for something that never will
END = 30.0


class Remote:
    """A method as Ray's handles have it."""

    def __init__(self, actor: Actor, method: Callable[..., Awaitable[Any]]):
        self._actor, self._method = actor, method

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._actor.until_killed(self._method(*arguments)))


class Actor:
    """An engine without a model. Answers when `answer` is called, with the version that it has."""

    def __init__(self) -> None:
        self.boxes = Mailboxes(60.0)
        self.asked: dict[str, int] = {}
        self.aborted: list[str] = []
        self.version = 0
        self.rounds: list[str] = []
        self.started = asyncio.Event()
        #: polls come to nothing
        self.deaf = False
        self._killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> Remote:
        return Remote(self, getattr(type(self), f"on_{name}").__get__(self))

    def kill(self) -> None:
        if not self._killed.done():
            self._killed.set_result(None)

    @property
    def killed(self) -> bool:
        return self._killed.done()

    def answer(self) -> None:
        """All that was asked."""
        ids = np.asarray([1, 2], np.int32).tobytes()
        prompt, said = np.asarray(PROMPT.ids, np.int32).tobytes(), np.zeros(2, np.float32).tobytes()
        keys, self.asked = self.asked, {}
        self.boxes.deliver([Result(key, prompt, ids, said, ((self.version, 0, 2),), "stop") for key in keys])

    async def until_killed(self, work: Awaitable[Any]) -> Any:
        from ray.exceptions import ActorDiedError

        task = asyncio.ensure_future(work)
        await asyncio.wait({task, self._killed}, return_when=asyncio.FIRST_COMPLETED)
        if self._killed.done():
            task.cancel()
            raise ActorDiedError()
        return await task

    async def on_ready(self) -> None:
        await self.started.wait()

    async def on_submit(self, client: str, requests: Sequence[tuple], frames: dict[str, bytes]) -> None:
        for key in self.boxes.expect(client, [request[0] for request in requests]):
            self.asked[engine_key(client, key)] = 1

    async def on_collect(self, client: str, seconds: float) -> Any:
        if self.deaf:
            await asyncio.sleep(0.001)
            return [], False, 0.0
        return await self.boxes.collect(client, seconds)

    async def on_abort(self, client: str, keys: Sequence[str]) -> None:
        for key in self.boxes.withdraw(client, keys):
            self.aborted.append(key)
            del self.asked[key]

    async def on_watch(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return ""

    async def on_renew(self, payload: Any, version: int, mode: str) -> None:
        self.rounds.append("renew")
        self.boxes.pause()
        self.version = version

    async def on_release(self) -> CacheCounts:
        self.rounds.append("release")
        self.boxes.proceed()
        return CacheCounts(10, 4, 2, 1)


def connected(*actors: Actor, answer_seconds: float = END, pause_seconds: float = END) -> EngineConnection:
    live = tuple(Replica(index, 0, actor) for index, actor in enumerate(actors))
    return EngineConnection(FORM, 99, answer_seconds, pause_seconds, Replicas(1, live))


def asking(client: EngineClient, count: int = 1, engine: int | None = None) -> list[asyncio.Task[Generation]]:
    return [asyncio.create_task(client.generate(PROMPT, Sampling(4, engine=engine))) for _ in range(count)]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(END):
        while not condition():  # noqa: ASYNC110 - other tasks of this loop
            await asyncio.sleep(0.001)


# --- keys and deadlines ----------------------------------------------------------------------------------------------


def test_a_deadline_stands_still_with_its_engine_and_no_longer_than_it_may() -> None:
    reading = PauseReading()
    deadline = Deadline(seconds=10, pause_seconds=100, started=0)
    deadline.move(reading, 0)
    reading.read(False, 500, 1)  # what was before the first reading is nobody's pause
    assert deadline.left(4) == 6
    reading.read(True, 500, 4)
    assert deadline.left(50) == 6
    reading.read(False, 546, 50)
    assert deadline.left(51) == 5
    deadline.move(None, 51)  # its engine died, and is started again
    assert deadline.left(54) == 5
    other = PauseReading()
    other.read(True, 0, 53)
    deadline.move(other, 54)
    assert deadline.left(95) == 5
    assert deadline.left(1000) == 10 - 1000 + 100


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 9)), max_size=20))
def test_a_reading_follows_the_meter(story: list[tuple[bool, float]]) -> None:
    now, paused, begun = 0.0, 0.0, False
    meter, reading = PauseMeter(lambda: now), PauseReading()
    reading.read(False, 0, 0)
    for stands, seconds in story:
        (meter.pause if stands else meter.proceed)()
        reading.read(meter.paused, meter.seconds, now)
        now += seconds
        paused, begun = paused + seconds * stands, stands
        assert meter.paused == begun
        assert meter.seconds == pytest.approx(paused) and reading.until(now) == pytest.approx(paused)


def test_restarts_are_so_many_an_hour() -> None:
    budget = RestartBudget(2)
    assert [budget.spend(now) for now in (0, 1000, 3000, 3601, 3602, 4601)] == [True, True, False, True, False, True]


def test_the_engine_tells_its_clients_apart_and_gives_up_those_that_are_gone() -> None:
    async def go() -> None:
        now = 0.0
        boxes = Mailboxes(60, lambda: now)
        assert boxes.expect("a", ["0", "1"]) == {"0", "1"} and boxes.expect("b", ["0"]) == {"0"}
        assert boxes.expect("a", ["1", "2"]) == {"2"}, "asking twice is asking once"
        boxes.deliver([Result("a/0"), Result("b/0"), Result("a/7"), Result("c/0")])
        assert [row[0] for row in (await boxes.collect("a", 0))[0]] == ["0"]  # type: ignore[index]
        assert boxes.withdraw("a", ["1", "0"]) == ["a/1"]
        now = 61
        boxes.expect("b", ["1"])
        assert boxes.expire() == ["a/2"]
        assert await boxes.collect("a", 0) is None, "it is told, once"
        assert (await boxes.collect("a", 0))[0] == []  # type: ignore[index]
        assert [row[0] for row in (await boxes.collect("b", 0))[0]] == ["0"]  # type: ignore[index]

    asyncio.run(go())


def test_of_two_polls_the_newer_one_gets_the_results() -> None:
    """The older one's answer may be on its way to nobody."""

    async def go() -> None:
        boxes = Mailboxes(60)
        boxes.expect("a", ["0"])
        polls = [asyncio.create_task(boxes.collect("a", END)) for _ in range(2)]
        await asyncio.sleep(0)
        boxes.deliver([Result("a/0")])
        found = await asyncio.wait_for(asyncio.gather(*polls), END)
        assert [[row[0] for row in rows] for rows, *_ in found] == [[], ["0"]]  # type: ignore[misc]

    asyncio.run(go())


# --- clients ----------------------------------------------------------------------------------------------------------


def test_two_clients_of_one_engine_get_their_own_answers_and_one_that_leaves_harms_nobody() -> None:
    async def go() -> None:
        actor = Actor()
        first, second = EngineClient(connected(actor)), EngineClient(connected(actor))
        mine, others = asking(first, 3), asking(second, 2)
        await until(lambda: len(actor.asked) == 5)
        for task in others:
            task.cancel()
        await until(lambda: len(actor.aborted) == 2)
        actor.answer()
        assert [list(g.ids) for g in await asyncio.gather(*mine)] == [[1, 2]] * 3

    asyncio.run(go())


def test_a_client_that_was_taken_for_gone_asks_again() -> None:
    async def go() -> None:
        actor = Actor()
        actor.deaf, now = True, 0.0
        actor.boxes = Mailboxes(60, lambda: now)
        tasks = asking(EngineClient(connected(actor)), 2)
        await until(lambda: len(actor.asked) == 2)
        now = 100.0
        for key in actor.boxes.expire():
            del actor.asked[key]
        assert not actor.asked
        actor.deaf = False
        await until(lambda: len(actor.asked) == 2)
        actor.answer()
        await asyncio.gather(*tasks)

    asyncio.run(go())


def test_an_episode_stays_with_its_engine_and_goes_elsewhere_when_that_one_dies() -> None:
    async def go() -> None:
        actors = Actor(), Actor()
        client = EngineClient(connected(*actors))
        tasks = asking(client, 4, engine=1)
        await until(lambda: len(actors[1].asked) == 4)
        actors[1].kill()
        await until(lambda: len(actors[0].asked) == 4)
        actors[0].answer()
        await asyncio.gather(*tasks)
        (late,) = asking(client, 1, engine=1)
        await until(lambda: len(actors[0].asked) == 1)
        actors[0].answer()
        await late

    asyncio.run(go())


def test_an_engine_whose_sampling_thread_died_is_left_too() -> None:
    async def go() -> None:
        actors = Actor(), Actor()
        tasks = asking(EngineClient(connected(*actors)), 2, engine=0)
        await until(lambda: len(actors[0].asked) == 2)
        actors[0].boxes.deliver([Result(key, error=f"{DEAD}: out of memory") for key in list(actors[0].asked)[:1]])
        await until(lambda: len(actors[1].asked) == 2)
        actors[1].answer()
        await asyncio.gather(*tasks)

    asyncio.run(go())


def test_requests_wait_for_a_new_engine_longer_than_for_an_answer_and_not_for_ever() -> None:
    async def go() -> None:
        first, second = Actor(), Actor()
        client = EngineClient(connected(first, answer_seconds=0.3))
        (asked,) = asking(client)
        await until(lambda: first.asked)
        first.kill()
        await until(lambda: client._unplaced)
        client.use(Replicas(2, (Replica(0, 0, first),)))  # old news
        await asyncio.sleep(0.6)
        assert client._unplaced
        client.use(Replicas(4, (Replica(0, 1, second),)))
        client.use(Replicas(3, ()))  # older than the last
        await until(lambda: second.asked)
        second.answer()
        assert list((await asked).ids) == [1, 2]
        hurried = EngineClient(connected(answer_seconds=0.05, pause_seconds=0.05))
        with pytest.raises(EngineError, match="no engine answered within 0 s"):
            await hurried.generate(PROMPT, Sampling(4))

    asyncio.run(go())


def test_frames_that_are_asked_for_again_come_all_at_once() -> None:
    """Those that were at hand the first time may be dropped before the others come."""
    shown = tuple(FittedFrame(name, b"", 32, 32) for name in "ab")
    prompt = Prompt((99, 99, 7), shown, 3)
    at_hand = [set(), {"a"}, set()]
    sent: list[set[str]] = []

    class Forgetful(Actor):
        async def on_submit(self, client: str, requests: Sequence[tuple], frames: dict[str, bytes]) -> None:
            missing = {"a", "b"} - frames.keys() - at_hand[len(sent)]
            sent.append(set(frames))
            ids = np.asarray(prompt.ids, np.int32).tobytes()
            for key in self.boxes.expect(client, [request[0] for request in requests]):
                result = Result(engine_key(client, key), ids, finish_reason="stop", missing=tuple(missing))
                self.boxes.deliver([result])

    async def go() -> None:
        client = EngineClient(connected(Forgetful()))
        for _ in range(2):
            await client.generate(prompt, Sampling(4))
        assert sent == [{"a", "b"}, set(), {"a", "b"}]

    asyncio.run(go())


def test_a_call_whose_argument_died_with_its_maker_is_not_the_engines_death() -> None:
    """Else the death of a learner's rank would take all engines with it, again and again."""
    from ray.exceptions import ActorDiedError, RayTaskError

    async def call(error: Exception) -> None:
        reference = asyncio.get_running_loop().create_future()
        reference.set_exception(error)
        await called(reference, "engine 0", "renew", END)

    with pytest.raises(EngineError, match="renew failed") as raised:
        asyncio.run(call(RayTaskError("renew", "traceback", ActorDiedError()).as_instanceof_cause()))
    assert not isinstance(raised.value, EngineDied)
    with pytest.raises(EngineDied, match="died during renew"):
        asyncio.run(call(ActorDiedError()))


def test_the_end_of_all_engines_fails_who_waits_and_who_comes_later_with_the_reason() -> None:
    async def go() -> None:
        client = EngineClient(connected())
        (waiting,) = asking(client)
        await asyncio.sleep(0)
        client.use(Replicas(2, (), "engine 0 died for the third time"))
        for attempt in (waiting, client.generate(PROMPT, Sampling(4))):
            with pytest.raises(EngineDied, match="third time"):
                await attempt

    asyncio.run(go())


def test_while_the_engine_stands_still_no_deadline_passes() -> None:
    async def go() -> None:
        actor = Actor()
        client = EngineClient(connected(actor, answer_seconds=0.3))
        (asked,) = asking(client)
        await until(lambda: actor.asked)
        actor.boxes.pause()
        await until(lambda: client._engines[0].pauses.paused)
        await asyncio.sleep(0.6)
        assert not asked.done()
        actor.boxes.proceed()
        actor.answer()
        await asked
        late = EngineClient(connected(actor, answer_seconds=0.05, pause_seconds=0.05))
        actor.boxes.pause()
        with pytest.raises(EngineError, match="did not answer within 0 s"):
            await late.generate(PROMPT, Sampling(4))

    asyncio.run(go())


# --- the engine's actor -----------------------------------------------------------------------------------------------


class Silent:
    """A sampler that answers nothing."""

    def __init__(self, settings: EngineSettings, on_done: Callable[[list[Result]], None]):
        self.ready: Future[None] = Future()
        self.ready.set_result(None)
        self.dead: Future[str] = Future()
        self.aborted: list[str] = []
        self.work: Future[None] = Future()

    def submit(self, requests: Sequence[Request], frames: dict[str, bytes]) -> None:
        """They are sampled for ever."""

    def abort(self, keys: Sequence[str]) -> None:
        self.aborted += keys

    def renew(self, *_: Any) -> Future[None]:
        return self.work

    def discard(self, why: str) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


def test_the_engine_aborts_what_a_client_asked_for_that_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
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

    asyncio.run(go())


def test_an_engine_stands_still_from_the_first_step_of_a_sync_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step fails: `discard` comes after it."""

    async def go() -> None:
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

    asyncio.run(go())


def test_what_is_in_flight_has_the_time_of_an_answer_to_end_before_new_weights() -> None:
    sampler = Sampler.__new__(Sampler)  # without its thread and its engine
    sampler.settings = replace(SETTINGS, answer_seconds=0.0)
    sampler._llm = SimpleNamespace(has_unfinished_requests=lambda: True)
    sampler._queued, sampler._unfinished = [], {"a/0"}
    with pytest.raises(TimeoutError, match="1 requests did not finish within 0 s before a weight sync"):
        sampler._pause("wait")
    assert not sampler._draining


# --- the driver's hold ------------------------------------------------------------------------------------------------


class Fleet:
    """Engines whose starts and deaths a test decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replicas: int):
        self.actors: list[Actor] = []
        monkeypatch.setattr(engines, "start_engine", lambda settings: self.start())
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


def test_a_dead_engine_starts_again_beside_the_others_and_joins_with_the_next_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go() -> None:
        fleet = await Fleet(monkeypatch, 2).up()
        await fleet.renewed(1)
        assert fleet.engines.metrics == {"prefix_cache_hit_rate": 0.4, "mm_cache_hit_rate": 0.5, "engine_restarts": 0}
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

    asyncio.run(go())


def test_an_engine_that_dies_between_weights_and_their_proof_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
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

    asyncio.run(go())


def test_a_sole_engine_asks_for_weights_when_it_is_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
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

    asyncio.run(go())


def test_an_engine_that_dies_again_and_again_ends_the_run_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
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

    asyncio.run(go())


def test_without_weights_of_a_learner_an_engine_is_there_as_soon_as_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        fleet = await Fleet(monkeypatch, 1).up()
        fleet.actors[0].kill()
        await until(lambda: len(fleet.actors) == 2)
        fleet.actors[1].started.set()
        await until(lambda: fleet.live == [(0, 1)])
        await fleet.engines.close()

    asyncio.run(go())
