"""`python inside.py PLAN`: a real node's first process. It needs process and mount namespaces of its own (`unshare`)
and makes its network: when it ends, the kernel takes every process, mount, interface and packet filter of the node with
it, however it ended. Nothing of the node can be left behind on the machine.

The plan (JSON) says what happens, in this order:
    bind      [[source, target]...]     folders seen elsewhere
    tmpfs     [target...]               empty folders in memory
    cable     interface, host, node, prefix, block, services: the link to the machine and what leads over it
    write     [[path, text]...]         kernel settings; those that this kernel has not are left out
    run       [{name, arguments, log, after}...]    programs; `after`: the socket that must be there first
It ends with 1, and with it the node, as soon as one of the programs has ended. One that waited for a socket may end
with an error in its first minute: it is started again, as an init system does, as the listener may not be ready.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from typing import Any

_CLONE_NEWNET = 0x40000000
_UPLINK = "uplink"
_SOCKET_SECONDS = 60.0
#: in which a program that needs another one may end, and the pause until it is started again
_EARLY_SECONDS, _AGAIN_SECONDS = 60.0, 0.5


def main(plan: dict[str, Any]) -> None:
    for source, target in plan["bind"]:
        _do("mount", "--bind", source, target)
    for target in plan["tmpfs"]:
        os.makedirs(target, exist_ok=True)
        _do("mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", target)
    _plug(plan["cable"])
    for path, text in plan["write"]:
        if os.path.exists(path):
            with open(path, "w") as file:
                file.write(text)
    for stale in {program["after"] for program in plan["run"]} - {""}:
        if os.path.exists(stale):
            os.unlink(stale)
    running = {}
    began = {}
    for program in plan["run"]:
        if program["after"]:
            _wait(program["after"])
        running[_start(program)] = program
        began[program["name"]] = time.monotonic()
    # Also whatever lost its parent.
    while True:
        pid, status = os.wait()
        if pid in running:
            ended, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            if ended["after"] and code > 0 and time.monotonic() < began[ended["name"]] + _EARLY_SECONDS:
                time.sleep(_AGAIN_SECONDS)
                running[_start(ended)] = ended
                continue
            print(f"{ended['name']} ended with {code}; {ended['log']} ends with:")
            with open(ended["log"], errors="replace") as log:
                print("".join(log.readlines()[-15:]))
            sys.exit(1)


def _start(program: dict[str, Any]) -> int:
    with open(program["log"], "ab") as log:
        return subprocess.Popen(program["arguments"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/").pid


def _plug(cable: dict[str, str]) -> None:
    machine = os.open("/proc/self/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace could be made")
    outside = ("nsenter", f"--net=/proc/{os.getpid()}/fd/{machine}", "ip")
    name, node, prefix = cable["interface"], cable["node"], cable["prefix"]
    # What a node of this name had before may take a moment to go.
    subprocess.run([*outside, "link", "delete", name], capture_output=True, timeout=120, check=False)
    _do(*outside, "link", "add", name, "type", "veth", "peer", "name", _UPLINK, "netns", str(os.getpid()))
    _do("ip", "link", "set", "lo", "up")
    _do("ip", "address", "add", f"{node}/{prefix}", "dev", _UPLINK)
    _do("ip", "link", "set", _UPLINK, "up")
    _do(*outside, "address", "add", f"{cable['host']}/{prefix}", "dev", name)
    _do(*outside, "link", "set", name, "up")
    _do(*outside, "route", "add", cable["block"], "via", node)
    # Programs of the node itself reach services: what they send is turned round before it leaves.
    _do("ip", "route", "add", cable["services"], "via", cable["host"])
    os.close(machine)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")


def _wait(path: str) -> None:
    deadline = time.monotonic() + _SOCKET_SECONDS
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path} is not there after {_SOCKET_SECONDS:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    with open(sys.argv[1]) as given:
        main(json.load(given))
