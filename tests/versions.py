"""`make test-versions`: the control plane's tests on other versions of Kubernetes and KubeRay, one by one.

    python -m tests.versions [NAME...]

- The oldest Kubernetes that is supported and the newest one: every test of the control plane that needs no real node.
  The oldest KubeRay: the tests of runs that start it.
- What a version is made of is built from source first: minutes, once.
- The last lines say for each version what passed; the exit code is 1 when anything failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.cluster import binaries
from tests import tiers

LOGS: Final = Path("test-logs/versions")
#: of one version, seconds
LIMIT: Final = 3600
#: what they test does not depend on a version: the benchmark's own parts, how programs are built and installed
_OWN_PARTS: Final = ("tests/e2e/test_bench_parts.py", "tests/e2e/test_binaries.py", "tests/e2e/test_packages.py")
_ALL: Final = ("tests/e2e", *(f"--ignore={file}" for file in _OWN_PARTS))


@dataclass(frozen=True)
class Version:
    name: str
    #: variable that has the cluster made of it, and its value
    variable: str
    value: str
    sources: binaries.Sources
    #: module in whose version it is interesting
    module: str
    tests: tuple[str, ...]

    @property
    def number(self) -> str:
        text = (self.sources.module / self.sources.modfile).read_text()
        found = re.search(rf"{re.escape(self.module)} v(\S+)", text)
        assert found is not None, f"{self.sources.modfile} of {self.name} requires no {self.module}"
        return found[1]


VERSIONS: Final = (
    Version(
        "kubernetes-oldest",
        "TAPFORGE_TEST_KUBERNETES",
        "oldest",
        binaries.OLDEST_KUBERNETES,
        "k8s.io/kubernetes",
        _ALL,
    ),
    Version(
        "kubernetes-newest",
        "TAPFORGE_TEST_KUBERNETES",
        "newest",
        binaries.NEWEST_KUBERNETES,
        "k8s.io/kubernetes",
        _ALL,
    ),
    Version(
        "kuberay-oldest",
        "TAPFORGE_TEST_KUBERAY",
        "oldest",
        binaries.OLDEST_KUBERAY,
        "github.com/ray-project/kuberay/ray-operator",
        ("tests/e2e/test_runs_control_plane.py",),
    ),
)


def main(names: Sequence[str]) -> int:
    known = {version.name: version for version in VERSIONS}
    if unknown := [name for name in names if name not in known]:
        print(f"versions: {' '.join(unknown)} is none of {' '.join(known)}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    results = [(version, *_run(version)) for version in VERSIONS if not names or version.name in names]
    for version, line, seconds, _ in results:
        print(f"versions: {version.name} {version.number}: {line}, {seconds:.0f} s")
    return max(code for *_, code in results)


def _run(version: Version) -> tuple[str, float, int]:
    """(what pytest said last, seconds, its exit code)"""
    binaries.ensure(of=version.sources)
    log = LOGS / f"{version.name}.log"
    print(f"versions: {version.name} {version.number} begins: {log}", flush=True)
    command = [sys.executable, "-m", "pytest", "-v", *version.tests, "-m", "not node and not long"]
    began = time.monotonic()
    with log.open("wb") as out:
        environment = {**os.environ, version.variable: version.value, "TAPFORGE_SAME_EXAMPLES": "1", "CI": "true"}
        done = subprocess.run(command, stdout=out, stderr=out, env=environment, timeout=LIMIT, check=False)
    said = tiers.read(log.read_text(errors="replace"))
    for name in (*said.failed, *said.skipped):
        print(f"versions: {version.name}: {name}", flush=True)
    counts = ", ".join(f"{number} {word}" for word, number in said.counts.items()) or "nothing ran"
    return counts, time.monotonic() - began, done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
