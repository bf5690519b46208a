"""The manifests on a real API server, as a person applies them: both overlays install into an empty cluster, and
the operator's service account may do what it needs and is refused everything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from claiming import may
from e2e.cluster import MERGE, PATIENCE, Cluster, NotInTime, Options, Refused
from operator_process import Operator

MANIFESTS = Path(__file__).parents[2] / "manifests"
OPERATOR = "system:serviceaccount:tapforge-system:tapforge-operator"
POOLS = "/apis/tapforge.dev/v1alpha1/namespaces/default/emulatorpools"


@pytest.fixture(scope="module")
def own(built: None) -> Iterator[Cluster]:
    """A cluster of its own, because what is installed holds for every namespace."""
    # This admission plugin is on in some distributions.
    strict = {"kube-apiserver": {"enable-admission-plugins": "NodeRestriction,OwnerReferencesPermissionEnforcement"}}
    with Cluster(Options(nodes=1, flags=strict)) as own:
        own.kubectl("label", "namespace", HERE, "tapforge.dev/workloads=enabled")
        yield own


@pytest.fixture(scope="module")
def install(own: Cluster) -> Callable[[str], Cluster]:
    """Installs an overlay, where it isn't the one that stands."""
    stands = ""

    def install(overlay: str) -> Cluster:
        nonlocal stands
        if stands != overlay:
            stands = ""
            _install(own, overlay)
            stands = overlay
        return own

    return install


def _install(own: Cluster, overlay: str) -> None:
    """Returns when the API server goes by all of it: it reads bindings and policies some time after they are there."""
    own.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "overlays" / overlay))
    own.wait_kinds()
    for policy in own.api("GET", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies")["items"]:
        _wait_checked(own, policy["metadata"]["name"])
    if overlay == "namespaced":  # what the other overlay may have left behind
        wide = ("tapforge-operator-pools", "tapforge-operator-nodes")
        own.kubectl("delete", "clusterrolebinding", *wide, "--ignore-not-found")
    else:
        own.kubectl("delete", "rolebinding", "tapforge-operator-logs", "-n", HERE, "--ignore-not-found")
    rights = (("tapforge.dev", "emulatorpools", HERE), ("tapforge.dev", "emulatorpools", ""), ("", "nodes", ""))
    told = [True, overlay == "cluster", overlay == "cluster"]
    own.wait_for("its rights", lambda: [may(own, OPERATOR, "list", *right) for right in rights] == told)
    alone = ("run", "probe", "--image=x", "--dry-run=server", f"--as={OPERATOR}", "-n", HERE)
    own.wait_for("its confinement", lambda: "EmulatorPool controls" in own.kubectl(*alone, check=False).stderr)
    _pool(own, "probe")
    probe = _claimed(own, "probe", 1)
    own.wait_for("the pools' protection", lambda: _protected(own, probe))
    own.api("DELETE", _claimed(own, "probe", 0))


def _protected(own: Cluster, pool: str) -> bool:
    try:
        own.api("DELETE", f"{pool}?dryRun=All")
    except Refused as error:
        return "are claimed" in str(error)
    return False


@pytest.fixture(params=["namespaced", "cluster"], scope="module")
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def installed(install: Callable[[str], Cluster], overlay: str) -> Cluster:
    return install(overlay)


@pytest.fixture
def whole(install: Callable[[str], Cluster]) -> Cluster:
    """With pools in every namespace."""
    return install("cluster")


def _wait_checked(own: Cluster, policy: str) -> None:
    path = f"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{policy}"
    status = own.wait_for(f"{policy} is checked", lambda: own.api("GET", path).get("status"))
    assert not status["typeChecking"].get("expressionWarnings"), status


def as_operator(installed: Cluster) -> Path:
    """A kubeconfig with the token that the operator's Pod gets."""
    return installed.user_with_token("operator", installed.token("tapforge-system", "tapforge-operator"))


def refused(cluster: Cluster, kubeconfig: Path, *arguments: str, input: str | None = None) -> str:
    done = cluster.kubectl(*arguments, kubeconfig=kubeconfig, check=False, input=input)
    assert done.returncode != 0, f"kubectl {' '.join(arguments)} was allowed: {done.stdout}"
    assert "Forbidden" in done.stderr or "forbidden" in done.stderr, done.stderr
    return done.stderr


def test_applying_it_again_changes_nothing(installed, overlay):
    path = "/apis/apps/v1/namespaces/tapforge-system/deployments/tapforge-operator"
    before = installed.api("GET", path)
    again = installed.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "overlays" / overlay))
    assert "Warning" not in again.stderr
    after = installed.api("GET", path)
    assert (before["spec"], before["metadata"]["generation"]) == (after["spec"], after["metadata"]["generation"])


