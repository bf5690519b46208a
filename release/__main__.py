"""`make release`: everything of a release into one folder, with checksums.

    python -m release [--output dist] [--no-images] [--trainer] [--uv PROGRAM]

- The version comes from git's tags (version.py). Everything is built from a copy with that version in it (stage.py).
- What this machine can't build is left out, and the last lines and RELEASE.txt name it; then the exit code is 1.
- Nothing is signed and nothing is published: docs/release.md has the commands.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from e2e import images
from e2e.cluster import CannotBuild, binaries
from e2e.cluster.node import CannotRun
from packaging.version import Version

from . import archives, sbom
from .stage import copy, stamp
from .version import NoVersion, chart_version, found, image_tag, is_release

ROOT: Final = Path(__file__).parents[1]
LOCKS: Final = ("operator", "phone", "web", "trainer-cpu", "trainer-gpu")
#: where images of a release are called to be: the publisher renames them
REGISTRY: Final = "docker.io/tapforge"
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_SECONDS: Final = 600


@dataclass
class Release:
    version: Version
    stage: Path
    output: Path
    uv: str
    #: what was asked for and could not be built, with the reason
    left_out: list[str] = field(default_factory=list)

    @property
    def machine(self) -> str:
        return _MACHINES.get(platform.machine(), platform.machine())

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """A part of the release; what keeps this machine from building it is noted, and the others go on."""
        try:
            yield
        except (CannotBuild, CannotRun, sbom.CannotList, subprocess.SubprocessError, OSError) as error:
            said = getattr(error, "stderr", "") or str(error)
            self.left_out.append(f"{what}: {str(said).strip()}")
            say(f"LEFT OUT: {what}: {str(said).strip()}")


def say(line: str) -> None:
    print(f"release: {line}", flush=True)


def packages(release: Release) -> None:
    """The wheel and the source distribution."""
    say("wheel and source distribution")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(release.output)]
    _run(build, cwd=release.stage)


def chart(release: Release) -> None:
    say(f"chart {chart_version(release.version)}")
    helm = binaries.ensure(say, binaries.HELM) / "helm"
    folder = release.stage / "charts" / "tapforge"
    _run([str(helm), "package", str(folder), "--destination", str(release.output)], cwd=release.stage)


def image_archives(release: Release, targets: tuple[str, ...]) -> list[Path]:
    """One archive per image; each image by itself, so that one that fails takes no other with it."""
    tag, made = image_tag(release.version), []
    for target in targets:
        with release.part(f"image {target}"):
            layout = images.ensure(target, root=release.stage, say=say)
            path = release.output / f"tapforge-{target}-{tag}-{release.machine}.oci.tar"
            digest = archives.archive(layout, images.IMAGES[target], f"{REGISTRY}/{target}:{tag}", path)
            say(f"image {target}: {path.stat().st_size / 2**20:.0f} MiB, {digest}")
            made.append(path)
    return made


def bills(release: Release, built: list[Path]) -> None:
    with release.part("SBOMs of the Python packages"):
        tool = sbom.python_tool(release.stage, release.uv, say)
        for name in LOCKS:
            lock = release.stage / "requirements" / f"{name}.txt"
            sbom.of_lock(
                tool,
                lock,
                release.stage / "pyproject.toml",
                release.output / f"tapforge-{release.version}-{name}.packages.cdx.json",
            )
    if built:
        with release.part("SBOMs of the images"):
            program = sbom.image_tool(say)
            for path in built:
                sbom.of_image(program, path, path.with_name(path.name.replace(".oci.tar", ".image.cdx.json")))


def about(release: Release, not_asked: list[str]) -> None:
    """RELEASE.txt, and SHA256SUMS of everything beside it."""
    lines = [f"tapforge {release.version}, built on {release.machine}", ""]
    lines += [path.name for path in sorted(release.output.iterdir())]
    lines += ["", *(f"left out: {one}" for one in (*release.left_out, *not_asked))]
    (release.output / "RELEASE.txt").write_text("\n".join(lines).strip() + "\n")
    sums = [f"{_sha256(path)}  {path.name}" for path in sorted(release.output.iterdir())]
    (release.output / "SHA256SUMS").write_text("\n".join([*sums, ""]))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(command: list[str], cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_SECONDS, check=True)


def _changelog(root: Path, version: Version) -> None:
    """Raises NoVersion."""
    if is_release(version) and f"\n## {version}\n" not in (root / "CHANGELOG.md").read_text():
        raise NoVersion(f"CHANGELOG.md has no section {version}: write what changes for those who install it")


def make(root: Path, output: Path, uv: str, targets: tuple[str, ...], not_asked: list[str]) -> int:
    """Returns the exit code. Raises NoVersion."""
    version = found(root)
    _changelog(root, version)
    output.mkdir(parents=True, exist_ok=True)
    if old := sorted(path.name for path in output.iterdir()):
        raise NoVersion(f"{output} holds {', '.join(old[:3])} already: remove it, or name another folder (--output)")
    say(f"tapforge {version} into {output}")
    with tempfile.TemporaryDirectory(prefix="tapforge-release-") as place:
        release = Release(version, Path(place) / f"tapforge-{version}", output.absolute(), uv)
        copy(root, release.stage)
        stamp(release.stage, version)
        steps: dict[str, Callable[[Release], None]] = {"wheel and sdist": packages, "chart": chart}
        for what, step in steps.items():
            with release.part(what):
                step(release)
        bills(release, image_archives(release, targets))
        about(release, not_asked)
    for one in (*release.left_out, *not_asked):
        say(f"LEFT OUT: {one}")
    say(f"{len(list(output.iterdir()))} files in {output}; SHA256SUMS names them")
    return 1 if release.left_out else 0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make release", description="build a release into a folder")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--no-images", action="store_true", help="packages, chart and their SBOMs alone")
    parser.add_argument("--trainer", action="store_true", help="the trainer's image, too: for GPUs, 25 GB of disk")
    parser.add_argument("--uv", default=os.environ.get("UV", "uv"), help="program of uv")
    given = parser.parse_args(words)
    targets = () if given.no_images else ("operator", "phone", "web", *(("trainer",) if given.trainer else ()))
    not_asked = [f"image {name} (not asked for)" for name in images.IMAGES if name not in targets]
    try:
        return make(ROOT, given.output, given.uv, targets, not_asked)
    except NoVersion as error:
        print(f"release: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
