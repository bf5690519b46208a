"""1 % of 5,000 ready slots fail at once, ten times: how soon is each one's replacement created?

A slot's time begins when its failure was written (its Pod's phase is Failed) and ends when the create of its
replacement was answered. Which Pod is whose replacement is known from its name.
"""

from __future__ import annotations

from random import Random
from typing import Any

from e2e.cluster import STRATEGIC
from tapforge_operator import labels

from . import pools
from .figures import percentile
from .raw import Request, job, send
from .testbed import NAMESPACE, USER, Run, Testbed

_KILLER = "bench-killer"
_SEED = 0


def run(options: Run) -> dict[str, Any]:
    slots, rounds = (100, 2) if options.quick else (5000, 10)
    share = max(1, slots // 100)
    took: list[float] = []
    with Testbed(options, nodes=-(-slots // pools.PER_NODE) + 2, qps=1000) as bed:
        bed.start_operator()
        pool = bed.make_fleet("phones", slots)
        rng, cpu = Random(_SEED), bed.cpu_seconds()
        for _ in range(rounds):
            alive = [pod for pod in bed.pods() if "deletionTimestamp" not in pod["metadata"]]
            took += _round(bed, pool["metadata"]["uid"], rng.sample(alive, share))
            bed.wait_status("phones", 120, ready=slots, pods=slots)
        cpu = bed.cpu_seconds() - cpu
    return {
        "replace_p50_s": round(percentile(took, 50), 3),
        "replace_p99_s": round(percentile(took, 99), 3),
        "replace_max_s": round(max(took), 3),
        "replaced": len(took),
        "at_once": share,
        "of_slots": slots,
        "cpu_ms_per_replacement": round(1000 * cpu / len(took), 1),
    }


def _round(bed: Testbed, pool_uid: str, pods: list[dict[str, Any]]) -> list[float]:
    """Seconds of each."""
    mark = bed.audit.mark()
    send(job(bed.cluster, _KILLER, [_failure(pod) for pod in pods]))
    heirs = {_heir(pool_uid, pod): pod["metadata"]["name"] for pod in pods}
    made = bed.audit.wait(
        f"{len(pods)} replacements",
        mark,
        lambda w: w.user == USER and w.verb == "create" and w.resource == "pods" and w.done and w.name in heirs,
        len(pods),
        120,
    )
    failed = {w.name: w.ended for w in bed.audit.since(mark) if w.agent == _KILLER}
    return [write.ended - failed[heirs[write.name]] for write in made]


def _failure(pod: dict[str, Any]) -> Request:
    status = {
        "phase": "Failed",
        "reason": "OOMKilled",
        "conditions": [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "False"}],
    }
    where = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}/status"
    return Request("PATCH", where, {"status": status}, STRATEGIC)


def _heir(pool_uid: str, pod: dict[str, Any]) -> str:
    """Name of the Pod that takes this one's place."""
    ordinal = int(pod["metadata"]["labels"][labels.ORDINAL])
    return labels.slot_name("phones", pool_uid, ordinal, pod["metadata"]["uid"])