def test_its_pod_is_allowed_where_only_restricted_pods_are(whole):
    """The namespace enforces it; a Pod that was refused would never appear."""
    pods = "/api/v1/namespaces/tapforge-system/pods"
    found = whole.wait_for("the operator's Pod", lambda: whole.api("GET", pods)["items"])
    assert found[0]["spec"]["serviceAccountName"] == "tapforge-operator"
    privileged = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    privileged["spec"] = {"containers": [{"name": "x", "image": "x", "securityContext": {"privileged": True}}]}
    with pytest.raises(Refused, match="violates PodSecurity"):
        whole.api("POST", pods, privileged)


HERE, THERE = "default", "kube-public"
#: who may what: verb, group, resource, namespace ("" is the whole cluster), name; in which overlays
QUESTIONS = [
    ("list", "tapforge.dev", "emulatorpools", HERE, "", {"cluster", "namespaced"}),
    ("watch", "tapforge.dev", "trainingruns", HERE, "", {"cluster", "namespaced"}),
    ("list", "tapforge.dev", "emulatorpools", "", "", {"cluster"}),
    ("patch", "tapforge.dev", "emulatorpools/status", HERE, "", {"cluster", "namespaced"}),
    ("patch", "tapforge.dev", "emulatorpools", HERE, "", set()),
    ("update", "tapforge.dev", "emulatorpools", HERE, "", set()),
    ("create", "tapforge.dev", "emulatorpools", HERE, "", {"cluster", "namespaced"}),
    ("delete", "tapforge.dev", "emulatorpools", HERE, "", {"cluster", "namespaced"}),
    ("deletecollection", "tapforge.dev", "emulatorpools", HERE, "", set()),
    ("patch", "tapforge.dev", "trainingruns", HERE, "", set()),
    ("watch", "", "pods", HERE, "", {"cluster", "namespaced"}),
    ("create", "", "pods", HERE, "", {"cluster", "namespaced"}),
    ("create", "", "pods", THERE, "", {"cluster"}),
    ("delete", "", "pods", "kube-system", "", {"cluster"}),
    ("deletecollection", "", "pods", HERE, "", set()),
    ("create", "", "pods/exec", HERE, "", set()),
    ("create", "", "pods/eviction", HERE, "", set()),
    ("get", "", "pods/log", HERE, "", {"namespaced"}),
    ("get", "", "pods/log", THERE, "", set()),
    ("delete", "coordination.k8s.io", "leases", HERE, "", set()),
    ("delete", "policy", "poddisruptionbudgets", HERE, "", set()),
    ("create", "policy", "poddisruptionbudgets", HERE, "", {"cluster", "namespaced"}),
    ("list", "coordination.k8s.io", "leases", HERE, "", set()),
    ("patch", "coordination.k8s.io", "leases", HERE, "", set()),
    ("patch", "coordination.k8s.io", "leases", "kube-system", "", set()),
    ("patch", "coordination.k8s.io", "leases", "tapforge-system", "tapforge-operator", {"cluster", "namespaced"}),
    ("patch", "coordination.k8s.io", "leases", "tapforge-system", "another", set()),
    ("get", "batch", "jobs", HERE, "", {"cluster", "namespaced"}),
    ("create", "ray.io", "rayjobs", HERE, "", {"cluster", "namespaced"}),
    ("patch", "ray.io", "rayjobs", HERE, "", set()),
    ("get", "ray.io", "rayclusters", HERE, "", {"cluster", "namespaced"}),
    ("list", "ray.io", "rayclusters", HERE, "", set()),
    ("create", "batch", "jobs", HERE, "", set()),
    ("create", "apps", "deployments", HERE, "", set()),
    ("list", "", "nodes", "", "", {"cluster"}),
    ("patch", "", "nodes", "", "", set()),
    ("list", "", "namespaces", "", "", set()),
    ("get", "", "namespaces", HERE, HERE, {"cluster", "namespaced"}),
    ("get", "", "namespaces", "kube-system", "kube-system", {"cluster"}),
    ("create", "networking.k8s.io", "networkpolicies", HERE, "", {"cluster", "namespaced"}),
    ("delete", "networking.k8s.io", "networkpolicies", HERE, "", set()),
    ("get", "", "secrets", HERE, "", set()),
    ("list", "", "secrets", "", "", set()),
    ("list", "", "secrets", "tapforge-system", "", set()),
    ("get", "", "secrets", "tapforge-system", "another", set()),
    ("get", "", "secrets", "tapforge-system", "tapforge-broker", {"cluster", "namespaced"}),
    ("get", "", "configmaps", HERE, "", set()),
    ("patch", "", "configmaps", HERE, "", {"cluster", "namespaced"}),
    ("list", "", "configmaps", HERE, "", set()),
    ("delete", "", "configmaps", HERE, "", set()),
    ("get", "", "configmaps", "tapforge-system", "tapforge-broker-ca", {"cluster", "namespaced"}),
    ("create", "", "serviceaccounts/token", HERE, "", set()),
    ("create", "authentication.k8s.io", "tokenreviews", "", "", {"cluster", "namespaced"}),
    ("create", "authorization.k8s.io", "subjectaccessreviews", "", "", {"cluster", "namespaced"}),
    ("create", "rbac.authorization.k8s.io", "clusterrolebindings", "", "", set()),
    ("impersonate", "", "users", "", "", set()),
]


