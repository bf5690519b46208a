"""Bills of materials in CycloneDX: of the locks of Python packages by cyclonedx-bom, of images by syft.

cyclonedx-bom comes from requirements/release.txt into an environment of its own, syft is built from its Go module
(release/syft); both are kept in the cache between releases.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from e2e.cluster.binaries import Sources, cache
from e2e.cluster.binaries import ensure as built

SYFT: Final = Sources("syft", Path(__file__).parent / "syft", ("go.mod", "go.sum"), ("tool",), "syft")
_SECONDS: Final = 900


class CannotList(RuntimeError):
    """A bill of materials can't be made here; says why."""


def python_tool(root: Path, uv: str, say: Callable[[str], None]) -> Path:
    """The program `cyclonedx-py`, in the versions of the lock. Raises CannotList."""
    lock = root / "requirements" / "release.txt"
    name = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = cache() / f"cyclonedx-{name}"
    program = folder / "bin" / "cyclonedx-py"
    if not program.exists():
        say(f"sbom: cyclonedx-bom into {folder} (once)")
        _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
        _run(uv, "pip", "sync", "--quiet", "--python", str(folder / "bin" / "python"), str(lock))
    return program


def of_lock(program: Path, lock: Path, pyproject: Path, target: Path) -> None:
    """Every package of a lock, and tapforge as what needs them. Raises CannotList."""
    about = ("--pyproject", str(pyproject), "--mc-type", "application")
    form = ("--output-reproducible", "--output-format", "JSON", "--output-file", str(target))
    _run(str(program), "requirements", *about, *form, str(lock))


def image_tool(say: Callable[[str], None]) -> Path:
    """The program `syft`. Raises e2e.cluster.CannotBuild."""
    return built(say, SYFT) / "syft"


def of_image(program: Path, archive: Path, target: Path) -> None:
    """Every package of an image: Debian's and Python's. Raises CannotList."""
    quiet = {"SYFT_CHECK_FOR_APP_UPDATE": "false", "SYFT_CACHE_DIR": str(cache() / "syft-cache")}
    _run(str(program), "scan", f"oci-archive:{archive}", "-q", "-o", f"cyclonedx-json={target}", **quiet)


def _run(*command: str, **environment: str) -> None:
    done = subprocess.run(
        ["nice", "-n", "5", *command],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode != 0:
        raise CannotList(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
