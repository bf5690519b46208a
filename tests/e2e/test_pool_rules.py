"""What the operator does about slots, on a real control plane: one test for each of the planner's rules, seen from
outside. Fake nodes play the Pods' lives; deadlines are seconds here and minutes elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from e2e.cluster import Cluster, Refused, fake
from live_pool import LivePool, Object, name, note_of, only_on, own_nodes, phone, ready, stays, uid, uids
from operator_process import Operator

from tapforge_api.base import INT32
from tapforge_operator import labels

pytestmark = pytest.mark.usefixtures("operator")


@pytest.fixture
def nodes(cluster: Cluster, space: str) -> Iterator[list[str]]:
    """Nodes for this test alone; what a test adds to the list goes with it."""
    added: list[str] = []
    yield added
    for node in added:
        cluster.nodes.remove(node)


def counts(pool: LivePool, *counters: str) -> list[int]:
    status = pool.status()
    return [status[counter] for counter in counters]


def node_of(pod: Object) -> str | None:
    return pod["spec"].get("nodeName")


def replaced(pool: LivePool, old: list[str]) -> list[Object]:
    """Waits until all slots are ready, and none of the Pods with these UIDs is among them."""
    pool.wait("others in their place", lambda: not set(old) & set(uids(pool.pods())))
    return pool.wait_ready(pool.status()["desiredReplicas"])


# --- from nothing to ready, and back ----------------------------------------------------------------------------------


def test_slots_come_up_as_the_spec_says_and_then_nothing_is_written(cluster: Cluster, space: str) -> None:
    pool = LivePool(cluster, space, replicas=3)
    pods = pool.wait_ready(3)
    status = pool.status()
    assert {k: status[k] for k in ("desiredReplicas", "pods", "ready", "updated", "claimed", "booting")} == {
        "desiredReplicas": 3,
        "pods": 3,
        "ready": 3,
        "updated": 3,
        "claimed": 0,
        "booting": 0,
    }
    for kind, value in {"Ready": "True", "Reconciling": "False", "Stalled": "False", "Degraded": "False"}.items():
        assert pool.condition(kind)["status"] == value
    for ordinal, pod in enumerate(pods):
        metadata, spec = pod["metadata"], pod["spec"]
        assert metadata["labels"][labels.ORDINAL] == str(ordinal)
        assert metadata["labels"][labels.POOL] == "phones"
        assert note_of(pod, labels.SAFE_TO_EVICT) == "true" and note_of(pod, labels.DO_NOT_DISRUPT) is None
        assert spec["restartPolicy"] == "Never" and spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        container = spec["containers"][0]["securityContext"]
        assert container["capabilities"] == {"drop": ["ALL"]} and container["allowPrivilegeEscalation"] is False
    where = f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets/phones-claimed"
    pool.wait("its disruption budget", lambda: cluster.exists(where))
    budget = cluster.api("GET", where)
    assert budget["spec"]["minAvailable"] == INT32 and budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert pool.object()["spec"]["replicas"] == 3
    assert pool.object()["metadata"].get("finalizers", []) == []

    def versions() -> list[str]:
        return [thing["metadata"]["resourceVersion"] for thing in (pool.object(), *pool.all_pods())]

    before = versions()
    stays("something was written in a pool at rest", lambda: versions() == before)


def test_scaling_out_is_parallel_and_scaling_in_empties_nodes(cluster: Cluster, space: str, nodes: list[str]) -> None:
    nodes += own_nodes(cluster, space, 1, prefix=f"{space}-full", pods=4)
    pool = LivePool(cluster, space, replicas=4, template=phone(**only_on(space)))
    pool.wait_ready(4)
    nodes += own_nodes(cluster, space, 1, prefix=f"{space}-rest")
    cluster.kubectl("scale", "epool/phones", "--replicas=7", "-n", space)
    pool.wait_ready(7)
    cluster.kubectl("scale", "epool/phones", "--replicas=5", "-n", space)
    kept = pool.wait_ready(5)
    assert sorted(node_of(pod) == nodes[0] for pod in kept) == [False, True, True, True, True]
    pool.edit(replicas=4)
    assert {node_of(pod) for pod in pool.wait_ready(4)} == {nodes[0]}
    pool.edit(replicas=0)
    pool.wait("no slots", lambda: pool.all_pods() == [] and pool.status()["pods"] == 0)
    assert pool.says("Ready", "True"), "nothing is missing where nothing is wanted"


def test_slots_that_no_node_has_room_for_are_held_until_one_comes(
    cluster: Cluster, space: str, nodes: list[str]
) -> None:
    pool = LivePool(cluster, space, replicas=2, template=phone(**only_on(space)))
    pool.wait("2 unschedulable slots", lambda: pool.status()["unschedulable"] == 2)
    held = uids(pool.pods())
    assert pool.says("Ready", "False", "SlotsMissing") and pool.says("Reconciling", "True")
    assert pool.says("Stalled", "False")
    nodes += own_nodes(cluster, space, 1)
    assert uids(pool.wait_ready(2)) == held
    assert pool.status()["unschedulable"] == 0 and pool.status()["replacedTotal"] == 0


def test_of_a_device_plugins_resource_each_slot_takes_one(cluster: Cluster, space: str, nodes: list[str]) -> None:
    device = "devices.example.org/kvm"
    nodes += own_nodes(cluster, space, 1, resources={device: "2"})
    kvm = {"mode": "DevicePlugin", "resourceName": device}
    pool = LivePool(cluster, space, replicas=3, kvm=kvm, template=phone(**only_on(space)))
    pool.wait("2 slots with a device", lambda: counts(pool, "ready", "unschedulable") == [2, 1])
    for pod in pool.pods():
        assert pod["spec"]["containers"][0]["resources"]["limits"] == {device: "1"}
        assert not pod["spec"]["containers"][0]["securityContext"].get("privileged")


# --- the API server refuses -------------------------------------------------------------------------------------------


def test_a_quota_holds_what_it_refuses_until_it_is_raised_and_describe_tells_the_story(
    cluster: Cluster, space: str
) -> None:
    cluster.kubectl("create", "quota", "few", "--hard=pods=2", "-n", space)
    used = f"/api/v1/namespaces/{space}/resourcequotas/few"
    cluster.wait_for("the quota to be counted", lambda: "used" in cluster.api("GET", used)["status"])
    pool = LivePool(cluster, space, replicas=4)
    pool.wait("word of the quota", lambda: pool.says("Degraded", "True", "QuotaExceeded"))
    assert "exceeded quota: few" in pool.condition("Degraded")["message"]
    assert pool.says("Stalled", "False"), "it may pass by itself"
    first = pool.wait("as many as may be", lambda: uids(pool.pods()) if len(pool.pods()) == 2 else [])
    cluster.kubectl("patch", "quota", "few", "--type=merge", "-p", '{"spec":{"hard":{"pods":"9"}}}', "-n", space)
    assert set(first) < set(uids(pool.wait_ready(4)))
    assert pool.says("Degraded", "False") and pool.status()["replacedTotal"] == 0
    # What it has been through is what `kubectl describe` tells.
    pool.annotate(first_name := name(pool.pods()[0]), {fake.EXIT: "0", fake.EXIT_CODE: "137"})
    pool.wait("another in its place", lambda: pool.status()["replacedTotal"] == 1)
    pool.edit(template=phone("phone:2"))
    pool.wait("the roll-out", lambda: pool.status()["updated"] == 4 and pool.says("Reconciling", "False"))
    described = lambda: cluster.kubectl("describe", "epool", pool.name, "-n", space).stdout  # noqa: E731
    pool.wait("the end of its story", lambda: "RollOutFinished" in described())
    told = described().partition("\nEvents:")[2]
    for kind, reason, words in (
        ("Warning", "QuotaExceeded", "exceeded quota: few"),
        ("Normal", "Recovered", "no longer the case: QuotaExceeded"),
        ("Normal", "SlotsReady", "4 of 4 slots are ready"),
        ("Warning", "SlotFailed", f"1 slot ended: {first_name}"),
        ("Normal", "RollOutStarted", "of an old template"),
        ("Normal", "RollOutFinished", "of the present template"),
    ):
        (line,) = [line for line in told.splitlines() if line.split()[1:2] == [reason]]
        assert line.split()[0] == kind and "tapforge-operator" in line and words in line


def test_a_field_that_no_pod_has_stalls_the_pool_until_somebody_corrects_it(cluster: Cluster, space: str) -> None:
    """The template is passed through: the API server would leave the field out of the Pods without a word."""
    pool = LivePool(cluster, space, replicas=2, template=phone(nodeSelektor={"a": "b"}))
    pool.wait("word of the refusal", lambda: pool.says("Stalled", "True", "Invalid"))
    message = pool.condition("Degraded")["message"]
    assert 'unknown field "spec.nodeSelektor"' in message and "spec.template" in message
    assert pool.pods() == []
    pool.edit(template=phone(nodeSelector={}))
    pool.wait_ready(2)
    assert pool.says("Degraded", "False")


def test_pod_security_stalls_the_pool_until_somebody_corrects_the_template(cluster: Cluster, space: str) -> None:
    cluster.kubectl("label", "namespace", space, "pod-security.kubernetes.io/enforce=restricted")
    probe = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "probe", "image": "probe"}]}}

    def enforced() -> bool:
        """The API server reads the label some time after it is there."""
        try:
            cluster.api("POST", f"/api/v1/namespaces/{space}/pods?dryRun=All", probe)
        except Refused as error:
            return "violates PodSecurity" in str(error)
        return False

    cluster.wait_for("the standard to be enforced", enforced)
    pool = LivePool(cluster, space, replicas=2, template=phone(hostNetwork=True))
    pool.wait("word of the refusal", lambda: pool.says("Stalled", "True", "PodSecurity"))
    assert "host namespaces" in pool.condition("Stalled")["message"]
    assert pool.says("Reconciling", "False") and pool.says("Ready", "False") and pool.pods() == []
    pool.edit(template=phone())
    pool.wait_ready(2)
    assert pool.says("Stalled", "False") and pool.says("Degraded", "False")
    kvm = {"mode": "DevicePlugin", "resourceName": "devices.example.org/kvm"}
    plugged = LivePool(cluster, space, "plugged", replicas=2, kvm=kvm)
    plugged.wait("its slots to be taken", lambda: plugged.status().get("pods") == 2)
    assert plugged.says("Stalled", "False"), "where nothing is said, slots pass the level `restricted`"


def test_a_foreign_pod_with_a_slots_name_is_named_and_left_alone(cluster: Cluster, space: str) -> None:
    pool = LivePool(cluster, space, replicas=0)
    pool.wait("the operator to have seen it", lambda: pool.says("Ready", "True"))
    taken = labels.slot_name("phones", pool.uid, 0, "")
    theirs = {"metadata": {"name": taken}, "spec": {"containers": [{"name": "mine", "image": "mine"}]}}
    made = cluster.api("POST", f"/api/v1/namespaces/{space}/pods", theirs)
    pool.edit(replicas=1)
    pool.wait("word of it", lambda: pool.says("Stalled", "True", "NameTaken"))
    assert taken in pool.condition("Stalled")["message"]
    assert uid(pool.pod(taken)) == uid(made) and pool.pods() == []
    cluster.api("DELETE", pool.place(taken))
    pool.wait_ready(1)
    assert pool.says("Stalled", "False")


# --- sick slots -------------------------------------------------------------------------------------------------------


def test_the_boot_deadline_counts_from_the_containers_start(cluster: Cluster, space: str) -> None:
    """A pull that takes longer than the deadline is no reason; a boot that does is. The first one is ready in the
    moment of its container's start, so that nothing but its pull takes time."""
    slow_pull = phone(notes={fake.PULL: "never"})
    pulls = LivePool(cluster, space, "pulls", template=slow_pull, boot={"deadlineSeconds": 2, "pullDeadlineSeconds": 1})
    hangs = LivePool(cluster, space, "hangs", template=phone(notes={fake.BOOT: "never"}), boot={"deadlineSeconds": 2})
    first = pulls.wait("its Pod", pulls.pods)
    dead = pulls.wait("the Pod that hangs", hangs.pods)
    assert hangs.wait("word of the failure", lambda: hangs.failure(dead[0]))["reason"] == "BootDeadline"
    hangs.wait("another Pod", lambda: not set(uids(dead)) & set(uids(hangs.pods())))
    pulls.wait("word of the slow pull", lambda: pulls.says("Degraded", "True", "ImagePullSlow"))
    # The other one's deadline is over, and was as long.
    pulls.annotate(name(first[0]), {fake.PULL: None})
    assert uids(pulls.wait_ready(1)) == uids(first) and pulls.says("Degraded", "False")