def test_the_operator_may_what_it_needs_and_no_more(installed, overlay):
    def wrong() -> list[tuple[str, ...]]:
        return [
            (verb, group, resource, namespace, name)
            for verb, group, resource, namespace, name, where in QUESTIONS
            if may(installed, OPERATOR, verb, group, resource, namespace, name) is not (overlay in where)
        ]

    with contextlib.suppress(NotInTime):
        installed.wait_for("bindings that were just written", lambda: not wrong())
    assert not wrong()


def test_what_it_may_not_is_refused_to_its_token(installed, overlay):
    token = as_operator(installed)
    installed.kubectl("apply", "-f", str(MANIFESTS / "samples" / "pool-autoscaled.yaml"))
    assert "autoscaled" in installed.kubectl("get", "emulatorpools", "-n", HERE, kubeconfig=token).stdout
    refused(installed, token, "get", "secrets", "-n", HERE)
    refused(installed, token, "get", "secrets", "-n", "kube-system")
    refused(installed, token, "create", "deployment", "x", "--image=x", "-n", HERE)
    larger = '-p={"spec":{"replicas":9}}'
    refused(installed, token, "patch", "emulatorpools", "autoscaled", "--type=merge", larger, "-n", HERE)
    refused(installed, token, "annotate", "emulatorpools", "autoscaled", "mine=1", "-n", HERE)
    refused(installed, token, "scale", "emulatorpools", "autoscaled", "--replicas=9", "-n", HERE)
    refused(installed, token, "delete", "emulatorpools", "autoscaled", "-n", HERE)
    refused(installed, token, "create", "token", "default", "-n", HERE)
    if overlay == "namespaced":
        refused(installed, token, "get", "nodes")
        refused(installed, token, "get", "pods", "-n", THERE)
    else:
        assert "fake-0" in installed.kubectl("get", "nodes", kubeconfig=token).stdout


