"""`tapforge doctor -f` on the phones that a file lists: as adb has them, or as servers that take connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from adb_desk import Desk
from real_adb import RealAdb

from tapforge_api import load
from tapforge_trainer.doctor.findings import Finding
from tapforge_trainer.doctor.phones import of_adb, of_servers, phones

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "quickstart.yaml"


def asked(addresses: Sequence[str], protocol: str = "adb") -> list[Finding]:
    source = f"spec.environment.source={{urls: {{list: [{', '.join(map(repr, addresses))}]}}}}"
    return phones(load(SAMPLE, [source, f"spec.environment.protocol={protocol}"]))


async def test_phones_are_those_of_the_adb_server_that_a_run_would_ask(
    desk: Desk, adb: RealAdb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(adb.port))
    (none,) = await asyncio.to_thread(asked, ["auto"])
    assert none.state == "fail" and "no phone is attached" in none.text
    address = f"127.0.0.1:{(await desk.phone()).port}"
    (before,) = await asyncio.to_thread(asked, [address])
    assert before.state == "warn" and address in before.text and before.remedy.endswith(f"adb connect {address}")
    await adb("connect", address)
    (after,) = await asyncio.to_thread(asked, [address])
    assert after == Finding("phones", "ok", "1 attached and allowed")
    missing, *_ = await asyncio.to_thread(asked, [address, "R58M123ABC"])
    assert missing.state == "fail" and "R58M123ABC: adb doesn't know it" in missing.text


def test_no_adb_server_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", "1")
    (found,) = asked(["R58M123ABC"])
    assert found.state == "fail" and "no adb server at 127.0.0.1:1" in found.text and "start-server" in found.text


def test_phones_that_cant_be_used_are_named_up_to_a_bound() -> None:
    states = {f"S{k}": "unauthorized" for k in range(7)} | {"good": "device"}
    *named, rest = of_adb(["auto"], states)
    assert [one.text[:3] for one in named] == [f"S{k}:" for k in range(5)] and rest.text.startswith("and 2 more")
    assert all(one.state == "fail" and "Allow USB debugging" in one.text for one in named)


def test_servers_that_take_no_connection_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as up:
        there = f"http://127.0.0.1:{up.getsockname()[1]}"
        (found,) = asked([there, "http://127.0.0.1:1"], "tapforge")
        assert found.state == "warn" and "1 of 2 servers" in found.text and "127.0.0.1:1: " in found.text
        assert asked([there], "tapforge")[0].state == "ok"
    assert of_servers({"a:1": "refused"})[0].state == "fail"
