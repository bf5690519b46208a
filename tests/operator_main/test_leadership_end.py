"""Whose fault the end of a leadership is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tapforge_operator import manager
from tapforge_operator.config import Settings
from tapforge_operator.kube.client import ApiError
from tapforge_operator.manager import Leadership
from tapforge_operator.observability.metrics import Telemetry


class Election:
    """The Lease is over after it was looked at so many times."""

    def __init__(self, looks: float):
        self.looks = looks
        self.looked = 0

    @property
    def leads(self) -> bool:
        self.looked += 1
        return self.looked <= self.looks


class Claims:
    """A broker leads while it is whole and its process leads."""

    def __init__(self, election: Election):
        self._election = election
        self.whole = True

    @property
    def leading(self) -> bool:
        return self.whole and self._election.leads


def made(monkeypatch: pytest.MonkeyPatch, looks: float) -> tuple[Any, Election, Claims]:
    monkeypatch.setattr(manager, "_CHECK_SECONDS", 0.0)
    election: Any = Election(looks)
    nobody: Any = SimpleNamespace()
    ours: Any = Leadership(Settings("me"), nobody, nobody, nobody, election, Telemetry())
    ours._claims = Claims(election)
    return ours, election, ours._claims


@pytest.mark.parametrize("looks", range(4))
async def test_a_lease_that_is_over_between_two_checks_is_not_the_brokers_fault(
    looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, election, _ = made(monkeypatch, looks)
    task = asyncio.create_task(ours._broker_fails())
    async with asyncio.timeout(60):
        while election.looked < looks + 8 and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})


async def test_a_broker_that_stopped_by_itself_ends_the_leadership(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, claims = made(monkeypatch, float("inf"))
    claims.whole = False
    with pytest.raises(RuntimeError, match="the broker stopped"):
        await asyncio.wait_for(ours._broker_fails(), 60)


class Kept:
    """A Lease that is ours for as long as it is kept."""

    def __init__(self) -> None:
        self.leads = True
        self.given_up = False
        self._over = asyncio.Event()

    async def win(self) -> int:
        return 1

    async def keep(self) -> None:
        try:
            await self._over.wait()
        finally:
            self.leads = False

    async def resign(self) -> None:
        self.given_up, self.leads = self.leads, False
        self._over.set()


async def test_who_leaves_in_the_middle_of_writes_gives_the_lease_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What acts is cancelled one by one, and the Lease is kept until the last of it has ended."""
    election: Any = Kept()
    client: Any = SimpleNamespace()
    ours: Any = Leadership(Settings("me"), client, client, client, election, Telemetry())
    jobs = asyncio.create_task(asyncio.Event().wait())

    async def nothing(*_: object) -> None:
        await asyncio.Event().wait()

    async def begin(term: int) -> asyncio.Task[Any]:
        return jobs

    async def listen(stack: object) -> None:
        pass

    async def end_runs() -> None:
        jobs.cancel()
        await asyncio.wait({jobs})

    async def end_claims() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    monkeypatch.setattr(ours, "_begin", begin)
    monkeypatch.setattr(ours, "_listen", listen)
    monkeypatch.setattr(ours, "_broker_fails", nothing)
    monkeypatch.setattr(ours.informers, "resync", nothing)
    monkeypatch.setattr(ours._runs, "stop", end_runs)
    ours._claims = SimpleNamespace(end=end_claims)
    leading = asyncio.create_task(ours.run())
    for _ in range(10):
        await asyncio.sleep(0)
    await asyncio.wait_for(ours.close(), 60)
    assert election.given_up
    await asyncio.wait_for(leading, 60)


