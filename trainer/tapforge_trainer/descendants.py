"""Nothing that a command starts outlives it: what is left when it ends is ended with it.

Ray's agents look for a parent now and then, and not at all while they try to reach a control store that is gone: a
command that is stopped while Ray starts would leave them behind for minutes.

- On Linux the process adopts what its children leave behind, so that it finds them; elsewhere only those are found
  whose own parents live.
- It happens when the interpreter ends, after Ray's own end; not when the process is killed.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import sys
from typing import Final

log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER: Final = 36
#: how long a process may take to end when it is asked to, seconds
_GRACE: Final = 2.0


def adopt() -> None:
    """From here on. Called before anything registers an end of its own, it comes after those."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        log.warning("processes that Ray leaves behind won't be ended: %s", OSError(ctypes.get_errno(), "prctl"))
    atexit.register(end)


def end() -> None:
    """Ends every process below this one."""
    import psutil

    # Who is asked to end may leave others behind: they are asked too.
    for ask in (psutil.Process.terminate, psutil.Process.kill, psutil.Process.kill):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            try:
                ask(process)
            except psutil.NoSuchProcess:
                continue  # it ended by itself
        psutil.wait_procs(left, timeout=_GRACE)
