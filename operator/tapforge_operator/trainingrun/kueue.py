"""Runs in Kueue's queues, and what the AdmissionCheck controller `tapforge.dev/phones` decides. Pure.

A ClusterQueue that lists a check of this controller reserves quota for a run's RayJob and starts it when the run's
phones are there. The rules:

1. Where the cluster has such a check, the RayJob of a run with a queue's label is created before there are phones. Else
   the phones of the run come first, as without a queue.
2. A run's demand for phones counts from the moment on when quota is reserved for it and all other checks of its
   Workload are Ready, until the quota is taken back. Without our check in the Workload that is its admission.
3. The check turns Ready when as many phones are ready and free as the run starts with. It stays so: Kueue resets it
   when it evicts the Workload.
4. Quota is held without phones for at most `boot.deadlineSeconds` of the pool, counted from when this operator saw the
   demand: Kueue's clock may be wrong. Then the check says Retry: Kueue takes the quota back and queues the run behind
   all others of its priority. `requeueAfterSeconds` is the shortest there is: Kueue (0.15) takes the quota back only
   when that time is over.
5. Where Kueue is not installed, does not answer or may not be read, there is no check.

Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tapforge_operator import labels
from tapforge_operator.kube.objectmeta import reading, seconds

CONTROLLER: Final = "tapforge.dev/phones"

_REQUEUE_AFTER: Final = 1
#: characters of Kueue's message that are worth repeating
_WORDS: Final = 500


# --- Kueue's objects --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckState:
    """An entry of a Workload's status.admissionChecks."""

    name: str
    #: Pending, Ready, Retry or Rejected
    state: str
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What a queue holds for a RayJob."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    #: UID of the RayJob
    job_uid: str
    queue: str = ""
    #: since when quota is reserved; 0 while it is not
    reserved: float = 0.0
    #: it has ended, or its quota is being taken back
    leaving: bool = False
    checks: tuple[CheckState, ...] = ()
    #: why no quota is reserved, in Kueue's words
    message: str = ""
    #: since when this process has seen the demand for phones that `demand_since` dates by others' clocks; 0: unknown
    seen: float = 0.0


@reading
def observe_workload(body: Mapping[str, Any]) -> Workload | None:
    """None for one of anything but a RayJob."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    owner = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), None)
    if owner is None or owner.get("kind") != "RayJob":
        return None
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    true = {kind for kind, condition in conditions.items() if condition.get("status") == "True"}
    quota = conditions.get("QuotaReserved", {})
    return Workload(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        job_uid=owner["uid"],
        queue=spec.get("queueName") or "",
        reserved=seconds(quota.get("lastTransitionTime") or "") if "QuotaReserved" in true else 0.0,
        leaving=not true.isdisjoint(("Evicted", "Finished")) or "deletionTimestamp" in metadata,
        checks=tuple(
            CheckState(check["name"], check["state"], seconds(check.get("lastTransitionTime") or ""))
            for check in status.get("admissionChecks") or ()
        ),
        message=(quota.get("message") or "")[:_WORDS],
    )


@dataclass(frozen=True, slots=True)
class AdmissionCheck:
    """One of this controller's."""

    name: str
    uid: str
    resource_version: str
    generation: int
    #: has its condition already
    active: bool = False


@reading
def observe_check(body: Mapping[str, Any]) -> AdmissionCheck | None:
    """None for one of another controller's."""
    metadata, spec = body["metadata"], body.get("spec") or {}
    if spec.get("controllerName") != CONTROLLER:
        return None
    conditions = (body.get("status") or {}).get("conditions") or ()
    active = any(c.get("type") == "Active" and c.get("status") == "True" for c in conditions)
    return AdmissionCheck(
        metadata["name"], metadata["uid"], metadata["resourceVersion"], metadata.get("generation", 0), active
    )


# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckUpdate:
    """The new state of our check in a Workload."""

    workload: Workload
    check: str
    state: str
    message: str
    requeue_after: int | None = None


def queue_of(run_labels: Mapping[str, str]) -> str:
    """Name of the LocalQueue that a run waits in; "" for none."""
    return run_labels.get(labels.QUEUE, "")


def demand_since(workload: Workload | None, ours: Collection[str]) -> float:
    """Since when the run's demand for phones counts; 0 while it does not. `ours`: names of this controller's checks."""
    if workload is None or not workload.reserved or workload.leaving:
        return 0.0
    others = [check for check in workload.checks if check.name not in ours]
    mine = [check for check in workload.checks if check.name in ours]
    if any(check.state != "Ready" for check in others) or any(c.state not in ("Pending", "Ready") for c in mine):
        return 0.0
    return max([workload.reserved, *(check.since for check in others)])


def decide(
    workload: Workload, ours: Collection[str], short: str, deadline: float, now: float
) -> CheckUpdate | float | None:
    """What to write, for a run whose demand counts; or the seconds until time alone changes that; None for a Workload
    without a pending check of ours. `short`: what keeps its phones from being enough, "" when they are."""
    check = next((check for check in workload.checks if check.name in ours and check.state == "Pending"), None)
    if check is None:
        return None
    if not short:
        return CheckUpdate(workload, check.name, "Ready", "its phones are ready")
    left = (workload.seen or demand_since(workload, ours)) + deadline - now
    if left > 0:
        return left
    text = f"quota was held for the pool's boot deadline of {deadline:g} s: {short}"
    return CheckUpdate(workload, check.name, "Retry", text, requeue_after=_REQUEUE_AFTER)


def queue_message(workload: Workload | None, held: str) -> str:
    """Why a queue holds a RayJob. `held`: what is known without the Workload."""
    if workload is None:
        return held
    if workload.reserved and workload.leaving:
        return f"{held}: queue {workload.queue} takes its quota back"
    if workload.reserved:
        open_ = ", ".join(check.name for check in workload.checks if check.state != "Ready")
        return f"{held}: queue {workload.queue} has reserved quota and waits for its checks ({open_})"
    return f"{held}: queue {workload.queue}: {workload.message or 'no quota is reserved yet'}"
