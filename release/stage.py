"""A copy of the checkout with the release's version in it: everything of a release is built from there.

Git's files alone are copied, so that what lies about in a checkout gets into no package. In an unpacked sdist, where
there is no git, all files are.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from packaging.version import Version

from .version import chart_version, image_tag

_SECONDS: Final = 60
_MADE: Final = ("bench-results", "build", "dist", "people", "runs", "test-logs")
_IMAGE: Final = re.compile(r"\btapforge/(operator|phone|trainer|web):dev\b")


def copy(root: Path, stage: Path) -> None:
    if not (root / ".git").exists():
        shutil.copytree(root, stage, ignore=_ignored(root), dirs_exist_ok=True)
        return
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, timeout=_SECONDS, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (source := root / name).is_file():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, stage / name)


def _ignored(root: Path) -> Callable[[str, list[str]], set[str]]:
    """Hidden files, caches, and what commands leave at the top of the tree."""
    everywhere, above = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info"), shutil.ignore_patterns(*_MADE)
    return lambda folder, names: everywhere(folder, names) | (above(folder, names) if Path(folder) == root else set())


def stamp(stage: Path, version: Version) -> None:
    """Writes the version into the copy: the package's, the chart's, and the tags of our images in chart and samples.
    Raises ValueError for a file that has no place for it."""
    tag, chart = image_tag(version), chart_version(version)
    _exchange(stage / "pyproject.toml", {r'^version = ".*"$': f'version = "{version}"'})
    _exchange(
        stage / "charts/tapforge/Chart.yaml",
        {r"^version: .*$": f"version: {chart}", r"^appVersion: .*$": f'appVersion: "{version}"'},
    )
    _exchange(stage / "charts/tapforge/values.yaml", {r"^  tag: dev$": f'  tag: "{tag}"'})
    for path in sorted((stage / "manifests").rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if (written := _IMAGE.sub(rf"tapforge/\1:{tag}", text)) != text:
            path.write_text(written, encoding="utf-8")


def _exchange(path: Path, places: Mapping[str, str]) -> None:
    text = path.read_text(encoding="utf-8")
    for pattern, line in places.items():
        text, count = re.subn(pattern, lambda _, line=line: line, text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"{path} has {count} lines like {pattern}, and a release writes its version into one")
    path.write_text(text, encoding="utf-8")
