"""Karpenter beside a cluster, with the provider that makes kwok's nodes, and its kinds in it.

- It is a process of the cluster like others (`karpenter`), with an administrator's rights under a name of its own, so
  that the audit log distinguishes its evictions from all others.
- Its nodes carry kwok's label: they become Ready, and their Pods live, as fake.py says.
- What a cloud would offer is `TYPES`, in one zone, on demand; prices go with the size, so that only what is unused
  makes a node worth taking away. Of an extended resource a node has as many as were asked for when it was made, never
  more: the provider knows no others.
- A NodePool has to ask for `ON_DEMAND`. Of one that leaves it open Karpenter takes the replacement of a node from spot
  capacity alone; the provider has none and panics, for that NodeClaim each time again, and Karpenter does nothing at
  all until that NodeClaim is launched.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from . import binaries
from .cluster import Cluster
from .processes import free_ports

KARPENTER: Final = "karpenter"
#: requirement of a NodePool
ON_DEMAND: Final = {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]}
_KINDS = ("karpenter.sh/v1/nodepools", "karpenter.sh/v1/nodeclaims", "karpenter.sh/v1alpha1/nodeoverlays")
#: dollars per hour and processor
_PRICE = 0.05


@dataclass(frozen=True, slots=True)
class InstanceType:
    name: str
    cpu: int
    memory_gib: int
    pods: int = 110


TYPES: Final = (
    InstanceType("m.4", 4, 16, 58),
    InstanceType("m.8", 8, 32, 58),
    InstanceType("m.16", 16, 64),
    InstanceType("m.32", 32, 128),
    InstanceType("metal.32", 32, 256),
)


def start(cluster: Cluster, types: Iterable[InstanceType] = TYPES) -> None:
    """Returns when it is ready: it has read the cluster, and brings nodes as soon as there is a NodePool."""
    programs = binaries.ensure(of=binaries.KARPENTER)
    cluster.apply(*(file for crds in ("crds", "provider-crds") for file in sorted((programs.parent / crds).glob("*"))))
    cluster.wait_for("Karpenter's kinds", lambda: all(cluster.exists(f"/apis/{kind}") for kind in _KINDS))
    offers = cluster.folder / "instance-types.json"
    offers.write_text(json.dumps([_offer(each) for each in types]))
    metrics, health = free_ports(2)
    environment = {
        "KUBECONFIG": str(cluster.user(KARPENTER, "system:masters")),
        "INSTANCE_TYPES_FILE_PATH": str(offers),
        "METRICS_PORT": str(metrics),
        "HEALTH_PROBE_PORT": str(health),
        "DISABLE_LEADER_ELECTION": "true",
        "FEATURE_GATES": "NodeOverlay=true",
    }
    cluster.run(KARPENTER, [str(programs / "karpenter")], environment)
    cluster.wait_for("Karpenter", lambda: _answers(health))


def panics(cluster: Cluster) -> list[str]:
    """Those that Karpenter's log has: it survives them, but what panicked is tried for ever."""
    said = [json.loads(line) for line in cluster.log(KARPENTER).read_text().splitlines() if line.startswith("{")]
    return [f"{it['time']} {it['controller']} {it['name']}: {it['panic']}" for it in said if "panic" in it]


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def _offer(it: InstanceType) -> dict[str, Any]:
    """As the provider reads it: its files mix two ways of writing names."""
    on = {"karpenter.sh/capacity-type": "on-demand", "topology.kubernetes.io/zone": "zone-a"}
    wanted = [{"key": key, "operator": "In", "values": [value]} for key, value in on.items()]
    return {
        "name": it.name,
        "architecture": "amd64",
        "operatingSystems": ["linux"],
        "resources": {"cpu": str(it.cpu), "memory": f"{it.memory_gib}Gi", "pods": str(it.pods)},
        "offerings": [
            {"Price": it.cpu * _PRICE + (0.1 if "metal" in it.name else 0), "Available": True, "Requirements": wanted}
        ],
    }
