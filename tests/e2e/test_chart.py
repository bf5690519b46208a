"""The Helm chart as people use it: what it renders is what kustomize renders, each value does what it says, and a wrong
one is refused by its name."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster import binaries

from tapforge_operator.broker.types import ClaimQuotas
from tapforge_operator.config import Settings, claim_quotas, device_rules
from tapforge_operator.main import main

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
CHART = ROOT / "charts" / "tapforge"
OURS = "tapforge-system"
Object = dict[str, Any]
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def render(helm: Helm, tmp_path: Path) -> Callable[..., list[Object]]:
    """The chart's objects with these values; the version is needed because Helm asks no cluster here."""

    def render(values: Mapping[str, Any] | None = None, namespace: str = OURS) -> list[Object]:
        file = tmp_path / "values.yaml"
        file.write_text(json.dumps(dict(values or {})))  # PyYAML leaves "1e3" bare, which is a number to Helm
        words = ("tapforge", str(CHART), "--kube-version=1.36.0", "-f", str(file), "-n", namespace)
        return read(helm("template", *words).stdout)

    return render


def read(text: str) -> list[Object]:
    return [thing for thing in yaml.load_all(text, Loader=yaml.CSafeLoader) if thing]


def kustomize(place: Path, files: Mapping[str, str], **content: Any) -> list[Object]:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / name).write_text(text)
    up = "/".join([".."] * len(place.parts[1:]))
    for kind in {"resources", "components"} & set(content):
        content[kind] = [f"{up}{MANIFESTS}/{name}" for name in content[kind]]
    content["resources"] = [*content.get("resources", ()), *files]
    (place / "kustomization.yaml").write_text(yaml.safe_dump(content))
    kubectl = binaries.ensure() / "kubectl"
    done = subprocess.run(
        [str(kubectl), "kustomize", str(place)], capture_output=True, text=True, timeout=60, check=True
    )
    return read(done.stdout)


