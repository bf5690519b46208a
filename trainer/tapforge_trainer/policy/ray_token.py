"""The token of a Ray that a run starts on its own machine.

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


def set_token(environment: MutableMapping[str, str] = os.environ) -> None:
    """Unless there is one already, or somebody has chosen another mode. Before Ray starts."""
    given = environment.get(_TOKEN) or environment.get(_TOKEN_FILE) or _USUAL_FILE.expanduser().is_file()
    if environment.get(_MODE, "token") == "token" and not given:
        environment[_TOKEN] = secrets.token_hex(32)
