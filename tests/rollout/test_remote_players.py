"""The link between the driver and its workers: a worker with a clock of its own, messages that get lost, deaths."""

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from phones import PATIENT, phones, put_forward, until
from scripted import AGENT, DONE, TASKS, Demonstrator, Held

from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.protocol import EnvironmentFault, Outcome, Reason
from tapforge_envs.slots.lease_life import LeaseLife
from tapforge_envs.slots.source import Lease, Verdict
from tapforge_trainer.attempt import Attempt, AttemptRequest
from tapforge_trainer.judges.journal import VerdictJournal, VerdictRelay, Written
from tapforge_trainer.judges.verdicts import Verdict as Judged
from tapforge_trainer.records import Sampling
from tapforge_trainer.rollout import remote_players
from tapforge_trainer.rollout.remote_players import RESTART_SECONDS, RESTARTS, RemotePlayers, WorkerError, WorkerLost
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.rollout.worker_host import (
    LINK_SECONDS,
    LeaseTerms,
    RewardTerms,
    Wanted,
    WorkerHost,
    end_on_worker,
)
from tapforge_trainer.run.shutdown import failure_of

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
        self.relay = VerdictRelay()
        self.worker = RolloutWorker(AGENT, {"": generator})
        self.host = WorkerHost(self.worker, self.engines.append, ahead, self.relay)
        self.silent = asyncio.Event()
        self.dead = asyncio.Event()
        #: the call that plays is lost on its way back, or waits before it says that the process is dead
        self.cut = asyncio.Event()
        self.told = asyncio.Event()
        self.told.set()
        #: answers to messages wait for it
        self.passes = asyncio.Event()
        self.passes.set()
        self.wanted: list[Wanted] = []
        self.closed = False

    async def exchange(self, wanted, seconds):
        if self.dead.is_set():
            raise WorkerLost("its process ended", dead=True)
        if self.silent.is_set():
            raise WorkerLost("no answer", dead=False)
        self.wanted.append(wanted)
        answer = self.host.exchange(wanted)
        await self.passes.wait()
        return answer

    async def play(self, request, terms):
        playing = asyncio.create_task(self.host.play(request, terms))
        self.playing = playing
        death, cut = (asyncio.create_task(event.wait()) for event in (self.dead, self.cut))
        try:
            await asyncio.wait({playing, death, cut}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
            cut.cancel()
        if self.cut.is_set():
            raise WorkerLost("the way is cut", dead=False)
        if not self.dead.is_set():
            return await playing
        playing.cancel()
        await self.told.wait()
        raise WorkerLost("its process ended", dead=True)

    async def health(self, phone, seconds):
        return await self.host.health(phone)

    async def reward(self, record, frames, terms):
        return await self.host.reward(record, frames, terms)

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


@asynccontextmanager
async def linked_and_playing():
    """An attempt is played, and its model answers when the generator is let go."""
    generator = Held(lambda *a: DONE)
    async with linked(generator) as (players, wires, lease, _):
        playing = asyncio.create_task(players.play(request(), lease()))
        await until(lambda: generator.held)
        yield playing, generator, players, wires, lease


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
        assert [players._home[f"phone-{n}"].worker.index for n in range(2)] == [0, 1]


async def test_a_stop_arrives_at_once_and_returns_the_steps():
    async with linked_and_playing() as (playing, _generator, players, wires, _lease):
        players.stop(request().attempt.episode, Reason.RECLAIMED)
        result = await playing
        assert (result.record.reason, result.verdict) == (Reason.RECLAIMED, Verdict.UNPROVEN)
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
    async with linked_and_playing() as (playing, generator, _players, wires, _lease):
        for _ in range(4):
            before = len(wires[0].wanted)
            put_forward(LINK_SECONDS / 2 - 2)
            await until(lambda before=before: len(wires[0].wanted) > before)
        assert not playing.done()
        generator.let_go.set()
        assert (await playing).record.reason is Reason.DONE


async def test_a_worker_without_a_driver_stops_its_attempts_and_uses_no_phone():
    async with linked_and_playing() as (playing, _generator, players, wires, lease):
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
    async with linked_and_playing() as (playing, generator, _players, wires, _lease):
        host, newest = wires[0].host, wires[0].wanted[-1].number
        episode = request().attempt.episode
        answer = host.exchange(Wanted(newest - 1, stop={episode: Reason.CANCELLED}))
        assert answer.number == newest - 1 and answer.steps == {episode: 0}
        generator.let_go.set()
        assert (await playing).record.reason is Reason.DONE


async def test_a_worker_that_dies_costs_its_attempts_and_is_started_again():
    async with linked_and_playing() as (playing, generator, players, wires, lease):
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
        seen = len(wires[1].wanted)
        players._workers[0].wake.set()
        await until(lambda: len(wires[1].wanted) > seen)
        assert [wire.engines for wire in wires] == [["these"], ["these"]], "once each"


async def test_engines_that_a_worker_did_not_hear_of_are_said_again():
    async with linked(Demonstrator([TASK])) as (players, wires, _, _):
        wires[0].silent.set()
        players.use_engines("these")
        await until(lambda: not players._workers[0].wake.is_set())
        assert not wires[0].engines
        wires[0].silent.clear()
        players._workers[0].wake.set()
        await until(lambda: wires[0].engines == ["these"])


async def test_phones_are_asked_for_their_health_by_the_worker_that_uses_them():
    async with linked(Demonstrator([TASK])) as (players, _, lease, _):
        assert await players.health(lease().phone)
        gone = PhoneAddress("gone", "http://127.0.0.1:1", PATIENT)
        with pytest.raises(EnvironmentFault, match="no server answers"):
            await players.health(gone)


async def test_who_plays_after_the_last_death_hears_of_it(monkeypatch):
    monkeypatch.setattr(remote_players, "RESTARTS", 0)
    async with linked_and_playing() as (playing, _generator, players, wires, lease):
        wires[0].told.clear()
        wires[0].dead.set()
        await until(lambda: players._failure)
        wires[0].told.set()
        assert (await playing).record.reason is Reason.CANCELLED
        with pytest.raises(WorkerError, match="died 1 times"):
            async with asyncio.timeout(30):
                await players.play(request(1), lease(1))


async def test_each_worker_may_die_as_often(monkeypatch):
    monkeypatch.setattr(remote_players, "RESTARTS", 1)
    async with linked(Demonstrator([TASK]), workers=2) as (players, wires, lease, _):
        for wire in list(wires):
            wire.dead.set()
        for worker in players._workers:
            worker.wake.set()
        await until(lambda: len(wires) == 4)
        results = await asyncio.gather(*(players.play(request(n), lease(n)) for n in range(2)))
        assert [r.record.outcome for r in results] == [Outcome.SUCCESS] * 2


async def test_a_start_that_fails_counts_as_a_death_however_long_it_takes():
    async with linked(Demonstrator([TASK])) as (players, wires, lease, _):
        starts = []

        async def start(index):
            starts.append(index)
            put_forward(RESTART_SECONDS)
            raise WorkerLost("there is no place for it", dead=False)

        players._start = start
        wires[0].dead.set()
        with pytest.raises(WorkerError, match="there is no place for it"):
            while True:
                await players.play(request(), lease())
        assert len(starts) == RESTARTS


async def test_a_fault_of_ours_in_a_message_ends_the_run():
    async with linked(Demonstrator([TASK])) as (players, wires, lease, _):

        def use_engines(engines):
            raise ValueError("these are no engines")

        wires[0].host._use_engines = use_engines
        players.use_engines("those")
        await until(players._links[0].done)
        with pytest.raises(WorkerError, match="these are no engines"):
            async with asyncio.timeout(30):
                await players.play(request(), lease())


@pytest.mark.parametrize("how", ["cut", "cancelled"])
async def test_a_lease_that_nobody_answers_for_is_not_made_longer(how):
    async with linked_and_playing() as (playing, _generator, _players, wires, _lease):
        if how == "cut":
            wires[0].cut.set()
        else:
            playing.cancel()
        if how == "cut":
            there = wires[0].playing
            await until(there.done)
            assert (await there).record.reason is Reason.CANCELLED
        else:
            await until(lambda: wires[0].wanted[-1].stop)
        last = wires[0].wanted[-1]
        assert not last.leases and set(last.lost) == {"phone-0#1"}
        if how == "cut":
            assert not playing.done(), "the phone may be in use until the lease is over"
            put_forward(LINK_SECONDS)
            result = await playing
            assert (result.record.reason, result.verdict) == (Reason.CANCELLED, Verdict.DIRTY)
        else:
            with pytest.raises(asyncio.CancelledError):
                await playing
            put_forward(LINK_SECONDS)
        await until(lambda: not wires[0].wanted[-1].lost)


async def test_nothing_is_played_under_a_claim_that_was_lost_before():
    async with linked(Demonstrator([TASK])) as (players, _, lease, _):
        held = lease()
        held.life.lose("somebody else has it")
        result = await players.play(request(), held)
        assert (result.record.reason, result.record.steps) == (Reason.LEASE_LOST, ())


async def test_an_answer_of_a_worker_that_was_replaced_meanwhile_is_none():
    async with linked(Demonstrator([TASK])) as (players, wires, lease, _):
        begun, start = asyncio.Event(), players._start

        async def late(index):
            await begun.wait()
            return await start(index)

        players._start = late
        wires[0].passes.clear()
        players._engines = "these"
        playing = asyncio.create_task(players.play(request(), lease()))
        await until(lambda: wires[0].wanted[-1].engines)
        wires[0].dead.set()
        players._workers[0].wake.set()
        await until(lambda: players._workers[0].carrier is None)
        wires[0].passes.set()
        for _ in range(10):
            await asyncio.sleep(0)
        begun.set()
        assert (await playing).record.outcome is Outcome.SUCCESS
        assert wires[1].engines == ["these"]


async def test_a_stopped_attempt_does_not_wait_for_its_worker():
    async with linked(Demonstrator([TASK])) as (players, wires, lease, _):
        players._start = lambda index: asyncio.Event().wait()
        wires[0].dead.set()
        players._workers[0].wake.set()
        await until(lambda: players._workers[0].carrier is None)
        playing = asyncio.create_task(players.play(request(), lease()))
        await until(lambda: players._workers[0].attempts)
        players.stop(request().attempt.episode, Reason.CANCELLED)
        async with asyncio.timeout(30):
            result = await playing
        assert (result.record.reason, result.verdict) == (Reason.CANCELLED, Verdict.UNPROVEN)


async def test_that_a_worker_is_away_says_nothing_about_phones():
    async with linked(Demonstrator([TASK])) as (players, wires, lease, _):
        begun, start = asyncio.Event(), players._start

        async def late(index):
            await begun.wait()
            return await start(index)

        players._start = late
        wires[0].dead.set()
        players._workers[0].wake.set()
        await until(lambda: players._workers[0].carrier is None)
        asked = asyncio.create_task(players.health(lease().phone))
        await asyncio.sleep(0)
        begun.set()
        assert await asked


async def test_another_episode_of_the_name_of_one_that_was_given_up_is_played():
    async with linked_and_playing() as (playing, generator, players, wires, lease):
        playing.cancel()
        await until(wires[0].playing.done)
        generator.let_go.set()
        again = await players.play(request(), replace(lease(), fence=2))
        assert again.record.reason is Reason.DONE
        assert all(not wanted.stop or not wanted.leases for wanted in wires[0].wanted)


async def test_phones_that_are_gone_do_not_count_where_new_ones_are_played():
    async with linked(Demonstrator([TASK]), workers=2) as (players, *_):
        for number in range(100):
            players._worker_of(f"gone-{2 * number}")
            players._worker_of(f"stays-{2 * number + 1}")
        put_forward(remote_players.HOME_SECONDS)
        for number in range(100):
            players._worker_of(f"stays-{2 * number + 1}")
        new = [players._worker_of(f"new-{number}").index for number in range(50)]
        assert new == [0] * 50 and len(players._home) == 150


async def test_workers_that_cannot_be_started_are_a_failure_with_a_message():
    async def start(index):
        raise WorkerLost("it gave no answer within 3600 s", dead=False)

    with pytest.raises(WorkerError) as error:
        await RemotePlayers(start, 2).start()
    told = (1, "a rollout worker could not be started: it gave no answer within 3600 s")
    assert failure_of(error.value) == told


# --- rewards ---


class Slow:
    """In the place of a `Rewarder`: has a verdict on each step, in an order, each once it is let go; then none."""

    def __init__(self, relay):
        self.relay, self.steps, self.cancelled = relay, asyncio.Queue(), asyncio.Event()
        #: keys that it had to ask for
        self.asked = []

    async def rewards(self, record, frames):
        try:
            for step in range(2):
                key = f"{record.id} {step}"
                if self.relay.get(key) is None:
                    self.asked.append(key)
                    await self.steps.get()
                    verdict = Judged(1.0, "right", (), 0, 1, 1, 0.0, "m")
                    self.relay.put(Written(key, key, record.id, step, verdict))
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def close(self):
        pass


@asynccontextmanager
async def asking(journal=None):
    """An episode was played, and its rewards are asked for."""
    async with linked(Demonstrator([TASK])) as (players, wires, lease, _):
        players._journal = journal
        record = (await players.play(request(), lease())).record
        wires[0].worker._rewarder = slow = Slow(wires[0].relay)
        task = asyncio.create_task(players.reward(record, {}))
        await until(lambda: slow.asked)
        yield task, slow, record, players, wires


async def test_the_rewards_of_a_group_that_is_given_up_are_asked_for_no_longer():
    async with asking() as (task, slow, *_):
        await asyncio.sleep(2.5 * remote_players.EXCHANGE_SECONDS)
        assert not slow.cancelled.is_set(), "while the driver waits, it goes on"
        task.cancel()
        async with asyncio.timeout(30):
            await slow.cancelled.wait()


async def test_a_question_that_comes_after_it_was_given_up_is_not_asked():
    async with asking() as (task, slow, record, _, wires):
        task.cancel()
        await slow.cancelled.wait()
        number = wires[0].wanted[-1].number
        given_up = await wires[0].reward(record, {}, RewardTerms(number - 1))
        assert given_up.reason is Reason.VERDICT_MISSING and len(slow.asked) == 1


async def test_verdicts_come_while_others_are_asked_for_and_survive_their_worker(tmp_path):
    journal = VerdictJournal(tmp_path / "verdicts.jsonl")
    async with asking(journal) as (task, slow, record, players, wires):
        wires[0].silent.set()
        slow.steps.put_nowait(None)
        await until(lambda: len(slow.asked) == 2)
        assert not journal.of(record.id)
        wires[0].silent.clear()
        players._workers[0].wake.set()
        await until(lambda: journal.of(record.id))
        await players.verdicts_written()
        assert len((tmp_path / "verdicts.jsonl").read_text().splitlines()) == 1
        # A worker that is started in its place is given what is known: only the second step is asked about.
        task.cancel()
        wires[0].dead.set()
        players._workers[0].wake.set()
        await until(lambda: len(wires) == 2)
        wires[1].worker._rewarder = again = Slow(wires[1].relay)
        task = asyncio.create_task(players.reward(record, {}))
        await until(lambda: again.asked)
        assert again.asked == [f"{record.id} 1"]
        again.steps.put_nowait(None)
        await until(lambda: len(journal.of(record.id)) == 2)
        task.cancel()