def test_an_image_that_never_boots_slows_the_pool_down_and_says_so(cluster: Cluster, space: str) -> None:
    pool = LivePool(cluster, space, replicas=3, template=phone(notes={fake.BOOT: "never", fake.EXIT: "0"}))
    pool.wait("word of it", lambda: pool.says("Degraded", "True", "BootFailing"))
    assert "boots in a row failed" in pool.condition("Degraded")["message"]
    assert pool.says("Ready", "False")
    reasons = {failure["reason"] for failure in pool.status()["lastFailures"]}
    assert reasons == {"Error"} and len(pool.status()["lastFailures"]) <= 5
    pool.edit(template=phone("phone:2"))
    pool.wait_ready(3)
    assert pool.says("Degraded", "False")


def test_a_slot_may_be_unready_for_its_grace_and_no_longer(cluster: Cluster, space: str) -> None:
    """Both have run for an hour. One turns again and again, the other has been unready for half of the hour, of which
    the operator counts what it has watched itself."""
    pool = LivePool(cluster, space, replicas=2, health={"unreadyGraceSeconds": 30})
    briefly, lastingly = both = pool.wait_ready(2)
    for pod in both:
        pool.kubelet_says(pod, since=3600, ready=True)
        pool.annotate(name(pod), {fake.UNREADY: "true"})
    pool.wait("both to count as unhealthy", lambda: pool.status()["unhealthy"] == 2)
    stays("one that has just turned was replaced", lambda: uids(pool.pods()) == uids(both))
    pool.kubelet_says(lastingly, since=1800, ready=False)

    def replaced_one() -> bool:
        pool.kubelet_says(briefly, since=0, ready=False)
        return uid(lastingly) not in uids(pool.pods())

    pool.wait("another Pod for one", replaced_one)
    pool.annotate(name(briefly), {fake.UNREADY: None})
    after = pool.wait_ready(2)
    assert uid(after[0]) == uid(briefly)
    status = pool.status()
    assert status["replacedTotal"] == 1 and status["lastFailures"][0]["reason"] == "Unready"


