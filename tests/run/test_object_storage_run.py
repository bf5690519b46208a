"""A whole run whose checkpoints are in object storage, and which loses its machine with everything on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.s3 import CREDENTIALS, make_bucket, s3_server
from whole import SPEC, Command, Run, tapforge

__all__ = ["s3_server"]

pytestmark = pytest.mark.long


def test_a_run_resumes_on_another_machine(tmp_path: Path, s3_server: str) -> None:
    """Weights, counts, the KL reference and what was measured before are in the bucket; the recording is not."""
    bucket = make_bucket(s3_server)
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_server}
    (tmp_path / "run.yaml").write_text(SPEC)
    words = ("run", "-f", "run.yaml", "--set", f"spec.checkpoints.uri={bucket.uri}")
    done = Command(*words, "--set", "spec.stop.maxUpdates=1", place=tmp_path, environment=environment).wait()
    assert done.code == 0, done.said
    first = Run(tmp_path / "runs" / "tiny", tmp_path / "run.yaml", done)
    saved = first.events("checkpoint")[-1]
    assert saved["update"] == 1 and saved["path"].startswith(f"{bucket.uri}/tiny/update-00000001-")
    assert saved["bytes"] > 1_000_000 and saved["seconds"] >= saved["seconds_stalled"] >= 0
    assert not list((first.folder / "checkpoints").rglob("*.distcp")), "nothing of it is here"
    before = first.summary["success_before"]
    shutil.rmtree(tmp_path / "runs")
    done = Command(*words, place=tmp_path, environment=environment).wait()
    assert done.code == 0, done.said
    second = Run(tmp_path / "runs" / "tiny", tmp_path / "run.yaml", done)
    assert [event["update"] for event in second.events("update")] == [2]
    assert second.summary["success_before"] == before and second.summary["updates"] == 2
    names = {name.split("/")[2] for name in bucket.names()}
    assert {"latest", "export", "reference"} <= names and sum(name.startswith("update-") for name in names) == 2
    assert tapforge("export", "runs/tiny", "model", place=tmp_path).code != 0, "without credentials"
