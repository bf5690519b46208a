"""What docs/security.md says of a stolen operator token, line by line, with such a token: what it can is taken, what it
can't is refused, by a real API server. Nothing is kept: whatever may be a dry run is one.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from claiming import may
from e2e.cluster import JSON_PATCH, MERGE, Cluster
from operator_process import ACCOUNT, Ground, enabled, let_in_everywhere
from ray_kinds import ray_kinds

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
CORE, TAPFORGE, COORDINATION = "/api/v1", "/apis/tapforge.dev/v1alpha1", "/apis/coordination.k8s.io/v1"
NETWORKING, RAY = "/apis/networking.k8s.io/v1", "/apis/ray.io/v1"
Object = dict[str, Any]
#: method, path, body, and of a patch its kind
Attempt = tuple[str, str] | tuple[str, str, Any] | tuple[str, str, Any, str]
MINE: Object = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "EmulatorPool", "name": "x", "controller": True}
MINE |= {"uid": "11111111-1111-1111-1111-111111111111"}


def bullets(above: str) -> list[str]:
    """The list that follows this line of the page."""
    text = PAGE.split(f"{above}\n\n", 1)[1].split("\n\n", 1)[0]
    return [line.replace("\n  ", " ") for line in text.removeprefix("- ").split("\n- ")]


@dataclass
class Thief:
    cluster: Cluster
    #: the operator's own namespace; an enabled one with rights, one that isn't enabled, an enabled one without `logs`
    own: str
    here: str
    closed: str
    other: str

    def __post_init__(self) -> None:
        self._token = self.cluster.token(self.own, ACCOUNT)
        self._tls = ssl.create_default_context(cafile=str(self.cluster.ca))

    def try_(self, *attempt: Any) -> str:
        """Why it is refused; "" when it isn't. A kind that the API server has just learned is waited for."""
        said = self.cluster.wait_for("an answer", lambda: self._try(*attempt))
        return said.removeprefix("taken")

    def _try(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> str:
        """Why it is refused; "taken" when it isn't; "" while the API server is not ready for it."""
        dry = method != "GET" and not path.endswith(("/tokenreviews", "/subjectaccessreviews"))
        request = urllib.request.Request(
            f"{self.cluster.server}{path}{'?dryRun=All' if dry else ''}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind},
        )
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._tls):
                return "taken"
        except urllib.error.HTTPError as error:
            said = json.loads(error.read())["message"]
            if error.code == 429:
                return ""
            if path.endswith("/log") and error.code != 403:  # no node has such a Pod
                return "taken"
            assert error.code == 403, f"{method} {path}: neither taken nor refused, but {said}"
            return str(said)


