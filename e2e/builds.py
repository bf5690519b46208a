"""Whatever the tests of the control plane and of a real node are made of, before the first of them runs.

    python -m e2e.builds [long]

- `long` also makes what only the long tests use.
- What is there already is not made again: then it returns after a second.
- The longest comes first, and programs are compiled one after the other, because each compilation fills the machine.
  Beside them packages are downloaded and images put together, which waits for the network most of the time.
- Each line says what is being made. What can't be had on this machine is named with the remedy, and the exit code is 1;
  the rest is made all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from . import installed
from .cluster import CannotBuild, binaries
from .cluster.node import CannotRun
from .gitops import kstatus

PROGRAMS = (binaries.CONTROL_PLANE, binaries.ADDONS, kstatus.SOURCES, binaries.HELM)
LONG_PROGRAMS = (binaries.KARPENTER, binaries.KUEUE)


def main(tier: str = "") -> int:
    programs = (*PROGRAMS, *LONG_PROGRAMS) if tier == "long" else PROGRAMS
    with ThreadPoolExecutor(2) as both:
        done = [both.submit(_tried, make) for make in (lambda: _compiled(programs), installed.prepare)]
        return max(one.result() for one in done)


def _compiled(programs: Iterable[binaries.Sources]) -> None:
    for sources in programs:
        binaries.ensure(of=sources)


def _tried(make: Callable[[], object]) -> int:
    try:
        make()
    except (CannotBuild, CannotRun) as error:
        print(f"builds: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
