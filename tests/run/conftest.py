"""One tiny run for all tests of this room, in three sessions; each fixture is the run's folder as a session left it.

`trained` begins and ends by itself, with two ranks. `interrupted` goes on with it until Ctrl-C, and loses its engine
and then a rank on the way. `resumed` goes on to the end with one rank and on other phones: some of them sick, one dead.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from whole import PHONES, SICK, SPEC, Command, Finished, Run, restarts

from tapforge_trainer.run.folder import read_events


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that commands are started in."""
    folder = tmp_path_factory.mktemp("house")
    (folder / "tiny.yaml").write_text(SPEC)
    return folder


def _since_restart(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = list(events)
    return found[[e["event"] for e in [*found, {"event": "restart"}]].index("restart") :]


def _left(house: Path, name: str, finished: Finished) -> Run:
    """A copy of the run's folder as it is now."""
    shutil.copytree(house / "runs" / "tiny", house / name / "tiny")
    return Run(house / name / "tiny", house / "tiny.yaml", finished)


@pytest.fixture(scope="session")
def trained(house: Path) -> Run:
    return _left(house, "trained", Command("run", "-f", "tiny.yaml", place=house).wait())


@pytest.fixture(scope="session")
def interrupted(house: Path, trained: Run) -> Run:
    more = ("--set", "spec.stop.maxUpdates=1000", "--set", "spec.evaluation.everyUpdates=0")
    command = Command("run", "-f", "tiny.yaml", *more, place=house)
    first = trained.summary["updates"]
    updates = house / "runs" / "tiny"
    command.until(lambda: any(e["event"] == "update" and e["update"] > first for e in read_events(updates)))
    command.kill_one("EngineActor")
    command.until(lambda: any(e["event"] == "update" and restarts(e) for e in read_events(updates)))
    command.kill_one("RankActor", of=2)
    command.until(lambda: "update" in [e["event"] for e in _since_restart(read_events(updates))])
    command.interrupt()
    return _left(house, "interrupted", command.wait())


@pytest.fixture(scope="session")
def phones() -> Iterator[list[str]]:
    """Addresses of a server that somebody else started: sick ones first, at the end one where nobody is."""
    command = [sys.executable, "-m", "tapforge_envs.phone.server", "--slots", str(PHONES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, socket.socket() as nobody:
        assert server.stdout is not None
        port = json.loads(server.stdout.readline())["port"]
        urls = [f"http://127.0.0.1:{port}/slot/{slot}" for slot in range(PHONES)]
        for url, kind in zip(urls, SICK, strict=False):
            body = json.dumps([{"kind": kind}]).encode()
            request = urllib.request.Request(f"{url}/faults", body, {"Content-Type": "application/json"})
            assert urllib.request.urlopen(request, timeout=120).status == 200
        nobody.bind(("127.0.0.1", 0))  # and never listens
        yield [*urls, f"http://127.0.0.1:{nobody.getsockname()[1]}"]
        server.terminate()


@pytest.fixture(scope="session")
def resumed(house: Path, interrupted: Run, phones: list[str]) -> Run:
    (house / "phones.txt").write_text("# a comment\n" + "\n".join(phones) + "\n")
    more = (
        *("--set", f"spec.stop.maxUpdates={interrupted.state['update'] + 3}"),
        *("--set", "spec.evaluation.everyUpdates=0"),
        *("--set", 'spec.environment.source={"urls": {"file": "phones.txt"}}'),
        *("--set", "spec.learner.ranks=1"),
    )
    return _left(house, "resumed", Command("run", "-f", "tiny.yaml", *more, place=house).wait())
