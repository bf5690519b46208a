"""A broker with a ledger of its own over TLS, real phone servers, and who claims them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from leased import on
from phones import PATIENT, TASKS, Phones, a_port, bounded, phones
from small_broker import NAMESPACE, POOL, Authority, SmallBroker, loop_time

from tapforge_envs.protocol import Home
from tapforge_envs.slots.broker import BrokerSlots
from tapforge_envs.slots.claim_manager import Pace
from tapforge_envs.slots.source import Lease

PACE = Pace(wait=1, answer=60, first=0.02, cap=0.2, close=60)
TASK = TASKS.sample(0, 0)


@dataclass
class Lab:
    broker: SmallBroker
    authority: Authority
    server: Phones

    def slots(self, count: int = 2, pool: str = POOL, **kw) -> BrokerSlots:
        access = kw.pop("access", None) or self.authority.access(self.broker.port)
        return BrokerSlots(pool, access, slots=count, **{"deadlines": PATIENT, "pace": PACE, "clock": loop_time, **kw})

    @asynccontextmanager
    async def claimed(self, count: int = 2, **kw) -> AsyncIterator[BrokerSlots]:
        """Phones that are claimed until the block ends; then none of them waits for its expiry."""
        slots = self.slots(count, **kw)
        await slots.start()
        try:
            yield slots
        finally:
            await slots.close()
        assert not self.broker.held
        assert not self.broker.broken


@asynccontextmanager
async def a_lab(folder: Path, count: int = 3, ttl: float = 120.0, *, up: bool = True) -> AsyncIterator[Lab]:
    """A broker that grants `count` phones for `ttl` seconds each."""
    with bounded(), a_port() as port:
        authority, broker = Authority(folder / "ca"), SmallBroker(ttl, port)
        async with phones(count) as server:
            await broker.put(*server.urls)
            lab = Lab(broker, authority, server)
            if not up:
                yield lab
                return
            async with broker.serving(authority):
                yield lab


async def play(lease: Lease, steps: int = 2) -> None:
    await on(lease).reset(TASK)
    for index in range(steps):
        await on(lease).step(Home(), index)


def environment(lab: Lab, folder: Path) -> dict[str, str]:
    access = lab.authority.access(lab.broker.port)
    return {
        "TAPFORGE_BROKER_URL": str(access.url),
        "TAPFORGE_BROKER_CA": str(lab.authority.ca),
        "TAPFORGE_BROKER_TOKEN_FILE": str(access.token),
        "TAPFORGE_NAMESPACE": NAMESPACE,
    }
