"""A package that offers loggers which misbehave, as another project would: by its entry points."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MODULE = '''
import json, time
from pathlib import Path


class Notes:
    def __init__(self, options):
        self.options = options

    def start(self, run):
        self.file = (run.folder / "notes.jsonl").open("a")
        self.write(start=run.name, resume=run.resume, config=dict(run.config), options=dict(self.options))
        return "id-1"

    def log(self, step, figures):
        self.write(step=step, figures=dict(figures))

    def finish(self, status):
        self.write(status=status)

    def write(self, **line):
        print(json.dumps(line), file=self.file, flush=True)


class Deaf(Notes):
    """As a server that takes the connection and never answers."""

    def log(self, step, figures):
        time.sleep(3600)


class Failing(Notes):
    def log(self, step, figures):
        raise ConnectionError("no route to the server")


class Leaving(Notes):
    def start(self, run):
        raise SystemExit(3)
'''


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "others"
    info = place / "misbehaving-1.0.dist-info"
    info.mkdir(parents=True)
    (place / "misbehaving.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: misbehaving\nVersion: 1.0\n")
    names = ("Notes", "Deaf", "Failing", "Leaving")
    lines = "\n".join(f"{name.lower()} = misbehaving:{name}" for name in names)
    (info / "entry_points.txt").write_text(f"[tapforge.loggers]\n{lines}\n")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))