def test_it_writes_only_what_a_pool_controls(whole):
    """RBAC would let it: this is the policy's work."""
    token = as_operator(whole)
    spec = {"containers": [{"name": "x", "image": "x"}]}
    pods = f"/api/v1/namespaces/{HERE}/pods"
    foreign = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "foreign"}, "spec": spec}
    whole.api("POST", pods, foreign)
    owner = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "EmulatorPool", "name": "owner", "controller": True}
    owner |= {"uid": _pool(whole, "owner"), "blockOwnerDeletion": True}
    own = foreign | {"metadata": {"name": "own", "ownerReferences": [owner]}}
    assert "only what an EmulatorPool controls" in refused(whole, token, "delete", "pod", "foreign", "-n", HERE)
    refused(whole, token, "label", "pod", "foreign", "tapforge.dev/claimed=true", "-n", HERE)
    said = refused(whole, token, "run", "alone", "--image=x", "-n", HERE)
    assert "an EmulatorPool controls whatever the operator writes" in said
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "theirs"}}
    whole.api("POST", f"/apis/coordination.k8s.io/v1/namespaces/{HERE}/leases", lease)
    refused(whole, token, "annotate", "lease", "theirs", "x=1", "-n", HERE)
    whole.kubectl("create", "-n", HERE, "-f", "-", kubeconfig=token, input=json.dumps(own))
    whole.kubectl("label", "pod", "own", "tapforge.dev/claimed=true", "-n", HERE, kubeconfig=token)
    patch = '[{"op": "remove", "path": "/metadata/ownerReferences"}]'
    refused(whole, token, "patch", "pod", "own", "--type=json", f"-p={patch}", "-n", HERE)
    whole.kubectl("delete", "pod", "own", "--wait=false", "-n", HERE, kubeconfig=token)


def test_another_namespace_and_another_name_are_confined_as_well(whole, tmp_path):
    overlay = os.path.relpath(MANIFESTS / "overlays" / "cluster", tmp_path)
    changed = {"resources": [overlay], "namespace": "elsewhere", "namePrefix": "acme-"}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(changed))
    whole.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(tmp_path))
    other = "system:serviceaccount:elsewhere:acme-tapforge-operator"
    whole.wait_for("its rights", lambda: may(whole, other, "create", "", "pods", HERE))
    alone = ("run", "alone", "--image=x", "--dry-run=server", "-n")
    whole.wait_for(
        "its confinement",
        lambda: "EmulatorPool controls" in whole.kubectl(*alone, HERE, f"--as={other}", check=False).stderr,
    )
    # Nobody else is: an administrator that is a service account.
    whole.kubectl("create", "serviceaccount", "robot", "-n", HERE)
    whole.kubectl(
        "create", "clusterrolebinding", "robot", "--clusterrole=cluster-admin", f"--serviceaccount={HERE}:robot"
    )
    robot = f"system:serviceaccount:{HERE}:robot"
    whole.wait_for("its rights", lambda: may(whole, robot, "create", "", "pods", THERE))
    whole.kubectl(*alone, THERE, f"--as={robot}")
    whole.kubectl("delete", "clusterrolebinding", "robot")


def _pool(cluster: Cluster, name: str, namespace: str = HERE) -> str:
    spec = {"external": {"urls": ["http://127.0.0.1:9"]}}
    pool = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "EmulatorPool", "metadata": {"name": name}, "spec": spec}
    return cluster.api("POST", POOLS.replace(HERE, namespace), pool)["metadata"]["uid"]


def _claimed(cluster: Cluster, name: str, slots: int, namespace: str = HERE) -> str:
    path = f"{POOLS.replace(HERE, namespace)}/{name}"
    cluster.api("PATCH", f"{path}/status", {"status": {"claimed": slots}}, MERGE)
    return path


def test_a_pool_with_claimed_slots_is_deleted_only_on_purpose(whole):
    _pool(whole, "busy")
    path = _claimed(whole, "busy", 3)
    with pytest.raises(Refused, match="3 slots of this pool are claimed; stop their runs, or annotate"):
        whole.api("DELETE", path)
    whole.api("PATCH", path, {"metadata": {"annotations": {"tapforge.dev/allow-delete-claimed": "yes"}}}, MERGE)
    with pytest.raises(Refused, match="are claimed"):
        whole.api("DELETE", path)
    whole.api("PATCH", path, {"metadata": {"annotations": {"tapforge.dev/allow-delete-claimed": "true"}}}, MERGE)
    whole.api("DELETE", path)
    _pool(whole, "idle")
    whole.api("DELETE", _claimed(whole, "idle", 0))
    _pool(whole, "new")
    whole.api("DELETE", f"{POOLS}/new")


