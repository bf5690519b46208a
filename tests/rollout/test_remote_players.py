"""The link between the driver and its workers: a worker with a clock of its own, messages that get lost, deaths."""

import asyncio
import math
from contextlib import asynccontextmanager

import pytest
from phones import PATIENT, phones, put_forward, until
from scripted import AGENT, DONE, TASKS, Demonstrator, Held

from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.protocol import EnvironmentFault, Outcome, Reason
from tapforge_envs.slots.lease_life import LeaseLife
from tapforge_envs.slots.source import Lease, Verdict
from tapforge_trainer.records import Sampling
from tapforge_trainer.rollout.attempt import Attempt, AttemptRequest
from tapforge_trainer.rollout.remote_players import RESTARTS, RemotePlayers, WorkerError, WorkerLost
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.rollout.worker_host import LINK_SECONDS, LeaseTerms, Wanted, WorkerHost, end_on_worker

TASK = TASKS.sample(0, 0)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def ahead() -> float:
    """The clock of a worker's machine."""
    return loop_time() + 1000.0


class Wire:
    """A way to a worker in this process that can be cut. `silent`: messages are lost; `dead`: so is the process."""

    def __init__(self, generator):
        self.engines = []
        self.host = WorkerHost(RolloutWorker(AGENT, {"": generator}), self.engines.append, ahead)
        self.silent = asyncio.Event()
        self.dead = asyncio.Event()
        self.wanted: list[Wanted] = []
        self.closed = False

    async def exchange(self, wanted, seconds):
        if self.dead.is_set():
            raise WorkerLost("its process ended", dead=True)
        if self.silent.is_set():
            raise WorkerLost("no answer", dead=False)
        self.wanted.append(wanted)
        return self.host.exchange(wanted)

    async def play(self, request, terms):
        playing = asyncio.create_task(self.host.play(request, terms))
        death = asyncio.create_task(self.dead.wait())
        await asyncio.wait({playing, death}, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if not self.dead.is_set():
            return await playing
        playing.cancel()
        raise WorkerLost("its process ended", dead=True)

    async def health(self, phone, seconds):
        return await self.host.health(phone)

    async def close(self):
        self.closed = True
        await self.host.close()


def request(number: int = 0) -> AttemptRequest:
    return AttemptRequest(Attempt(f"g{number:06}", number, 0, 0, 0, TASK, seed=1), Sampling(99))


@asynccontextmanager
async def linked(generator, workers=1, phone_count=2):
    wires: list[Wire] = []

    async def start(index):
        wires.append(Wire(generator))
        return wires[-1]

    async with phones(phone_count) as server:
        players = RemotePlayers(start, workers, loop_time)
        await players.start()

        def lease(slot=0, **life):
            address = PhoneAddress(f"phone-{slot}", server.url(slot), PATIENT)
            return Lease(f"phone-{slot}", 1, address, LeaseLife(f"phone-{slot}", clock=loop_time, **life))

        try:
            yield players, wires, lease, server
        finally:
            await players.close()


def test_an_end_on_the_workers_clock_is_never_later_than_on_the_drivers():
    # The worker's reading was taken at or before the moment at which the driver had it.
    for delay in (0.0, 3.0):
        true_offset, answered = 1000.0, 50.0
        reading = answered - delay + true_offset
        assert end_on_worker(60.0, answered, reading) - true_offset == 60.0 - delay
        assert end_on_worker(math.inf, answered, reading) - true_offset == answered + LINK_SECONDS - delay
        assert end_on_worker(9999.0, answered, reading) - true_offset == answered + LINK_SECONDS - delay


async def test_an_attempt_is_played_elsewhere_as_it_would_be_here():
    async with linked(Demonstrator([TASK]), workers=2) as (players, wires, lease, _):
        results = await asyncio.gather(*(players.play(request(n), lease(n)) for n in range(2)))
        assert [r.record.outcome for r in results] == [Outcome.SUCCESS] * 2
        assert [r.verdict for r in results] == [Verdict.CLEAN] * 2
        assert all(wire.wanted for wire in wires), "each slot has a worker of its own"
        again = lease(1)
        await players.play(request(3), again)
        assert again.life.episodes == 1
        assert [players._home[f"phone-{n}"].index for n in range(2)] == [0, 1]


async def test_a_stop_arrives_at_once_and_returns_the_steps():
    generator = Held(lambda *a: DONE)
    async with linked(generator) as (players, wires, lease, _):
        playing = asyncio.create_task(players.play(request(), lease()))
        await until(lambda: generator.held)
        players.stop(request().attempt.episode, Reason.RECLAIMED)
        result = await playing
        assert (result.record.reason, result.verdict) == (Reason.RECLAIMED, Verdict.CLEAN)
        assert wires[0].wanted[-1].stop == {request().attempt.episode: Reason.RECLAIMED}


async def test_a_lost_claim_cuts_a_call_off_in_the_worker():
    async with linked(Demonstrator([TASK])) as (players, _, lease, server):
        await server.set_faults(0, {"kind": "hung"})
        held = lease()
        playing = asyncio.create_task(players.play(request(), held))
        await until(server.hung)
        held.life.lose("somebody else has it")
        result = await playing
        assert result.record.reason is Reason.LEASE_LOST and "somebody else has it" in result.record.message


async def test_leases_live_as_long_as_messages_are_answered():
    generator = Held(lambda *a: DONE)
    async with linked(generator) as (players, wires, lease, _):
        playing = asyncio.create_task(players.play(request(), lease()))
        await until(lambda: generator.held)
        for _ in range(4):
            before = len(wires[0].wanted)
            put_forward(LINK_SECONDS / 2 - 2)
            await until(lambda before=before: len(wires[0].wanted) > before)
        assert not playing.done()
        generator.let_go.set()
        assert (await playing).record.reason is Reason.DONE


async def test_a_worker_without_a_driver_stops_its_attempts_and_uses_no_phone():
    generator = Held(lambda *a: DONE)
    async with linked(generator) as (players, wires, lease, _):
        playing = asyncio.create_task(players.play(request(), lease()))
        await until(lambda: generator.held)
        wires[0].silent.set()
        put_forward(LINK_SECONDS - 5)
        result = await playing
        assert result.record.reason is Reason.CANCELLED, "what we do to ourselves is no fault of the phone"
        put_forward(6)
        ends = players._workers[0].worker_now + LINK_SECONDS
        there = lease()
        late = await wires[0].host.play(request(1), LeaseTerms(there.slot, 1, there.phone, ends))
        assert late.record.reason is Reason.LEASE_LOST and late.record.steps == ()


async def test_a_message_that_was_overtaken_changes_nothing():
    generator = Held(lambda *a: DONE)
    async with linked(generator) as (players, wires, lease, _):
        playing = asyncio.create_task(players.play(request(), lease()))
        await until(lambda: generator.held)
        host, newest = wires[0].host, wires[0].wanted[-1].number
        episode = request().attempt.episode
        answer = host.exchange(Wanted(newest - 1, stop={episode: Reason.CANCELLED}))
        assert answer.number == newest - 1 and answer.steps == {episode: 0}
        generator.let_go.set()
        assert (await playing).record.reason is Reason.DONE


async def test_a_worker_that_dies_costs_its_attempts_and_is_started_again():
    generator = Held(lambda *a: DONE)
    async with linked(generator) as (players, wires, lease, _):
        playing = asyncio.create_task(players.play(request(), lease()))
        await until(lambda: generator.held)
        wires[0].dead.set()
        result = await playing
        assert (result.record.reason, result.record.outcome) == (Reason.CANCELLED, None)
        assert (result.verdict, result.why) == (Verdict.DIRTY, "its process ended")
        generator.let_go.set()
        assert (await players.play(request(1), lease(1))).record.reason is Reason.DONE
        await until(lambda: len(wires) == 2)
        assert wires[0].closed and players.metrics()["restarts"] == 1


async def test_workers_that_die_again_and_again_end_the_run():
    async with linked(Demonstrator([TASK])) as (players, wires, lease, _):
        for death in range(RESTARTS + 1):
            await until(lambda death=death: len(wires) > death)
            wires[-1].dead.set()
        with pytest.raises(WorkerError, match=f"died {RESTARTS + 1} times"):
            while True:
                await players.play(request(), lease())


async def test_workers_are_told_of_the_engines_also_those_that_are_started_again():
    async with linked(Demonstrator([TASK])) as (players, wires, _, _):
        assert not wires[0].engines
        players.use_engines("these")
        await until(lambda: wires[0].engines)
        wires[0].dead.set()
        await until(lambda: len(wires) == 2 and wires[1].engines)
        assert {*wires[0].engines, *wires[1].engines} == {"these"}


async def test_phones_are_asked_for_their_health_by_the_worker_that_uses_them():
    async with linked(Demonstrator([TASK])) as (players, _, lease, _):
        assert await players.health(lease().phone)
        gone = PhoneAddress("gone", "http://127.0.0.1:1", PATIENT)
        with pytest.raises(EnvironmentFault, match="nobody answers"):
            await players.health(gone)