def by_name(objects: list[Object]) -> dict[str, Object]:
    return {
        "/".join((o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"])): o
        for o in objects
        # Helm makes the release's namespace before it reads a chart.
        if o["kind"] != "Namespace"
    }


def only(objects: list[Object], kind: str) -> Object:
    (found,) = [o for o in objects if o["kind"] == kind]
    return found


HERE: Object = {"namespaces": ["default"]}
#: overlay, components; values that make the same
SAME: dict[str, tuple[str, list[str], Object]] = {
    "defaults": ("cluster", [], {}),
    "namespaced": ("namespaced", [], HERE),
    "alerts": (
        "cluster",
        ["monitoring", "prometheus"],
        {"monitoring": {"scrape": "PodMonitor", "rules": True, "dashboard": True}},
    ),
    "flow control, Kueue": ("cluster", ["flowcontrol", "kueue"], {"flowControl": True, "kueue": True}),
    "ServiceMonitor": ("namespaced", ["servicemonitor"], {**HERE, "monitoring": {"scrape": "ServiceMonitor"}}),
}


@pytest.mark.parametrize("name", SAME)
def test_it_renders_what_kustomize_renders(render, tmp_path, name):
    overlay, components, values = SAME[name]
    names = [*(f"components/{component}" for component in components), "components/keep-kinds"]
    theirs = kustomize(tmp_path / "kustomize", {}, resources=[f"overlays/{overlay}"], components=names)
    # Written by the same tool, which spells numbers in its own way.
    rendered = kustomize(tmp_path / "chart", {"chart.yaml": yaml.dump_all(render(values), Dumper=yaml.CSafeDumper)})
    for kind in (o for o in rendered if o["kind"] == "CustomResourceDefinition"):
        assert kind["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
    ours, wanted = by_name(rendered), by_name(theirs)
    assert set(ours) == set(wanted)
    assert {key: ours[key] for key in ours if ours[key] != wanted[key]} == {}


def test_phones_are_closed_in_where_it_is_said(render, tmp_path):
    rendered = render({"networkPolicies": {"phones": ["lab", "team"]}})
    wanted = [
        policy
        for space in ("lab", "team")
        for policy in kustomize(tmp_path / space, {}, namespace=space, components=["components/network/phones"])
    ]
    theirs = by_name(wanted)
    ours = by_name([o for o in rendered if o["metadata"]["name"].startswith("tapforge-phones")])
    assert len(ours) == 4 and ours == theirs


def test_it_goes_into_any_namespace(render):
    rendered = render({"monitoring": {"scrape": "ServiceMonitor"}, "flowControl": True}, namespace="phones-operator")
    assert OURS not in yaml.safe_dump_all(rendered)
    spaces = {o["metadata"].get("namespace") for o in rendered}
    assert spaces == {None, "phones-operator"}


def test_names_stay_text_that_yaml_reads_as_something_else(render):
    names = ["2024", "on", "1e3"]
    values = {
        "namespaces": names,
        "networkPolicies": {"phones": names},
        "priorityClassName": "true",
        "tls": {"secretName": "123", "issuerRef": {"name": "1"}},
        "monitoring": {"scrape": "ServiceMonitor", "rules": True, "dashboard": True},
        "flowControl": True,
        "kueue": True,
    }
    rendered = render(values, namespace="2025")
    assert {o["metadata"].get("namespace") for o in rendered} == {None, "2025", *names}
    subjects = [subject["namespace"] for o in rendered for subject in o.get("subjects", ()) if "namespace" in subject]
    assert subjects and set(subjects) == {"2025"}
    flow = only(rendered, "FlowSchema")["spec"]["rules"]
    accounts = [subject["serviceAccount"]["namespace"] for rule in flow for subject in rule["subjects"]]
    assert accounts and set(accounts) == {"2025"}
    pod = only(rendered, "Deployment")["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "true"
    assert {"name": "tls", "secret": {"secretName": "123"}} in pod["volumes"]
    assert only(rendered, "Certificate")["spec"]["secretName"] == "123"


def test_what_is_switched_off_is_not_there(render):
    defaults = set(by_name(render()))
    for values, gone in (
        ({"crds": {"install": False}}, {"emulatorpools.tapforge.dev", "trainingruns.tapforge.dev"}),
        (
            {"protection": False},
            {f"{what}.tapforge.dev" for what in ("claimed-pools", "started-runs", "pools-of-runs")},
        ),
        ({"confinement": False}, {"operator-writes-its-own.tapforge.dev"}),
        ({"nodes": False}, {"tapforge-operator-nodes"}),
        ({"networkPolicies": {"operator": False}}, {"NetworkPolicy"}),
    ):
        missing = defaults - set(by_name(render(values)))
        names = {key.rpartition("/")[2] for key in missing} | {key.partition("/")[0] for key in missing}
        assert gone <= names and len(missing) <= 2 * len(gone), values
    kinds = [o for o in render({"crds": {"keep": False}}) if o["kind"] == "CustomResourceDefinition"]
    assert len(kinds) == 2 and not any("annotations" in kind["metadata"] for kind in kinds)


def test_nodes_are_watched_also_where_pools_are_in_few_namespaces(render):
    rendered = render({**HERE, "nodes": True})
    assert "ClusterRoleBinding//tapforge-operator-nodes" in by_name(rendered)
    (container,) = only(rendered, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--no-nodes" not in container["args"]


def test_the_operators_pod_is_as_the_values_say(render):
    tolerations = [{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}]
    spread = [{"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    digest = "sha256:" + "0" * 64
    rendered = render(
        {
            "image": {
                "repository": "mine:5000/operator",
                "digest": digest,
                "pullPolicy": "Always",
                "pullSecrets": [{"name": "mine"}],
            },
            "namespaces": ["lab", "team"],
            "replicas": 3,
            "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
            "nodeSelector": {"pool": "system"},
            "tolerations": tolerations,
            "affinity": affinity,
            "topologySpreadConstraints": spread,
            "priorityClassName": "system-cluster-critical",
            "podLabels": {"team": "phones"},
            "podAnnotations": {"note": "yes"},
            "logLevel": "DEBUG",
            "extraArgs": ["--in-flight=128"],
        }
    )
    spec = only(rendered, "Deployment")["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["replicas"] == 3
    assert (container["image"], container["imagePullPolicy"]) == (f"mine:5000/operator@{digest}", "Always")
    assert container["resources"] == {"requests": {"cpu": "1", "memory": "192Mi"}, "limits": {"memory": "1Gi"}}
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "system"}
    assert (pod["tolerations"], pod["affinity"], pod["topologySpreadConstraints"]) == (tolerations, affinity, spread)
    assert pod["priorityClassName"] == "system-cluster-critical"
    assert spec["template"]["metadata"]["labels"] == {"app.kubernetes.io/name": "tapforge-operator", "team": "phones"}
    assert spec["template"]["metadata"]["annotations"] == {"note": "yes"}
    said = main.make_context("tapforge-operator", list(container["args"])).params
    assert (said["namespaces"], said["nodes"]) == (("lab", "team"), False)
    assert (said["log_level"], said["in_flight"]) == ("DEBUG", 128)
    bound = {key for key in by_name(rendered) if "Binding" in key and key.endswith("tapforge-operator-pools")}
    assert bound == {f"RoleBinding/{space}/tapforge-operator-pools" for space in ("lab", "team")}


def test_quotas_of_claims_are_those_of_the_values(render):
    quotas = {"team": 0, "2024": 12_000_000, "*": 3}
    (container,) = only(render({"claimQuotas": quotas}), "Deployment")["spec"]["template"]["spec"]["containers"]
    said = main.make_context("tapforge-operator", list(container["args"])).params["claim_quota"]
    assert said == ("*=3", "2024=12000000", "team=0"), "sorted: the same values make the same Pods"
    assert claim_quotas(said) == ClaimQuotas({"team": 0, "2024": 12_000_000}, 3)


@pytest.mark.parametrize(
    ("values", "kuberay", "metrics"),
    [
        ({}, "", ("kubernetes.io/metadata.name=monitoring",)),
        ({"metricsFrom": []}, "", ("",)),
        ({"kuberayFrom": {"a": "b", "c": "d"}, "metricsFrom": [{"e": "f"}, {"g": "h"}]}, "a=b,c=d", ("e=f", "g=h")),
    ],
)
def test_namespaces_that_reach_runs_are_those_of_the_values(render, values, kuberay, metrics):
    for closed in (True, False):
        more = {"networkPolicies": {**values, "runs": closed}}
        (container,) = only(render(more), "Deployment")["spec"]["template"]["spec"]["containers"]
        said = main.make_context("tapforge-operator", list(container["args"])).params
        assert (said["run_network"], said["kuberay_namespace"], said["metrics_namespaces"]) == (
            closed,
            kuberay,
            metrics,
        )


def test_devices_that_namespaces_may_name_are_those_of_the_values(render):
    devices = {"lab": ["10.1.0.0/16", "*.lab.example"], "*": ["10.2.0.1"]}
    (container,) = only(render({"externalDevices": devices}), "Deployment")["spec"]["template"]["spec"]["containers"]
    said = main.make_context("tapforge-operator", list(container["args"])).params["external_device"]
    assert said == ("*=10.2.0.1", "lab=10.1.0.0/16", "lab=*.lab.example")
    assert device_rules(said).allow("lab", "http://10.1.2.3:80", "tapforge")


def test_monitors_are_found_by_the_labels_of_your_prometheus(render):
    for kind, spec in (("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints")):
        found = only(
            render({"monitoring": {"scrape": kind, "labels": {"release": "prom"}, "interval": "1m"}}),
            kind,
        )
        assert found["metadata"]["labels"] == {"release": "prom"}
        assert found["spec"][spec][0]["interval"] == "1m"


@pytest.mark.parametrize(("kind", "spec"), [("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints")])
def test_metrics_ask_for_the_token_that_prometheus_shows(render, kind, spec):
    secret = {"name": "scraper", "key": "token"}
    rendered = render({"monitoring": {"scrape": kind, "token": True, "tokenSecret": secret}})
    assert only(rendered, kind)["spec"][spec][0]["authorization"] == {"credentials": secret}
    (container,) = only(rendered, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert main.make_context("tapforge-operator", list(container["args"])).params["metrics_token"]


@pytest.mark.parametrize("labels", [[], [{"team": "obs"}, {"kubernetes.io/metadata.name": "prom"}]])
def test_metrics_are_reached_from_the_namespaces_of_the_values(render, labels):
    policy = only(render({"networkPolicies": {"metricsFrom": labels}}), "NetworkPolicy")
    (rule,) = [rule for rule in policy["spec"]["ingress"] if rule["ports"] == [{"protocol": "TCP", "port": 8080}]]
    peers = [{"namespaceSelector": {"matchLabels": one}} for one in labels]
    assert (rule["from"] or []) == peers, "no peer: everybody"


def test_the_broker_has_a_certificate_of_yours(render):
    assert "--tls-dir" not in yaml.safe_dump(only(render(), "Deployment"))
    issuer = {"kind": "ClusterIssuer", "name": "internal"}
    for values, secret in (
        ({"secretName": "mine"}, "mine"),
        ({"issuerRef": issuer, "dnsNames": ["claims.example.com"]}, "tapforge-broker-tls"),
        ({"issuerRef": issuer, "secretName": "mine"}, "mine"),
    ):
        rendered = render({"tls": values}, namespace="own")
        pod = only(rendered, "Deployment")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        folder = str(main.make_context("tapforge-operator", list(container["args"])).params["tls_dir"])
        assert {"name": "tls", "mountPath": folder, "readOnly": True} in container["volumeMounts"]
        assert {"name": "tls", "secret": {"secretName": secret}} in pod["volumes"]
        certificates = [o["spec"] for o in rendered if o["kind"] == "Certificate"]
        assert len(certificates) == ("issuerRef" in values)
        for certificate in certificates:
            names = [Settings("x", namespace="own").service, *values.get("dnsNames", [])]
            assert (certificate["secretName"], certificate["dnsNames"]) == (secret, names)
            assert certificate["issuerRef"] == issuer


#: words after --set -> what Helm says
WRONG = {
    "replica=1": "additional properties 'replica' not allowed",
    "replicas=two": "at '/replicas': got string, want integer",
    "replicas=-1": "at '/replicas': minimum: got -1, want 0",
    "nodes=maybe": "at '/nodes': value must be one of 'auto', true, false",
    "namespaces={Lab_1}": "at '/namespaces/0': 'Lab_1' does not match pattern",
    "claimQuotas.lab=few": "at '/claimQuotas/lab': got string, want integer",
    "claimQuotas.lab=-1": "at '/claimQuotas/lab': minimum: got -1, want 0",
    "claimQuotas.Lab=1": "invalid propertyName 'Lab'",
    "claimQuotas=null": "at '': missing property 'claimQuotas'",
    "image.pullPolicy=always": "at '/image/pullPolicy': value must be one of",
    "image.tag=": "at '/image/tag': '' does not match pattern",
    "resources.limits.memory=lots": "at '/resources/limits/memory': 'lots' does not match pattern",
    "tolerations[0].effect=No": "at '/tolerations/0/effect': value must be one of",
    "podLabels.app\\.kubernetes\\.io/name=x": "at '/podLabels/app.kubernetes.io~1name': false schema",
    "extraArgs={in-flight}": "at '/extraArgs/0': 'in-flight' does not match pattern",
    "image.tag=null": "at '/image': missing property 'tag'",
    "image.pullPolicy=null": "at '/image': missing property 'pullPolicy'",
    "resources=null": "at '': missing property 'resources'",
    "namespaces=null": "at '': missing property 'namespaces'",
    "tls=null": "at '': missing property 'tls'",
    "tls.issuerRef=null": "at '/tls': missing property 'issuerRef'",
    "crds=null": "at '': missing property 'crds'",
    "monitoring=null": "at '': missing property 'monitoring'",
    "networkPolicies.operator=null": "at '/networkPolicies': missing property 'operator'",
    "tls.secretName=tapforge-broker": "at '/tls/secretName': 'not' failed",
    "tls.secretName=Mine": "at '/tls/secretName': 'Mine' does not match pattern",
    "tls.issuerRef.kind=Issuer": "at '/tls/issuerRef': properties 'name' required, if 'kind' exists",
    "crds.keep=yes": "at '/crds/keep': got string, want boolean",
    "monitoring.scrape=both": "at '/monitoring/scrape': value must be one of",
    "monitoring.interval=often": "at '/monitoring/interval': 'often' does not match pattern",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_value_is_refused_by_its_name(helm, setting):
    done = helm("template", "tapforge", str(CHART), "--kube-version=1.36.0", "--set", setting, check=False)
    assert done.returncode != 0
    assert WRONG[setting] in done.stderr


def test_a_default_within_a_map_may_be_taken_out(helm):
    settings = ("--set=resources.limits=null", "--set=nodeSelector.kubernetes\\.io/os=null")
    digest = ("--set=image.tag=null", f"--set=image.digest=sha256:{'0' * 64}")
    done = helm("template", "tapforge", str(CHART), "--kube-version=1.36.0", *settings, *digest)
    pod = only(read(done.stdout), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"tapforge/operator@sha256:{'0' * 64}"
    assert "nodeSelector" not in pod and set(container["resources"]) == {"requests"}


def test_it_is_clean_by_helms_own_rules_and_packaged_whole(helm, tmp_path):
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", str(CHART)).stdout
    helm("package", str(CHART), "-d", str(tmp_path))
    (packed,) = tmp_path.glob("tapforge-*.tgz")
    words = ("-n", OURS, "--kube-version=1.36.0")
    assert helm("template", "t", str(packed), *words).stdout == helm("template", "t", str(CHART), *words).stdout
    old = helm("template", "t", str(CHART), "-n", OURS, "--kube-version=1.29.0", check=False)
    assert "requires kubeVersion: >=1.30" in old.stderr
