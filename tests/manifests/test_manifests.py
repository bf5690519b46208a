"""What is applied to a cluster: every file parses and is part of something, the operator may do exactly what a table
says, its Pod asks for no privilege, and the samples are what the API takes.

Whether an API server takes it all is asked in tests/e2e.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tapforge_api import load_pool
from tapforge_api.training_run import CHANGEABLE
from tapforge_operator import labels as wellknown
from tapforge_operator.broker.tls import CONFIG_MAP, SECRET
from tapforge_operator.emulatorpool.backoff import refusal
from tapforge_operator.emulatorpool.pod import slot_pods
from tapforge_operator.emulatorpool.state import NewSlot, Pool
from tapforge_operator.main import LEASE, main
from tapforge_operator.observability.metrics import Telemetry
from tapforge_operator.trainingrun.apply import FOREIGN
from tapforge_trainer.cli.env import serve

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
SAMPLES = MANIFESTS / "samples"
ACCOUNT = {"kind": "ServiceAccount", "name": "tapforge-operator", "namespace": "tapforge-system"}

KUSTOMIZATIONS = sorted(
    [*MANIFESTS.rglob("kustomization.yaml"), *MANIFESTS.rglob("Kustomization"), ROOT / "crds" / "Kustomization"]
)
#: what kustomize is told of references that it doesn't know
REFERENCES = sorted(MANIFESTS.rglob("references.yaml"))
#: everything that is installed, in whatever combination
INSTALLED = sorted(
    path
    for folder in ("base", "overlays", "components")
    for path in (MANIFESTS / folder).rglob("*.yaml")
    if path not in (*KUSTOMIZATIONS, *REFERENCES)
)


@cache
def parsed(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(yaml.safe_load_all(path.read_text()))


def documents(*paths: Path) -> Iterator[dict[str, Any]]:
    """Nobody changes them: all tests see the same ones."""
    for path in paths:
        yield from parsed(path)


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [thing for thing in documents(*INSTALLED) if thing["kind"] in kinds]


def only(kind: str) -> dict[str, Any]:
    (thing,) = of_kind(kind)
    return thing


def test_every_kustomization_names_what_is_there_and_no_file_is_left_over():
    assert len(KUSTOMIZATIONS) >= 12
    used = set()
    for path in KUSTOMIZATIONS:
        content = yaml.safe_load(path.read_text())
        for name in [name for kind in ("resources", "components", "configurations") for name in content.get(kind, ())]:
            found = (path.parent / name).resolve()
            assert found.exists(), f"{path}: {name}"
            used.add(found)
    samples = set(SAMPLES.glob("pool-*.yaml"))
    assert {path.resolve() for path in [*INSTALLED, *REFERENCES, *samples]} <= used


def test_objects_have_a_kind_and_a_name_of_their_own():
    things = [
        (t["apiVersion"], t["kind"], t["metadata"].get("namespace"), t["metadata"]["name"])
        for t in documents(*INSTALLED)
    ]
    assert len(things) > 15
    assert len(set(things)) == len(things)


READ, LOOK = ("get", "list", "watch"), ("list", "watch")
#: role -> what it may do: (group, resource, names): verbs. What isn't here is a mistake, also when it does no harm.
ROLES: dict[str, dict[tuple[str, str, tuple[str, ...]], tuple[str, ...]]] = {
    "tapforge-operator-pools": {
        ("tapforge.dev", "emulatorpools", ()): (*READ, "create", "delete"),
        ("tapforge.dev", "trainingruns", ()): READ,
        ("tapforge.dev", "emulatorpools/status", ()): ("patch",),
        ("tapforge.dev", "trainingruns/status", ()): ("patch",),
        ("tapforge.dev", "emulatorpools/finalizers", ()): ("update",),
        ("tapforge.dev", "trainingruns/finalizers", ()): ("update",),
        ("", "pods", ()): (*READ, "create", "patch", "delete"),
        ("policy", "poddisruptionbudgets", ()): ("get", "create"),
        ("batch", "jobs", ()): ("get",),
        ("ray.io", "rayclusters", ()): ("get",),
        ("ray.io", "rayjobs", ()): (*READ, "create", "delete"),
        ("", "configmaps", ()): ("create", "patch"),
        ("", "namespaces", ()): ("get",),
        ("networking.k8s.io", "networkpolicies", ()): ("get", "create", "patch"),
        ("", "persistentvolumeclaims", ()): ("get",),
        ("", "events", ()): ("create",),
    },
    "tapforge-operator-reviews": {
        ("authentication.k8s.io", "tokenreviews", ()): ("create",),
        ("authorization.k8s.io", "subjectaccessreviews", ()): ("create",),
    },
    "tapforge-operator-logs": {("", "pods/log", ()): ("get",)},
    "tapforge-operator-devices": {("coordination.k8s.io", "leases", ()): (*READ, "create", "patch", "delete")},
    "tapforge-operator-nodes": {("", "nodes", ()): LOOK},
    "tapforge-operator-kueue": {
        ("kueue.x-k8s.io", "admissionchecks", ()): LOOK,
        ("kueue.x-k8s.io", "workloads", ()): LOOK,
        ("kueue.x-k8s.io", "admissionchecks/status", ()): ("patch",),
        ("kueue.x-k8s.io", "workloads/status", ()): ("patch",),
    },
    "tapforge-operator": {
        ("coordination.k8s.io", "leases", ()): (*LOOK, "create"),
        ("coordination.k8s.io", "leases", (LEASE,)): ("get", "patch"),
        ("", "secrets", ()): ("create",),
        ("", "secrets", (SECRET,)): ("get", "patch"),
        ("", "configmaps", ()): ("create",),
        ("", "configmaps", (CONFIG_MAP,)): ("get", "patch"),
    },
    "tapforge-view": {
        ("tapforge.dev", resource, ()): READ
        for resource in (
            *("emulatorpools", "emulatorpools/status", "emulatorpools/scale"),
            *("trainingruns", "trainingruns/status"),
        )
    },
    "tapforge-edit": {
        ("tapforge.dev", "emulatorpools", ()): ("create", "update", "patch", "delete", "deletecollection"),
        ("tapforge.dev", "trainingruns", ()): ("create", "update", "patch", "delete", "deletecollection"),
        ("tapforge.dev", "emulatorpools/scale", ()): ("update", "patch"),
    },
    "tapforge-broker-ca": {("", "configmaps", (CONFIG_MAP,)): ("get",)},
    "tapforge-metrics-reader": {("", "/metrics", ()): ("get",)},
    "tapforge-claimer": {("tapforge.dev", "emulatorpools/claim", ()): ("create",)},
}


def allowed(role: dict[str, Any]) -> dict[tuple[str, str, tuple[str, ...]], tuple[str, ...]]:
    found: dict[tuple[str, str, tuple[str, ...]], tuple[str, ...]] = defaultdict(tuple)
    for rule in role["rules"]:
        for url in rule.get("nonResourceURLs", ()):
            found["", url, ()] += tuple(rule["verbs"])
        for group in rule.get("apiGroups", ()):
            for resource in rule["resources"]:
                found[group, resource, tuple(rule.get("resourceNames", ()))] += tuple(rule["verbs"])
    return {key: tuple(sorted(verbs)) for key, verbs in found.items()}


def test_roles_are_exactly_the_table():
    roles = {role["metadata"]["name"]: allowed(role) for role in of_kind("Role", "ClusterRole")}
    table = {name: {key: tuple(sorted(verbs)) for key, verbs in rules.items()} for name, rules in ROLES.items()}
    assert roles == table


def test_no_role_has_a_wildcard_or_lets_anybody_become_somebody_else():
    for role in of_kind("Role", "ClusterRole"):
        for rule in role["rules"]:
            said = {word for words in rule.values() for word in words}
            assert not {word for word in said if "*" in word}
            assert not said & {"escalate", "bind", "impersonate", "serviceaccounts/token", "pods/exec"}
            assert rule.get("nonResourceURLs", ["/metrics"]) == ["/metrics"]


def test_roles_are_bound_to_the_operator_alone_and_exist():
    roles = {(role["kind"], role["metadata"]["name"]) for role in of_kind("Role", "ClusterRole")}
    bindings = of_kind("RoleBinding", "ClusterRoleBinding")
    bound = {(binding["roleRef"]["kind"], binding["roleRef"]["name"]) for binding in bindings}
    assert bound <= roles
    assert {name for _, name in roles - bound} == {
        "tapforge-view",
        "tapforge-edit",
        "tapforge-claimer",
        "tapforge-metrics-reader",
    }
    public = [binding for binding in bindings if binding["subjects"] != [ACCOUNT]]
    assert [binding["roleRef"]["name"] for binding in public] == ["tapforge-broker-ca"]
    (account,) = of_kind("ServiceAccount")
    assert (account["metadata"]["name"], account["metadata"]["namespace"]) == (ACCOUNT["name"], ACCOUNT["namespace"])


def test_what_needs_the_whole_cluster_can_be_left_out_but_for_the_reviews():
    """Tokens and permissions have no namespace; everything else is bound by an overlay or a component."""
    base = [t for t in documents(*(MANIFESTS / "base").glob("*.yaml")) if t["kind"] == "ClusterRoleBinding"]
    assert [binding["roleRef"]["name"] for binding in base] == ["tapforge-operator-reviews"]
    namespaced = MANIFESTS / "overlays" / "namespaced"
    assert [t["kind"] for name in ("binding", "logs") for t in documents(namespaced / f"{name}.yaml")] == 2 * [
        "RoleBinding"
    ]


def test_the_operators_pod_asks_for_no_privilege():
    pod = only("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all(set(volume) <= {"name", "emptyDir"} for volume in pod["volumes"])
    assert container["resources"]["limits"]["memory"]
    assert container["image"] == "tapforge/operator:dev"


def test_one_operator_is_always_there():
    """Through an update, a drained node and a node that is lost."""
    deployment, budget = only("Deployment")["spec"], only("PodDisruptionBudget")["spec"]
    assert deployment["replicas"] == 2
    update = {"maxSurge": 1, "maxUnavailable": 0}
    assert deployment["strategy"] == {"type": "RollingUpdate", "rollingUpdate": update}
    labels = deployment["template"]["metadata"]["labels"]
    # Of one replica too: a drain must not wait for ever.
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    pod = deployment["template"]["spec"]
    assert set(pod["affinity"]) == {"podAntiAffinity"}
    (apart,) = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert apart["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert apart["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()
    (container,) = pod["containers"]
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 0 < wait < pod["terminationGracePeriodSeconds"] / 2, "and time for what it still does"


def test_everything_finds_the_operator():
    deployment = only("Deployment")
    service, metrics = of_kind("Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert only("PodMonitor")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert metrics["spec"]["selector"].items() <= labels.items()
    monitor = only("ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= metrics["metadata"]["labels"].items()
    assert not monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [(p["port"], ports[p["targetPort"]]) for p in service["spec"]["ports"]] == [(8443, 8443)]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {"health"}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert only("PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] in ports
    assert [(p["port"], ports[p["targetPort"]]) for p in metrics["spec"]["ports"]] == [(8080, 8080)]
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == [p["name"] for p in metrics["spec"]["ports"]]


def test_the_operator_understands_how_it_is_started():
    (container,) = only("Deployment")["spec"]["template"]["spec"]["containers"]
    namespaced = yaml.safe_load((MANIFESTS / "overlays" / "namespaced" / "kustomization.yaml").read_text())
    more = [step["value"] for patch in namespaced["patches"] for step in yaml.safe_load(patch["patch"])]
    arguments = [*container["args"], *more]
    assert container["command"] == ["tapforge-operator"]
    said = main.make_context("tapforge-operator", list(arguments)).params
    assert (said["namespaces"], said["nodes"]) == (("default",), False)
    set_from_pod = {"$(POD_NAME)": "identity", "$(POD_NAMESPACE)": "own_namespace", "$(POD_IP)": "advertise_address"}
    assert {word: name for word, name in set_from_pod.items() if said[name] == word} == set_from_pod
    assert {f"$({entry['name']})" for entry in container["env"]} == set(set_from_pod)
    fields = {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in container["env"]}
    assert fields == {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_IP": "status.podIP"}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"broker": said["broker_port"], "health": said["health_port"]}


def test_policies_know_the_operator_and_what_it_writes():
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind("ValidatingAdmissionPolicy")}
    deletion, confinement = policies["claimed-pools.tapforge.dev"], policies["operator-writes-its-own.tapforge.dev"]
    assert repr(wellknown.ALLOW_DELETE) in deletion["validations"][0]["expression"]
    assert str(list(CHANGEABLE)) in yaml.safe_dump(policies["started-runs.tapforge.dev"], width=1000)
    bindings = {b["spec"]["policyName"]: b["spec"] for b in of_kind("ValidatingAdmissionPolicyBinding")}
    assert set(bindings) == set(policies)
    assert all(binding["validationActions"] == ["Deny"] for binding in bindings.values())
    account = {"name": ACCOUNT["name"], "namespace": ACCOUNT["namespace"], "parameterNotFoundAction": "Allow"}
    assert bindings["operator-writes-its-own.tapforge.dev"]["paramRef"] == account
    assert ACCOUNT["namespace"] not in yaml.safe_dump(confinement), "an overlay would not change it here"
    # Whatever kind the operator may write, the policy knows; an event belongs to nobody.
    written = {
        (group, resource)
        for role in ("tapforge-operator-pools", "tapforge-operator-devices", "tapforge-operator")
        for (group, resource, _), verbs in ROLES[role].items()
        if {"create", "patch", "delete"} & set(verbs) and "/" not in resource and resource != "events"
    }
    rules = confinement["matchConstraints"]["resourceRules"]
    assert {
        (group, resource) for rule in rules for group in rule["apiGroups"] for resource in rule["resources"]
    } == written


def test_the_confinement_speaks_as_the_operator_understands():
    confinement = next(p["spec"] for p in of_kind("ValidatingAdmissionPolicy") if "paramKind" in p["spec"])
    own = next(v["expression"] for v in confinement["variables"] if v["name"] == "own")
    assert f"['leases/{LEASE}', 'secrets/{SECRET}', 'configmaps/{CONFIG_MAP}']" in own
    words = [v.get("message") or v["messageExpression"] for v in confinement["validations"]]
    assert [word for word in words if word.startswith(FOREIGN)] == [words[2]]
    found = [refusal(403, "Forbidden", f'pods "a" is forbidden: denied request: {word}') for word in words]
    reasons = [one.reason for one in found if one is not None]
    assert reasons == ["NamespaceNotEnabled" if wellknown.WORKLOADS in word else "Forbidden" for word in words], (
        "what a label would change is known by it"
    )
    assert reasons.count("NamespaceNotEnabled") == 3


SAMPLES_OF_POOLS = sorted([*SAMPLES.glob("pool-*.yaml"), *SAMPLES.glob("scaling-*.yaml")])


#: of the public images of docs/emulators.md
OTHERS_IMAGES = (
    "pool-mobileworld",
    "pool-mobileworld-redroid",
    "pool-androidworld",
    "pool-docker-android",
    "pool-android-emulator",
    "pool-redroid",
)


@pytest.mark.parametrize("path", SAMPLES_OF_POOLS, ids=lambda path: path.name)
def test_a_sample_is_a_pool(path):
    pool = load_pool(path)
    assert path.stem == f"pool-{pool.metadata.name}" or path.stem in ("pool-kvm", "scaling-keda")
    assert pool.metadata.namespace is None, "it goes where its user works"
    if pool.spec.template is not None:
        for container in pool.spec.template.spec.containers:
            assert "/" not in container.image.replace("tapforge/", "", 1), "an image without a registry"
    if pool.spec.template is not None and path.stem not in OTHERS_IMAGES:
        # Nothing that the operator sets by itself is repeated, so that a sample shows what is one's own to say.
        (phone,) = pool.spec.template.spec.containers
        assert "securityContext" not in (phone.model_extra or {})
    for other in documents(path):
        if other["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = {"apiVersion": pool.api_version, "kind": pool.kind, "name": pool.metadata.name}
            assert other["spec"]["scaleTargetRef"] == target
            assert pool.spec.replicas is not None, "an autoscaler and `scaling` would both set the size"


def test_keda_asks_for_what_the_operator_measures():
    """KEDA's kind is in no test cluster: its query is compared with the metrics."""
    pool, scaled = documents(SAMPLES / "scaling-keda.yaml")
    spec, name = scaled["spec"], f"default/{pool['metadata']['name']}"
    assert spec["minReplicaCount"] >= 1 and spec["minReplicaCount"] <= pool["spec"]["replicas"]
    (trigger,) = [t["metadata"] for t in spec["triggers"] if t["type"] == "prometheus"]
    asked = set(re.findall(r'(tapforge_\w+)\{pool="([^"]+)"\}', trigger["query"]))
    assert asked == {("tapforge_claims_held", name), ("tapforge_claims_waiting", name)}
    telemetry = Telemetry()
    telemetry.reconciled(name, 0.1)
    telemetry.claims(name, 3, 2)
    lines = telemetry.render().decode().splitlines()
    assert [line for line in lines if line.startswith(tuple(metric for metric, _ in asked))] == [
        f'tapforge_claims_held{{pool="{name}"}} 3.0',
        f'tapforge_claims_waiting{{pool="{name}"}} 2.0',
    ]


