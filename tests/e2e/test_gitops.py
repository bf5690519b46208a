"""Pools and runs in the hands of GitOps tools and autoscalers: what Argo CD and Flux read while they live, that nothing
drifts from what git says, and a real HorizontalPodAutoscaler, which sizes a pool through its scale subresource.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from claiming import caller
from e2e.cluster import MERGE, Cluster, Options
from e2e.gitops import kstatus
from e2e.gitops.argocd import health
from live_pool import LivePool, Object, phone
from live_run import LiveRun, pool_source
from operator_process import Operator

from tapforge_operator import labels

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"


@pytest.fixture(scope="module")
def cluster(built: None) -> Iterator[Cluster]:
    """One of this file's own: its autoscaler looks every second, not every 15."""
    often = {"kube-controller-manager": {"horizontal-pod-autoscaler-sync-period": "1s"}}
    with Cluster(Options(nodes=3, qps=200, flags=often)) as up:
        up.apply(*sorted((ROOT / "crds").glob("*.yaml")))
        up.wait_kinds()
        kinds = ("emulatorpools", "trainingruns")
        up.wait_for("the kinds", lambda: all(up.exists(f"/apis/tapforge.dev/v1alpha1/{kind}") for kind in kinds))
        yield up


def read(thing: Object) -> tuple[str, str]:
    """What Argo CD and kstatus say."""
    (reading,) = kstatus.read(thing)
    return health(thing).status, reading.status


def test_what_nobody_has_looked_at_is_on_its_way(cluster: Cluster, namespace: str) -> None:
    """Without an operator: a tool that waits would otherwise go on at once."""
    pool, run = LivePool(cluster, namespace), LiveRun(cluster, namespace)
    assert [read(thing.object()) for thing in (pool, run)] == [("Progressing", "InProgress")] * 2


def test_a_pool_is_read_as_it_is_all_its_life(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=2)
    pool.wait("it to be current", lambda: read(pool.object()) == ("Healthy", "Current"))
    edited = cluster.api("PATCH", pool.path, {"spec": {"replicas": 3}}, MERGE)
    assert read(edited) == ("Progressing", "InProgress"), "the status speaks of the spec before"
    pool.wait("it to be current again", lambda: read(pool.object()) == ("Healthy", "Current"))
    pool.edit(replicas=0)
    pool.wait("an empty pool to be current", lambda: read(pool.object()) == ("Healthy", "Current"))
    pool.edit(replicas=2)
    pool.wait_ready(2)
    gone = cluster.api("DELETE", pool.path, {"propagationPolicy": "Foreground"})
    assert kstatus.read(gone)[0].status == "Terminating"


def test_a_run_is_read_as_it_is(cluster: Cluster, space: str, operator: Operator) -> None:
    run = LiveRun(cluster, space, suspend=True)
    run.wait("it to be suspended", lambda: read(run.object()) == ("Suspended", "Current"))
    resumed = cluster.api("PATCH", run.path, {"spec": {"suspend": False}}, MERGE)
    assert read(resumed) == ("Progressing", "InProgress")
    # This cluster has no KubeRay, which only a person can change.
    run.wait("it to be stalled", lambda: read(run.object()) == ("Degraded", "Failed"))
    assert "KubeRay" in health(run.object()).message
    waits = LiveRun(cluster, space, "waits", **pool_source("nowhere"))
    waits.wait("it to be stalled too", lambda: read(waits.object()) == ("Degraded", "Failed"))


@pytest.mark.parametrize("options", [["--server-side"], []], ids=["server-side", "client-side"])
def test_nothing_drifts_from_what_git_says(
    cluster: Cluster, space: str, operator: Operator, options: list[str], tmp_path: Path
) -> None:
    """Slots come, one is claimed, the status is written: the file is still what stands."""
    text = yaml.safe_load((MANIFESTS / "samples" / "pool-phones.yaml").read_text())
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(text))

    def kubectl(verb: str, check: bool = True) -> Any:
        return cluster.kubectl(verb, *options, "-f", str(file), "-n", space, check=check)

    kubectl("apply")
    path = f"/apis/tapforge.dev/v1alpha1/namespaces/{space}/emulatorpools/phones"
    cluster.wait_for("phones", lambda: cluster.api("GET", path).get("status", {}).get("ready", 0) >= 2)
    claim = caller(operator, space).acquire_one(ttlSeconds=3600)
    cluster.wait_for("the claim in the status", lambda: cluster.api("GET", path)["status"]["claimed"] == 1)

    def version() -> str:
        return str(cluster.api("GET", path)["metadata"]["resourceVersion"])

    # The operator writes the status now and then: a write in the middle of a comparison is no drift.
    for _ in range(100):
        before, same = version(), kubectl("diff", check=False)
        if version() == before:
            break
    assert (same.returncode, same.stdout) == (0, ""), same.stderr
    metadata = cluster.api("GET", path)["metadata"]
    assert metadata["generation"] == 1 and not metadata.get("finalizers")
    text["spec"]["scaling"]["maxReplicas"] = 17
    file.write_text(yaml.safe_dump(text))
    assert "maxReplicas" in kubectl("diff", check=False).stdout, "a change is seen"
    assert claim.slot


def _autoscaler(pool: LivePool, least: int, most: int) -> Object:
    (sample,) = [
        thing
        for thing in yaml.safe_load_all((MANIFESTS / "samples" / "pool-autoscaled.yaml").read_text())
        if thing["kind"] == "HorizontalPodAutoscaler"
    ]
    spec = {**sample["spec"], "minReplicas": least, "maxReplicas": most}
    assert spec["scaleTargetRef"]["name"] == pool.name
    return {**sample, "metadata": {"name": pool.name, "namespace": pool.namespace}, "spec": spec}


def test_a_real_autoscaler_sizes_a_pool_by_its_scale_subresource(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    """There are no metrics here, so it is its bounds that move the pool; it goes the same way with them."""
    pool = LivePool(cluster, space, "autoscaled", replicas=1, template=phone())
    pool.wait_ready(1)
    cluster.apply(_autoscaler(pool, 3, 5))
    pool.wait("the autoscaler to raise it", lambda: pool.object()["spec"]["replicas"] == 3)
    pool.wait_ready(3)
    cluster.apply(_autoscaler(pool, 1, 2))
    pool.wait("the autoscaler to lower it", lambda: pool.object()["spec"]["replicas"] == 2)
    pool.wait_ready(2)
    where = f"/apis/autoscaling/v2/namespaces/{space}/horizontalpodautoscalers/autoscaled"

    def conditions() -> dict[str, Object]:
        return {c["type"]: c for c in cluster.api("GET", where)["status"].get("conditions", ())}

    pool.wait("it to see the new size", lambda: cluster.api("GET", where)["status"].get("currentReplicas") == 2)
    pool.wait("it to be able to scale", lambda: conditions()["AbleToScale"]["status"] == "True")
    scale = cluster.api("GET", f"{pool.path}/scale")
    assert scale["status"] == {"replicas": 2, "selector": f"{labels.POOL_UID}={pool.uid}"}
    wrote = [m for m in pool.object()["metadata"]["managedFields"] if m.get("subresource") == "scale"]
    assert [m["manager"] for m in wrote] == ["kube-controller-manager"], "and nobody else did"
