"""What a command leaves behind when it ends: nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

#: a grandchild whose own parent is gone, in a session of its own, deaf to being asked to end; and a child
COMMAND = """
import atexit, subprocess, sys
from tapforge_trainer.run.shutdown import become_subreaper

become_subreaper()
atexit.register(lambda: print("cleaned up", flush=True))
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
start = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True, \
stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid, flush=True)"
print(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
sys.exit(3)
"""


def test_processes_whose_parents_are_gone_end_with_the_command_after_its_own_clean_up() -> None:
    # stdout of the sleepers stays open until they end: `run` returns when nobody holds it any more
    ended = subprocess.run([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    *pids, last = ended.stdout.splitlines()
    assert (ended.returncode, last, len(pids)) == (3, "cleaned up", 2)
    until = time.monotonic() + 60  # whoever reaps them may be slow
    while (left := [pid for pid in pids if Path("/proc", pid).exists()]) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


#: cannot look at its processes, and waits for a volume that is gone
STUCK = """
import sys, time
from tapforge_trainer.run import shutdown

sys.modules["psutil"] = None
shutdown._FORCED_EXIT = 0.0
shutdown.force_exit(75)
time.sleep(600)
"""


def test_a_driver_that_can_not_kill_its_descendants_exits_all_the_same() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.returncode == 75, ended.stderr
