"""`python -m tapforge_trainer.serving.guard MODULE [ARGUMENTS]`: a module that ends, with all its processes, when the
process that started it does.

vLLM's server starts processes that outlive it when it is killed. Here all of them are in the guard's process group. Its
input ends when the process at the other end dies in whichever way: then the group is killed. It is killed as well when
the module ends, and, by the module's own process, when the guard dies first: Ray kills the children of an actor's
process, and no further ones.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from typing import Final

#: before the module's name, where its own process is meant
_INNER: Final = "--inner"


def main(words: list[str]) -> None:
    threading.Thread(target=_end_with_input, daemon=True).start()
    if words[0] == _INNER:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    command = [sys.executable, "-m", "tapforge_trainer.serving.guard", _INNER, *words]
    module = subprocess.Popen(command, stdin=subprocess.PIPE)
    module.wait()
    print(f"--- {words[0]} ended with {module.returncode}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
