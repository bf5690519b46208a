"""`make dev`: the operator of the checkout starts, and again when one of its files is saved. It is a control plane of
its own, as it is for a person, and ends with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: for all of it, seconds
PATIENCE = 300


@pytest.mark.long
def test_the_operator_of_the_checkout_runs_and_starts_again_at_a_save(addons: None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "e2e.dev"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    late = threading.Timer(PATIENCE, process.kill)
    late.start()
    said: list[str] = []
    try:
        assert process.stdout is not None
        lines = iter(process.stdout)
        export = _until(lines, said, r"^export KUBECONFIG=(\S+) PATH=(\S+):\$PATH$")
        apply = _until(lines, said, r"^kubectl (apply -f \S+)$")[1].split()
        environment = {**os.environ, "KUBECONFIG": export[1], "PATH": f"{export[2]}:{os.environ['PATH']}"}
        subprocess.run(["kubectl", *apply], env=environment, check=True, timeout=60)
        ready = ("wait", "--for=condition=Ready", "epool", "--all", "--timeout=60s")
        subprocess.run(["kubectl", *ready], env=environment, check=True, timeout=90)
        file = ROOT / "operator" / "tapforge_operator" / "labels.py"
        os.utime(file)
        _until(lines, said, r"^dev: saved: operator/tapforge_operator/labels.py$")
        _until(lines, said, r"leads as \S+ in term \d+$")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, "".join(said)
        assert not Path(export[1]).exists(), "nothing is kept"
    finally:
        late.cancel()
        process.kill()
        process.wait()


def _until(lines: Iterator[str], said: list[str], pattern: str) -> re.Match[str]:
    for line in lines:
        said.append(line)
        if (found := re.search(pattern, line.rstrip())) is not None:
            return found
    raise AssertionError(f"it ended without saying {pattern}:\n{''.join(said)}")