def test_a_crashed_phone_is_replaced_and_never_restarted(cluster: Cluster, space: str) -> None:
    pool = LivePool(cluster, space, replicas=2)
    stays_up, crashes = pool.wait_ready(2)
    pool.annotate(name(crashes), {fake.EXIT: "0", fake.EXIT_CODE: "137"})
    after = replaced(pool, [uid(crashes)])
    assert uid(after[0]) == uid(stays_up) and name(after[1]) != name(crashes)
    assert after[1]["status"]["containerStatuses"][0]["restartCount"] == 0
    pool.wait("it to be counted", lambda: pool.status()["replacedTotal"] == 1)
    assert pool.status()["lastFailures"][0]["pod"] == name(crashes)


def test_the_newest_failed_pods_are_kept_and_their_last_words_are_in_the_status(cluster: Cluster, space: str) -> None:
    cluster.pod_log("booting\nout of memory: killed qemu")
    pool = LivePool(cluster, space, recycle={"retainFailed": 1})
    (second,) = pool.wait_ready(1)
    for _ in range(4):
        first = second
        # Of two that were made within one second either is the newest.
        made = datetime.fromisoformat(first["metadata"]["creationTimestamp"]).timestamp()
        pool.wait("the next second", lambda made=made: time.time() >= made + 1.0)
        pool.annotate(name(first), {fake.EXIT: "0"})
        (second,) = replaced(pool, [uid(first)])
        kept = pool.pod(name(first))
        assert uid(kept) == uid(first) and note_of(kept, labels.RETAINED) == "Failed"
        said = pool.wait("its last words", lambda first=first: pool.failure(first).get("logTail"))
        if "could not be read" not in said:  # in time, on a machine that stalls
            break
    assert said == "booting\nout of memory: killed qemu\n"
    pool.annotate(name(second), {fake.EXIT: "0"})
    replaced(pool, [uid(second)])
    pool.wait("the older one to go", lambda: uid(first) not in uids(pool.all_pods()))
    assert note_of(pool.pod(name(second)), labels.RETAINED) == "Failed"
    assert pool.status()["pods"] == 1, "what is kept aside is no slot"


