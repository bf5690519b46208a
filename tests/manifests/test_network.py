"""Who reaches whom by the NetworkPolicies of manifests/components/network and those that the operator makes for runs,
with the labels that Pods really have: those that the operator's own functions give them, and KubeRay. No network of a
test cluster enforces policies, so they are read here as the API documents them: who is selected by no policy of a
direction is open in that direction, all others reach what one of their policies names.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pools import body, pool
from runs_made import made

from tapforge_api import load_pool
from tapforge_operator import labels as wellknown
from tapforge_operator.clusternetwork import RunNetwork, namespace_labels
from tapforge_operator.emulatorpool.pod import slot_pods
from tapforge_operator.emulatorpool.state import NewSlot
from tapforge_operator.trainingrun.network import network_policy
from tapforge_operator.trainingrun.rayjob import Broker, ray_job
from tapforge_operator.trainingrun.state import Run

Json = dict[str, Any]
MANIFESTS = Path(__file__).parents[2] / "manifests"
NETWORK = MANIFESTS / "components" / "network"


def read(path: Path) -> list[Json]:
    return list(yaml.safe_load_all(path.read_text()))


#: in `lab`, with the policy that the operator makes
RUN_OBJECT = replace(made(cluster={"image": "i", "workers": [{"name": "gpu", "replicas": 1}]}), namespace="lab")
USUAL = RunNetwork()
#: as they are in a cluster with the component in the operator's namespace and the one for phones in `lab`
POLICIES = [
    *read(NETWORK / "operator.yaml"),
    *({**p, "metadata": {**p["metadata"], "namespace": "lab"}} for p in read(NETWORK / "phones" / "phones.yaml")),
]


@dataclass(frozen=True)
class End:
    """Of a connection: a Pod, or an address of somebody else."""

    namespace: str = ""
    labels: Json = field(default_factory=dict)
    address: str = "10.64.0.9"

    @property
    def namespace_labels(self) -> Json:
        return {"kubernetes.io/metadata.name": self.namespace}


def selects(selector: Json, labels: Json) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", [])
    assert all(e["operator"] == "Exists" for e in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(e["key"] in labels for e in expressions)


def names_it(peer: Json, end: End, namespace: str) -> bool:
    """`namespace`: the policy's, which a peer without a namespaceSelector means."""
    if block := peer.get("ipBlock"):
        address = ipaddress.ip_address(end.address)
        inside = [net for net in (block["cidr"], *block["except"]) if address in ipaddress.ip_network(net)]
        return inside == [block["cidr"]]
    if not end.namespace:
        return False
    where = (
        selects(peer["namespaceSelector"], end.namespace_labels)
        if "namespaceSelector" in peer
        else end.namespace == namespace
    )
    return where and selects(peer.get("podSelector", {}), end.labels)


def lets(direction: str, one: End, other: End, port: tuple[str, int], policies: list[Json]) -> bool:
    """Whether `one` may have the connection with `other` in this direction."""
    selecting = [
        p
        for p in policies
        if p["metadata"]["namespace"] == one.namespace
        and direction in p["spec"]["policyTypes"]
        and selects(p["spec"]["podSelector"], one.labels)
    ]
    peers = "from" if direction == "Ingress" else "to"
    rules = [(p, rule) for p in selecting for rule in p["spec"].get(direction.lower(), [])]
    return not selecting or any(
        ("ports" not in rule or any(port == (p["protocol"], p.get("port", port[1])) for p in rule["ports"]))
        and (peers not in rule or any(names_it(peer, other, p["metadata"]["namespace"]) for peer in rule[peers]))
        for p, rule in rules
    )


def reaches(one: End, other: End, port: int, protocol: str = "TCP", network: RunNetwork = USUAL) -> bool:
    policies = [*POLICIES, network_policy(RUN_OBJECT, network)]
    at = protocol, port
    return lets("Egress", one, other, at, policies) and lets("Ingress", other, one, at, policies)


def phone(**labels: str) -> End:
    template = {"metadata": {"labels": labels}, "spec": body()["spec"]["template"]["spec"]}
    pod = slot_pods(pool(template=template))(NewSlot(name="phones-1", ordinal=0))
    return End("lab", pod["metadata"]["labels"])


def run_pods(run: Run) -> dict[str, End]:
    spec = ray_job(run, 1, Broker("https://broker", "ca"))["spec"]
    cluster = spec["rayClusterSpec"]
    templates = {
        "head": cluster["headGroupSpec"]["template"],
        "worker": cluster["workerGroupSpecs"][0]["template"],
        "submitter": spec["submitterPodTemplate"],
    }
    # As KubeRay adds it to what is in a Ray cluster.
    ray = {"head": {"ray.io/node-type": "head"}, "worker": {"ray.io/node-type": "worker"}}
    return {
        name: End("lab", {**template["metadata"]["labels"], **ray.get(name, {})})
        for name, template in templates.items()
    }


