"""What the confinement policy costs a write: Pods created one after the other, with the policy in the cluster and
without.

Two accounts write equal Pods: the operator's, whose writes the policy judges to the end, and another one, of which it
compares the name. The four take turns (without, with, with, without, as often as `rounds` says), and a figure is the
median of its turns. No operator and no scheduler runs, so the API server has the machine for itself.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

from e2e.cluster import MERGE, SCHEDULER

from . import pools
from .raw import CLIENT, Request, job, send
from .testbed import NAMESPACE, SYSTEM, Run, Testbed

_POLICY: Final = Path(__file__).parents[2] / "manifests" / "components" / "confinement" / "policy.yaml"
_GROUP: Final = "/apis/admissionregistration.k8s.io/v1"
_NAME: Final = "operator-writes-its-own.tapforge.dev"
#: as the policy's binding names it
_OPERATOR: Final = "tapforge-operator"
_OTHER: Final = CLIENT[1]
_PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"
_ENABLED: Final = {"tapforge.dev/workloads": "enabled"}


def run(options: Run) -> dict[str, Any]:
    writes, rounds = (40, 1) if options.quick else (600, 4)
    # Milliseconds of a write, by whether the policy is there and whose write it is.
    took: dict[tuple[bool, str], list[float]] = {}
    with Testbed(options) as bed:
        bed.cluster.stop_component(SCHEDULER)
        operator = bed.administrator(_OPERATOR)
        api = bed.cluster.api
        api("PATCH", f"/api/v1/namespaces/{NAMESPACE}", {"metadata": {"labels": _ENABLED}}, MERGE)
        pool = bed.make_pool("phones", 0)
        there = False
        for confined in (False, True, True, False) * rounds:
            if confined != there:
                (_install if confined else _remove)(bed, operator)
                there = confined
            for account in (_OPERATOR, _OTHER):
                took.setdefault((confined, account), []).append(_write(bed, pool, account, writes))
                bed.drop_pods()
    free, judged = (statistics.median(took[confined, _OPERATOR]) for confined in (False, True))
    other_free, other = (statistics.median(took[confined, _OTHER]) for confined in (False, True))
    return {
        "confinement_write_ms": round(judged, 3),
        "confinement_write_free_ms": round(free, 3),
        "confinement_write_ratio": round(judged / free, 3),
        "confinement_others_write_ratio": round(other / other_free, 3),
        "confinement_turns": {f"{account}, {'with' if c else 'without'}": took[c, account] for c, account in took},
        "confinement_writes": writes,
    }


def _write(bed: Testbed, pool: dict[str, Any], account: str, writes: int) -> float:
    """Milliseconds that one create takes, of so many in a row by this account."""
    pods = pools.equal_pods(pool, writes)
    token = bed.cluster.token(SYSTEM, account)
    work = job(bed.cluster, account, [Request("POST", _PODS, pod) for pod in pods], in_flight=1, token=token)
    return round(1000 * send(work).seconds / writes, 3)


def _install(bed: Testbed, operator: Path) -> None:
    bed.cluster.apply(_POLICY)
    bed.cluster.wait_for("the policy to be in force", lambda: _refuses(bed, operator), 60)


def _remove(bed: Testbed, operator: Path) -> None:
    for kind in ("validatingadmissionpolicybindings", "validatingadmissionpolicies"):
        bed.cluster.api("DELETE", f"{_GROUP}/{kind}/{_NAME}")
    bed.cluster.wait_for("the policy to be gone", lambda: not _refuses(bed, operator), 60)


def _refuses(bed: Testbed, operator: Path) -> bool:
    """Whether the operator's account may not write what belongs to no object of ours."""
    command = ("create", "configmap", "probe", "-n", "default", "--dry-run=server")
    done = bed.cluster.kubectl(*command, kubeconfig=operator, check=False)
    return done.returncode != 0 and _NAME in done.stderr
