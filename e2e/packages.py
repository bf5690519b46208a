"""Debian packages that tests and clusters of this machine use, installed by apt-get.

- `ensure` installs what is missing and says so before it does; it removes nothing.
- One at a time: apt-get refuses to be two. The kernel frees the lock when its holder ends.
- What can't be had is a `CannotInstall` that says why.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

#: where programs lie on machines whose PATH does not say so
PATH: Final = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
#: program -> Debian's package
ADB: Final = {"adb": "adb"}
CHROMIUM: Final = {"chromium": "chromium"}
#: the package's daemon is not started: services start under systemd alone
PROMETHEUS: Final = {"promtool": "prometheus", "prometheus": "prometheus"}

_INSTALL_SECONDS: Final = 600
_LOCK: Final = Path("/run/lock/tapforge-packages")


class CannotInstall(RuntimeError):
    """A package can't be had on this machine; says why and what would help."""


def ensure(programs: Mapping[str, str], say: Callable[[str], None] = lambda line: print(line, flush=True)) -> None:
    """Returns when the programs are there. Raises CannotInstall."""
    install_missing(lambda: missing_programs(programs), say)


def missing_programs(programs: Mapping[str, str], path: str = PATH) -> set[str]:
    """Packages of the programs that are not there."""
    return {package for program, package in programs.items() if shutil.which(program, path=path) is None}


def install_missing(missing: Callable[[], Iterable[str]], say: Callable[[str], None]) -> None:
    """Installs what `missing` names, and asks it again afterwards. Raises CannotInstall."""
    if not (wanted := missing()):
        return
    names = " ".join(sorted(wanted))
    if shutil.which("apt-get") is None:
        raise CannotInstall(f"{names} are missing, and there is no apt-get to install them with")
    if os.geteuid() != 0:
        raise CannotInstall(f"{names} are missing, and only root installs them: `apt-get install {names}`")
    _LOCK.parent.mkdir(parents=True, exist_ok=True)
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if packages := sorted(missing()):
            _install(packages, say)
            if left := sorted(missing()):
                raise CannotInstall(f"{' '.join(left)} were installed and their programs are not on {PATH}")


def _install(packages: list[str], say: Callable[[str], None]) -> None:
    say(f"packages: installing {' '.join(packages)} on this machine with apt-get")
    started = time.monotonic()
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "--no-remove", *packages]
    done = _run(install)
    if done.returncode != 0:
        # Lists of packages that are old or not there at all.
        updated = _run(["apt-get", "update", "-q"])
        done = _run(install) if updated.returncode == 0 else updated
    if done.returncode != 0:
        raise CannotInstall(f"`{' '.join(done.args)}` ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    say(f"packages: installed in {time.monotonic() - started:.0f} s")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(
        command,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=_INSTALL_SECONDS,
        check=False,
        env=environment,
    )