# --- healthy slots that are exchanged ---------------------------------------------------------------------------------


def rolled(pool: LivePool, image: str, least: int, most: int) -> None:
    """Watches a roll-out to its end: at every moment at least `least` slots serve and at most `most` exist."""
    seen: list[tuple[int, int]] = []

    def done() -> bool:
        pods = pool.pods()
        seen.append((sum(map(ready, pods)), len(pods)))
        return all(pod["spec"]["containers"][0]["image"] == image for pod in pods) and all(map(ready, pods))

    pool.wait(f"all slots to be of {image}", done)
    assert min(serving for serving, _ in seen) >= least, seen
    assert max(there for _, there in seen) <= most, seen


def test_a_new_template_is_rolled_out_with_surge_and_without_a_gap(cluster: Cluster, space: str) -> None:
    strategy = {"maxSurge": 1, "maxUnavailable": 0}
    pool = LivePool(cluster, space, replicas=3, updateStrategy=strategy, template=phone(notes={fake.BOOT: "1"}))
    pool.wait_ready(3)
    pool.edit(template=phone("phone:2"))
    rolled(pool, "phone:2", least=3, most=4)
    pool.wait_ready(3)
    pool.wait("the status to say so", lambda: pool.status()["updated"] == 3 and pool.says("Reconciling", "False"))
    assert pool.status()["lastFailures"] == []


