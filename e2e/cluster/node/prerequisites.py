"""What a real node needs of the machine: Linux, root, namespaces, and a few programs from the distribution's packages.

`ensure` installs what is missing with apt-get and says so before it does; it removes nothing. What can't be had is
named.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

#: where programs lie on machines whose PATH does not say so
PATH: Final = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
#: program -> Debian's package
NODE: Final = {
    "containerd": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables-save": "iptables",
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
IMAGES: Final = {"buildah": "buildah", "debootstrap": "debootstrap"}
_PLUGINS = ("/usr/lib/cni", "/opt/cni/bin")
_PLUGIN_PACKAGE = "containernetworking-plugins"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_INSTALL_SECONDS = 600
_LOCK = Path("/run/lock/tapforge-packages")


class CannotRun(RuntimeError):
    """This machine can't have a real node; says why and what would help."""


def ensure(
    programs: Mapping[str, str] = NODE, say: Callable[[str], None] = lambda line: print(line, flush=True)
) -> None:
    """Returns when the programs are there. Raises CannotRun."""
    if sys.platform != "linux":
        raise CannotRun(f"a real node runs on Linux only, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise CannotRun(f"a real node starts containers, which takes root, and this is user {os.geteuid()}")
    _LOCK.parent.mkdir(parents=True, exist_ok=True)
    with _LOCK.open("w") as lock:
        # One at a time: apt-get refuses to be two. The kernel frees the lock when its holder ends.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if packages := missing(programs):
            _install(packages, say)
            if left := missing(programs):
                raise CannotRun(f"{' '.join(left)} were installed and their programs are not on {PATH}")
    _probe()


def missing(programs: Mapping[str, str]) -> list[str]:
    """Packages to install, by name."""
    packages = {package for program, package in programs.items() if shutil.which(program, path=PATH) is None}
    if "containerd" in programs and _plugins() is None:
        packages.add(_PLUGIN_PACKAGE)
    if "debootstrap" in programs and not _KEYRING.exists():
        packages.add("debian-archive-keyring")
    return sorted(packages)


def plugins() -> Path:
    """Folder of the CNI plugins."""
    found = _plugins()
    if found is None:
        raise CannotRun(f"no CNI plugins in {' or '.join(_PLUGINS)}: install {_PLUGIN_PACKAGE}")
    return found


def _plugins() -> Path | None:
    wanted = ("bridge", "host-local", "portmap", "loopback")
    return next((Path(p) for p in _PLUGINS if all((Path(p) / name).exists() for name in wanted)), None)


def _install(packages: list[str], say: Callable[[str], None]) -> None:
    if shutil.which("apt-get") is None:
        raise CannotRun(f"{' '.join(packages)} are missing, and there is no apt-get to install them with")
    say(f"node: installing {' '.join(packages)} on this machine with apt-get")
    started = time.monotonic()
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "--no-remove", *packages]
    done = _run(install)
    if done.returncode != 0:
        # Lists of packages that are old or not there at all.
        updated = _run(["apt-get", "update", "-q"])
        done = _run(install) if updated.returncode == 0 else updated
    if done.returncode != 0:
        raise CannotRun(f"`{' '.join(done.args)}` ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    say(f"node: installed in {time.monotonic() - started:.0f} s")


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


def _probe() -> None:
    words = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--net", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise CannotRun(
            f"this machine makes no namespaces (`{' '.join(words)}`: {done.stderr.strip()}); in a container, run it "
            "with --privileged"
        )
