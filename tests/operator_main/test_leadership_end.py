"""Whose fault the end of a leadership is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tapforge_operator import leadership
from tapforge_operator.leadership import Leadership
from tapforge_operator.settings import Settings
from tapforge_operator.telemetry import Telemetry


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
    monkeypatch.setattr(leadership, "_LOOK_SECONDS", 0.0)
    election: Any = Election(looks)
    nobody: Any = SimpleNamespace()
    ours: Any = Leadership(Settings("me"), nobody, nobody, election, Telemetry())
    ours._claims = Claims(election)
    return ours, election, ours._claims


@pytest.mark.parametrize("looks", range(4))
async def test_a_lease_that_is_over_between_two_looks_is_not_the_brokers_fault(
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