(DEPLOYMENT,) = [d for d in read(MANIFESTS / "base" / "operator.yaml") if d["kind"] == "Deployment"]
RUN = run_pods(RUN_OBJECT)
OTHER_RUN = run_pods(replace(RUN_OBJECT, name="other", uid="another"))
#: by its chart, and by its kustomization
KUBERAY = {"app.kubernetes.io/name": "kuberay-operator", "app.kubernetes.io/component": "kuberay-operator"}
ENDS = {
    **RUN,
    "operator": End("tapforge-system", DEPLOYMENT["spec"]["template"]["metadata"]["labels"]),
    "operator elsewhere": End("other", DEPLOYMENT["spec"]["template"]["metadata"]["labels"]),
    "phone": phone(),
    "phone with internet": phone(**{"phone-egress": "internet"}),
    "run elsewhere": End("other", RUN["head"].labels),
    "another run": OTHER_RUN["head"],
    "kuberay": End("default", KUBERAY),
    "kuberay of a kustomization": End("ray-system", {**KUBERAY, "app.kubernetes.io/name": "kuberay"}),
    "somebody": End("lab", {"app": "x"}),
    "a client": End("other", {"tapforge.dev/broker-client": "true"}),
    "prometheus": End("monitoring", {"app.kubernetes.io/name": "prometheus"}),
    "dns": End("kube-system", {"k8s-app": "kube-dns"}),
    "metadata": End(address="169.254.169.254"),
    "metadata by IPv6": End(address="fd00:ec2::254"),
    "metadata by NAT64": End(address="64:ff9b::a9fe:a9fe"),
    "Azure's": End(address="168.63.129.16"),
    "Azure's by NAT64": End(address="64:ff9b::a83f:8110"),
    "Google's by IPv6": End(address="fd20:ce::254"),
    "Alibaba's": End(address="100.100.100.200"),
    "a cache of DNS": End(address="169.254.20.10"),
    "another DNS": End("openshift-dns", {"dns.operator.openshift.io/daemonset-dns": "default"}),
    "the API server by IPv6": End(address="fd00:10::1"),
    "a neighbour by NAT64": End(address="64:ff9b::c0a8:101"),
    "the internet by NAT64": End(address="64:ff9b::5db8:d822"),
    "the internet by IPv6": End(address="2606:2800::1"),
    "the API server": End(address="172.18.0.2"),
    "a neighbour": End(address="192.168.1.1"),
    "the internet": End(address="93.184.216.34"),
}
TABLE = """
head                  phone                 8000  yes
worker                phone                 8000  yes
phone_of_a_run        phone                 8000  no
somebody              phone                 8000  no
run_elsewhere         phone                 8000  no
prometheus            phone                 8000  no
operator              phone                 8000  no
phone                 phone                 8000  no
phone                 head                  8265  no
phone                 head                  6379  no
phone                 somebody              80    no
phone                 operator              8443  no
phone                 the_API_server        443   no
phone                 metadata              80    no
phone                 metadata              53    no
phone                 metadata_by_IPv6      80    no
phone                 the_internet          443   no
phone                 dns                   53    yes
phone                 dns                   443   no
phone_with_internet   the_internet          443   yes
phone_with_internet   dns                   53    yes
phone_with_internet   metadata              80    no
phone_with_internet   metadata_by_IPv6      80    no
phone_with_internet   metadata_by_NAT64     80    no
phone_with_internet   Azure's               80    no
phone_with_internet   Azure's               32526 no
phone_with_internet   Azure's_by_NAT64      80    no
phone_with_internet   Google's_by_IPv6      80    no
phone_with_internet   Alibaba's             80    no
phone_with_internet   a_neighbour_by_NAT64  80    no
phone_with_internet   the_internet_by_NAT64 443   yes
phone_with_internet   the_internet_by_IPv6  443   yes
phone_with_internet   a_neighbour           80    no
phone_with_internet   somebody              80    no
head                  phone_with_internet   8000  yes
somebody              phone_with_internet   8000  no
head                  operator              8443  yes
run_elsewhere         operator              8443  yes
a_client              operator              8443  yes
somebody              operator              8443  no
prometheus            operator              8443  no
prometheus            operator              8080  yes
somebody              operator              8080  no
head                  operator              8080  no
phone                 operator              8080  no
operator              the_API_server        6443  yes
operator              the_API_server        443   yes
operator              the_API_server        16443 yes
operator              the_API_server_by_IPv6 6443 yes
operator              metadata              443   no
operator              metadata              80    no
operator              metadata_by_IPv6      443   no
operator              metadata_by_NAT64     80    no
operator              Azure's               80    no
operator              Azure's_by_NAT64      80    no
operator              Google's_by_IPv6      80    no
operator              Alibaba's             80    no
operator              dns                   53    yes
operator              operator              8443  yes
operator              operator              6379  no
operator_elsewhere    operator              8443  no
operator              a_cache_of_DNS        53    yes
operator              another_DNS           5353  yes
head                  worker                10002 yes
worker                head                  6379  yes
worker                worker                29500 yes
submitter             head                  8265  yes
submitter             head                  6379  no
submitter             worker                10002 no
kuberay               head                  8265  yes
kuberay_of_a_kustomization head             8265  yes
kuberay               head                  6379  no
kuberay               head                  10001 no
prometheus            head                  8080  yes
prometheus            worker                8080  yes
prometheus            head                  8265  no
somebody              head                  8265  no
somebody              head                  8080  no
somebody              head                  10001 no
somebody              worker                10002 no
somebody              submitter             80    no
run_elsewhere         head                  8265  no
another_run           head                  8265  no
another_run           head                  6379  no
operator              head                  8265  no
a_client              head                  8265  no
head                  metadata              80    yes
head                  the_internet          443   yes
"""
#: a phone that is claimed carries its run's name, and isn't a Pod of the run for that
ENDS["phone of a run"] = End("lab", {**phone().labels, wellknown.RUN: "run", wellknown.CLAIMED: "true"})


