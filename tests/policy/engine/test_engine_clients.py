"""Several clients and one engine, and deadlines that stand still, with engines of this process. What vLLM and Ray make
of it is in `test_in_flight.py` and `test_replicas.py`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from engine_fakes import END, PROMPT, Actor, asking, connected, until
from hypothesis import given
from hypothesis import strategies as st

from tapforge_trainer.engine.client import EngineClient, EngineDied, EngineError, called
from tapforge_trainer.engine.mailboxes import Mailboxes
from tapforge_trainer.engine.pauses import Deadline, PauseMeter, PauseReading
from tapforge_trainer.engine.restart_budget import RestartBudget
from tapforge_trainer.engine.wire import DEAD, GenerateResult, Replica, Replicas, engine_key
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.records import Prompt, Sampling

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


async def test_the_engine_tells_its_clients_apart_and_gives_up_those_that_are_gone() -> None:
    now = 0.0
    boxes = Mailboxes(60, lambda: now)
    assert boxes.expect("a", ["0", "1"]) == {"0", "1"} and boxes.expect("b", ["0"]) == {"0"}
    assert boxes.expect("a", ["1", "2"]) == {"2"}, "asking twice is asking once"
    boxes.deliver([GenerateResult("a/0"), GenerateResult("b/0"), GenerateResult("a/7"), GenerateResult("c/0")])
    assert [row[0] for row in (await boxes.collect("a", 0))[0]] == ["0"]  # type: ignore[index]
    assert boxes.withdraw("a", ["1", "0"]) == ["a/1"]
    now = 61
    boxes.expect("b", ["1"])
    assert boxes.expire() == ["a/2"]
    assert await boxes.collect("a", 0) is None, "it is told, once"
    assert (await boxes.collect("a", 0))[0] == []  # type: ignore[index]
    assert [row[0] for row in (await boxes.collect("b", 0))[0]] == ["0"]  # type: ignore[index]


async def test_of_two_polls_the_newer_one_gets_the_results() -> None:
    """The older one's answer may be on its way to nobody."""

    boxes = Mailboxes(60)
    boxes.expect("a", ["0"])
    polls = [asyncio.create_task(boxes.collect("a", END)) for _ in range(2)]
    await asyncio.sleep(0)
    boxes.deliver([GenerateResult("a/0")])
    found = await asyncio.wait_for(asyncio.gather(*polls), END)
    assert [[row[0] for row in rows] for rows, *_ in found] == [[], ["0"]]  # type: ignore[misc]


# --- clients ----------------------------------------------------------------------------------------------------------


async def test_two_clients_of_one_engine_get_their_own_answers_and_one_that_leaves_harms_nobody() -> None:
    actor = Actor()
    first, second = EngineClient(connected(actor)), EngineClient(connected(actor))
    mine, others = asking(first, 3), asking(second, 2)
    await until(lambda: len(actor.asked) == 5)
    for task in others:
        task.cancel()
    await until(lambda: len(actor.aborted) == 2)
    actor.answer()
    assert [list(g.ids) for g in await asyncio.gather(*mine)] == [[1, 2]] * 3


async def test_a_client_that_was_taken_for_gone_asks_again() -> None:
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


async def test_an_episode_stays_with_its_engine_and_goes_elsewhere_when_that_one_dies() -> None:
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


async def test_an_engine_whose_sampling_thread_died_is_left_too() -> None:
    actors = Actor(), Actor()
    tasks = asking(EngineClient(connected(*actors)), 2, engine=0)
    await until(lambda: len(actors[0].asked) == 2)
    actors[0].boxes.deliver([GenerateResult(key, error=f"{DEAD}: out of memory") for key in list(actors[0].asked)[:1]])
    await until(lambda: len(actors[1].asked) == 2)
    actors[1].answer()
    await asyncio.gather(*tasks)


async def test_requests_wait_for_a_new_engine_longer_than_for_an_answer_and_not_for_ever() -> None:
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


async def test_frames_that_are_asked_for_again_come_all_at_once() -> None:
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
                result = GenerateResult(engine_key(client, key), ids, finish_reason="stop", missing=tuple(missing))
                self.boxes.deliver([result])

    client = EngineClient(connected(Forgetful()))
    for _ in range(2):
        await client.generate(prompt, Sampling(4))
    assert sent == [{"a", "b"}, set(), {"a", "b"}]


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


async def test_an_answer_that_came_while_the_event_loop_stood_still_is_in_time() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    async def reference() -> str:
        return await answer

    call = asyncio.create_task(called(reference(), "engine 0", "watch", 0.2))
    await asyncio.sleep(0)
    threading.Timer(0.05, loop.call_soon_threadsafe, (answer.set_result, "here")).start()
    time.sleep(0.5)  # noqa: ASYNC251 - the loop stands still
    assert await call == "here"
    with pytest.raises(EngineError, match="watch took longer than 0 s"):
        await called(asyncio.Event().wait(), "engine 0", "watch", 0.1)


async def test_the_end_of_all_engines_fails_who_waits_and_who_comes_later_with_the_reason() -> None:
    client = EngineClient(connected())
    (waiting,) = asking(client)
    await asyncio.sleep(0)
    client.use(Replicas(2, (), "engine 0 died for the third time"))
    for attempt in (waiting, client.generate(PROMPT, Sampling(4))):
        with pytest.raises(EngineDied, match="third time"):
            await attempt


async def test_while_the_engine_stands_still_no_deadline_passes() -> None:
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
