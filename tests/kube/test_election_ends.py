"""When a term ends and when it does not: late answers, lost answers, a machine that slept; and the term after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from aiohttp import web

from tapforge_operator.kube.client import Client
from tapforge_operator.kube.leaderelection import Election, Timing

TIMING = Timing(lease_seconds=15.0, renew_seconds=10.0, every_seconds=0.05)


class Clock:
    """The machine's; what is added to `slept` passes at once."""

    def __init__(self) -> None:
        self.slept = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.slept


class LeaseServer:
    """One Lease, which takes a change of its newest version only."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lease: dict[str, Any] = {}
        self.version = 0
        #: renewals that are refused next
        self.refusals = 0
        #: seconds that every other one takes, which pass at once
        self.slow = 0.0
        #: somebody deletes it: it is looked at so often meanwhile
        self.missed = 0
        #: renewals are carried out and never answered
        self.mute = False
        self.renewals = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            self.missed += not self.lease
            return web.json_response(self.lease, status=200 if self.lease else 404)
        body = await request.json()
        if request.method == "POST" and self.lease:
            return web.json_response({"reason": "AlreadyExists", "message": "it is there"}, status=409)
        if request.method == "PATCH":
            if not self.lease:
                return web.json_response({"reason": "NotFound", "message": "it is not there"}, status=404)
            if self.refusals:
                self.refusals -= 1
                return web.json_response({"message": "busy"}, status=503)
            if body["metadata"].get("resourceVersion") != str(self.version):
                return web.json_response({"reason": "Conflict", "message": "modified"}, status=409)
            self.renewals += 1
            self.clock.slept += self.slow
        self.version += 1
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        if self.mute and request.method == "PATCH":
            await asyncio.sleep(60)
        return web.json_response(self.lease)


@asynccontextmanager
async def answering(server: LeaseServer) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with Client(kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}")) as client:
            yield client
    finally:
        await runner.cleanup()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> LeaseServer:
    return LeaseServer(clock)


@pytest.fixture
async def election(server: LeaseServer, clock: Clock) -> AsyncIterator[Election]:
    async with answering(server) as client:
        one = Election(client, "system", "operator", "me", TIMING, clock=clock)
        assert await one.win() == 1
        yield one


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_renewal_that_comes_too_late_revives_nothing(server: LeaseServer, election: Election) -> None:
    server.refusals, server.slow = 2, TIMING.renew_seconds
    await asyncio.wait_for(election.keep(), 60)
    assert (server.refusals, server.renewals) == (0, 1), "the Lease was renewed, when it was over"
    assert not election.leads


async def test_renewals_that_come_in_time_go_on(server: LeaseServer, election: Election) -> None:
    server.refusals, server.slow = 2, TIMING.renew_seconds * 0.4
    keep = asyncio.create_task(election.keep())
    await until(lambda: server.renewals >= 5)
    assert election.leads
    keep.cancel()
    await asyncio.wait({keep})
    assert not election.leads, "whoever keeps it no longer doesn't lead"


async def test_renewals_without_an_answer_count_when_the_lease_shows_them(
    server: LeaseServer, election: Election, clock: Clock
) -> None:
    """A storm on the API server: no renewal is ever answered, and each one makes the next a conflict."""
    server.mute = True
    keep = asyncio.create_task(election.keep())
    for _ in range(4):
        # The second one from here was sent after the first was found on the Lease.
        enough = server.renewals + 2
        await until(lambda: server.renewals >= enough)  # noqa: B023
        clock.slept += TIMING.renew_seconds * 0.6
        assert election.leads and not keep.done()
    keep.cancel()
    await asyncio.wait({keep})


async def test_a_machine_that_slept_leads_no_longer(election: Election, clock: Clock) -> None:
    keep = asyncio.create_task(election.keep())
    assert election.leads
    clock.slept += 3600.0
    assert not election.leads, "at once, before anything else is done"
    await asyncio.wait_for(keep, 60)
    assert not election.leads


async def test_after_a_term_is_lost_the_process_wins_the_next_one(
    server: LeaseServer, election: Election, clock: Clock
) -> None:
    clock.slept += 3600.0
    await asyncio.wait_for(election.keep(), 60)
    assert await asyncio.wait_for(election.win(), 60) == 2
    assert election.leads and server.lease["spec"]["leaseTransitions"] == 2


async def test_another_holder_ends_the_term(server: LeaseServer, election: Election) -> None:
    server.version += 1
    server.lease["metadata"]["resourceVersion"] = str(server.version)
    server.lease["spec"] |= {"holderIdentity": "other", "leaseTransitions": 2}
    await asyncio.wait_for(election.keep(), 60)
    assert not election.leads and server.lease["spec"]["holderIdentity"] == "other"


async def test_a_lease_that_is_deleted_is_written_back_in_the_same_term(
    server: LeaseServer, election: Election
) -> None:
    keep = asyncio.create_task(election.keep())
    await until(lambda: server.renewals >= 1)
    server.lease = {}
    await until(lambda: bool(server.lease))
    assert (server.lease["spec"]["holderIdentity"], server.lease["spec"]["leaseTransitions"]) == ("me", 1)
    renewals = server.renewals
    await until(lambda: server.renewals >= renewals + 2)
    assert election.leads and not keep.done()
    keep.cancel()
    await asyncio.wait({keep})


async def test_who_stands_by_takes_no_lease_that_its_leader_may_write_back(server: LeaseServer, clock: Clock) -> None:
    server.version = 7
    server.lease = {
        "metadata": {"name": "operator", "resourceVersion": "7"},
        "spec": {"holderIdentity": "other", "leaseTransitions": 41, "leaseDurationSeconds": 15},
    }
    async with answering(server) as client:
        one = Election(client, "system", "operator", "me", TIMING, clock=clock)
        winning = asyncio.create_task(one.win())
        await until(lambda: one.holder == "other")
        server.lease = {}
        await until(lambda: server.missed >= 5)
        assert not winning.done() and not server.lease
        clock.slept += TIMING.lease_seconds + 1
        assert await asyncio.wait_for(winning, 60) == 42, "beyond every term that was seen"


async def test_who_begins_while_the_lease_is_away_leaves_its_leader_time_to_write_it_back(
    server: LeaseServer, election: Election, clock: Clock
) -> None:
    """It never saw whom the Lease named: two would lead, and the term would fall back to the first."""
    server.lease = {}
    async with answering(server) as client:
        fresh = Election(client, "system", "operator", "fresh", TIMING, clock=clock)
        fresh.led_before = True
        winning = asyncio.create_task(fresh.win())
        looks = server.missed + 3
        await until(lambda: server.missed >= looks or winning.done())
        assert not winning.done() and not server.lease
        keep = asyncio.create_task(election.keep())
        await until(lambda: fresh.holder == "me")
        assert election.leads and not winning.done()
        for task in (keep, winning):
            task.cancel()
            await asyncio.wait({task})


async def test_a_lease_that_nobody_writes_back_is_taken(server: LeaseServer, clock: Clock) -> None:
    async with answering(server) as client:
        fresh = Election(client, "system", "operator", "fresh", TIMING, clock=clock)
        fresh.led_before = True
        winning = asyncio.create_task(fresh.win())
        await until(lambda: server.missed >= 2)
        clock.slept += TIMING.lease_seconds + 1
        assert await asyncio.wait_for(winning, 60) == 1


async def test_rights_that_are_missing_for_a_moment_end_no_candidate(server: LeaseServer, clock: Clock) -> None:
    """An API server that has just started refuses everybody until it has read its rules."""
    refusals = 2

    class Starting(LeaseServer):
        async def answer(self, request: web.Request) -> web.Response:
            nonlocal refusals
            if refusals:
                refusals -= 1
                return web.json_response({"reason": "Forbidden", "message": "no rules yet"}, status=403)
            return await super().answer(request)

    async with answering(Starting(clock)) as client:
        candidate = Election(client, "system", "operator", "me", TIMING, clock=clock)
        assert await asyncio.wait_for(candidate.win(), 60) == 1
    assert refusals == 0


async def test_a_lease_that_was_read_slowly_is_not_old(server: LeaseServer, clock: Clock) -> None:
    """The machine slept in the middle of the first read: what it read may have been written just before its end."""
    reads = 0

    class Sleeping(LeaseServer):
        async def answer(self, request: web.Request) -> web.Response:
            nonlocal reads
            if request.method == "GET":
                reads += 1
                clock.slept += 3600.0 if reads == 1 else 0.0
            return await super().answer(request)

    sleeping = Sleeping(clock)
    sleeping.version = 1
    spec = {"holderIdentity": "other", "leaseTransitions": 1, "leaseDurationSeconds": 15}
    sleeping.lease = {"metadata": {"resourceVersion": "1"}, "spec": spec}
    async with answering(sleeping) as client:
        candidate = Election(client, "system", "operator", "me", TIMING, clock=clock)
        winning = asyncio.create_task(candidate.win())
        await until(lambda: reads >= 5)
        assert not winning.done() and not candidate.leads
        winning.cancel()
        await asyncio.wait({winning})


@pytest.mark.parametrize("fresh", [True, False])
async def test_who_leaves_while_it_takes_the_lease_gives_it_up(server: LeaseServer, clock: Clock, fresh: bool) -> None:
    """It was carried out, and the answer is on its way: the next one would wait for the Lease's whole life."""
    answers = asyncio.Event()

    class Late(LeaseServer):
        async def answer(self, request: web.Request) -> web.Response:
            said = await super().answer(request)
            if request.method != "GET":
                await answers.wait()
            return said

    late = Late(clock)
    if not fresh:
        late.version = 1
        spec = {"holderIdentity": "", "leaseTransitions": 1, "leaseDurationSeconds": 15}
        late.lease = {"metadata": {"resourceVersion": "1"}, "spec": spec}
    async with answering(late) as client:
        candidate = Election(client, "system", "operator", "me", TIMING, clock=clock)
        winning = asyncio.create_task(candidate.win())
        await until(lambda: bool(late.lease) and late.lease["spec"]["holderIdentity"] == "me")
        leaving = asyncio.create_task(candidate.resign())
        await asyncio.sleep(0.05)
        answers.set()
        await asyncio.wait_for(leaving, 60)
        winning.cancel()
        await asyncio.wait({winning})
    assert not candidate.leads and late.lease["spec"]["holderIdentity"] == ""
