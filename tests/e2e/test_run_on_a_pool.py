"""The trainer as it is, on phones that the operator hands out: real phone servers of this machine behind external URLs,
claimed, renewed and given back over the broker, while the operator dies in the middle and a person takes a phone away.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from claiming import account
from e2e.cluster import Cluster
from live_pool import LivePool, note_of
from operator_process import Operator

from tapforge_api.claims import AUDIENCE
from tapforge_operator import labels

PHONES = 6
PATIENCE = 600.0

RUN = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: on-a-pool}
spec:
  seed: 3
  model: {contextTokens: 256, adapter: {prompt: compact, historySteps: 8}}
  environment:
    source: {pool: {name: phones, slots: 5}}
    deadlines: {episodeSeconds: 300, acquireSeconds: 300}
  warmStart: {demonstrations: 20, steps: 2, batchSize: 8}
  rollout: {groupSize: 4, groupsPerUpdate: 2, responseTokens: 24, groupDeadlineSeconds: 300}
  learner: {ranks: 1}
  engine: {maxConcurrentSequences: 8, kvCacheMiB: 64}
  evaluation: {episodes: 4, everyUpdates: 0}
  stop: {maxUpdates: 2}
"""


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """Phones of this machine that nobody of us keeps: as real devices are."""
    command = [sys.executable, "-m", "tapforge_envs.phone.server", "--slots", str(PHONES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = json.loads(server.stdout.readline())["port"]
        yield [f"http://127.0.0.1:{port}/slot/{slot}" for slot in range(PHONES)]
        server.kill()


@pytest.fixture
def training(cluster: Cluster, space: str, operator: Operator, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`tapforge run`, as a Pod of a run would start it; a process group of its own."""
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "token").write_text(cluster.token(space, account(cluster, space), AUDIENCE))
    environment = os.environ | {
        "TAPFORGE_BROKER_URL": operator.broker,
        "TAPFORGE_BROKER_CA": str(operator.ca),
        "TAPFORGE_BROKER_TOKEN_FILE": str(tmp_path / "token"),
        "TAPFORGE_NAMESPACE": space,
    }
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tapforge_trainer.cli.main", "run", "-f", "run.yaml"],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=tmp_path,
            env=environment,
            start_new_session=True,
        )
        yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.mark.long
def test_a_run_learns_on_claimed_phones_through_a_death_of_the_operator(
    cluster: Cluster,
    space: str,
    operator: Operator,
    urls: list[str],
    training: subprocess.Popen[str],
    tmp_path: Path,
) -> None:
    pool = LivePool(cluster, space, external={"urls": urls})
    end = time.monotonic() + PATIENCE

    def until(what: str, holds: bool) -> bool:
        said = (tmp_path / "said").read_text()[-4000:]
        assert training.poll() is None or holds, f"the run ended before {what}: {training.returncode}\n{said}"
        assert time.monotonic() < end, f"{what}: not there after {PATIENCE:g} s\n{said}"
        time.sleep(0.2)
        return holds

    while not until("phones were claimed", pool.status()["claimed"] == 5):
        pass
    operator.restart()
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
    held = [lease for lease in cluster.api("GET", leases)["items"] if note_of(lease, labels.CLAIM)]
    assert len(held) == 5
    taken = note_of(held[0], labels.URL)
    pool.edit(external={"urls": [url for url in urls if url != taken]})
    # Not by `until`: the run may end between its two looks.
    with contextlib.suppress(subprocess.TimeoutExpired):
        training.wait(max(0.0, end - time.monotonic()))
    said = (tmp_path / "said").read_text()
    assert training.returncode == 0, said[-4000:]
    summary = json.loads((tmp_path / "runs" / "on-a-pool" / "summary.json").read_text())
    assert summary["updates"] == 2 and summary["episodes"] >= 16
    pool.wait("all phones to be given back", lambda: pool.status()["claimed"] == 0)
    pool.wait("one to be gone, and none to be the worse for it", lambda: pool.status()["ready"] == PHONES - 1)
    for lease in cluster.api("GET", leases)["items"]:
        assert note_of(lease, labels.CLAIM) is None and note_of(lease, labels.STRIKES) is None
