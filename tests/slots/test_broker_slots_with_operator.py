"""The client of claims and the operator's own broker: its ledger, its marks on Leases, its HTTP server over TLS, with
real phones behind external URLs. Only the API server is a small one of the test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from leased import on
from phones import PATIENT, TASKS, Phones, a_port, bounded, phones, put_forward, until
from small_broker import NAMESPACE, POOL, Authority, loop_time

from tapforge_api.claims import AUDIENCE
from tapforge_envs.protocol import EnvironmentFault, Home, Reason
from tapforge_envs.slots.broker import BrokerSlots
from tapforge_envs.slots.claim_manager import Pace
from tapforge_envs.slots.source import SlotError, Verdict
from tapforge_operator.broker.auth import Auth
from tapforge_operator.broker.claim_record import Keys
from tapforge_operator.broker.http import application, runner
from tapforge_operator.broker.renewals import RunningClock
from tapforge_operator.broker.service import Claims
from tapforge_operator.broker.types import LedgerTimeouts, ServiceTimeouts
from tapforge_operator.broker.waiting import WaitingRoom, limits_of
from tapforge_operator.kube.client import ApiError
from tapforge_operator.kube.types import PoolObject

PACE = Pace(ttl=120, wait=60, answer=60, first=0.02, cap=0.2, close=60)
#: after which a renewal is due
ROUND = PACE.ttl / 3 + 1
TASK = TASKS.sample(0, 0)


@dataclass
class SmallApiServer:
    """Leases with resourceVersions, tokens of users, and who may claim."""

    leases: dict[str, dict[str, Any]] = field(default_factory=dict)
    users: set[str] = field(default_factory=lambda: {"ann", "bob"})
    version: int = 100

    async def get(self, path: str) -> dict[str, Any]:
        if path not in self.leases:
            raise ApiError(path, 404, "NotFound", "no such object")
        return self.leases[path]

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("tokenreviews"):
            user = body["spec"]["token"].removeprefix("token-of-")
            return {
                "status": {"authenticated": user in self.users, "audiences": [AUDIENCE], "user": {"username": user}}
            }
        if path.endswith("subjectaccessreviews"):
            return {"status": {"allowed": body["spec"]["user"] in self.users - {"eve"}}}
        place = f"{path}/{body['metadata']['name']}"
        if place in self.leases:
            raise ApiError(path, 409, "AlreadyExists", "it is there")
        return self._store(place, {**body, "metadata": {**body["metadata"], "uid": f"uid-of-{place}"}})

    async def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        known = await self.get(path)
        if body["metadata"].get("resourceVersion") not in (None, known["metadata"]["resourceVersion"]):
            raise ApiError(path, 409, "Conflict", "it changed")
        return self._store(path, _merged(known, body))

    async def delete(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.leases.pop(path)

    def _store(self, place: str, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.leases[place] = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        return self.leases[place]

    @property
    def holders(self) -> list[str]:
        return sorted(h for lease in self.leases.values() if (h := lease["spec"].get("holderIdentity")))


def _merged(known: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(known) if isinstance(known, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged


@dataclass
class Operator:
    api: SmallApiServer
    pool: PoolObject
    authority: Authority
    server: Phones
    port: int
    term: int = 0
    #: last part of the path of each call
    calls: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Claims]:
        """One life of the operator; the next one knows only what is on the Leases."""
        keys = Keys(b"k" * 32)
        claims = Claims(
            self.api,
            keys,
            lambda: True,
            ledger_timeouts=LedgerTimeouts(revoke_after=0.3, linger=0.3, step_deadline=0.3, first_pause=600),
            timeouts=ServiceTimeouts(tick=0.05, siblings=0.2, release=60),
            clock=RunningClock(longest_step=PACE.ttl, monotonic=loop_time),
        )
        self.term += 1
        claims.begin(self.term, [self.pool], (), list(self.api.leases.values()))

        @web.middleware
        async def counted(request: web.Request, handler: Any) -> web.StreamResponse:
            self.calls.append(request.path.rpartition("/")[2])
            return await handler(request)

        served = application(claims, Auth(self.api, claims.find_pool), keys.proved, WaitingRoom(limits_of(64)))
        served.middlewares.insert(0, counted)
        app_runner = runner(served)
        await app_runner.setup()
        site = web.TCPSite(app_runner, "127.0.0.1", self.port, ssl_context=self.authority.server(), reuse_address=True)
        await site.start()
        try:
            yield claims
        finally:
            await claims.end()
            await app_runner.cleanup()

    @asynccontextmanager
    async def claimed(self, count: int, user: str = "ann", **kw: Any) -> AsyncIterator[BrokerSlots]:
        own = self.authority.folder.parent / user
        own.mkdir(exist_ok=True)
        access = self.authority.access(self.port)
        token = own / "token"
        token.write_text(f"token-of-{user}")
        access = type(access)(access.url, token, access.namespace, access.ca)
        slots = BrokerSlots(
            kw.pop("pool", POOL), access, slots=count, deadlines=PATIENT, pace=PACE, clock=loop_time, **kw
        )
        await slots.start()
        try:
            yield slots
        finally:
            await slots.close()


@asynccontextmanager
async def an_operator(folder: Path, count: int) -> AsyncIterator[Operator]:
    with bounded(), a_port() as port:
        async with phones(count) as server:
            body = {"spec": {"external": {"urls": server.urls}}}
            pool = PoolObject(NAMESPACE, POOL, "pool-uid-1", "7", False, body)
            yield Operator(SmallApiServer(), pool, Authority(folder / "ca"), server, port)


async def until_recalled(claims: Claims, count: int) -> None:
    """The operator wants so many back, and their holder hears of it."""
    await until(lambda: sum(bool(claim.revoked) for claim in claims.held("pool-uid-1").values()) == count)
    put_forward(ROUND)


async def test_phones_are_claimed_played_on_exchanged_and_given_back(tmp_path):
    async with an_operator(tmp_path, 3) as operator, operator.running(), operator.claimed(2) as slots:
        await until(lambda: slots.usable == 2)
        assert operator.api.holders == ["user/ann", "user/ann"]
        lease = await slots.acquire(60)
        await on(lease).reset(TASK)
        await on(lease).step(Home(), 0)
        await slots.release(lease, Verdict.CLEAN)
        again = await slots.acquire(60, avoid=frozenset({lease.slot}))
        await on(again).reset(TASK)
        await slots.release(again, Verdict.DIRTY, "something is left over")
        await until(lambda: slots.usable == 2)
        third = {(await slots.acquire(60)).slot for _ in range(2)} - {lease.slot}
        assert again.slot not in third
        await slots.close()
        assert operator.api.holders == []
        episodes = {
            lease["metadata"]["annotations"].get("tapforge.dev/episodes") for lease in operator.api.leases.values()
        }
        assert "1" in episodes


async def test_a_restart_of_the_operator_is_not_felt(tmp_path):
    async with an_operator(tmp_path, 2) as operator:
        async with operator.running():
            slots = await (claiming := operator.claimed(2)).__aenter__()
            lease = await slots.acquire(60)
            await until(lambda: slots.usable == 2)
            await on(lease).reset(TASK)
        put_forward(ROUND)
        await until(lambda: "can't be reached" in slots.describe())
        await on(lease).step(Home(), 0)
        async with operator.running() as claims:
            await until(lambda: "can't be reached" not in slots.describe())
            await on(lease).step(Home(), 1)
            await slots.release(lease, Verdict.CLEAN)
            assert (slots.size, slots.usable) == (2, 2)
            assert {held.holder for held in claims.held("pool-uid-1").values()} == {"user/ann"}
            await claiming.__aexit__(None, None, None)
            assert operator.api.holders == []


async def test_two_runs_share_a_pool_and_then_leave_each_other_alone(tmp_path):
    async with an_operator(tmp_path, 4) as operator, operator.running() as claims, operator.claimed(4) as ann:
        await until(lambda: ann.usable == 4)
        leases = [await ann.acquire(60) for _ in range(4)]
        async with operator.claimed(4, "bob") as bob:
            await until_recalled(claims, 2)
            await until(lambda: sum(ann._serving[lease.slot].recalled != "" for lease in leases) == 2)
            assert bob.size == 0, "nothing is taken away in mid-episode"
            for lease in leases:
                await on(lease).reset(TASK)
                await ann.release(lease, Verdict.CLEAN)
            await until(lambda: (ann.usable, bob.usable) == (2, 2))
            fences = {place: lease["spec"]["leaseTransitions"] for place, lease in operator.api.leases.items()}
            for _ in range(3):  # both still wish for more, through several rounds of asking and renewing
                operator.calls.clear()
                put_forward(PACE.wait + 1)
                await until(lambda: operator.calls.count("claims") >= 2 and operator.calls.count("renew") >= 2)
            assert (ann.usable, bob.usable) == (2, 2)
            assert fences == {place: lease["spec"]["leaseTransitions"] for place, lease in operator.api.leases.items()}
        await until(lambda: ann.usable == 4)


async def test_the_more_urgent_run_gets_what_it_wants(tmp_path):
    async with an_operator(tmp_path, 3) as operator, operator.running() as claims, operator.claimed(3) as ann:
        await until(lambda: ann.usable == 3)
        async with operator.claimed(2, "bob", priority=5) as bob:
            await until_recalled(claims, 2)
            await until(lambda: (ann.usable, bob.usable) == (1, 2))


async def test_a_claim_whose_lease_somebody_deleted_ends_the_episode(tmp_path):
    async with an_operator(tmp_path, 2) as operator, operator.running() as claims, operator.claimed(1) as slots:
        lease = await slots.acquire(60)
        await on(lease).reset(TASK)
        (place,) = operator.api.leases
        gone = operator.api.leases.pop(place)
        claims.observe_lease({**gone, "metadata": {**gone["metadata"], "resourceVersion": "999"}}, deleted=True)
        put_forward(ROUND)
        other = await slots.acquire(60)
        with pytest.raises(EnvironmentFault) as caught:
            await on(lease).step(Home(), 0)
        assert caught.value.reason is Reason.LEASE_LOST
        await slots.release(lease, Verdict.CLEAN)
        await on(other).reset(TASK)
        assert slots.counts().leased == 1


@pytest.mark.parametrize(
    ("user", "pool", "words"),
    [
        ("mallory", POOL, "401 Unauthorized: the token was not accepted.*kubectl create token"),
        ("eve", POOL, "403 Forbidden: eve may not claim.*emulatorpools/claim"),
        ("ann", "fones", "404 PoolNotFound: there is no EmulatorPool fones.*get emulatorpools -n lab"),
    ],
)
async def test_refusals_say_what_to_do(tmp_path, user, pool, words):
    async with an_operator(tmp_path, 1) as operator, operator.running():
        operator.api.users.add("eve")
        with pytest.raises(SlotError, match=words):
            async with operator.claimed(1, user, pool=pool):
                pass


async def test_a_broker_that_does_not_lead_yet_is_waited_for(tmp_path):
    async with an_operator(tmp_path, 1) as operator, operator.running() as claims:
        await claims.end()
        claiming = operator.claimed(1)
        starting = asyncio.create_task(claiming.__aenter__())
        await asyncio.sleep(0.2)
        assert not starting.done()
        claims.begin(9, [operator.pool], (), ())
        slots = await starting
        await on(await slots.acquire(60)).reset(TASK)
        await claiming.__aexit__(None, None, None)
        assert operator.api.holders == []