@pytest.mark.parametrize("line", [line for line in TABLE.split("\n") if line])
def test_who_reaches_whom(line: str) -> None:
    one, other, port, said = (word.replace("_", " ") for word in line.split())
    assert reaches(ENDS[one], ENDS[other], int(port)) is (said == "yes")


def test_kuberay_and_prometheus_are_where_the_operator_was_told() -> None:
    told = RunNetwork(kuberay=namespace_labels("kubernetes.io/metadata.name=ray-system,team=ml"), metrics=({"a": "b"},))
    assert not any(reaches(ENDS[name], ENDS["head"], 8265, network=told) for name in ("kuberay", "somebody"))
    in_system = replace(told, kuberay=namespace_labels("kubernetes.io/metadata.name=ray-system"))
    assert reaches(ENDS["kuberay of a kustomization"], ENDS["head"], 8265, network=in_system)
    assert not reaches(ENDS["kuberay"], ENDS["head"], 8265, network=in_system)
    assert not reaches(ENDS["prometheus"], ENDS["head"], 8080, network=told)
    anywhere = replace(told, metrics=(namespace_labels(""),))
    assert reaches(ENDS["somebody"], ENDS["head"], 8080, network=anywhere)
    assert not reaches(ENDS["somebody"], ENDS["head"], 8265, network=anywhere)


@pytest.mark.parametrize("wrong", ["kuberay", "=b", "a=b,c"])
def test_labels_of_a_namespace_that_are_none_are_named(wrong: str) -> None:
    with pytest.raises(ValueError, match="not a namespace label: expected KEY=VALUE"):
        namespace_labels(wrong)


def test_ports_that_a_template_chooses_are_open_and_the_usual_ones_are_not() -> None:
    chosen = {"dashboard-port": "9265", "metrics-export-port": "9080"}
    run = made(cluster={"image": "i", "head": {"rayStartParams": chosen}})
    _, dashboard, metrics = network_policy(run, RunNetwork())["spec"]["ingress"]
    assert [rule["port"] for rule in dashboard["ports"]] == [9265]
    assert [rule["port"] for rule in metrics["ports"]] == [9080]


@pytest.mark.parametrize("overlay", ["cluster", "namespaced"])
def test_the_operators_network_is_closed_by_default(overlay: str) -> None:
    kustomization = MANIFESTS / "overlays" / overlay / "kustomization.yaml"
    components = yaml.safe_load(kustomization.read_text())["components"]
    assert NETWORK in [(kustomization.parent / component).resolve() for component in components]


def test_dns_is_asked_by_datagrams_too() -> None:
    assert all(reaches(ENDS[name], ENDS["dns"], 53, "UDP") for name in ("phone", "operator"))


def test_the_internet_is_one_label_of_the_template_away() -> None:
    template = {"metadata": {"labels": {"phone-egress": "internet"}}, **body()["spec"]["template"]}
    text = yaml.safe_dump(
        {
            "apiVersion": "tapforge.dev/v1alpha1",
            "kind": "EmulatorPool",
            "metadata": {"name": "x"},
            "spec": {"replicas": 1, "template": template},
        }
    )
    assert load_pool(text).spec.template is not None, "a label that the operator kept for itself would be refused"
