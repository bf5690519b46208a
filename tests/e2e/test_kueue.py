"""Runs in a queue of Kueue's. A stack of its own: with Kueue's webhooks in it a cluster holds everybody's RayJobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e import queues
from e2e.cluster import Cluster, Options, binaries, kueue
from e2e.queues import Lab
from operator_process import MANIFESTS, Operator

pytestmark = pytest.mark.long
CRDS = sorted((Path(__file__).parents[2] / "crds").glob("*.yaml"))


@pytest.fixture(scope="module")
def cluster(addons: None) -> Iterator[Cluster]:
    binaries.ensure(of=binaries.KUEUE)
    with Cluster(Options(nodes=2, qps=200)) as up:
        up.apply(*CRDS)
        up.wait_kinds()
        queues.install(up)
        yield up


@pytest.fixture
def lab(cluster: Cluster, space: str, operator: Operator) -> Lab:
    one = Lab(cluster, space)
    one.queue()
    return one


def active(lab: Lab, space: str) -> bool:
    check = lab.cluster.api("GET", f"/apis/{kueue.VERSION}/admissionchecks/{space}")
    queue = lab.cluster.api("GET", f"/apis/{kueue.VERSION}/clusterqueues/{space}")
    conditions = [*check.get("status", {}).get("conditions", ()), *queue.get("status", {}).get("conditions", ())]
    return [c["status"] for c in conditions if c["type"] == "Active"] == ["True", "True"]


def test_a_run_is_queued_let_in_preempted_and_goes_on(lab: Lab, space: str, operator: Operator) -> None:
    cluster = lab.cluster
    cluster.wait_for("the check and its queue to be active", lambda: active(lab, space))
    for pool in ("a", "b"):
        lab.pool(pool)

    lab.run("patient", "low", "a")
    lab.until("its RayJob", lambda: lab.workload("patient"))
    assert lab.job("patient")["spec"]["suspend"] is True, "there before its phones"
    lab.until("its phones", lambda: lab.phones("a") == 2)
    assert lab.holds("patient")
    lab.starts("patient")
    assert lab.check("patient")["state"] == "Ready"

    lab.run("equal", "low", "b")
    lab.until("equal to wait", lambda: lab.reason("equal") == "Queued" and lab.workload("equal"))
    assert "quota" in lab.status("equal")["message"], "why, in Kueue's words"
    assert lab.phones("b") == 0, "a queued run has no phones"
    lab.run("urgent", "high", "b")
    lab.until("patient to be preempted", lambda: lab.reason("patient") == "Queued")
    lab.until("patient to keep no phones", lambda: lab.phones("a") == 0)
    lab.starts("urgent")
    assert lab.phones("b") == 2, "equal is queued still"
    operator.restart()
    lab.ends("urgent")

    lab.starts("patient")
    status = lab.status("patient")
    assert (status["attempts"], status["lostClusters"], status["disruptions"], status["failures"]) == (1, 0, 0, 0)
    lab.ends("patient")
    lab.starts("equal")
    lab.ends("equal")
    lab.until("nobody to need phones", lambda: lab.phones("a") == lab.phones("b") == 0)


def test_phones_that_do_not_boot_give_their_quota_back(lab: Lab) -> None:
    lab.pool("sick", boots=False)
    lab.pool("well")
    lab.run("unlucky", "low", "sick")
    lab.until("its phones", lambda: lab.phones("sick") == 2)
    lab.run("next", "low", "well")
    lab.until("next to wait", lambda: lab.reason("next") == "Queued" and lab.workload("next"))
    assert lab.holds("unlucky") and lab.phones("well") == 0
    lab.until("the quota to be given back", lambda: not lab.holds("unlucky"))
    # Kueue keeps what the check said last while it is Pending again.
    check = lab.check("unlucky")
    assert check["requeueAfterSeconds"] == 1 and check["retryCount"] >= 1
    assert lab.job("unlucky")["spec"]["suspend"] is True, "it never had the GPUs"
    lab.starts("next")
    lab.until("unlucky to have no phones", lambda: lab.phones("sick") == 0)
    lab.ends("next")
    lab.until("the second try", lambda: lab.holds("unlucky") and lab.phones("sick") == 2)
    assert lab.status("unlucky")["attempts"] == 1


def test_the_sample_is_taken(cluster: Cluster) -> None:
    sample = MANIFESTS / "samples" / "queue-kueue.yaml"
    said = cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(sample)).stdout
    assert said.count("created (server dry run)") == sample.read_text().count("\nkind: ")


def test_the_operator_saw_no_trouble(operator: Operator) -> None:
    """Last: after everything above."""
    assert operator.trouble() == []
