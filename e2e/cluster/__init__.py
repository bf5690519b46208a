"""A real Kubernetes control plane with fake nodes, for tests, demonstrations and benchmarks.

    with Cluster(nodes=3) as cluster:
        cluster.kubectl("get", "nodes")

etcd, the API server, the controller manager and the scheduler are the real ones, built from source; kwok plays the
nodes and their pods (fake.py says how to make a pod slow, sick or crash). Nothing is downloaded but Go modules; no
root, no containers, no fixed ports.

Seen on 2 cores that were busy with other work, Linux 6.18: the build takes 4 minutes once and leaves one binary of 150
MB beside Go's own caches (several GB). A cluster is up 4 to 7 s after `start` and gone 0.2 s after `stop`. It holds
about 450 MiB, with 1,000 pods 650, with 5,000 pods 1,040, more than half of it the API server. At `qps=2000` a
ReplicaSet's 1,000 pods are Ready after 13 s and 5,000 after 71 s, which cost 14 and 63 CPU-seconds. An API server that
was killed is back after 2 s.

`Options(real_node=True)` adds one real node (node/): a kubelet and containers that run. That takes root and 5 s more.
"""

from . import fake
from .api import APPLY, JSON_PATCH, MERGE, STRATEGIC, Api, Refused
from .binaries import CannotBuild
from .cluster import PATIENCE, Cluster, NotInTime
from .components import API_SERVER, CONTROLLER_MANAGER, ETCD, KWOK, SCHEDULER, Options

__all__ = [
    "API_SERVER",
    "APPLY",
    "CONTROLLER_MANAGER",
    "ETCD",
    "JSON_PATCH",
    "KWOK",
    "MERGE",
    "PATIENCE",
    "SCHEDULER",
    "STRATEGIC",
    "Api",
    "CannotBuild",
    "Cluster",
    "NotInTime",
    "Options",
    "Refused",
    "fake",
]
