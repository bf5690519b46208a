"""Which tapforge a run is: its release, and in a checkout the commit, with + where files differ from it."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[3]
#: for git, seconds
_TIMEOUT: Final = 10.0


def software() -> dict[str, str]:
    """Names that are not known are left out: an installed package has no commit."""
    found = {}
    with suppress(PackageNotFoundError):  # run from files
        found["tapforge"] = version("tapforge")
    commit = _git("rev-parse", "--short=12", "HEAD") if (_ROOT / ".git").exists() else None
    if commit:
        found["commit"] = commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    return found


def _git(*words: str) -> str | None:
    try:
        command = ["git", "-C", str(_ROOT), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):  # no git here, or a checkout of another owner
        return None
    return done.stdout.strip()
