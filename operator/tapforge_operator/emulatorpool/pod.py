"""A pool's objects as plain dicts: the Pod of a slot, the disruption budget of the claimed ones.

What the user's template says stands; where it is silent a Pod is unprivileged and not root (`podsecurity.py`), as the
Pod Security level `restricted` asks. Always the operator's are: `restartPolicy: Never` (a phone is replaced and not
restarted in place), the owner, the pool's labels, and an explicit `safe-to-evict: "true"`, which a claim turns over.

* `kvm.mode: DevicePlugin` asks for one `kvm.resourceName`; `HostPath` mounts the node's /dev/kvm and is privileged.
* The server's container is the one with `port` among its ports (a bridge beside the emulator), or else the emulator's.
* It knows the slot that it is, by the UID of its Pod (`TAPFORGE_SLOT`): it serves that slot's claims and no others. A
  variable of that name in the template stands.
* It is probed on `readinessPath` (adb: on the port), unless it has probes of its own. The startup probe never gives up:
  the boot deadline is the pool's to keep, for slots that boot already as for later ones when it is edited.
* The budget selects claimed Pods and asks for 2147483647 of them: with `maxUnavailable` the expected number would come
  from the pool's scale, and evictions would slip through. Pods that are broken anyway may always be evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tapforge_api.base import INT32
from tapforge_api.claims import SLOT_VARIABLE
from tapforge_api.pool import EmulatorPoolSpec
from tapforge_api.template import PodTemplate
from tapforge_operator import labels as wellknown
from tapforge_operator.emulatorpool.state import NewSlot, Pool, Reason
from tapforge_operator.kube.objectmeta import controller_reference
from tapforge_operator.podsecurity import harden

Json = dict[str, Any]

KVM_DEVICE = "/dev/kvm"
_KVM_VOLUME = "tapforge-kvm"
#: seconds between two looks of the startup probe: a phone serves that soon after it can
_STARTUP_PERIOD = 2
#: as long as a boot deadline can be
_STARTUP_LOOKS = 31_536_000 // _STARTUP_PERIOD


def slot_pods(pool: Pool) -> Callable[[NewSlot], Json]:
    """Builds the Pods of the pool. They share one spec, which callers must not change. Make another builder when the
    pool's generation changes."""
    template = pool.spec.template
    if template is None:
        raise ValueError(f"pool {pool.namespace}/{pool.name} has external devices: there are no Pods to make")
    spec = _pod_spec(pool.spec, template)
    labels = {**template.metadata.labels, **_labels(pool), wellknown.TEMPLATE: pool.template}
    annotations = {**template.metadata.annotations, wellknown.SAFE_TO_EVICT: "true"}
    owners = [controller_reference("EmulatorPool", pool.name, pool.uid)]

    def pod(slot: NewSlot) -> Json:
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": slot.name,
                "namespace": pool.namespace,
                "labels": {**labels, wellknown.ORDINAL: str(slot.ordinal)},
                "annotations": annotations,
                "ownerReferences": owners,
            },
            "spec": spec,
        }

    return pod


def disruption_budget(pool: Pool) -> Json:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": f"{pool.name}-claimed",
            "namespace": pool.namespace,
            "labels": _labels(pool),
            "ownerReferences": [controller_reference("EmulatorPool", pool.name, pool.uid)],
        },
        "spec": {
            "minAvailable": INT32,
            "selector": {"matchLabels": {wellknown.POOL_UID: pool.uid, wellknown.CLAIMED: "true"}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def retain_patch(reason: Reason) -> Json:
    """Merge patch that takes a failed Pod out of its pool and keeps it for a look at its log."""
    return {
        "metadata": {
            "labels": {wellknown.CLAIMED: None, wellknown.RUN: None},
            "annotations": {
                wellknown.RETAINED: str(reason),
                wellknown.CLAIM: None,
                wellknown.SAFE_TO_EVICT: "true",
                wellknown.DO_NOT_DISRUPT: None,
            },
        }
    }


def _labels(pool: Pool) -> dict[str, str]:
    return {wellknown.POOL: pool.name, wellknown.POOL_UID: pool.uid, wellknown.MANAGED_BY: wellknown.OPERATOR}


def _pod_spec(spec: EmulatorPoolSpec, template: PodTemplate) -> Json:
    pod: Json = template.written()["spec"]
    pod["restartPolicy"] = "Never"
    emulator = next(c for c in pod["containers"] if c["name"] == wellknown.CONTAINER)
    server = next((c for c in pod["containers"] if _listens(c, spec.port)), emulator)
    _give_kvm(spec, pod, emulator)
    _name_slot(server)
    _probe(spec, server)
    harden(pod, non_root=True)
    return pod


def _listens(container: Json, port: int) -> bool:
    return any(listed.get("containerPort") == port for listed in container.get("ports") or ())


def _give_kvm(spec: EmulatorPoolSpec, pod: Json, emulator: Json) -> None:
    if spec.kvm.mode == "DevicePlugin":
        resources = emulator["resources"] = dict(emulator.get("resources") or {})
        resources["limits"] = {spec.kvm.resource_name: "1", **(resources.get("limits") or {})}
    elif spec.kvm.mode == "HostPath":
        emulator["securityContext"] = {"privileged": True, **(emulator.get("securityContext") or {})}
        mounts = emulator.get("volumeMounts") or []
        if not any(mount.get("mountPath") == KVM_DEVICE for mount in mounts):
            emulator["volumeMounts"] = [*mounts, {"name": _KVM_VOLUME, "mountPath": KVM_DEVICE}]
            volume = {"name": _KVM_VOLUME, "hostPath": {"path": KVM_DEVICE, "type": "CharDevice"}}
            pod["volumes"] = [*(pod.get("volumes") or ()), volume]


def _name_slot(server: Json) -> None:
    said = server.get("env") or []
    if not any(variable.get("name") == SLOT_VARIABLE for variable in said):
        uid = {"name": SLOT_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
        server["env"] = [uid, *said]


def _probe(spec: EmulatorPoolSpec, server: Json) -> None:
    if "readinessProbe" in server:
        return
    look: Json = {"httpGet": {"path": spec.readiness_path, "port": spec.port}}
    if spec.protocol == "adb":
        look = {"tcpSocket": {"port": spec.port}}
    server["readinessProbe"] = {**look, "periodSeconds": 5, "timeoutSeconds": 3, "failureThreshold": 3}
    if "startupProbe" not in server:
        server["startupProbe"] = {
            **look,
            "periodSeconds": _STARTUP_PERIOD,
            "timeoutSeconds": 3,
            "failureThreshold": _STARTUP_LOOKS,
        }
