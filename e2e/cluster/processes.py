"""Processes that end together: on request, and at the latest when the process that started them ends (guardian.py).

Each writes what it says into a file of its own. A process is started again under its name with the arguments it had.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_GUARDIAN = Path(__file__).with_name("guardian.py")
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.01
#: below the range that outgoing connections take theirs from, so that a port stays free while its server is away
_PORTS = range(18000, 32000)
#: those that this process gave out
_reserved: list[socket.socket] = []


@dataclass(slots=True)
class _Member:
    arguments: tuple[str, ...]
    environment: dict[str, str] | None
    process: subprocess.Popen[bytes]
    #: it was ended on purpose
    stopped: bool = False


def _wait_until_stopped(name: str, pid: int) -> None:
    """The kernel says that a child is stopped when the last one of its threads is."""
    deadline = time.monotonic() + _STOP_SECONDS
    events = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (seen := os.waitid(os.P_PID, pid, events)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} (pid {pid}) took no SIGSTOP within {_STOP_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
    if seen.si_code != os.CLD_STOPPED:
        raise RuntimeError(f"{name} (pid {pid}) ended while it was being paused: its log may say why")


class Family:
    """The processes of one cluster. `folder` is removed with them, and the cgroups of that name."""

    def __init__(self, folder: Path, logs: Path, *, keep: bool = False, cgroup: str = "") -> None:
        self._logs = logs
        self._members: dict[str, _Member] = {}
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARDIAN), "" if keep else str(folder), cgroup],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            process_group=0,
        )

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """`environment` replaces the inherited one, where it is given."""
        if name in self._members and self.running(name):
            raise RuntimeError(f"{name} is running already (pid {self.pid(name)}): stop it first")
        if self._guardian.poll() is not None:
            raise RuntimeError(f"the cluster has been stopped, so {name} can't be started in it: make a new one")
        given = dict(environment) if environment is not None else None
        with open(self.log(name), "ab") as log:
            process = subprocess.Popen(
                list(arguments),
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._logs,
                process_group=self._guardian.pid,
            )
        self._members[name] = _Member(tuple(arguments), given, process)

    def start_again(self, name: str) -> None:
        member = self._member(name)
        self.start(name, member.arguments, member.environment)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM, seconds: float = _STOP_SECONDS) -> None:
        """Ends one process; killed when it isn't gone in time. Nothing happens when it is gone already."""
        self._member(name).stopped = True
        process = self._member(name).process
        process.send_signal(number)
        # One that was stopped takes no other signal before it goes on.
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_SECONDS)

    def may_end(self, name: str) -> None:
        """By itself, from now on until it is started again: that does not count as a crash."""
        self._member(name).stopped = True

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Its connections stay open inside the block, and none of its threads runs."""
        process = self._member(name).process
        if not self.running(name):
            raise RuntimeError(f"{name} (pid {process.pid}) has ended and can't be paused: start it first")
        process.send_signal(signal.SIGSTOP)
        try:
            # The signal is sent at once; on a busy machine a thread may still answer after that.
            _wait_until_stopped(name, process.pid)
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def pid(self, name: str) -> int:
        return self._member(name).process.pid

    def running(self, name: str) -> bool:
        return name in self._members and self._members[name].process.poll() is None

    def crashed(self) -> list[str]:
        """Those that ended without having been stopped."""
        return [name for name, member in self._members.items() if not member.stopped and not self.running(name)]

    def names(self) -> list[str]:
        return [name for name in self._members if self.running(name)]

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def last_words(self, name: str, lines: int = 15) -> str:
        path = self.log(name)
        said = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
        return "\n".join(said) or "(it said nothing)"

    def close(self) -> None:
        """Kills them all; returns when they are gone."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        self._guardian.wait(_STOP_SECONDS)
        for member in self._members.values():
            member.process.kill()  # should the guardian have been ended before
            member.process.wait(_STOP_SECONDS)

    def _member(self, name: str) -> _Member:
        if name not in self._members:
            raise KeyError(f"no process is called {name}; there are {', '.join(self._members) or 'none'}")
        return self._members[name]


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that no program listens on, all different; no other process gets one of them from
    here as long as this one lives, also while the port's server is not there yet or away.

    Each is bound here and never listened on: a program that checks whether it is free finds it taken, and a server that
    sets SO_REUSEADDR, as all of ours do, takes it all the same."""
    found: list[int] = []
    for port in random.sample(_PORTS, k=len(_PORTS)):
        place = socket.socket()
        try:
            place.bind(("127.0.0.1", port))
        except OSError:
            place.close()
            continue
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _reserved.append(place)
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(
        f"{count} free ports are needed between {_PORTS.start} and {_PORTS.stop}, and {len(found)} are left"
    )
