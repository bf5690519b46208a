"""The scenario `claims` on a machine that others use as well: `stress-ng` keeps two processes busy, so that operator,
API server, etcd and load share what these leave. Figures have the names of that scenario's, after `busy_`.
"""

from __future__ import annotations

import subprocess
from typing import Any, Final

from e2e import packages

from . import claims
from .testbed import Run

_STRESS: Final = {"stress-ng": "stress-ng"}
_PROCESSES: Final = 2
#: at most; it ends with the scenario
_SECONDS: Final = 3600


def run(options: Run) -> dict[str, Any]:
    packages.ensure(_STRESS)
    command = ["stress-ng", "--cpu", str(_PROCESSES), "--timeout", f"{_SECONDS}s", "--quiet"]
    with subprocess.Popen(command, env={"PATH": packages.PATH}) as stress:
        try:
            found = claims.run(options)
            if stress.poll() is not None:
                raise RuntimeError(f"stress-ng ended with {stress.returncode} before the scenario did")
        finally:
            stress.terminate()
    return {f"busy_{name}": value for name, value in found.items()}
