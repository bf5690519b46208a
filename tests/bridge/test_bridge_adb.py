"""Phones that only offer adb, through the bridge with an adb server of its own: an episode from reset to verdict, and
nothing left behind."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from e2e import packages
from phones import PATIENT
from test_env_serve import SERVE, started

from tapforge_envs.bridge.adb_server import AdbServerError, own_adb_server
from tapforge_envs.check import examine
from tapforge_envs.clients.adb.wire import AdbServer, ServerAddress
from tapforge_envs.clients.http import new_session
from tapforge_envs.clients.tapforge_http import TapforgeClient
from tapforge_envs.protocol import EnvironmentFault, Hotkey, Reason, Tap, Task, UnsupportedAction
from tapforge_trainer.data.folder import DataFolder

WIFI = Task(
    suite="adb",
    template="wifi_is_on",
    goal="Turn Wi-Fi on",
    params={"setup": "settings put global wifi_on 0", "check": "settings get global wifi_on", "expect": "^1$"},
)


@pytest.fixture(scope="module")
def adb() -> None:
    packages.ensure(packages.ADB)


@pytest.fixture
def ports(adb) -> Iterator[list[int]]:
    """Of two simulated phones' adbd."""
    command = [sys.executable, "-m", "tapforge_envs.phone.adbd", "--phones", "2", "--width", "360", "--height", "800"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as phone:
        assert phone.stdout is not None
        yield json.loads(phone.stdout.readline())["ports"]
        phone.terminate()


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


async def keyboard(adb_port: int, port: int) -> str:
    """The phone's input method."""
    server = AdbServer(ServerAddress(port=adb_port))
    return (await server.shell(f"127.0.0.1:{port}", "settings get secure default_input_method")).text


async def test_an_episode_over_adb_through_the_bridge(ports, tmp_path):
    adb_port = a_free_port()
    devices = [word for port in ports for word in ("--device", f"127.0.0.1:{port}")]
    options = ["--adb-port", str(adb_port), "--settle", "none", "--page", "0", "--record", str(tmp_path / "people")]
    process, ready = await started("--protocol", "adb", *devices, *options)
    try:
        async with new_session() as session:
            urls = [f"http://127.0.0.1:{ready['port']}/slot/{slot}" for slot in (0, 1)]
            one, two = (TapforgeClient(url, session, PATIENT) for url in urls)
            assert len({await one.health(), await two.health()}) == 2
            first = await one.reset(WIFI)
            assert (first.frame.width, first.frame.height) == (360, 800) and first.app == "dev.tapforge.home"
            assert (await one.evaluate()).value == 0
            with pytest.raises(UnsupportedAction):
                await one.step(Hotkey(keys=("ctrl", "c")), 0)
            await one.step(Tap(x=0.5, y=0.5), 0)
            serial = f"127.0.0.1:{ports[0]}"
            await AdbServer(ServerAddress(port=adb_port)).shell(serial, "settings put global wifi_on 1")
            assert (await one.step(Tap(x=0.5, y=0.99), 1)).observation.frame.width == 360
            for index, (rotation, width) in enumerate([(1, 800), (0, 360)], start=2):
                turn = f"am broadcast -a tapforge.STATE --ei rotation {rotation}"
                await AdbServer(ServerAddress(port=adb_port)).shell(serial, turn)
                assert (await one.step(Tap(x=0.5, y=0.99), index)).observation.frame.width == width
            assert (await one.evaluate()).value == 1
            await two.reset(Task(suite="adb", template="without a judge"))
            with pytest.raises(EnvironmentFault) as fault:
                await two.evaluate()
            assert fault.value.reason is Reason.JUDGE_ERROR
            assert "adbkeyboard" in (await keyboard(adb_port, ports[0]))
            assert list((await examine(urls[1], task=WIFI, deadline=100)).violations) == []
            checked = await examine(urls[1], deadline=100)
            assert list(checked.violations) == [] and "name one (--task)" in " ".join(checked.notes)
        await a_person_plays(ready["page"], AdbServer(ServerAddress(port=adb_port)), f"127.0.0.1:{ports[1]}")
    finally:
        process.terminate()
        _, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    [episode] = DataFolder(tmp_path / "people")
    assert (episode.task.goal, episode.outcome) == ("Turn the phone", "success")
    assert [step.action.type for step in episode.steps] == ["tap", "tap", "type", "terminate"]
    with pytest.raises(ConnectionRefusedError):  # its adb server is gone too
        socket.create_connection(("127.0.0.1", adb_port), 1)
    async with own_adb_server(adb_port):
        await AdbServer(ServerAddress(port=adb_port)).connect(f"127.0.0.1:{ports[0]}")
        assert "adbkeyboard" not in (await keyboard(adb_port, ports[0])), "in the middle of an episode it was stopped"


async def a_person_plays(page: str, adb: AdbServer, serial: str) -> None:
    """A goal of their own on the second phone, which nothing judges; its screen is turned in the middle."""
    places = {"type": "tap", "x": 0.5, "y": 0.99}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=100)) as session:

        async def call(name: str, body: dict, phone: int = 1) -> tuple[int, dict]:
            async with session.post(f"{page}api/phones/{phone}/{name}", json=body) as answer:
                return answer.status, await answer.json()

        async with session.get(f"{page}api/phones/1/catalog") as answer:
            assert await answer.json() == {"tasks": [], "goals": True, "note": ""}
        status, said = await call("task", {"goal": "Turn the phone"}, 0)
        assert status == 409 and "a program plays episode" in said["error"]
        status, state = await call("task", {"goal": "Turn the phone"})
        assert status == 200 and (state["width"], state["height"]) == (360, 800)
        status, said = await call("act", {"action": {"type": "hotkey", "keys": ["ctrl", "c"]}})
        assert status == 422 and "hotkey" in said["error"]
        await adb.shell(serial, "am broadcast -a tapforge.STATE --ei rotation 1")
        status, state = await call("act", {"action": places, "screen": [360, 800]})
        assert status == 200 and "was not touched" in state["note"] and (state["width"], state["height"]) == (800, 360)
        assert (await call("act", {"action": places, "screen": [360, 800]}))[0] == 409
        assert (await call("act", {"action": places, "screen": [800, 360]}))[0] == 200
        for key in "ab":
            assert (await call("act", {"action": {"type": "type", "text": key}}))[0] == 200
        status, state = await call("finish", {"status": "success"})
        assert status == 200 and state["verdict"]["score"] is None and "nothing judges it" in state["verdict"]["reason"]
        assert state["keep"]["decide"] and (await call("keep", {}))[0] == 409
        assert (await call("keep", {"outcome": "success"}))[0] == 200