class Taken(Kept):
    """A Lease whose taking is answered in the moment in which it is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.leads = False
        self._answered = asyncio.Event()

    async def win(self) -> int:
        await self._answered.wait()
        self.leads = True
        return 1

    async def resign(self) -> None:
        self._answered.set()
        for _ in range(10):
            await asyncio.sleep(0)
        await super().resign()


async def test_what_is_won_while_the_process_leaves_is_no_term(monkeypatch: pytest.MonkeyPatch) -> None:
    election: Any = Taken()
    client: Any = SimpleNamespace()
    ours: Any = Leadership(Settings("me"), client, client, client, election, Telemetry())
    terms: list[int] = []

    async def lead(term: int) -> None:
        terms.append(term)

    async def listen(stack: object) -> None:
        pass

    monkeypatch.setattr(ours, "_lead", lead)
    monkeypatch.setattr(ours, "_listen", listen)
    leading = asyncio.create_task(ours.run())
    await asyncio.sleep(0)
    await asyncio.wait_for(ours.close(), 60)
    await asyncio.wait_for(leading, 60)
    assert election.given_up and not terms


def test_what_a_namespace_uses_of_its_quota_concerns_its_pools_and_its_runs_that_want_phones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody: Any = SimpleNamespace()
    ours: Any = Leadership(Settings("me"), nobody, nobody, nobody, Election(float("inf")), Telemetry())
    for namespace, pool, suspend in (("a", "phones", False), ("a", "phones", True), ("b", "others", False)):
        name = f"{namespace}-{suspend}"
        metadata = {"namespace": namespace, "name": pool, "uid": f"pool-{namespace}", "resourceVersion": "1"}
        ours.cache.observe_pool({"metadata": metadata, "spec": {}})
        spec = {"environment": {"source": {"pool": {"name": pool, "slots": 2}}}, "suspend": suspend}
        ours.cache.observe_run({"metadata": metadata | {"name": name, "uid": f"run-{name}"}, "spec": spec})
    requeued: list[str] = []
    monkeypatch.setattr(ours, "_requeue", requeued.append)
    monkeypatch.setattr(ours._runs._queue, "wake", requeued.append)
    ours._quota_used("a")
    assert requeued == ["pool-a", "run-a-False"]


async def test_the_end_of_a_term_names_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Type and text of each, also of those inside groups and of those that have no text."""
    election: Any = Kept()
    client: Any = SimpleNamespace()
    ours: Any = Leadership(Settings("me"), client, client, client, election, Telemetry())

    async def breaks(*_: object) -> None:
        raise ExceptionGroup("watches", [KeyError("spec"), ApiError("LIST it", 500, "InternalError", "no webhook")])

    async def times_out(*_: object) -> None:
        raise TimeoutError

    async def begin(term: int) -> asyncio.Task[None]:
        return asyncio.create_task(breaks())

    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(ours, "_begin", begin)
    monkeypatch.setattr(ours, "_broker_fails", times_out)
    monkeypatch.setattr(ours.informers, "resync", nothing)
    ours._claims = SimpleNamespace(leading=False, end=nothing)
    await asyncio.wait_for(ours._lead(1), 60)
    assert election.given_up
    for words in ("KeyError: 'spec'", "ApiError: LIST it: 500 InternalError: no webhook", "TimeoutError"):
        assert words in ours.unready() + ours._why
    assert "lists ended" in ours._why, "what ends without an error is named too"


async def test_claims_that_missed_something_are_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of a slot, or the answer to a write of it, breaks on a mistake in here: whoever told goes on."""
    election: Any = Kept()
    client: Any = SimpleNamespace()
    ours: Any = Leadership(Settings("me"), client, client, client, election, Telemetry())
    told: list[str] = []

    async def begin(term: int) -> asyncio.Task[None]:
        begun.set()
        return asyncio.create_task(nothing())

    async def nothing(*_: object) -> None:
        await asyncio.Event().wait()

    async def at_once() -> None:
        pass

    def breaks(pool: Any) -> None:
        told.append(pool.name)
        raise KeyError("a bug")

    begun = asyncio.Event()
    monkeypatch.setattr(ours, "_begin", begin)
    monkeypatch.setattr(ours, "_broker_fails", nothing)
    monkeypatch.setattr(ours.informers, "resync", nothing)
    ours._claims = SimpleNamespace(leading=True, end=at_once, observe_pool=breaks)
    monkeypatch.setattr(ours._pools, "wake", told.append)
    leading = asyncio.create_task(ours._lead(1))
    await asyncio.wait_for(begun.wait(), 60)
    metadata = {"namespace": "a", "name": "phones", "uid": "pool", "resourceVersion": "1"}
    ours.cache.observe_pool({"metadata": metadata, "spec": {}})
    await asyncio.wait_for(leading, 60)
    assert told == ["phones", "pool"] and election.given_up and "KeyError: 'a bug'" in ours._why
