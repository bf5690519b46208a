"""A small whole model folder, a hub that has it, and nodes: processes with caches of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.model_source.fake_hub import FakeHub, Repository
from tests.model_source.small_model import FIRST, REPO, files
from tests.s3 import bucket, s3_server

__all__ = ["bucket", "s3_server"]


#: pins and resolves in a process of its own, whose environment is that of a node
_SCRIPT = """
import json, sys
from dataclasses import asdict
from tapforge_api.model import ModelSource
from tapforge_trainer.model_source import ref, resolve
asked = json.loads(sys.argv[1])
try:
    if "source" in asked:
        found = asdict(resolve.pin(ModelSource.model_validate(asked["source"]), asked["earlier"]))
    else:
        given = asked["ref"] | {"files": tuple(ref.ModelFile(**file) for file in asked["ref"]["files"])}
        found = str(resolve.resolve(ref.ModelRef(**given), weights=asked["weights"], seconds=asked["seconds"]))
    print(json.dumps(["", found]))
except ref.ModelError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    for name, data in files().items():
        if "/" not in name:
            (place / name).write_bytes(data)
    return place


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    fake = FakeHub({REPO: Repository(files(), {"main": FIRST})})
    fake.endpoint = fake.start()  # type: ignore[attr-defined]
    yield fake
    fake.stop()


@dataclass
class Node:
    """Processes with this environment. What fails is (type of the error, words), else ("", what was asked for)."""

    environment: dict[str, str]

    def start(self, *before: str, **asked: Any) -> subprocess.Popen[str]:
        """`before`: a command that runs this one."""
        command = [*before, sys.executable, "-c", _SCRIPT, json.dumps(asked)]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)

    def pin(self, source: dict, earlier: dict | None = None) -> tuple[str, Any]:
        return said(self.start(source=source, earlier=earlier))

    def resolve(self, ref: dict, *, weights: bool = True, seconds: float = 60.0) -> tuple[str, Any]:
        return said(self.start(ref=ref, weights=weights, seconds=seconds))


def said(process: subprocess.Popen[str]) -> tuple[str, Any]:
    out, _ = process.communicate(timeout=120)
    kind, found = json.loads(out.splitlines()[-1])
    return kind, found


def pinned(node: Node, source: dict, earlier: dict | None = None) -> dict:
    kind, found = node.pin(source, earlier)
    assert kind == "", found
    return found


def node(place: Path, **environment: str) -> Node:
    cleared = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_CACHE")
    base = {name: value for name, value in os.environ.items() if name not in cleared}
    return Node(base | {"HF_HOME": f"{place}/hf", "TAPFORGE_CACHE": f"{place}/tapforge"} | environment)
