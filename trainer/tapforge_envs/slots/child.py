"""`python -m tapforge_envs.slots.child PARENT_PID MODULE [ARGUMENTS]`: runs a module that never outlives its parent.

On Linux the kernel kills this process when the parent thread that started it ends; elsewhere a thread looks once a
second. It is set here, after exec, and not in the parent's fork: a trainer has threads, and code between fork and exec
of a threaded process may deadlock.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # The parent may have died before the line above.
    if os.getppid() != parent:
        sys.exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