@pytest.fixture(scope="module")
def thief(cluster: Cluster, ground: Ground) -> Iterator[Thief]:
    """With the rights of the overlay `cluster` and the component `devices`; `logs` in one namespace."""
    let_in_everywhere(cluster, ground.own)
    here, closed, other = ground.spaces[0], f"{ground.own}-closed", f"{ground.own}-other"
    cluster.apply(enabled(other), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": closed}})
    cluster.kubectl("label", "namespace", "kube-public", "tapforge.dev/workloads=privileged")
    with ray_kinds(cluster):
        for space in (here, closed, ground.own, "kube-public"):
            pools(cluster, space)
        user = f"system:serviceaccount:{ground.own}:{ACCOUNT}"
        for resource in ("pods", "leases"):
            group = "coordination.k8s.io" if resource == "leases" else ""
            cluster.wait_for(
                "its rights", lambda group=group, name=resource: may(cluster, user, "create", group, name, other)
            )
        yield Thief(cluster, ground.own, here, closed, other)
    cluster.kubectl("label", "namespace", "kube-public", "tapforge.dev/workloads-")
    cluster.api("DELETE", f"{TAPFORGE}/namespaces/kube-public/emulatorpools/mine")
    cluster.kubectl("delete", "namespace", closed, other, "--wait=false")


def pools(cluster: Cluster, space: str) -> None:
    """A pool, a slot of it, and things of others."""
    account = f"{CORE}/namespaces/{space}/serviceaccounts/default"
    cluster.wait_for("the namespace's service account", lambda: cluster.exists(account))
    spec = {"external": {"urls": ["http://127.0.0.1:9"]}}
    mine = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "EmulatorPool", "metadata": {"name": "mine"}, "spec": spec}
    uid = cluster.api("POST", f"{TAPFORGE}/namespaces/{space}/emulatorpools", mine)["metadata"]["uid"]
    if space.startswith("kube-"):
        return
    owned = {"ownerReferences": [{**MINE, "name": "mine", "uid": uid}]}
    for name, metadata in (("slot", owned), ("theirs", {})):
        cluster.api("POST", f"{CORE}/namespaces/{space}/pods", pod(name, **metadata))
        config = {"metadata": {"name": name, **metadata}}
        cluster.api("POST", f"{CORE}/namespaces/{space}/configmaps", config)
        cluster.api("POST", f"{COORDINATION}/namespaces/{space}/leases", config)
        closed = {"metadata": {"name": name, **metadata}, "spec": {"podSelector": {}}}
        cluster.api("POST", f"{NETWORKING}/namespaces/{space}/networkpolicies", closed)
        cluster.api("POST", f"{RAY}/namespaces/{space}/rayjobs", {**ray_job(), "metadata": {"name": name, **metadata}})
    cluster.api("POST", f"{CORE}/namespaces/{space}/secrets", {"metadata": {"name": "theirs"}})


def pod(
    name: str = "new", /, *, spec: Object | None = None, container: Object | None = None, **metadata: Any
) -> Object:
    containers = [{"name": "emulator", "image": "phone:1", **(container or {})}]
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}}
    return {**whole, "spec": {"containers": containers, "nodeName": "none", **(spec or {})}}


def owned(kind: str, version: str, name: str = "new", **more: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "ownerReferences": [MINE]}, **more}


def ray_job(
    *, head: Object | None = None, worker: Object | None = None, submitter: Object | None = None, **more: Any
) -> Object:
    """Of Pods like these; `more`: of its cluster."""
    ray = {
        "headGroupSpec": {"rayStartParams": {}, "template": head or pod()},
        "workerGroupSpecs": [{"groupName": "workers", "rayStartParams": {}, "template": worker or pod()}],
        **more,
    }
    spec = {"entrypoint": "true", "submitterPodTemplate": submitter or pod(), "rayClusterSpec": ray}
    return owned("RayJob", "ray.io/v1", spec=spec)


def made(space: str) -> list[Attempt]:
    """Creates of all kinds, each with an owner."""
    core, lease = f"{CORE}/namespaces/{space}", owned("Lease", "coordination.k8s.io/v1")
    closed = owned("NetworkPolicy", "networking.k8s.io/v1", spec={"podSelector": {}})
    budget = owned("PodDisruptionBudget", "policy/v1", spec={"selector": {}})
    pool = owned("EmulatorPool", "tapforge.dev/v1alpha1", spec={"external": {"urls": ["http://127.0.0.1:9"]}})
    return [
        ("POST", f"{core}/pods", pod(ownerReferences=[MINE])),
        ("POST", f"{core}/configmaps", owned("ConfigMap", "v1")),
        ("POST", f"{COORDINATION}/namespaces/{space}/leases", lease),
        ("POST", f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets", budget),
        ("POST", f"{TAPFORGE}/namespaces/{space}/emulatorpools", pool),
        ("POST", f"{NETWORKING}/namespaces/{space}/networkpolicies", closed),
        ("POST", f"{RAY}/namespaces/{space}/rayjobs", ray_job()),
    ]


HOST_SPECS: list[Object] = [
    {"hostNetwork": True},
    {"hostPID": True},
    {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]},
    {"securityContext": {"seLinuxOptions": {"user": "system_u"}}},
    {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "65536"}]}},
]
UNCONFINED: Object = {"container.apparmor.security.beta.kubernetes.io/emulator": "unconfined"}


