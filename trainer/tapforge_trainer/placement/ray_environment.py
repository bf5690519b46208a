"""What a Ray that a run starts on its own machine finds in the environment. Variables that are already set are kept.

A local Ray takes work from holders of its token only. Where it finds none it writes one into the home folder, which may
be read-only; the one from here is in the environment of the run's processes alone.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

_MODE: Final = "RAY_AUTH_MODE"
_TOKEN: Final = "RAY_AUTH_TOKEN"
_TOKEN_FILE: Final = "RAY_AUTH_TOKEN_PATH"
#: where Ray looks when the environment names none
_USUAL_FILE: Final = Path("~/.ray/auth_token")
#: Ray's control store may be as late as this, seconds. Ray gives its port 30 s at each start; and a process
#: without an answer of it for 60 s is ended by Ray on the spot, the driver as well
_TIMEOUTS: Final = {"RAY_gcs_server_port_wait_time_s": "60", "RAY_gcs_rpc_server_reconnect_timeout_s": "300"}


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Before Ray is imported, which is when it reads the times."""
    for name, seconds in _TIMEOUTS.items():
        environment.setdefault(name, seconds)
    given = environment.get(_TOKEN) or environment.get(_TOKEN_FILE) or _has_usual_file()
    if environment.get(_MODE, "token") == "token" and not given:
        environment[_TOKEN] = secrets.token_hex(32)


def refused(address: str, error: Exception) -> ConnectionError:
    """What may be wrong with the Ray cluster at that address, which the run did not start."""
    return ConnectionError(
        f"the Ray cluster that RAY_ADDRESS names ({address}) takes no driver: {error}. Is it there, and are {_MODE} "
        f"and {_TOKEN} here what its nodes were started with?"
    )


def _has_usual_file() -> bool:
    """A home folder that may not be searched, or that there is not, has none: Ray could not read it either."""
    try:
        return _USUAL_FILE.expanduser().is_file()
    except (OSError, RuntimeError):
        return False
