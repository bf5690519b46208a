"""Who may wait for slots while others want to: places are shared fairly among namespaces."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable

import pytest

from tapforge_operator.broker import waiting
from tapforge_operator.broker.auth import Denied
from tapforge_operator.broker.waiting import Limits, WaitingRoom, limits_of

ANN, BOB = "user/ann", "user/bob"


def account(namespace: str, number: int = 0) -> str:
    return f"user/system:serviceaccount:{namespace}:sa-{number}"


def run(namespace: str) -> str:
    return f"run/{namespace}/train/uid"


class Hall:
    """A waiting room with those in it."""

    def __init__(self) -> None:
        self.room = WaitingRoom(Limits(4, 6, 12))
        self.there: Counter[str] = Counter()
        self.why: list[str] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def enter(self, holders: Iterable[str]) -> None:
        """They wait, as far as they may."""
        for holder in holders:
            call = asyncio.create_task(self._wait(holder))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def leave(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _wait(self, holder: str) -> None:
        try:
            async with self.room.place(holder):
                self.there[holder] += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    self.there[holder] -= 1
        except Denied as error:
            assert (error.status, error.reason) == (429, "TooManyWaiters")
            self.why.append(str(error))

    @property
    def counts(self) -> dict[str, int]:
        return dict(+self.there)


@pytest.fixture
async def hall() -> AsyncIterator[Hall]:
    hall = Hall()
    yield hall
    await hall.leave()
    await hall.enter([ANN])
    assert hall.counts == {ANN: 1}, "everybody who left gave up its place"
    await hall.leave()


async def test_a_holder_has_a_limit(hall: Hall) -> None:
    await hall.enter([run("lab")] * 5)
    assert hall.counts == {run("lab"): 4}
    assert hall.why == [f"{run('lab')} waits in 4 acquires, of at most 4; {waiting._ADVICE}"]


async def test_the_holders_of_a_namespace_share_one(hall: Hall) -> None:
    await hall.enter(account("lab", k) for k in range(5))
    await hall.enter([run("lab")] * 2)
    assert sum(hall.counts.values()) == 6
    assert "namespace lab" in hall.why[0]
    await hall.enter([run("other"), ANN, BOB])
    assert sum(hall.counts.values()) == 9, "nobody else is kept waiting by it"


async def test_who_is_of_no_namespace_shares_with_nobody(hall: Hall) -> None:
    await hall.enter([ANN] * 4 + [BOB] * 4)
    assert hall.counts == {ANN: 4, BOB: 4}


async def test_a_full_room_takes_newcomers_at_the_cost_of_who_has_most(hall: Hall) -> None:
    await hall.enter([account("mallory", 1)] * 4 + [account("mallory", 2)] * 2 + [run("lab")] * 3 + [ANN] * 3)
    assert sum(hall.counts.values()) == 12
    await hall.enter([run("other")])
    assert hall.counts == {
        account("mallory", 1): 3, account("mallory", 2): 2, run("lab"): 3, ANN: 3, run("other"): 1,
    }  # fmt: skip
    assert "gave up" in hall.why[0]
    await hall.enter([run("other")] * 4)
    assert hall.counts[run("other")] == 3, "as many as the others have"
    assert sum(n for holder, n in hall.counts.items() if "mallory" in holder) == 3


async def test_many_namespaces_keep_no_other_one_out(hall: Hall) -> None:
    await hall.enter(run(f"mallory-{k % 4}") for k in range(12))
    await hall.enter([run("lab")] * 2)
    assert hall.counts[run("lab")] == 2
    assert sum(hall.counts.values()) == 12


async def test_what_ends_by_itself_is_no_refusal(hall: Hall) -> None:
    with pytest.raises(TimeoutError):
        async with hall.room.place(ANN), asyncio.timeout(0):
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("connections", "limits"),
    [(16_384, (256, 1024, 6144)), (4096, (256, 1024, 1536)), (128, (8, 32, 48)), (1, (1, 1, 1))],
)
def test_who_waits_leaves_connections_to_others(connections: int, limits: tuple[int, ...]) -> None:
    assert limits_of(connections) == limits