def host(space: str) -> list[Attempt]:
    """Pods that ask for the host, and RayJobs that have such Pods."""
    secure = [
        {"privileged": True},
        {"capabilities": {"add": ["SYS_ADMIN"]}},
        {"seccompProfile": {"type": "Unconfined"}},
        {"seLinuxOptions": {"type": "spc_t"}},
    ]
    init = {"name": "i", "image": "i", "securityContext": {"privileged": True}}
    bodies = [
        *(pod(container={"securityContext": context}, ownerReferences=[MINE]) for context in secure),
        pod(container={"ports": [{"containerPort": 1, "hostPort": 1}]}, ownerReferences=[MINE]),
        *(pod(spec=spec, ownerReferences=[MINE]) for spec in HOST_SPECS),
        pod(spec={"initContainers": [init]}, ownerReferences=[MINE]),
        pod(annotations=UNCONFINED, ownerReferences=[MINE]),
    ]
    jobs = [
        *(ray_job(head=pod(container={"securityContext": context})) for context in secure),
        *(ray_job(worker=pod(spec=spec)) for spec in HOST_SPECS),
        ray_job(submitter=pod(spec={"initContainers": [init]})),
        ray_job(head=pod(annotations=UNCONFINED)),
        ray_job(worker=pod(annotations=UNCONFINED)),
        ray_job(submitter=pod(annotations=UNCONFINED)),
    ]
    rays = [("POST", f"{RAY}/namespaces/{space}/rayjobs", body) for body in jobs]
    return [*(("POST", f"{CORE}/namespaces/{space}/pods", body) for body in bodies), *rays]


LABEL: Object = {"metadata": {"labels": {"a": "b"}}}
STATUS: Object = {"status": {"claimed": 1}}
REVIEW: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": "x"}}
ACCESS: Object = {
    "apiVersion": "authorization.k8s.io/v1",
    "kind": "SubjectAccessReview",
    "spec": {"user": "x", "resourceAttributes": {"verb": "get", "resource": "pods"}},
}
Lines = dict[str, Callable[[Thief], list[Attempt]]]

