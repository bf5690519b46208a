"""The operator's rooms in this process, with a client that dies at a chosen write: from then on nothing of that
operator's life goes on, and all it knew is lost. `House` builds the next one from what is written on the cluster.

What the watches would tell, lists tell here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal, TypeVar

import kopf
from e2e.cluster import PATIENCE

from tapforge_api.claims import Acquire, Claim, Given, Held, Release, Renew
from tapforge_operator.broker.claim_record import Keys
from tapforge_operator.broker.service import Claims
from tapforge_operator.broker.types import Holder, ServiceTimeouts
from tapforge_operator.controller import WorkQueue
from tapforge_operator.emulatorpool.controller import PoolController
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.client import ApiError, Client
from tapforge_operator.kube.informers import Informers, Scope
from tapforge_operator.observability.metrics import Telemetry

When = Literal["before", "after"]
T = TypeVar("T")

_KEY = b"k" * 32
_LIST_SECONDS = 0.2
_READS = ("get", "list")


class MortalClient(Client):
    """Dies at its `at`-th write: before it is sent, or after it was carried out and before the answer is known. Whoever
    waits for an answer of a dead one waits for ever."""

    def __init__(self, info: kopf.ConnectionInfo, at: int, when: When):
        # One that waits long for an answer: what a slow one does is another test's matter.
        super().__init__(info, deadline=PATIENCE)
        self.died = asyncio.Event()
        #: sent, or carried out
        self.writes = 0
        self._at, self._when = at, when

    async def _call(self, verb: str, *args: Any, **more: Any) -> dict[str, Any]:
        await self._live()
        writes = verb not in _READS
        if writes and self._when == "before":
            await self._count()
        try:
            answer = await super()._call(verb, *args, **more)
        except ApiError:
            await self._live()
            raise
        if writes and self._when == "after":
            await self._count()
        await self._live()
        return answer

    async def _count(self) -> None:
        self.writes += 1
        if self.writes == self._at:
            self.died.set()
        await self._live()

    async def _live(self) -> None:
        if self.died.is_set():
            await asyncio.Event().wait()


class Life:
    """One life of the operator, in one namespace."""

    def __init__(self, client: MortalClient, namespace: str):
        self.client = client
        self._telemetry = Telemetry("mortal")
        self.cache = Cache(self._telemetry, self._requeue)
        self._informers = Informers(self.cache, Scope((namespace,), nodes=False), self._telemetry)
        timeouts = ServiceTimeouts(tick=0.05, siblings=0.2)
        self.claims = Claims(
            client,
            Keys(_KEY),
            self._leads,
            on_change=self._requeue,
            observe_pod=self.cache.observe_pod,
            timeouts=timeouts,
        )
        self._pools = WorkQueue("EmulatorPool", self._controller, self._leads, self._passed)
        self._tasks: set[asyncio.Task[None]] = set()
        #: what went wrong in a way that no operator should go wrong
        self.broken: list[BaseException] = []

    async def begin(self, term: int) -> None:
        await self._informers.sync(self.client)
        self.cache.slot_listeners.append(self._slot_changed)
        self.cache.pool_listeners.append(self._pool_changed)
        self.cache.lease_listeners.append(self.claims.observe_lease)
        leases = [lease.body for lease in self.cache.leases.all()]
        self.claims.begin(term, self.cache.pools.all(), self.cache.slots.all(), leases)
        self._pools.start()
        for pool in list(self.cache.pools.all()):
            self._requeue(pool.uid)
        self._start(self._look())

    async def end(self) -> None:
        await self._pools.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.claims.end()

    def _leads(self) -> bool:
        return not self.client.died.is_set()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LIST_SECONDS)
            await self._informers.sync(self.client)

    def _requeue(self, uid: str) -> None:
        if self.claims.leading:
            self._pools.wake(uid)

    def _controller(self, uid: str) -> PoolController | None:
        pool = self.cache.pools.get(uid)
        if pool is None:
            return None
        wake = lambda: self._requeue(uid)  # noqa: E731
        return PoolController(pool, self.cache, self.client, self.claims, self._telemetry, self._leads, wake)

    def _passed(self, pool: str, _: float, error: str | None) -> None:
        if error == "Crash":
            self.broken.append(RuntimeError(f"the controller of pool {pool} broke: the log says how"))

    def _slot_changed(self, before: Any, after: Any) -> None:
        if after is not None:
            self.claims.observe(after)
        else:
            self.claims.forget(before)

    def _pool_changed(self, before: Any, after: Any) -> None:
        if after is not None:
            self.claims.observe_pool(after)
        else:
            self.claims.forget_pool(before.uid)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken.append(error)


class House:
    """Where an operator dies and the next one is begun. What callers ask is asked again of the next one."""

    def __init__(self, info: kopf.ConnectionInfo, namespace: str, deaths: Callable[[int], int], when: When):
        """`deaths`: at which of its writes the n-th operator (from 1) dies; 0 never."""
        self._info, self._namespace = info, namespace
        self._deaths, self._when = deaths, when
        self.lives = 0
        self.writes = 0
        self._life: Life | None = None
        self._stack = AsyncExitStack()
        self._there = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> House:
        self._task = asyncio.get_running_loop().create_task(self._succeed())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._bury()

    def check(self) -> None:
        """Raises what ended the succession."""
        if self._task is not None and self._task.done():
            self._task.result()

    @property
    def deaths(self) -> int:
        return self.lives - 1

    async def _succeed(self) -> None:
        while True:
            self.lives += 1
            client = MortalClient(self._info, self._deaths(self.lives), self._when)
            await self._stack.enter_async_context(client)
            self._life = Life(client, self._namespace)
            await self._life.begin(self.lives)
            self._there.set()
            await client.died.wait()
            self._there.clear()
            await self._bury()

    async def _bury(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            self.writes += life.client.writes
            await life.end()
            await self._stack.aclose()
            if life.broken:
                raise life.broken[0]

    # --- callers ------------------------------------------------------------------------------------------------------

    async def acquire(self, pool: str, request: str, **ask: Any) -> list[Claim]:
        body = Acquire.model_construct(
            **{"request": request, "slots": 1, "wait_seconds": 5.0, "ttl_seconds": 3600.0, "priority": 0, **ask}
        )
        said = await self._ask(lambda claims: claims.acquire(self._namespace, pool, Holder("user/tester"), body))
        return list(said.claims)

    async def renew(self, claim: Claim) -> str:
        asked = Renew(claims=(Held(id=claim.id, secret=claim.secret),))
        return (await self._ask(lambda claims: claims.renew(asked))).claims[0].state

    async def release(self, claim: Claim, verdict: Literal["clean", "dirty", "broken"] = "clean") -> None:
        asked = Release(claims=(Given(id=claim.id, secret=claim.secret, verdict=verdict, episodes=1),))
        await self._ask(lambda claims: claims.release(asked))

    async def _ask(self, call: Callable[[Claims], Awaitable[T]]) -> T:
        """Until somebody answers; a caller of a dead operator hears nothing and asks the next one."""
        async with asyncio.timeout(2 * PATIENCE):
            while True:
                self.check()
                assert self._task is not None
                there = asyncio.ensure_future(self._there.wait())
                await asyncio.wait({there, self._task}, return_when=asyncio.FIRST_COMPLETED)
                there.cancel()
                life = self._life
                if life is None:
                    continue
                asked = asyncio.ensure_future(call(life.claims))
                dead = asyncio.ensure_future(life.client.died.wait())
                await asyncio.wait({asked, dead}, return_when=asyncio.FIRST_COMPLETED)
                dead.cancel()
                if asked.done() and not life.client.died.is_set():
                    return asked.result()
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)


def connection_info(server: str, files: Mapping[str, str]) -> kopf.ConnectionInfo:
    return kopf.ConnectionInfo(server=server, **files)