async def test_the_bridge_ends_when_its_adb_server_does(ports):
    adb_port = a_free_port()
    process, _ = await started("--protocol", "adb", "--device", f"127.0.0.1:{ports[0]}", "--adb-port", str(adb_port))
    await asyncio.to_thread(
        subprocess.run, ["adb", "-P", str(adb_port), "kill-server"], check=True, timeout=60, capture_output=True
    )
    async with asyncio.timeout(120):
        _, said = await process.communicate()
    assert process.returncode == 1 and "ended by itself" in said.decode()


async def test_its_server_listens_on_this_machine_alone_and_is_ended(adb):
    port = a_free_port()
    async with own_adb_server(port) as process:
        lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
        listening = [f for line in lines if f":{port:04X} " in line and (f := line.split())[3] == "0A"]
        assert {fields[1].split(":")[0] for fields in listening} <= {"0100007F", "0" * 24 + "01000000"}
        assert listening
    assert process.returncode is not None


async def test_somebody_elses_server_is_neither_used_nor_ended(adb):
    port = a_free_port()
    async with own_adb_server(port) as process:
        with pytest.raises(AdbServerError, match="can't be had"):
            async with own_adb_server(port):
                pass
        assert process.returncode is None
    with pytest.raises(AdbServerError, match="machine's own"):
        async with own_adb_server(5037):
            pass


async def test_without_adb_or_a_phone_it_says_what_is_missing(adb, monkeypatch):
    words = [*SERVE, "--protocol", "adb", "--device", "auto", "--port", "0"]
    done = await asyncio.to_thread(
        subprocess.run, [*words, "--adb-port", str(a_free_port())], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "auto: no phone can be used: `adb devices` lists none" in done.stderr
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(AdbServerError, match="Debian's package adb"):
        async with own_adb_server(a_free_port()):
            pass
