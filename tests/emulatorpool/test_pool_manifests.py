"""The objects of a pool: unprivileged unless somebody says otherwise, and what the user says stands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pools import IMAGE, decide, pool

from tapforge_operator import labels
from tapforge_operator.emulatorpool.pod import disruption_budget, retain_patch, slot_pods
from tapforge_operator.emulatorpool.state import NewSlot, Reason
from tapforge_operator.kube.types import observe, observe_pool

NEW = NewSlot("phones-0", 7, "before")


def made(emulator: dict[str, Any] | None = None, spec: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
    template = {
        "spec": {"containers": [{"name": "emulator", "image": "phone:1", **(emulator or {})}], **(spec or {})},
        **rest.pop("template", {}),
    }
    return slot_pods(pool(template=template, **rest))(NEW)


#: of a container where nothing is said, and of one that may be root
UNPRIVILEGED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
HARMLESS = {**UNPRIVILEGED, "runAsNonRoot": True}


def phone(pod: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in pod["spec"]["containers"] if c["name"] == "emulator")


def test_a_pod_without_any_wish_is_unprivileged() -> None:
    pod = made()
    assert pod["spec"] == {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "emulator",
                "image": "phone:1",
                "env": [{"name": "TAPFORGE_SLOT", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}],
                "securityContext": HARMLESS,
                "startupProbe": {
                    "httpGet": {"path": "/health", "port": 8000},
                    "periodSeconds": 2,
                    "timeoutSeconds": 3,
                    "failureThreshold": 15_768_000,
                },
                "readinessProbe": {
                    "httpGet": {"path": "/health", "port": 8000},
                    "periodSeconds": 5,
                    "timeoutSeconds": 3,
                    "failureThreshold": 3,
                },
            }
        ],
    }


def test_every_container_is_unprivileged() -> None:
    template = {
        "spec": {
            "initContainers": [{"name": "first", "image": "i"}],
            "containers": [*IMAGE["spec"]["containers"], {"name": "beside", "image": "b"}],
        }
    }
    spec = slot_pods(pool(template=template))(NEW)["spec"]
    for container in (*spec["containers"], *spec["initContainers"]):
        assert container["securityContext"] == HARMLESS


@pytest.mark.parametrize(
    ("said", "becomes"),
    [
        ({"privileged": True}, {"privileged": True}),
        ({"runAsUser": 7}, {**HARMLESS, "runAsUser": 7}),
        (
            {"allowPrivilegeEscalation": True, "capabilities": {"drop": []}},
            {"runAsNonRoot": True, "allowPrivilegeEscalation": True, "capabilities": {"drop": []}},
        ),
        (
            {"capabilities": {"add": ["NET_BIND_SERVICE"]}},
            {**HARMLESS, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}},
        ),
        # It is root, or says whether it may be.
        ({"runAsUser": 0}, {**UNPRIVILEGED, "runAsUser": 0}),
        ({"runAsNonRoot": False}, {**UNPRIVILEGED, "runAsNonRoot": False}),
        (
            {"capabilities": {"add": ["NET_ADMIN"]}},
            {**UNPRIVILEGED, "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]}},
        ),
        # The API server refuses this capability to a container that may not escalate.
        ({"capabilities": {"add": ["CAP_SYS_ADMIN"]}}, {"capabilities": {"drop": ["ALL"], "add": ["CAP_SYS_ADMIN"]}}),
    ],
)
def test_what_the_user_says_of_a_container_stands(said: dict, becomes: dict) -> None:
    assert phone(made({"securityContext": said}))["securityContext"] == becomes


def test_the_phone_knows_its_slot_unless_the_user_says_otherwise() -> None:
    own = [{"name": "MODE", "value": "a"}]
    assert phone(made({"env": own}))["env"][1:] == own
    said = [{"name": "TAPFORGE_SLOT", "value": "b"}]
    assert phone(made({"env": said}))["env"] == said


@pytest.mark.parametrize("said", [{"runAsUser": 0}, {"runAsNonRoot": False}, {"runAsNonRoot": True}])
def test_who_runs_the_containers_may_be_said_of_the_pod(said: dict) -> None:
    spec = made(spec={"securityContext": said})["spec"]
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, **said}
    assert spec["containers"][0]["securityContext"] == UNPRIVILEGED


def test_what_the_user_says_of_the_pod_stands() -> None:
    said = {
        "automountServiceAccountToken": True,
        "enableServiceLinks": True,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "Unconfined"}},
        "nodeSelector": {"kvm": "yes"},
        "tolerations": [{"operator": "Exists"}],
        "priorityClassName": "phones",
        "imagePullSecrets": [{"name": "pull"}],
        "runtimeClassName": "kata",
        "schedulerName": "gang",
        "volumes": [{"name": "data", "emptyDir": {}}],
    }
    spec = made(spec=said)["spec"]
    assert {key: spec[key] for key in said} == said


def test_labels_and_annotations_are_the_users_and_the_operators() -> None:
    pod = made(template={"metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}}})
    metadata = pod["metadata"]
    assert metadata["name"] == "phones-0"
    assert metadata["namespace"] == "lab"
    assert metadata["labels"]["team"] == "a"
    assert metadata["annotations"] == {"note": "b", labels.SAFE_TO_EVICT: "true"}
    [owner] = metadata["ownerReferences"]
    assert owner == {
        "apiVersion": "tapforge.dev/v1alpha1",
        "kind": "EmulatorPool",
        "name": "phones",
        "uid": "pool-1",
        "controller": True,
        "blockOwnerDeletion": True,
    }


def test_a_pod_that_was_made_is_read_as_the_slot_that_was_planned() -> None:
    of = pool(name="p" * 63)
    [new, *_] = decide(of).creates
    pod = json.loads(json.dumps(slot_pods(of)(new)))
    pod["metadata"] |= {"uid": "u", "resourceVersion": "5", "creationTimestamp": "2026-11-20T10:00:00Z"}
    slot = observe(pod)
    assert slot is not None
    assert (slot.pool, slot.pool_uid, slot.ordinal, slot.template) == (of.name, of.uid, new.ordinal, of.template)
    assert slot.name == new.name
    assert len(slot.name) <= 63


@pytest.mark.parametrize(
    ("spec", "checks"),
    [
        ({"replicas": 1, "template": IMAGE}, True),
        ({"replicas": 1, "template": IMAGE, "protocol": "tapforge"}, True),
        ({"replicas": 1, "template": IMAGE, "protocol": "mobileworld"}, False),
        ({"replicas": 1, "template": IMAGE, "protocol": "adb"}, False),
        # Its process may be started anew, and knows nothing then of the fences that it saw.
        ({"external": {"urls": ["http://phone:8000"]}}, False),
    ],
)
def test_which_pools_phones_are_known_to_check_fences(spec: dict[str, Any], checks: bool) -> None:
    metadata = {"namespace": "lab", "name": "phones", "uid": "u", "resourceVersion": "1"}
    assert observe_pool({"metadata": metadata, "spec": spec}).checks_fences is checks


def test_many_pods_are_built_without_touching_each_other() -> None:
    build = slot_pods(pool())
    first = json.dumps(build(NewSlot("a", 0)))
    build(NewSlot("b", 1))
    assert json.dumps(build(NewSlot("a", 0))) == first


# --- probes -----------------------------------------------------------------------------------------------------------


def test_probes_ask_where_the_pool_says() -> None:
    container = phone(made(readinessPath="/ok", port=9000))
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/ok", "port": 9000}


def test_the_boot_deadline_is_the_pools_to_keep_also_of_slots_that_boot_when_it_is_edited() -> None:
    of, later = (pool(boot={"deadlineSeconds": seconds}) for seconds in (1, 31_536_000))
    assert of.template == later.template, "nothing is rolled out"
    assert slot_pods(of)(NewSlot("a", 0)) == slot_pods(later)(NewSlot("a", 0)), "no Pod keeps the deadline of its start"
    startup = phone(slot_pods(of)(NewSlot("a", 0)))["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 31_536_000


def test_adb_is_asked_by_its_port() -> None:
    container = phone(made(protocol="adb", port=5555))
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["tcpSocket"] == {"port": 5555}
        assert "httpGet" not in container[probe]


def test_a_probe_of_the_users_stands() -> None:
    own = {"exec": {"command": ["check"]}}
    ready = phone(made({"readinessProbe": own}))
    assert ready["readinessProbe"] == own
    assert "startupProbe" not in ready, "nothing is asked where the user's phone may not answer"
    startup = phone(made({"startupProbe": own}))
    assert startup["startupProbe"] == own
    assert startup["readinessProbe"]["httpGet"]["path"] == "/health"


def test_a_bridge_beside_the_emulator_is_what_serves() -> None:
    """It is the container with the pool's port: it is asked how the phone is, and knows its slot. The emulator keeps
    its own probe, and has the KVM."""
    booted = {"exec": {"command": ["booted"]}}
    bridge = {"name": "bridge", "image": "b", "ports": [{"containerPort": 8000}], "env": [{"name": "A", "value": "b"}]}
    emulator = {"name": "emulator", "image": "e", "ports": [{"containerPort": 5555}], "readinessProbe": booted}
    pod = made(template={"spec": {"containers": [bridge, emulator]}}, kvm={"mode": "DevicePlugin"})
    beside, behind = pod["spec"]["containers"]
    assert [variable["name"] for variable in beside["env"]] == ["TAPFORGE_SLOT", "A"]
    assert beside["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    assert "startupProbe" in beside and "resources" not in beside
    assert (behind["readinessProbe"], "startupProbe" in behind, "env" in behind) == (booted, False, False)
    assert behind["resources"]["limits"] == {"devices.kubevirt.io/kvm": "1"}


# --- KVM --------------------------------------------------------------------------------------------------------------


def test_a_device_plugin_is_asked_for_one_device_and_nothing_is_privileged() -> None:
    container = phone(
        made(
            {"resources": {"limits": {"memory": "4Gi"}, "requests": {"cpu": "2"}}},
            kvm={"mode": "DevicePlugin", "resourceName": "squat.ai/kvm"},
        )
    )
    assert container["resources"] == {"limits": {"memory": "4Gi", "squat.ai/kvm": "1"}, "requests": {"cpu": "2"}}
    assert container["securityContext"] == HARMLESS
    assert "volumeMounts" not in container


def test_another_number_of_devices_stands() -> None:
    kvm = {"mode": "DevicePlugin"}
    container = phone(made({"resources": {"limits": {"devices.kubevirt.io/kvm": "2"}}}, kvm=kvm))
    assert container["resources"]["limits"] == {"devices.kubevirt.io/kvm": "2"}


def test_the_nodes_device_is_mounted_into_the_phone_alone_and_privileged() -> None:
    beside = {"name": "beside", "image": "b"}
    template = {
        "spec": {
            "containers": [
                beside,
                {"name": "emulator", "image": "p", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
            ],
            "volumes": [{"name": "data", "emptyDir": {}}],
        }
    }
    pod = slot_pods(pool(template=template, kvm={"mode": "HostPath", "privileged": True}))(NEW)
    container = phone(pod)
    assert container["securityContext"] == {"privileged": True}
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/data", "/dev/kvm"]
    [_, volume] = pod["spec"]["volumes"]
    assert volume["hostPath"] == {"path": "/dev/kvm", "type": "CharDevice"}
    assert volume["name"] == container["volumeMounts"][1]["name"]
    other = next(c for c in pod["spec"]["containers"] if c["name"] == "beside")
    assert other["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_mount_of_the_users_is_not_mounted_over() -> None:
    emulator = {"volumeMounts": [{"name": "mine", "mountPath": "/dev/kvm"}]}
    volumes = [{"name": "mine", "hostPath": {"path": "/dev/kvm"}}]
    pod = made(emulator, {"volumes": volumes}, kvm={"mode": "HostPath", "privileged": True})
    assert phone(pod)["volumeMounts"] == emulator["volumeMounts"]
    assert pod["spec"]["volumes"] == volumes


def test_without_kvm_nothing_is_asked_for() -> None:
    pod = made()
    assert "resources" not in phone(pod)
    assert "volumes" not in pod["spec"]


# --- the others -------------------------------------------------------------------------------------------------------


def test_the_budget_forbids_every_eviction_of_a_claimed_pod() -> None:
    budget = disruption_budget(pool(name="p" * 63))
    assert budget["spec"] == {
        "minAvailable": 2147483647,
        "selector": {"matchLabels": {"tapforge.dev/pool-uid": "pool-1", "tapforge.dev/claimed": "true"}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    assert budget["metadata"]["ownerReferences"][0]["controller"] is True
    assert len(budget["metadata"]["name"]) <= 253


def test_a_pod_that_is_kept_aside_is_nobodys() -> None:
    patch = retain_patch(Reason.FAILED)["metadata"]
    assert patch["annotations"][labels.RETAINED] == "Failed"
    assert patch["annotations"][labels.CLAIM] is None
    assert patch["labels"][labels.CLAIMED] is None


def test_a_pool_of_devices_makes_no_pods() -> None:
    with pytest.raises(ValueError, match="external devices"):
        slot_pods(pool(external={"urls": ["http://phone:1"]}))
