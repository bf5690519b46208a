"""Builds happen once, whoever comes first, and what is missing is named. A script plays Go, so that no test takes
minutes; the real one is what every other test of this folder starts from.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from e2e.cluster import PATIENCE, CannotBuild, binaries

ROOT = Path(__file__).parents[2]

#: notes every build, takes a while for it, and writes what it was told to
_GO = """#!/bin/sh
case "$1" in
env) echo "${FAKE_GO_VERSION:-go1.26.8}" ;;
build)
    echo built >> "$FAKE_GO_NOTES"
    echo some/package >&2
    sleep 0.3
    if [ -n "$FAKE_GO_FAILS" ]; then echo "main.go:1: this is wrong" >&2; exit 1; fi
    while [ "$1" != -o ]; do shift; done
    echo program > "$2" ;;
esac
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake Go, which is the one on the PATH now, notes its builds."""
    folder = tmp_path / "go"
    folder.mkdir()
    (folder / "go").write_text(_GO)
    (folder / "go").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("TAPFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_GO_NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


def _builds(notes: Path) -> int:
    return len(notes.read_text().splitlines()) if notes.exists() else 0


def test_a_build_is_found_again_and_holds_every_component(notes: Path) -> None:
    said: list[str] = []
    folder = binaries.ensure(said.append)
    assert {path.name for path in folder.iterdir()} == {"controlplane", *binaries.COMPONENTS}
    assert all((folder / name).read_text() == "program\n" for name in binaries.COMPONENTS)
    assert "minutes" in said[0] and "built the control plane in" in said[-1]
    said.clear()
    assert binaries.ensure(said.append) == folder
    assert (_builds(notes), said) == (1, [])


def test_another_go_is_another_build(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = binaries.ensure(lambda line: None)
    monkeypatch.setenv("FAKE_GO_VERSION", "go1.27.0")
    assert binaries.ensure(lambda line: None) != first
    assert _builds(notes) == 2 and first.is_dir()


def test_builders_that_come_together_build_once(notes: Path) -> None:
    script = "from e2e.cluster import binaries; print(binaries.ensure(lambda line: None))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    others = [
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    folders = {other.communicate(timeout=PATIENCE)[0].strip() for other in others}
    assert folders == {str(binaries.ensure(lambda line: None))}
    assert _builds(notes) == 1


def test_threads_of_one_process_build_once(notes: Path) -> None:
    threads = [threading.Thread(target=binaries.ensure, args=(lambda line: None,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert _builds(notes) == 1


def test_a_build_that_fails_says_why_leaves_nothing_and_is_tried_again(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GO_FAILS", "yes")
    with pytest.raises(CannotBuild, match="this is wrong"):
        binaries.ensure(lambda line: None)
    monkeypatch.delenv("FAKE_GO_FAILS")
    folder = binaries.ensure(lambda line: None)
    assert _builds(notes) == 2
    assert [path.name for path in folder.parents[1].iterdir() if not path.name.endswith(".lock")] == [
        folder.parent.name
    ]


@pytest.mark.parametrize("version", ["go1.19.8", "go1.25.7"])
def test_an_old_go_is_refused_with_what_is_needed(notes: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv("FAKE_GO_VERSION", version)
    with pytest.raises(CannotBuild, match=rf"needs Go 1\.26.*is {version}"):
        binaries.ensure(lambda line: None)
    assert _builds(notes) == 0


def test_without_go_it_is_said_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binaries, "USUAL_PLACES", str(tmp_path))
    with pytest.raises(CannotBuild, match=r"no `go` on the PATH.*https://go\.dev/dl/"):
        binaries.ensure(lambda line: None)
