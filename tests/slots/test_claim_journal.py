"""Claims of a process that was killed: given back by the one that is started in its place."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from broker_lab import a_lab, environment
from phones import until
from small_broker import POOL

from tapforge_api import attempt as variables
from tapforge_api import load
from tapforge_api.claims import Acquire, Given
from tapforge_envs.clients.phones import PhoneClients
from tapforge_envs.slots.broker_calls import BrokerCalls
from tapforge_envs.slots.claim_journal import ClaimJournal
from tapforge_trainer.run.assembly import slots_of

#: a number that no process has: the kernel stops far below
DEAD = 2**30


def notes(file: Path, **change: Any) -> dict[str, Any]:
    said = json.loads(file.read_text()) | change
    file.write_text(json.dumps(said))
    return said


async def test_what_a_killed_process_held_is_given_back_at_once(tmp_path: Path) -> None:
    file = tmp_path / "claims.json"
    async with a_lab(tmp_path, 3, ttl=600) as lab:
        async with BrokerCalls(lab.authority.access(lab.broker.port)) as calls:
            given = (await calls.acquire(POOL, Acquire(request="of-the-dead", slots=2), 10)).claims
        ClaimJournal(file).write(Given(id=claim.id, secret=claim.secret, episodes=3) for claim in given)
        notes(file, process=DEAD)
        async with lab.claimed(3, journal=ClaimJournal(file)) as slots:
            assert {(g.id, g.verdict) for g in lab.broker.given} == {(claim.id, "dirty") for claim in given}
            await until(lambda: slots.usable > 0)
            assert lab.broker.calls[1] == "release", "before anything is asked for"


async def test_the_file_names_the_claims_that_are_held_and_none_after_the_end(tmp_path: Path) -> None:
    file = tmp_path / "claims.json"
    async with a_lab(tmp_path, 2) as lab:
        async with lab.claimed(2, journal=ClaimJournal(file)) as slots:
            await until(lambda: slots.usable == 2)
            assert file.stat().st_mode & 0o077 == 0, "secrets"
            named = notes(file, process=DEAD)["claims"]
            assert {claim["id"] for claim in named} == {phone.holder.id for phone in lab.broker.phones.values()}
            assert {claim.id for claim in ClaimJournal(file).unreleased()} == {claim["id"] for claim in named}
        assert notes(file)["claims"] == []


async def test_a_living_process_keeps_its_claims(tmp_path: Path) -> None:
    file = tmp_path / "claims.json"
    async with a_lab(tmp_path, 2) as lab, lab.claimed(1, journal=ClaimJournal(file)) as slots:
        await until(lambda: slots.usable == 1)
        assert len(notes(file)["claims"]) == 1
        assert ClaimJournal(file).unreleased() == ()


def test_the_journal_of_a_later_release_is_read(tmp_path: Path) -> None:
    file = tmp_path / "claims.json"
    claim = {"id": "uid-1.1234", "secret": "s" * 20, "verdict": "worn", "later": 1}
    file.write_text(json.dumps({"process": DEAD, "claims": [claim], "later": 1}))
    assert [(c.id, c.verdict) for c in ClaimJournal(file).unreleased()] == [("uid-1.1234", "dirty")]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"process": 1.5}', '{"process": "x", "claims": []}', '{"claims": []}']
)
async def test_a_file_that_can_not_be_read_is_no_obstacle(tmp_path: Path, text: str) -> None:
    file = tmp_path / "claims.json"
    file.write_text(text)
    async with a_lab(tmp_path, 1) as lab, lab.claimed(1, journal=ClaimJournal(file)) as slots:
        await until(lambda: slots.usable == 1)
        assert len(notes(file)["claims"]) == 1


async def test_a_folder_that_is_not_there_is_no_obstacle(tmp_path: Path) -> None:
    journal = ClaimJournal(tmp_path / "none" / "claims.json")
    async with a_lab(tmp_path, 1) as lab, lab.claimed(1, journal=journal) as slots:
        await until(lambda: slots.usable == 1)


async def test_drivers_in_pods_that_share_their_work_folder_do_not_inherit_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = f"{{environment: {{source: {{pool: {{name: {POOL}, slots: 1}}}}}}, stop: {{maxUpdates: 1}}}}"
    run = load(f"{{apiVersion: tapforge.dev/v1alpha1, kind: TrainingRun, metadata: {{name: a}}, spec: {spec}}}\n")
    (tmp_path / "work").mkdir()

    @asynccontextmanager
    async def in_a_pod_of(uid: str) -> AsyncIterator[None]:
        (tmp_path / uid).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / uid))
        monkeypatch.setenv(variables.RUN_UID, uid)
        clients = PhoneClients()
        slots = slots_of(run, clients.health)
        await slots.start()
        try:
            yield
        finally:
            await slots.close()
            await clients.close()

    async with a_lab(tmp_path, 2) as lab:
        for name, value in (environment(lab, tmp_path) | {variables.WORK: str(tmp_path / "work")}).items():
            monkeypatch.setenv(name, value)
        async with in_a_pod_of("one"):
            await until(lambda: len(lab.broker.held) == 1)
            for file in tmp_path.rglob("*claims*.json"):
                notes(file, process=DEAD)  # as the number looks in another Pod
            async with in_a_pod_of("two"):
                assert lab.broker.given == []
                await until(lambda: len(lab.broker.held) == 2)