CAN: Lines = {
    "read pools, runs, Pods with variables, RayJobs, RayClusters, Jobs, volume claims, NetworkPolicies": lambda t: [
        ("GET", f"{CORE}/pods"),
        ("GET", f"{TAPFORGE}/emulatorpools"),
        ("GET", f"{TAPFORGE}/trainingruns"),
    ],
    "create Pods in an enabled namespace, with any service account and Secret of that namespace in them": lambda t: [
        (
            "POST",
            f"{CORE}/namespaces/{t.here}/pods",
            pod(
                container={"envFrom": [{"secretRef": {"name": "theirs"}}]},
                spec={"serviceAccountName": "default"},
                ownerReferences=[MINE],
            ),
        ),
    ],
    "create RayJobs, pools, ConfigMaps, Leases, NetworkPolicies and PodDisruptionBudgets there": lambda t: made(t.here),
    "delete RayJobs of runs, and so end attempts": lambda t: [
        ("DELETE", f"{RAY}/namespaces/{space}/rayjobs/slot") for space in (t.here, t.closed)
    ],
    "change NetworkPolicies of runs, and so let others at their Pods": lambda t: [
        ("PATCH", f"{NETWORKING}/namespaces/{space}/networkpolicies/slot", LABEL, MERGE) for space in (t.here, t.closed)
    ],
    "label, annotate and delete slots, and so end claims": lambda t: [
        attempt
        for space in (t.here, t.closed)
        for attempt in (
            ("PATCH", f"{CORE}/namespaces/{space}/pods/slot", LABEL, MERGE),
            ("DELETE", f"{CORE}/namespaces/{space}/pods/slot"),
        )
    ],
    "write the status of any pool and run": lambda t: [
        ("PATCH", f"{TAPFORGE}/namespaces/{space}/emulatorpools/mine/status", STATUS, MERGE)
        for space in (t.here, t.closed, "kube-public")
    ],
    "read its own Secret, with which claims can be forged and the broker played": lambda t: [
        ("POST", f"{CORE}/namespaces/{t.own}/secrets", {"metadata": {"name": "tapforge-broker"}}),
    ],
    "write Events in any namespace": lambda t: [
        (
            "POST",
            f"{CORE}/namespaces/{t.closed}/events",
            {"metadata": {"name": "e"}, "involvedObject": {"namespace": t.closed}, "reason": "R", "message": "m"},
        )
    ],
    "ask whose a token is, and what a user may do": lambda t: [
        ("POST", "/apis/authentication.k8s.io/v1/tokenreviews", REVIEW),
        ("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", ACCESS),
    ],
    "read logs in namespaces with the component `logs`": lambda t: [
        ("GET", f"{CORE}/namespaces/{t.here}/pods/slot/log"),
    ],
    "read all Leases, and write those of external devices, with the component `devices`": lambda t: [
        ("GET", f"{COORDINATION}/leases"),
        ("PATCH", f"{COORDINATION}/namespaces/{t.here}/leases/slot", LABEL, MERGE),
        ("PATCH", f"{COORDINATION}/namespaces/{t.closed}/leases/slot", LABEL, MERGE),
    ],
}
CAN_NOT: Lines = {
    "create anything in a namespace that isn't enabled, whatever owner it names": lambda t: made(t.closed),
    "write anything in a `kube-` namespace, also if that has the label": lambda t: [
        *made("kube-public"),
        *made("kube-system"),
        ("PATCH", f"{CORE}/namespaces/kube-system/configmaps/extension-apiserver-authentication", LABEL, MERGE),
        ("DELETE", f"{TAPFORGE}/namespaces/kube-public/emulatorpools/mine"),
    ],
    "create a Pod or RayJob that asks for the host, where the label doesn't say `privileged`": lambda t: host(t.here),
    "create a RayJob whose Ray cluster has more than a head and workers, as an autoscaler": lambda t: [
        ("POST", f"{RAY}/namespaces/{t.here}/rayjobs", ray_job(**more))
        for more in (
            {"enableInTreeAutoscaling": True},
            {"autoscalerOptions": {"image": "evil:1", "securityContext": {"privileged": True}}},
        )
    ],
    "change or delete a Pod, RayJob, ConfigMap, NetworkPolicy or Lease that no pool or run controls": lambda t: [
        attempt
        for where in (
            f"{CORE}/namespaces/{t.here}/pods/theirs",
            f"{RAY}/namespaces/{t.here}/rayjobs/theirs",
            f"{CORE}/namespaces/{t.here}/configmaps/theirs",
            f"{COORDINATION}/namespaces/{t.here}/leases/theirs",
            f"{NETWORKING}/namespaces/{t.here}/networkpolicies/theirs",
        )
        for attempt in (("PATCH", where, LABEL, MERGE), ("PATCH", where, {}, MERGE), ("DELETE", where))
    ],
    "change what runs in a Pod that is there": lambda t: [
        (
            "PATCH",
            f"{CORE}/namespaces/{space}/pods/slot",
            [{"op": "replace", "path": "/spec/containers/0/image", "value": "evil:1"}],
            JSON_PATCH,
        )
        for space in (t.here, t.closed)
    ],
    "take an object from its pool": lambda t: [
        ("PATCH", f"{where}/slot", [{"op": "remove", "path": "/metadata/ownerReferences"}], JSON_PATCH)
        for where in (
            f"{CORE}/namespaces/{t.here}/pods",
            f"{CORE}/namespaces/{t.here}/configmaps",
            f"{COORDINATION}/namespaces/{t.here}/leases",
        )
    ],
    "write anything else in its own namespace than its three objects": lambda t: [
        *made(t.own),
        ("POST", f"{CORE}/namespaces/{t.own}/secrets", {"metadata": {"name": "another"}}),
        ("POST", f"{CORE}/namespaces/{t.own}/configmaps", {"metadata": {"name": "another"}}),
        ("POST", f"{COORDINATION}/namespaces/{t.own}/leases", {"metadata": {"name": "another"}}),
        ("PATCH", f"{CORE}/namespaces/{t.own}/configmaps/theirs", LABEL, MERGE),
    ],
    "read ConfigMaps or Secrets that aren't its own": lambda t: [
        ("GET", f"{CORE}/namespaces/{t.here}/configmaps/theirs"),
        ("GET", f"{CORE}/namespaces/{t.here}/configmaps"),
        ("GET", f"{CORE}/namespaces/kube-system/configmaps/extension-apiserver-authentication"),
        ("GET", f"{CORE}/namespaces/{t.here}/secrets/theirs"),
        ("GET", f"{CORE}/namespaces/{t.own}/secrets"),
    ],
    "read logs in other namespaces": lambda t: [
        ("GET", f"{CORE}/namespaces/{t.other}/pods/any/log"),
        ("GET", f"{CORE}/namespaces/kube-system/pods/any/log"),
    ],
    "change the spec, the labels or the annotations of pools and runs": lambda t: [
        ("PATCH", f"{TAPFORGE}/namespaces/{t.here}/emulatorpools/mine", LABEL, MERGE),
        ("PATCH", f"{TAPFORGE}/namespaces/{t.here}/emulatorpools/mine", {"spec": {"replicas": 9}}, MERGE),
        ("PATCH", f"{TAPFORGE}/namespaces/{t.here}/trainingruns/any", LABEL, MERGE),
    ],
    "enable a namespace, or change a role, a binding or a policy": lambda t: [
        ("PATCH", f"{CORE}/namespaces/{t.closed}", LABEL, MERGE),
        ("PATCH", "/apis/rbac.authorization.k8s.io/v1/clusterroles/tapforge-operator-pools", LABEL, MERGE),
        ("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {"metadata": {"name": "x"}}),
        ("DELETE", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/any"),
        ("PATCH", f"{CORE}/namespaces/{t.own}/serviceaccounts/{ACCOUNT}", LABEL, MERGE),
    ],
    "make tokens, run commands in Pods, create Deployments": lambda t: [
        ("POST", f"{CORE}/namespaces/{t.here}/serviceaccounts/default/token", {"spec": {}}),
        ("POST", f"{CORE}/namespaces/{t.here}/pods/slot/exec", {}),
        ("POST", f"{CORE}/namespaces/{t.here}/pods/slot/eviction", {}),
        ("POST", f"/apis/apps/v1/namespaces/{t.here}/deployments", {"metadata": {"name": "x"}}),
    ],
}


def test_the_page_says_what_is_tried_here() -> None:
    assert bullets("With the overlay `cluster` and the policy it can:") == list(CAN)
    assert bullets("It can't:") == list(CAN_NOT)


def test_what_the_operators_token_can_is_no_more_than_it_says(thief: Thief) -> None:
    refused = [(attempt[:2], why) for line in CAN.values() for attempt in line(thief) if (why := thief.try_(*attempt))]
    assert not refused


def test_what_it_can_not_is_refused(thief: Thief) -> None:
    taken = [(line, attempt) for line, of in CAN_NOT.items() for attempt in of(thief) if not thief.try_(*attempt)]
    assert not taken


def test_a_label_opens_a_namespace_and_says_how(thief: Thief, cluster: Cluster) -> None:
    create = made(thief.closed)[0]
    said = thief.try_(*create)
    assert f"kubectl label namespace {thief.closed} tapforge.dev/workloads=enabled" in said
    cluster.kubectl("label", "namespace", thief.closed, "tapforge.dev/workloads=enabled")
    cluster.wait_for("the namespace to be open", lambda: not thief.try_(*create))
    wanted = f"kubectl label --overwrite namespace {thief.closed} tapforge.dev/workloads=privileged"
    assert all(wanted in thief.try_(*attempt) for attempt in host(thief.closed))
    cluster.kubectl("label", "--overwrite", "namespace", thief.closed, "tapforge.dev/workloads=privileged")
    cluster.wait_for("the host", lambda: not thief.try_(*host(thief.closed)[0]))
    assert not [why for attempt in host(thief.closed) if (why := thief.try_(*attempt))]
