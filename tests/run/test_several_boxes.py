"""A run in a Ray cluster that somebody has started: two nodes, a token, no Kubernetes (docs/gpus.md)."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from whole import PATIENCE, SPEC, Command, Run

pytestmark = pytest.mark.long

LITTLE = (
    "spec.warmStart=null",
    "spec.rollout.groupsPerUpdate=2",
    "spec.rollout.groupSize=2",
    "spec.stop.maxUpdates=1",
    'spec.evaluation={"episodes": 2, "sampled": false, "baselines": false}',
    "spec.checkpoints.export=false",
)


@contextmanager
def node(place: Path, name: str, environment: dict[str, str], *words: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(Path(sys.executable).with_name("ray")), "start", *words, "--num-cpus=2", "--block"]
    with (place / f"{name}.log").open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)  # ends what it has started
        process.wait(60)


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Its address and token, as variables."""
    place = tmp_path_factory.mktemp("boxes")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    with ExitStack() as stack:
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True))
        head = ("--head", f"--port={where.rpartition(':')[2]}", "--include-dashboard=false", f"--temp-dir={short}")
        stack.enter_context(node(place, "head", token, *head))
        stack.enter_context(node(place, "second", token, f"--address={where}"))
        _wait_for_two(place, {**token, "RAY_ADDRESS": where})
        yield {**token, "RAY_ADDRESS": where}


def _wait_for_two(place: Path, environment: dict[str, str]) -> None:
    asked = "import ray, time\nray.init(logging_level=40)\nwhile len(ray.nodes()) < 2: time.sleep(0.2)"
    for _ in range(10):
        done = subprocess.run(
            [sys.executable, "-c", asked],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if done.returncode == 0:
            return
    pytest.fail(f"no two nodes: {done.stderr[-2000:]}; {[log.read_text() for log in place.glob('*.log')]}")


def test_a_run_goes_from_its_file_to_its_end(ray: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    sets = [word for one in LITTLE for word in ("--set", one)]
    finished = Command("run", "-f", "tiny.yaml", *sets, place=tmp_path, environment=ray).wait()
    assert finished.code == 0 and finished.left_behind == [], finished.said
    run = Run(tmp_path / "runs" / "tiny", tmp_path / "tiny.yaml", finished)
    (update,) = run.events("update")
    assert update["rollout_workers"]["workers"] == 1, "in a cluster the driver doesn't play"


def test_a_driver_without_the_token_is_told_what_to_look_at(ray: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    stranger = {**ray, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    finished = Command("run", "-f", "tiny.yaml", place=tmp_path, environment=stranger).wait()
    assert finished.code != 0
    assert f"the Ray cluster that RAY_ADDRESS names ({ray['RAY_ADDRESS']}) takes no driver" in finished.said
    assert "RAY_AUTH_TOKEN" in finished.said and "Traceback" not in finished.err