def test_a_claimed_pool_is_spared_when_all_are_deleted(whole):
    """Whoever may edit may delete all at once; each of them is asked for."""
    for name, slots in (("busy", 2), ("idle", 0)):
        _pool(whole, name, THERE)
        _claimed(whole, name, slots, THERE)
    theirs = POOLS.replace(HERE, THERE)
    with pytest.raises(Refused, match="2 slots of this pool are claimed"):
        whole.api("DELETE", theirs)
    assert "busy" in {pool["metadata"]["name"] for pool in whole.api("GET", theirs)["items"]}
    _claimed(whole, "busy", 0, THERE)
    whole.api("DELETE", theirs)
    whole.wait_for("the end of both", lambda: not whole.api("GET", theirs)["items"])


def test_a_namespace_goes_with_its_claimed_pools(whole):
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ends"}}
    whole.api("POST", "/api/v1/namespaces", space)
    _pool(whole, "busy", "ends")
    _claimed(whole, "busy", 3, "ends")
    whole.api("DELETE", "/api/v1/namespaces/ends")
    whole.wait_for("the end of the namespace", lambda: not whole.exists("/api/v1/namespaces/ends"))


def test_people_get_their_rights_by_the_clusters_own_roles(whole):
    for role, user in (("view", "vera"), ("edit", "ed"), ("tapforge-claimer", "clara")):
        whole.kubectl("create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}", "-n", HERE)
    pools = ("tapforge.dev", "emulatorpools", HERE)
    allowed = [
        ("vera", "list", *pools),
        ("ed", "create", *pools),
        ("ed", "list", *pools),
        ("ed", "update", "tapforge.dev", "emulatorpools/scale", HERE),
        ("clara", "create", "tapforge.dev", "emulatorpools/claim", HERE),
    ]
    for question in allowed:  # the roles are put together one after the other
        whole.wait_for(" ".join(question), lambda question=question: may(whole, *question))
    denied = [
        ("vera", "create", *pools),
        ("vera", "delete", *pools),
        ("ed", "patch", "tapforge.dev", "emulatorpools/status", HERE),
        ("ed", "create", "tapforge.dev", "emulatorpools/claim", HERE),
        ("clara", "list", *pools),
        ("clara", "create", "tapforge.dev", "emulatorpools/claim", THERE),
    ]
    assert not [question for question in denied if may(whole, *question)]


# --- the operator itself, as nobody but its service account -----------------------------------------------------------

#: what each overlay adds to the operator's arguments: namespaces, others
SCOPE: dict[str, tuple[list[str], list[str]]] = {"cluster": ([], []), "namespaced": ([HERE], ["--no-nodes"])}


LONG = {"waitSeconds": 60, "ttlSeconds": 3600}


def ask(it: Operator, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
    request = urllib.request.Request(
        f"{it.broker}{path}",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE, context=ssl.create_default_context(cafile=it.ca)) as answer:
        return json.load(answer)


def ready(cluster: Cluster, pool: str, slots: int) -> bool:
    status = cluster.api("GET", f"{POOLS}/{pool}").get("status") or {}
    return status.get("ready", 0) >= slots and any(
        c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ())
    )


