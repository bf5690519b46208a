"""Pools as people and tools meet them: what `kubectl get` says, names at their limit, objects of an older schema,
labels that somebody forged, pools of the same name one after the other, and what is left when a pool goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e.cluster import MERGE, Cluster, Refused, fake
from live_pool import LivePool, name, note_of, phone, ready, stays, uid, uids
from operator_process import Operator

from tapforge_operator import labels as wellknown

CRD = Path(__file__).parents[2] / "crds" / "emulatorpools.yaml"
pytestmark = pytest.mark.usefixtures("operator")


def test_kubectl_get_tells_the_truth(cluster: Cluster, space: str) -> None:
    ready_pool = LivePool(cluster, space, "fine", replicas=2)
    never_pool = LivePool(cluster, space, "broken", replicas=1, template=phone(notes={fake.PULL: "never"}))
    ready_pool.wait_ready(2)
    never_pool.wait("its status", lambda: never_pool.says("Ready", "False", "SlotsMissing"))

    def table(*options: str) -> dict[str, dict[str, str]]:
        said = cluster.kubectl("get", "epool", "-n", space, *options).stdout.splitlines()
        heads = [(head.start(), head[0]) for head in re.finditer(r"\S+", said[0])]
        ends = [start for start, _ in heads[1:]] + [10_000]
        rows = [
            {head: line[start:end].strip() for (start, head), end in zip(heads, ends, strict=True)} for line in said[1:]
        ]
        return {row["NAME"]: row for row in rows}

    assert set(table()) == {"fine", "broken"}
    fine, broken = table()["fine"], table()["broken"]
    assert (fine["DESIRED"], fine["READY"], fine["STATUS"]) == ("2", "2", "SlotsReady")
    assert (broken["DESIRED"], broken["READY"], broken["STATUS"]) == ("1", "0", "SlotsMissing")
    wide = table("-o", "wide")
    assert "0 of 1 slots are ready" in wide["broken"]["MESSAGE"]
    done = cluster.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "epool/fine", "-n", space)
    assert "condition met" in done.stdout
    scale = cluster.api("GET", f"{ready_pool.path}/scale")
    assert scale["status"] == {"replicas": 2, "selector": f"{wellknown.POOL_UID}={ready_pool.uid}"}


def test_conditions_are_as_status_tools_read_them(cluster: Cluster, space: str) -> None:
    """Every word of a status is about the generation that it names; a transition has a time of its own, and what did
    not turn keeps its time."""
    pool = LivePool(cluster, space, replicas=1)
    pool.wait_ready(1)
    before = {c["type"]: c for c in pool.status()["conditions"]}
    assert set(before) == {"Ready", "Reconciling", "Stalled", "Degraded"}
    pool.edit(replicas=2, template=phone("phone:2", notes={fake.BOOT: "never"}), updateStrategy={"maxUnavailable": 2})
    pool.wait("it to be reconciled", lambda: pool.says("Reconciling", "True"))
    assert all(c["observedGeneration"] == 2 for c in pool.status()["conditions"])
    images = lambda: [pod["spec"]["containers"][0]["image"] for pod in pool.pods()]  # noqa: E731
    pool.wait("both to boot", lambda: images() == ["phone:2", "phone:2"])
    for pod in pool.pods():
        pool.annotate(name(pod), {fake.BOOT: None})
    pool.wait_ready(2)
    after = {c["type"]: c for c in pool.status()["conditions"]}
    assert after["Stalled"] == before["Stalled"] | {"observedGeneration": 2}
    assert not (after["Reconciling"]["status"] == "True" and after["Stalled"]["status"] == "True")


def test_a_name_at_the_limit(cluster: Cluster, space: str) -> None:
    longest = "p" + "-0" * 31
    assert len(longest) == 63
    pool = LivePool(cluster, space, longest, replicas=2)
    pods = pool.wait_ready(2)
    assert all(len(name(pod)) <= 63 and pod["metadata"]["labels"][wellknown.POOL] == longest for pod in pods)
    pool.annotate(name(pods[0]), {fake.EXIT: "0"})
    pool.wait("another Pod", lambda: uid(pods[0]) not in uids(pool.pods()))
    pool.wait_ready(2)
    budget = f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets/{longest}-claimed"
    pool.wait("its disruption budget", lambda: cluster.exists(budget))


def test_pods_with_forged_labels_are_nobodys_slots(cluster: Cluster, space: str) -> None:
    pool = LivePool(cluster, space, replicas=1)
    (own,) = pool.wait_ready(1)
    labels = own["metadata"]["labels"]
    pods = f"/api/v1/namespaces/{space}/pods"
    spec = {"containers": [{"name": "emulator", "image": "theirs"}]}
    forged = cluster.api("POST", pods, {"metadata": {"name": "forged", "labels": labels}, "spec": spec})
    another = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": pool.uid, "controller": True}
    owned = {"name": "owned", "labels": {**labels, wellknown.ORDINAL: "1"}, "ownerReferences": [another]}
    cluster.api("POST", pods, {"metadata": owned, "spec": spec})
    pool.edit(replicas=2)
    pool.wait_ready(2)
    pool.edit(replicas=1)
    pool.wait_ready(1)
    assert uid(cluster.api("GET", f"{pods}/forged")) == uid(forged), "it was neither counted nor deleted"
    # Who may name the pool as the owner makes a slot of it: here one too many.
    (own,) = pool.pods()
    pools = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "EmulatorPool", "name": "phones", "uid": pool.uid}
    owned = {"name": "believed", "labels": {**labels, wellknown.ORDINAL: "7"}}
    cluster.api("POST", pods, {"metadata": owned | {"ownerReferences": [pools | {"controller": True}]}, "spec": spec})
    both = [f"{pods}/{name(own)}", f"{pods}/believed"]
    pool.wait("one of the two to go", lambda: [cluster.exists(pod) for pod in both].count(False) == 1)
    pool.wait_ready(1)
    # A slot that loses its labels is no slot any more: it is replaced and left to whoever took it.
    (slot,) = pool.pods()
    cluster.api("PATCH", pool.place(name(slot)), {"metadata": {"labels": {wellknown.POOL_UID: None}}}, MERGE)
    pool.wait("another slot", lambda: pool.pods() and uid(slot) not in uids(pool.pods()))
    assert ready(pool.pod(name(slot)))
    # Given back, it is one again: one of the two has to go, and it is not the older one.
    cluster.api("PATCH", pool.place(name(slot)), {"metadata": {"labels": {wellknown.POOL_UID: pool.uid}}}, MERGE)
    pool.wait("it to be the pool's only slot", lambda: uids(pool.all_pods()) == [uid(slot)])
    pool.wait_ready(1)


def test_two_pools_of_the_same_name_one_after_the_other_share_nothing(cluster: Cluster, space: str) -> None:
    first = LivePool(cluster, space, replicas=3, template=phone(notes={fake.STOP: "2"}))
    old = uids(first.wait_ready(3))
    first.delete()
    second = LivePool(cluster, space, replicas=3)
    assert second.uid != first.uid
    new = uids(second.wait_ready(3))
    assert not set(old) & set(new)
    second.wait("the first one's Pods to be collected", lambda: first.all_pods() == [])
    budget = f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets/phones-claimed"
    second.wait("the first one's budget to be collected", lambda: owner(cluster, budget) != first.uid)
    assert uids(second.wait_ready(3)) == new


def test_a_disruption_budget_of_somebody_else_is_said_and_left_alone(cluster: Cluster, space: str) -> None:
    budgets = f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets"
    theirs = {
        "metadata": {"name": "phones-claimed"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"a": "b"}}},
    }
    made = cluster.api("POST", budgets, {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", **theirs})
    pool = LivePool(cluster, space, replicas=2)
    pool.wait_ready(2)
    pool.wait("it to be said", lambda: pool.says("Degraded", "True", "DisruptionBudget"))
    assert pool.says("Ready", "True") and "phones-claimed" in pool.condition("Degraded")["message"]
    assert uid(cluster.api("GET", f"{budgets}/phones-claimed")) == uid(made)


def owner(cluster: Cluster, path: str) -> str:
    """UID; "" where nothing is, also when it has just been collected."""
    try:
        return str(cluster.api("GET", path)["metadata"]["ownerReferences"][0]["uid"])
    except Refused as error:
        if error.status != 404:
            raise
        return ""


def test_nothing_is_left_of_a_deleted_pool(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=2)
    pool.wait_ready(2)
    pool.delete()
    # First: an operator that hears of its Pods' end before the pool's makes others, which are collected too.
    key = f"{space}/phones"
    pool.wait("its series to end", lambda: operator.metrics("tapforge_pool_slots", pool=key, state="desired") == 0)
    pool.wait("its Pods to be collected", lambda: not pool.all_pods())
    budgets = f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets"
    pool.wait("its budget to be collected", lambda: not cluster.api("GET", budgets)["items"])
    stays("a Pod came back", lambda: not pool.all_pods())


# --- another schema ---------------------------------------------------------------------------------------------------


@pytest.fixture
def older_schema(cluster: Cluster) -> Iterator[None]:
    """One that takes everything, in the place of ours, until the test says otherwise."""
    lax = yaml.safe_load(CRD.read_text())
    for version in lax["spec"]["versions"]:
        anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version["schema"]["openAPIV3Schema"]["properties"] |= {"spec": anything, "status": anything}
    anything_goes = {
        "apiVersion": "tapforge.dev/v1alpha1",
        "kind": "EmulatorPool",
        "metadata": {"name": "anything", "namespace": "default"},
        "spec": {"port": "the usual one"},
    }
    where = "/apis/tapforge.dev/v1alpha1/namespaces/default/emulatorpools?dryRun=All"

    def taken() -> bool:
        """The API server needs a moment to take a schema over."""
        try:
            return bool(cluster.api("POST", where, anything_goes))
        except Refused as error:
            if error.status != 422:
                raise
            return False

    cluster.apply(lax)
    cluster.wait_for("the older schema", taken)
    yield
    cluster.apply(CRD)
    cluster.wait_for("the newer schema", lambda: not taken())


def test_objects_of_an_older_schema_are_read_as_far_as_they_can_be(
    cluster: Cluster, space: str, older_schema: None
) -> None:
    """What is unknown is passed over; what can't be understood stops changes and nothing else."""
    pod = {"containers": [{"name": "emulator", "image": "phone:1"}]}
    older = LivePool(cluster, space, "older", replicas=2, flavour="sweet", boot={"deadlineSeconds": 60, "warm": True})
    broken = LivePool(cluster, space, "broken", replicas=2)
    bare = LivePool(cluster, space, "bare", replicas=1, template={"spec": pod})
    older.wait_ready(2)
    bare.wait_ready(1)
    kept = uids(broken.wait_ready(2))
    broken.edit(port="the usual one", replicas=5)
    broken.wait("word of it", lambda: broken.says("Stalled", "True", "InvalidSpec"))
    assert "port" in broken.condition("Stalled")["message"]
    broken.annotate(name(broken.pods()[0]), {"x": "y"})
    stays("a slot was touched", lambda: uids(broken.pods()) == kept)
    # The status that another release wrote may hold anything, too; it is not taken for that of a new pool.
    (slot,) = uids(bare.pods())
    cluster.api("PATCH", f"{bare.path}/status", {"status": {"replacedTotal": "some"}}, MERGE)
    bare.wait("word of it", lambda: bare.says("Stalled", "True", "UnreadableStatus"))
    bare.edit(replicas=2)
    stays("a slot was made or went", lambda: uids(bare.pods()) == [slot])
    cluster.api("PATCH", f"{bare.path}/status", {"status": {"replacedTotal": 3}}, MERGE)
    assert slot in uids(bare.wait_ready(2)) and bare.says("Stalled", "False")
    broken.edit(port=8000, replicas=3)
    assert set(kept) < set(uids(broken.wait_ready(3)))
    cluster.apply(CRD)
    older.wait("what the newer schema takes", lambda: accepted(older))
    assert len(older.wait_ready(3)) == 3


def accepted(pool: LivePool) -> bool:
    """An edit under the newer schema; the API server needs a moment to take it over."""
    pool.edit(replicas=3)
    return "flavour" not in pool.object()["spec"]


def test_a_pool_in_a_namespace_that_ends_is_no_trouble(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=2)
    (first, _) = pool.wait_ready(2)
    assert note_of(first, wellknown.CLAIM) is None
    cluster.api("DELETE", f"/api/v1/namespaces/{space}")
    cluster.wait_for("the end of the namespace", lambda: not cluster.exists(f"/api/v1/namespaces/{space}"))
    # A list is due at any time, and names what it may not read any more. What other tests provoked is named with its
    # namespace.
    here = [one for one in operator.trouble() if one.object.get("namespace", space) == space]
    assert [one for one in here if f"namespace {space} can't be read" not in one.message] == []