def test_the_samples_show_each_way_to_have_slots():
    specs = [load_pool(path).spec for path in SAMPLES.glob("pool-*.yaml")]
    assert {next(w for w in ("replicas", "scaling", "external") if getattr(s, w) is not None) for s in specs} == {
        "replicas",
        "scaling",
        "external",
    }
    assert {spec.kvm.mode for spec in specs} == {"None", "DevicePlugin", "HostPath"}


@pytest.mark.parametrize("name", OTHERS_IMAGES)
def test_an_emulators_sample_speaks_its_protocol_or_has_a_bridge_that_does(name):
    """The bridge's command is one that the command line takes; it serves where the pool looks, has a token, and knows
    its slot by the operator."""
    pool = load_pool(SAMPLES / f"{name}.yaml")
    spec = pool.spec
    assert f"`{name}.yaml`" in (ROOT / "docs" / "emulators.md").read_text()
    pod = slot_pods(Pool("lab", pool.metadata.name, "u", 1, spec))(NewSlot("slot", 0))
    bridges = [c for c in pod["spec"]["containers"] if c["name"] == "bridge"]
    if spec.protocol != "tapforge":
        assert not bridges and spec.port == {"mobileworld": 6800, "androidworld": 5000}[spec.protocol]
        return
    (bridge,) = bridges
    assert bridge["command"] == ["tapforge", "env", "serve"]
    options = serve.make_context("serve", list(bridge["args"])).params
    assert (options["protocol"], options["port"], options["host"]) == ("adb", spec.port, "::")
    assert len(options["devices"]) == 1
    # The image that has no adb finds a server of the emulator's image.
    assert (options["adb_port"] is None) == (bridge["image"] == "tapforge/phone:dev")
    assert {variable["name"] for variable in bridge["env"]} == {"TAPFORGE_SLOT", "TAPFORGE_TOKEN"}
    assert bridge["readinessProbe"]["httpGet"] == {"path": "/health", "port": spec.port}
    (emulator,) = [c for c in pod["spec"]["containers"] if c["name"] == "emulator"]
    assert "exec" in emulator["readinessProbe"] and "securityContext" in emulator
    assert bridge["securityContext"] == {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
