"""A pool and a ReplicaSet of the same Pod grow from nothing until all Pods are Ready, under equal raised limits.

Scheduler and controller manager may send 1,000 requests a second each, and so may the operator. The two take turns;
the time begins when the new size comes in at the API server and ends when the last Pod's Ready was written. Fake Pods
are Ready at once, so what is measured is the way through API server, scheduler and node.
"""

from __future__ import annotations

from typing import Any

from e2e.cluster import MERGE

from . import pools
from .audit import Write
from .testbed import NAMESPACE, USER, Run, Testbed

_QPS = 1000
_SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/replicasets"
_POD_WRITES = ("pods", "pods/binding", "pods/status", "events")


def run(options: Run) -> dict[str, Any]:
    slots = 100 if options.quick else 5000
    turns = ("pool", "set") if options.quick else ("pool", "set", "set", "pool")
    seconds: dict[str, list[float]] = {"pool": [], "set": []}
    writes: dict[str, list[float]] = {"pool": [], "set": []}
    with Testbed(options, nodes=-(-slots // pools.PER_NODE) + 1, qps=_QPS) as bed:
        bed.make_pool("phones", 0)
        bed.cluster.api("POST", _SETS, pools.replica_set("phones", NAMESPACE))
        bed.start_operator()
        for turn in turns:
            took, wrote = _pool(bed, slots) if turn == "pool" else _set(bed, slots)
            seconds[turn].append(took)
            writes[turn].append(wrote / slots)
    pool, other = sum(seconds["pool"]), sum(seconds["set"])
    return {
        "ready_seconds": round(pool / len(seconds["pool"]), 2),
        "replicaset_ready_seconds": round(other / len(seconds["set"]), 2),
        "ready_ratio": round(pool / other, 3),
        "ready_slots": slots,
        "turns": len(turns),
        "each": {side: [round(s, 2) for s in took] for side, took in seconds.items()},
        #: of all users, from empty to Ready
        "cluster_writes_per_slot": {side: round(sum(w) / len(w), 2) for side, w in writes.items()},
        "qps": _QPS,
    }


def _pool(bed: Testbed, slots: int) -> tuple[float, int]:
    mark = bed.audit.mark()
    bed.resize("phones", slots)
    measured = _until_ready(bed, mark, slots, "emulatorpools")
    bed.wait_status("phones", 60, ready=slots)
    bed.resize("phones", 0)
    bed.wait_status("phones", 300, pods=0)
    _wait_empty(bed)
    return measured


def _set(bed: Testbed, slots: int) -> tuple[float, int]:
    mark = bed.audit.mark()
    bed.cluster.api("PATCH", f"{_SETS}/phones", {"spec": {"replicas": slots}}, MERGE)
    measured = _until_ready(bed, mark, slots, "replicasets")
    bed.cluster.api("PATCH", f"{_SETS}/phones", {"spec": {"replicas": 0}}, MERGE)
    _wait_empty(bed)
    return measured


def _until_ready(bed: Testbed, mark: int, slots: int, resource: str) -> tuple[float, int]:
    """Seconds until all were Ready, and all users' writes meanwhile."""
    ready = bed.audit.wait(f"{slots} ready Pods", mark, _makes_ready, slots, 120 + slots / 5)
    since = bed.audit.since(mark)
    asked = next(w for w in since if w.resource == resource and w.verb == "patch" and w.user != USER)
    end = max(write.ended for write in ready)
    return end - asked.began, sum(w.resource in _POD_WRITES and w.ended <= end for w in since)


def _makes_ready(write: Write) -> bool:
    """kwok writes one status per Pod here: that it is Ready."""
    return write.resource == "pods/status" and write.agent.startswith("kwok") and write.done


def _wait_empty(bed: Testbed) -> None:
    where = f"/api/v1/namespaces/{NAMESPACE}/pods?limit=1"
    bed.cluster.wait_for("an empty namespace", lambda: not bed.cluster.api("GET", where)["items"], 300)
