"""A small Debian with Python as a tar, in the place of `debian:bookworm-slim`, which lies in a registry."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..cluster.binaries import cache, only_one
from ..cluster.node.prerequisites import CannotRun

#: in namespaces that end with the command, and every mount with them
ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--propagation", "private", "--")
_SUITE = "bookworm"
_PACKAGES = ("ca-certificates", "python3", "python3-venv")
#: what a slim image leaves out too
_WITHOUT = ("var/cache/apt/*", "var/lib/apt/lists/*", "usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*")
_SECONDS = 900


def fingerprint() -> str:
    return hashlib.sha256(" ".join((_SUITE, *_PACKAGES, *_WITHOUT, os.uname().machine)).encode()).hexdigest()[:16]


def ensure(say: Callable[[str], None]) -> Path:
    """The tar."""
    folder = cache() / f"base-{fingerprint()}"
    archive = folder / "base.tar"
    if not archive.exists():
        with only_one(folder, say, "the base of the images"):
            if not archive.exists():
                _make(folder, say)
    os.utime(folder)
    return archive


def _make(folder: Path, say: Callable[[str], None]) -> None:
    say(f"images: making a base of Debian packages in {folder} (a minute, once)")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as place:
        root, new = Path(place) / "root", Path(place) / "new"
        new.mkdir()
        _run(*ALONE, "debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _SUITE, str(root))
        without = [f"--exclude=./{pattern}" for pattern in _WITHOUT]
        _run("tar", "--create", "--file", str(new / "base.tar"), "--directory", str(root), *without, ".")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    say(f"images: base made in {time.monotonic() - started:.0f} s")


def _run(*command: str) -> None:
    done = subprocess.run(
        ["nice", "-n", "5", *command],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise CannotRun(f"`{' '.join(command)}` ended with {done.returncode}:\n{said}")
