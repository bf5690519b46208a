"""Which version a checkout is, from its tags. Pure but for `found`, which asks git.

| where | version |
|---|---|
| the commit of the tag v0.2.0, nothing changed | 0.2.0; `pyproject.toml` has to say so, too |
| 3 commits after v0.1.0, `pyproject.toml` says 0.1.0 | 0.1.1.dev3+g1a2b3c4 |
| 3 commits after v0.1.0, `pyproject.toml` says 0.2.0 | 0.2.0.dev3+g1a2b3c4 |
| 3 commits after v0.2.0rc1, `pyproject.toml` says 0.2.0rc1 or 0.2.0 | 0.2.0rc2.dev3+g1a2b3c4 |
| 40 commits, no tag, `pyproject.toml` says 0.1.0 | 0.1.0.dev40+g1a2b3c4 |
| files differ from the commit | the same with .dirty at the end, also at a tag |
| no git, as in an sdist | what `pyproject.toml` says: a release has written its version there |
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

_SECONDS = 60


class NoVersion(RuntimeError):
    """Tag and files contradict each other; says what to change."""


@dataclass(frozen=True, slots=True)
class Commit:
    #: of the newest tag before it, without its v; "": there is none
    tag: str
    #: since the tag; without one: all
    commits: int
    hash: str
    dirty: bool


def version_of(written: str, commit: Commit | None) -> Version:
    """`written`: in pyproject.toml. Raises NoVersion."""
    if commit is None:
        return Version(written)
    try:
        tag, base = Version(commit.tag or "0"), Version(written)
    except InvalidVersion as error:
        raise NoVersion(f"{error} (the newest tag is v{commit.tag}): write 0.2.0 or 0.2.0rc1") from error
    if commit.tag and commit.commits == 0 and not commit.dirty:
        if tag != base:
            raise NoVersion(
                f"the tag is v{commit.tag}, and pyproject.toml says {written}: write the tag's number there, into "
                "charts/tapforge/Chart.yaml and CHANGELOG.md, commit, and tag that commit"
            )
        return base
    number = base.base_version
    if tag.pre and base.base_version == tag.base_version:
        # Before the release itself, and after what was tried before it.
        pre = max(tag.pre, base.pre or tag.pre)
        number += f"{pre[0]}{pre[1] + (1 if pre == tag.pre else 0)}"
    elif base <= tag:
        number = f"{tag.major}.{tag.minor}.{tag.micro + 1}"
    return Version(f"{number}.dev{commit.commits}+g{commit.hash}{'.dirty' if commit.dirty else ''}")


def is_release(version: Version) -> bool:
    return version.local is None and not version.is_devrelease


def chart_version(version: Version) -> str:
    """As SemVer writes it, which is what Helm takes: 0.1.1-dev.3+g1a2b3c4, 0.2.0-rc.1. SemVer puts rc.2.dev.3 behind
    rc.2, so 0.2.0rc2.dev3 is 0.2.0-rc.1.dev.3: between rc.1 and rc.2."""
    base = version.base_version
    if version.pre:
        base += f"-{version.pre[0]}.{max(0, version.pre[1] - (version.dev is not None))}"
    if version.dev is not None:
        base += f"{'.' if version.pre else '-'}dev.{version.dev}"
    return base + (f"+{version.local}" if version.local else "")


def image_tag(version: Version) -> str:
    """An image's tag has no +; Helm writes _ in its place."""
    return chart_version(version).replace("+", "_")


def found(root: Path) -> Version:
    """Of a checkout, or of an unpacked sdist. Raises NoVersion."""
    written = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version_of(written, commit_of(root))


def commit_of(root: Path) -> Commit | None:
    """None: no checkout of git. Raises NoVersion where git can't read it."""
    if not (root / ".git").exists():
        return None
    described = _git(root, "describe", "--tags", "--long", "--always", "--dirty", "--match", "v[0-9]*")
    parts = re.fullmatch(r"(?:v(?P<tag>.+)-(?P<commits>\d+)-g)?(?P<hash>[0-9a-f]+)(?P<dirty>-dirty)?", described)
    if parts is None:
        raise NoVersion(f"git describes this commit as {described!r}: a tag is v0.2.0 or v0.2.0rc1")
    commits = int(parts["commits"]) if parts["tag"] else int(_git(root, "rev-list", "--count", "HEAD"))
    return Commit(parts["tag"] or "", commits, parts["hash"], bool(parts["dirty"]))


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode != 0:
        raise NoVersion(f"`git {' '.join(words)}` failed in {root}: {done.stderr.strip()}")
    return done.stdout.strip()
