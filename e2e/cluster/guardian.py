"""`python guardian.py FOLDER CGROUP`: ends a cluster's processes when the process that started them has gone, however.

It leads the process group that every component joins and reads a pipe whose other end only its parent has. The kernel
closes that end when the parent dies, also of SIGKILL; then everything in the group is killed (SIGKILL reaches stopped
processes too) and the folder, where one is named, is removed, and so are the cgroups of that name. Ending a cluster on
purpose takes the same way. A real node's containers are in no such group: the kernel ends them with the node's first
process, before that one counts as ended.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import sys
import time

_SECONDS = 60.0


def main(folder: str, cgroup: str) -> None:
    # Ctrl-C in a terminal is the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the kernel sends to a group with a stopped member when the group's last parent dies.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.stdin.buffer.read()
    group = os.getpgrp()
    if os.fork():
        signal.pause()
    # Out of the group, to outlive it.
    os.setsid()
    deadline = time.monotonic() + _SECONDS
    while True:
        # Again and again: one that was just being started joins the group late.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        if not _alive(group) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for top in glob.glob(f"/sys/fs/cgroup/{cgroup}") + glob.glob(f"/sys/fs/cgroup/*/{cgroup}") if cgroup else ():
        _remove_cgroups(top)
    deadline = time.monotonic() + _SECONDS
    while folder and os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_cgroups(top: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while os.path.isdir(top) and time.monotonic() < deadline:
        for place, _, _ in os.walk(top, topdown=False):
            # One that a process is just leaving goes in the next round.
            with contextlib.suppress(OSError):
                os.rmdir(place)
        time.sleep(0.02)


def _alive(group: int) -> bool:
    """Whether one of the group still runs. Those that have ended may wait for long until their parent collects them."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    state, _, of_group = stat.read().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if state != "Z" and int(of_group) == group:
                return True
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