def test_the_operator_lives_with_these_rights(installed, overlay):
    for kind in ("emulatorpools", "pods"):
        installed.kubectl("delete", kind, "--all", "--wait=false", "-n", HERE)
    # The Deployment's Pod is a fake one, which leads nothing.
    namespaces, more = SCOPE[overlay]
    devices = MANIFESTS / "components" / "devices" / ("" if overlay == "cluster" else overlay) / "binding.yaml"
    installed.kubectl("apply", "-f", str(devices))
    for verb in ("list", "create"):
        lease = (verb, "coordination.k8s.io", "leases", HERE)
        installed.wait_for("rights on Leases", lambda lease=lease: may(installed, OPERATOR, *lease))
    it = Operator(installed, "tapforge-system", namespaces, identity=overlay, arguments=more).start().wait_ready()
    for name in ("pool-phones.yaml", "pool-devices.yaml"):
        installed.kubectl("apply", "-f", str(MANIFESTS / "samples" / name), "-n", HERE)
    installed.wait_for("phones", lambda: ready(installed, "phones", 2))
    installed.wait_for("devices", lambda: ready(installed, "devices", 3))
    assert it.health("healthz") == ""
    if overlay == "namespaced":  # nothing is listed again while its own Lease is heard
        installed.wait_for("its own Lease", lambda: it.metrics("tapforge_watch_event_age_seconds", kind="leader") > 0)
    token, claims = _claimer(installed), "/v1/namespaces/default/pools/{}/claims"
    held = [
        ask(it, claims.format(pool), {"request": f"try-{pool}-{overlay}", **LONG}, token)["claims"][0]
        for pool in ("phones", "devices")
    ]
    proofs = [{"id": claim["id"], "secret": claim["secret"]} for claim in held]
    renewed = ask(it, "/v1/claims/renew", {"claims": proofs})["claims"]
    assert [claim["state"] for claim in renewed] == ["held", "held"]
    pod = f"/api/v1/namespaces/{HERE}/pods/{held[0]['slot']}"
    assert installed.api("GET", pod)["metadata"]["labels"]["tapforge.dev/claimed"] == "true"
    installed.wait_for("the claim in the status", lambda: _claims(installed, "phones"))
    with pytest.raises(Refused, match="are claimed"):
        installed.api("DELETE", f"{POOLS}/phones")
    ask(it, "/v1/claims/release", {"claims": [{**proof, "verdict": "broken"} for proof in proofs]})
    installed.wait_for("the broken phone's end", lambda: not installed.exists(pod))
    installed.wait_for("its replacement", lambda: ready(installed, "phones", 2) and _claims(installed, "phones") == 0)
    installed.wait_for("the end of both claims", lambda: _claims(installed, "devices") == 0)
    # Metrics are those of the last five seconds.
    ready_slots = {"pool": "default/phones", "state": "ready"}
    installed.wait_for("its metrics", lambda: it.metrics("tapforge_pool_slots", **ready_slots) >= 2)
    assert it.metrics("tapforge_claim_seconds_count", pool="default/phones") == 1
    it.stop()
    said = it.records()
    assert not [one for one in said if any(word in one.message + one.exception for word in (": 403 ", "orbidden"))]
    assert not [one for one in said if one.level == "ERROR"]
    installed.kubectl("delete", "-f", str(devices))
    installed.kubectl("delete", "emulatorpools", "--all", "--wait=false", "-n", HERE)


def _claims(cluster: Cluster, pool: str) -> int:
    return cluster.api("GET", f"{POOLS}/{pool}")["status"].get("claimed", 0)


def _claimer(cluster: Cluster) -> str:
    """A token whose account may claim, as in docs/claims.md."""
    account = f"/api/v1/namespaces/{HERE}/serviceaccounts/tester"
    if not cluster.exists(account):
        cluster.kubectl("create", "serviceaccount", "tester", "-n", HERE)
        allow = ("--clusterrole=tapforge-claimer", f"--serviceaccount={HERE}:tester")
        cluster.kubectl("create", "rolebinding", "tester-claims", *allow, "-n", HERE)
        claim = ("create", "tapforge.dev", "emulatorpools/claim", HERE)
        who = f"system:serviceaccount:{HERE}:tester"
        cluster.wait_for("its right", lambda: may(cluster, who, *claim))
    return cluster.token(HERE, "tester", "tapforge.dev/broker")


def test_callers_of_the_broker_have_a_lane_of_their_own_on_the_api_server(whole: Cluster):
    whole.kubectl("apply", "--server-side", "-f", str(MANIFESTS / "components" / "flowcontrol" / "flowcontrol.yaml"))
    schema = whole.api("GET", "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/tapforge-claims")["metadata"]["uid"]
    token = whole.token("tapforge-system", "tapforge-operator")
    trust = ssl.create_default_context(cafile=str(whole.ca))

    def lane(path: str, body: dict[str, Any] | None = None) -> str:
        """UID of the schema that the API server counts the request as one of."""
        request = urllib.request.Request(
            whole.server + path,
            data=json.dumps(body).encode() if body else None,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30, context=trust) as answer:
            return answer.headers["X-Kubernetes-PF-FlowSchema-UID"]

    group = "authentication.k8s.io/v1"
    review = {"apiVersion": group, "kind": "TokenReview", "spec": {"token": "nobody's"}}
    whole.wait_for("the lane of reviews", lambda: lane(f"/apis/{group}/tokenreviews", review) == schema)
    assert lane(f"/api/v1/namespaces/{HERE}/pods") != schema