def test_a_spec_that_is_edited_mid_rollout_wins(cluster: Cluster, space: str) -> None:
    strategy = {"maxSurge": 0, "maxUnavailable": 1}
    pool = LivePool(cluster, space, replicas=3, updateStrategy=strategy, template=phone(notes={fake.BOOT: "1"}))
    pool.wait_ready(3)
    # It gets no further than to its first slot.
    pool.edit(template=phone("phone:2", notes={fake.BOOT: "never"}))
    images = lambda: {pod["spec"]["containers"][0]["image"] for pod in pool.pods()}  # noqa: E731
    pool.wait("a roll-out under way", lambda: images() == {"phone:1", "phone:2"})
    pool.edit(template=phone("phone:3"), replicas=4)
    rolled(pool, "phone:3", least=2, most=4)
    pool.wait_ready(4)
    pool.wait("the status to say so", lambda: pool.status()["updated"] == 4)


def test_slots_are_exchanged_when_they_are_old_a_few_at_a_time(cluster: Cluster, space: str) -> None:
    strategy = {"maxSurge": 0, "maxUnavailable": 1}
    pool = LivePool(cluster, space, replicas=2, recycle={"afterSeconds": 15}, updateStrategy=strategy)
    first = uids(pool.wait_ready(2))
    serving: list[int] = []

    def others() -> bool:
        pods = pool.pods()
        serving.append(sum(map(ready, pods)))
        return not set(first) & set(uids(pods)) and len(pods) == 2

    pool.wait("both to be exchanged", others)
    assert min(serving) >= 1
    assert pool.status()["lastFailures"] == []


def test_a_cordoned_nodes_slots_move_and_its_node_can_be_drained(
    cluster: Cluster, space: str, nodes: list[str]
) -> None:
    nodes += own_nodes(cluster, space, 2)
    spread = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "nodeTaintsPolicy": "Honor",
            "labelSelector": {"matchLabels": {labels.POOL: "phones"}},
        }
    ]
    template = phone(**only_on(space), topologySpreadConstraints=spread)
    pool = LivePool(cluster, space, replicas=4, template=template)
    pods = pool.wait_ready(4)
    leaving = [pod for pod in pods if node_of(pod) == nodes[0]]
    assert len(leaving) == 2
    cluster.kubectl("cordon", nodes[0])
    after = replaced(pool, uids(leaving))
    assert {node_of(pod) for pod in after} == {nodes[1]}
    assert pool.status()["lastFailures"] == [], "a drain is nobody's sickness"


def test_slots_on_a_lost_node_do_not_block_their_replacements(cluster: Cluster, space: str, nodes: list[str]) -> None:
    nodes += own_nodes(cluster, space, 1, prefix=f"{space}-a")
    pool = LivePool(cluster, space, replicas=2, template=phone(**only_on(space)))
    lost = uids(pool.wait_ready(2))
    nodes += own_nodes(cluster, space, 1, prefix=f"{space}-b")
    cluster.nodes.lose(nodes[0])
    after = replaced(pool, lost)
    assert {node_of(pod) for pod in after} == {nodes[1]}
    pool.wait("the lost ones to be gone for good", lambda: len(pool.all_pods()) == 2)


# --- devices without Pods ---------------------------------------------------------------------------------------------


def test_external_devices_are_slots_without_pods(cluster: Cluster, space: str) -> None:
    urls = ["http://10.4.0.1:8000", "http://10.4.0.2:8000"]
    pool = LivePool(cluster, space, external={"urls": urls})
    pool.wait("its status", lambda: pool.says("Ready", "True"))
    status = pool.status()
    assert (status["desiredReplicas"], status["ready"], status["pods"]) == (2, 2, 0)
    pool.edit(external={"urls": urls[:1]})
    pool.wait("one device", lambda: pool.status()["ready"] == 1 and pool.says("Ready", "True"))
    assert pool.all_pods() == []


def test_the_operator_saw_no_trouble(operator: Operator) -> None:
    """Last: after everything above."""
    assert operator.trouble() == []
