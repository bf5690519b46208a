"""Builds targets of the Dockerfile.

- The result is one folder in OCI's layout with all images that were asked for, so that what they share is there once.
  Its name is a hash of what goes into the images; it is complete when it is there.
- Stages are kept between builds in a store of buildah's, one for each set of packages: after a change of code only the
  code's stages are built again.
- Nothing of this machine gets into an image. How it reaches package indexes (certificates, pip's settings) is mounted.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from ..cluster.binaries import cache, only_one
from ..cluster.node import prerequisites
from ..cluster.node.prerequisites import CannotRun
from . import base

#: target -> name that the manifests use
IMAGES: Final = {
    "operator": "docker.io/tapforge/operator:dev",
    "phone": "docker.io/tapforge/phone:dev",
    "trainer": "docker.io/tapforge/trainer:dev",
    "web": "docker.io/tapforge/web:dev",
}
ROOT: Final = Path(__file__).parents[2]
#: what says how images are made, and what of ours is in them: paths of the checkout
RECIPE: Final = ("Dockerfile", ".dockerignore", "requirements")
CODE: Final = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "crds/emulatorpools.yaml",
    "crds/trainingruns.yaml",
    "crds/tapforge_api",
    "manifests/samples",
    "operator/tapforge_operator",
    "trainer/tapforge_envs",
    "trainer/tapforge_trainer",
)
_BASE = "localhost/base"
_CERTIFICATES = Path("/etc/ssl/certs")
_PIP = Path("/etc/pip.conf")
_SECONDS = 1800
#: builds that are kept, and how old the others must be at least to be removed, seconds
_KEEP, _KEEP_SECONDS = 3, 3600


def ensure(
    *targets: str,
    arguments: Sequence[str] = (),
    root: Path = ROOT,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> Path:
    """The folder with the images of these targets; operator and phone by default. `arguments`: NAME=value of the
    Dockerfile's. Raises CannotRun."""
    targets = targets or ("operator", "phone")
    prerequisites.ensure({**prerequisites.NODE, **prerequisites.IMAGES}, say)
    folder = cache() / "images" / fingerprint(root, targets, arguments)
    if not folder.is_dir():
        with only_one(cache() / "images" / "all", say, "images"):
            if not folder.is_dir():
                _build(folder, cache() / f"store-{_packages(root, arguments)}", sorted(targets), arguments, root, say)
                _forget_old(folder)
    os.utime(folder)
    return folder


def fingerprint(root: Path, targets: Sequence[str], arguments: Sequence[str] = ()) -> str:
    """Of everything that goes into the images of these targets."""
    return _hash([_packages(root, arguments), *sorted(targets)], root, CODE)


def _packages(root: Path, arguments: Sequence[str]) -> str:
    return _hash([base.fingerprint(), *arguments], root, RECIPE)


def _build(
    folder: Path,
    store: Path,
    targets: Sequence[str],
    arguments: Sequence[str],
    root: Path,
    say: Callable[[str], None],
) -> None:
    started = time.monotonic()
    tar = base.ensure(say)
    say(f"images: building {', '.join(targets)} into {folder} (about a minute; after a change of code alone, less)")
    store.mkdir(parents=True, exist_ok=True)
    os.utime(store)
    buildah = _Buildah(store)
    if not buildah.has(_BASE):
        container = buildah("from", "scratch").strip()
        buildah("add", "--quiet", container, str(tar), "/")
        buildah("commit", "--quiet", "--rm", container, _BASE)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as place:
        settings, layout = Path(place) / "pip.conf", Path(place) / "layout"
        settings.write_text(_pip_settings())
        words = ["build", "--layers", "--pull-never", "--network", "host", "--build-arg", f"BASE={_BASE}"]
        words += [word for argument in arguments for word in ("--build-arg", argument)]
        words += ["--volume", f"{settings}:{_PIP}:ro"]
        words += ["--volume", f"{_CERTIFICATES}:{_CERTIFICATES}:ro"] if _CERTIFICATES.is_dir() else []
        for target in targets:
            name = IMAGES[target]
            buildah(*words, "--target", target, "--tag", name, "--file", str(root / "Dockerfile"), str(root))
            buildah("push", "--quiet", name, f"oci:{layout}:{name}")
        _name(layout)
        layout.rename(folder)
    size = sum(path.stat().st_size for path in folder.glob("blobs/*/*")) / 2**20
    say(f"images: built in {time.monotonic() - started:.0f} s, {size:.0f} MiB together")


class _Buildah:
    def __init__(self, store: Path) -> None:
        self._place = ("--root", str(store / "root"), "--runroot", str(store / "run"), "--storage-driver", "overlay")

    def __call__(self, *words: str) -> str:
        done = self._run(*words)
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip()[-4000:]
            raise CannotRun(f"`buildah {' '.join(words)}` ended with {done.returncode}:\n{said}")
        return done.stdout

    def has(self, name: str) -> bool:
        return self._run("inspect", "--type", "image", name).returncode == 0

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nice", "-n", "5", *base.ALONE, "buildah", *self._place, *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_SECONDS,
            check=False,
            env={**os.environ, "BUILDAH_ISOLATION": "chroot", "PATH": prerequisites.PATH},
        )


def _pip_settings() -> str:
    """How this machine's pip reaches an index: its file, and in its place what the environment says."""
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(_PIP)
    if not settings.has_section("global"):
        settings.add_section("global")
    bundle = _CERTIFICATES / "ca-certificates.crt"
    if bundle.exists() and not settings.has_option("global", "cert"):
        settings.set("global", "cert", str(bundle))
    for key in ("index-url", "extra-index-url", "trusted-host", "cert", "timeout"):
        if value := os.environ.get(f"PIP_{key.replace('-', '_').upper()}"):
            settings.set("global", key, value)
    lines = [f"{key} = {value}" for key, value in settings.items("global") if key != "find-links"]
    return "\n".join(["[global]", *lines, ""])


def _name(layout: Path) -> None:
    """As containerd looks for names: its importer would make up others."""
    index = json.loads((layout / "index.json").read_text())
    for manifest in index["manifests"]:
        notes = manifest["annotations"]
        notes["io.containerd.image.name"] = notes["org.opencontainers.image.ref.name"]
    (layout / "index.json").write_text(json.dumps(index))


def _hash(parts: Iterable[str], root: Path, places: Iterable[str]) -> str:
    whole = hashlib.sha256("\0".join(parts).encode())
    for place in places:
        top = root / place
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                whole.update(f"{path.relative_to(root)}\0{content}\0".encode())
    return whole.hexdigest()[:16]


def _forget_old(current: Path) -> None:
    others = [place for place in current.parent.iterdir() if place.is_dir() and place != current]
    others.sort(key=lambda place: place.stat().st_mtime, reverse=True)
    for place in others[_KEEP - 1 :]:
        if time.time() - place.stat().st_mtime > _KEEP_SECONDS:
            shutil.rmtree(place, ignore_errors=True)
