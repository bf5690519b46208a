"""kstatus, by which Flux waits for what it applied: the published library behind a small program, which is built from
source once (e2e/cluster/binaries.py).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from e2e.cluster import binaries

SOURCES: Final = binaries.Sources(
    "kstatus, by which Flux waits",
    Path(__file__).parent / "program",
    ("go.mod", "go.sum", "main.go"),
    (".",),
    "kstatus",
)


@dataclass(frozen=True, slots=True)
class Reading:
    #: Current, InProgress, Failed or Terminating
    status: str
    message: str


def read(*things: Mapping[str, Any], say: Callable[[str], None] = print) -> list[Reading]:
    """What kstatus says of each object."""
    done = subprocess.run(
        [str(binaries.ensure(say, SOURCES) / "kstatus")],
        input="".join(json.dumps(thing) + "\n" for thing in things),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise ValueError(f"kstatus ended with {done.returncode}: {done.stderr.strip()}")
    return [Reading(**json.loads(line)) for line in done.stdout.splitlines()]
