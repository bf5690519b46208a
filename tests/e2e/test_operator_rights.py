"""The operator where it may less: without a look at nodes, as in chosen namespaces only; when a right is taken away
from it; when one of its namespaces is gone. What it may not is named, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from claiming import Caller, caller, run, run_pod
from e2e.cluster import Cluster
from live_pool import LivePool, only_on, own_nodes, stays, uids
from operator_process import ACCOUNT, MANIFESTS, Ground, Operator, enabled, label, let_in

ROLES = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture(scope="module")
def leaving(cluster: Cluster, ground: Ground) -> Iterator[str]:
    """One more namespace of the operator's."""
    name = f"{ground.own}-leaving"
    cluster.api("POST", "/api/v1/namespaces", enabled(name))
    let_in(cluster, ground.own, [name])
    yield name
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def operator(cluster: Cluster, ground: Ground, leaving: str) -> Iterator[Operator]:
    cluster.api("DELETE", f"{ROLES}/clusterrolebindings/tapforge-operator-nodes.{ground.own}")
    cluster.wait_for("the right to be gone", lambda: not may(cluster, ground, "list", "nodes"))
    spaces = [*ground.spaces, leaving]
    one = Operator(cluster, ground.own, spaces, arguments=["--no-nodes"]).start().wait_ready()
    yield one
    one.stop()


def may(cluster: Cluster, ground: Ground, verb: str, resource: str, namespace: str = "") -> bool:
    attributes = {"verb": verb, "resource": resource, "namespace": namespace}
    user = f"system:serviceaccount:{ground.own}:{ACCOUNT}"
    groups = ["system:authenticated", "system:serviceaccounts"]
    body = {"spec": {"user": user, "groups": groups, "resourceAttributes": attributes}}
    where = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(cluster.api("POST", where, body)["status"]["allowed"])


def test_pools_work_without_a_look_at_nodes(cluster: Cluster, space: str, ground: Ground, operator: Operator) -> None:
    assert not may(cluster, ground, "list", "nodes") and not may(cluster, ground, "list", "pods")
    pool = LivePool(cluster, space, replicas=2)
    pool.wait_ready(2)
    who = caller(operator, space)
    who.release(who.acquire_one())


@pytest.mark.long
def test_a_dead_node_of_a_driver_is_found_out_by_its_pod(cluster: Cluster, space: str, operator: Operator) -> None:
    """By what the node controller itself leaves of the Pod; it takes its own time, and half a minute follows."""
    (node,) = own_nodes(cluster, "unseen", 1)
    pool = LivePool(cluster, space, replicas=2)
    pool.wait_ready(2)
    token = run_pod(cluster, space, run(cluster, space, "train", slots=2), **only_on("unseen"))
    driver = Caller(operator, space, token)
    cluster.wait_for("the driver to run", lambda: pool.pod("driver")["status"]["phase"] == "Running")
    driver.acquire_all(2, ttlSeconds=5)
    cluster.nodes.lose(node, at_once=False)
    pool.wait("its phones to be free", lambda: not pool.marked(), 150.0)
    assert "deletionTimestamp" not in pool.pod("driver")["metadata"], "its Pod is there"


def test_a_right_that_is_taken_away_is_named(cluster: Cluster, space: str, ground: Ground, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=1)
    kept = uids(pool.wait_ready(1))
    roles = [
        r for r in yaml.safe_load_all((MANIFESTS / "base" / "rbac.yaml").read_text()) if r["kind"] == "ClusterRole"
    ]
    role = next(role for role in roles if role["metadata"]["name"] == "tapforge-operator-pools")
    role["metadata"]["name"] = "without-creates"
    for rule in role["rules"]:
        if rule["resources"] == ["pods"]:
            rule["verbs"].remove("create")
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "without-creates", "namespace": space},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "without-creates"},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": ground.own}],
    }
    cluster.apply(role, binding)
    usual = f"{ROLES}/namespaces/{space}/rolebindings/tapforge-operator-pools"
    before = cluster.api("GET", usual)
    cluster.api("DELETE", usual)
    cluster.wait_for("the right to be gone", lambda: not may(cluster, ground, "create", "pods", space))
    pool.edit(replicas=2)
    pool.wait("word of it", lambda: pool.says("Stalled", "True", "Forbidden"))
    assert "cannot create resource" in pool.condition("Stalled")["message"]
    assert uids(pool.pods()) == kept
    del before["metadata"]["resourceVersion"], before["metadata"]["uid"]
    cluster.api("POST", usual.rpartition("/")[0], before)
    assert set(kept) < set(uids(pool.wait_ready(2)))
    assert pool.says("Stalled", "False")


def test_a_namespace_that_is_not_enabled_keeps_what_it_has_and_gets_nothing_new(
    cluster: Cluster, space: str, ground: Ground, operator: Operator
) -> None:
    """As after an upgrade from a release that knew no label."""
    pool = LivePool(cluster, space, replicas=2)
    kept = uids(pool.wait_ready(2))
    who = caller(operator, space)
    claim = who.acquire_one(ttlSeconds=600)
    label(cluster, ground.own, space, "")
    pool.edit(replicas=3)
    pool.wait("word of it", lambda: pool.says("Stalled", "True", "NamespaceNotEnabled"))
    assert f"kubectl label namespace {space} tapforge.dev/workloads=enabled" in pool.condition("Stalled")["message"]
    devices = LivePool(cluster, space, "devices", external={"urls": ["http://127.0.0.1:9"]})
    devices.wait("word of it", lambda: devices.says("Stalled", "True", "NamespaceNotEnabled"))
    assert uids(pool.pods()) == kept and who.state(claim) == "held"
    who.release(claim)
    label(cluster, ground.own, space, "enabled")
    pool.edit(replicas=4)  # tried at once; the label alone is noticed within half a minute
    assert set(kept) < set(uids(pool.wait_ready(4)))
    assert pool.says("Stalled", "False")


def test_a_namespace_that_can_not_be_read_keeps_nobody_elses_waiting(
    cluster: Cluster, space: str, ground: Ground, leaving: str, operator: Operator
) -> None:
    """One that was deleted takes the rights in it along."""
    pool = LivePool(cluster, space, replicas=1)
    pool.wait_ready(1)
    who = caller(operator, space)
    claim = who.acquire_one(ttlSeconds=600)
    cluster.api("DELETE", f"/api/v1/namespaces/{leaving}")
    cluster.wait_for("the end of the namespace", lambda: not cluster.exists(f"/api/v1/namespaces/{leaving}"))
    cluster.wait_for("the end of the rights", lambda: not may(cluster, ground, "list", "pods", leaving))
    operator.restart()
    unread = [one.message for one in operator.records("kube.informers") if one.level == "ERROR"]
    assert any(f"namespace {leaving} can't be read" in words and "forbidden" in words for words in unread)
    assert who.state(claim) == "held"
    pool.edit(replicas=2)
    pool.wait_ready(2)
    stays("it ended", lambda: operator.term > 0)
