"""Processes that a benchmark starts beside itself: scripts of this folder, with pipes to their stdin and stdout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def child(module: str, *arguments: str) -> subprocess.Popen[str]:
    """`python -m module`; the caller ends it."""
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
