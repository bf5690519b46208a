"""What has to be there before an attempt begins, in the order in which a person would put it right.

A thing that is missing may be on its way when the run was made a moment ago (tools apply files side by side): it is
Stalled only after `_ARRIVAL_GRACE`.
"""

from __future__ import annotations

from typing import Final

from tapforge_api.gpus import cluster_gpus_error
from tapforge_api.ray_authentication import authentication_error
from tapforge_api.run_status import MAX_RESOLVED
from tapforge_operator import labels
from tapforge_operator.kube.objectmeta import seconds
from tapforge_operator.trainingrun import templates
from tapforge_operator.trainingrun.kueue import queue_of
from tapforge_operator.trainingrun.rayjob import pool_spec_hash, ray_pods, resolve
from tapforge_operator.trainingrun.state import MAX_ATTEMPTS, UNDECIDED, PlanBuilder, pool_of, slots_of
from tapforge_operator.trainingrun.status import SUSPENSIONS, Situation

#: seconds
_ARRIVAL_GRACE: Final = 60.0
_REFRESH: Final = 15.0
KUBERAY_REFRESH: Final = 60.0
#: bytes of all that a ConfigMap holds
_MAX_CONFIG_MAP: Final = 1_048_576
#: between the loss of a cluster and the next attempt: the first wait, and the longest
_FIRST_BACKOFF: Final = 5.0
_LONGEST_BACKOFF: Final = 300.0

_SEVERAL: Final = ("ReadWriteMany",)
_WRITABLE: Final = ("ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")


def unmet_prerequisite(plan: PlanBuilder) -> Situation | None:
    """What keeps the next attempt from beginning."""
    queue_first = bool(plan.observed.phone_checks and queue_of(plan.run.labels))
    return (
        _spec(plan)
        or _config(plan)
        or _volume(plan)
        or _dry_run(plan)
        or phones(plan, later=queue_first)
        or _backoff(plan)
    )


def _spec(plan: PlanBuilder) -> Situation | None:
    """What the file lacks, and the cluster."""
    run = plan.run
    if run.spec.cluster is None:
        text = "spec.cluster is missing: on a cluster a run has to say which image and machines it runs on"
        return _stalled("ClusterMissing", text)
    if not run.status.start_time:  # one that has started stays as it is: its spec can't be corrected any more
        if wrong := cluster_gpus_error(run.spec):
            return _stalled("GPUsMissing", wrong)
        if wrong := authentication_error(run.spec.cluster):
            return _stalled("RayAuthentication", wrong)
    if run.status.attempts >= MAX_ATTEMPTS:
        return _stalled("TooManyAttempts", f"{MAX_ATTEMPTS} attempts were made, and a RayJob's name takes no more")
    if (missing := plan.observed.no_ray_jobs) is not None:
        plan.requeue(KUBERAY_REFRESH)
        return Situation("stalled" if missing.stalls else "busy", missing.reason, missing.message)
    return _too_large(plan) if not run.status.resolved else templates_lost(plan)


def _too_large(plan: PlanBuilder) -> Situation | None:
    """For the status, and for the ConfigMap that keeps it beside the Pod templates."""
    resolved = resolve(plan.run)
    if (size := len(resolved)) > MAX_RESOLVED:
        text = f"the run has {size:,} characters when everything is written out, more than {MAX_RESOLVED:,}"
        return _stalled("SpecTooLarge", f"{text}: name a file of URLs or tasks instead of listing them")
    ours = len(templates.written(plan.run.spec).encode())
    if (size := len(resolved.encode()) + ours) > _MAX_CONFIG_MAP:
        text = f"the run and its Pod templates have {size:,} bytes, and a ConfigMap takes {_MAX_CONFIG_MAP:,}"
        help_ = "mount ConfigMaps of your own instead of writing files into the templates"
        return _stalled("SpecTooLarge", f"{text}; the templates alone have {ours:,}: {help_}")
    return None


def templates_lost(plan: PlanBuilder) -> Situation | None:
    run = plan.run
    if not templates.lost(run.spec, run.status.resolved, run.templates):
        return None
    plan.requeue(_REFRESH)
    return _stalled("TemplatesLost", templates.lost_message(labels.config_name(run.name, run.uid)))


def _config(plan: PlanBuilder) -> Situation | None:
    if (refusal := plan.observed.config_refusal) is None:
        return None
    plan.requeue(_REFRESH)
    return Situation("stalled" if refusal.stalls else "busy", refusal.reason, refusal.message)


def _volume(plan: PlanBuilder) -> Situation | None:
    storage, cluster = plan.run.spec.checkpoints.storage, plan.run.spec.cluster
    if storage is None or cluster is None:
        return None
    name, volume = storage.volume_claim.claim_name, plan.observed.volume
    plan.do(read_volume=True)
    if volume is None:
        return UNDECIDED
    plan.requeue(_REFRESH)
    if not volume.found:
        return _missing(plan, "VolumeNotFound", f"there is no PersistentVolumeClaim {name} in {plan.run.namespace}")
    modes, pods = ", ".join(volume.modes) or "none", ray_pods(cluster)
    if not set(volume.modes) & set(_WRITABLE):
        text = f"PersistentVolumeClaim {name} can't be written to (access modes: {modes})"
        return _stalled("VolumeReadOnly", text)
    if pods > 1 and not set(volume.modes) & set(_SEVERAL):
        text = f"{pods} Ray Pods on several nodes write checkpoints, and PersistentVolumeClaim {name} is for one node"
        help_ = "take a ReadWriteMany claim, or leave spec.cluster.workers out"
        return _stalled("VolumeNotShared", f"{text} (access modes: {modes}): {help_}")
    return None


def _dry_run(plan: PlanBuilder) -> Situation | None:
    """Before the start, as long as the file can be corrected: would its RayJob be accepted?"""
    run, dry_run = plan.run, plan.observed.dry_run
    if run.status.start_time:
        return None
    if dry_run is None or dry_run.generation != run.generation:
        plan.do(dry_run_job=True)
        return UNDECIDED
    if dry_run.refusal is None:
        return None
    plan.do(dry_run_job=True)
    plan.requeue(_REFRESH)
    return Situation("stalled" if dry_run.refusal.stalls else "busy", dry_run.refusal.reason, dry_run.refusal.message)


def phones(plan: PlanBuilder, *, later: bool = False) -> Situation | None:
    """What keeps the run from having the phones that it starts with. `later`: only what a person has to correct."""
    run, pool = plan.run, plan.observed.pool
    cluster, name = run.spec.cluster, pool_of(plan.run)
    if not name or cluster is None:
        return None
    need, quota = cluster.min_ready_slots, plan.observed.claim_quota
    if quota is not None and quota < need:
        text = f"spec.cluster.minReadySlots is {need}, and the claim quota of namespace {run.namespace} is {quota}"
        return _stalled("ClaimQuotaTooSmall", f"{text}: lower the one, or have the other raised")
    if run.spec.environment.source.own_pool is not None:
        if later:
            return None
        if (unmet := own_pool(plan)) is not None:
            return unmet
    elif pool is None:
        plan.requeue(_REFRESH)
        return _missing(plan, "PoolNotFound", f"there is no EmulatorPool {name} in namespace {run.namespace}")
    if pool is None:
        return None
    if pool.protocol != run.spec.environment.protocol:
        text = f"the phones of pool {name} speak {pool.protocol}, and the run expects {run.spec.environment.protocol}"
        return _stalled("ProtocolMismatch", f"{text}: set spec.environment.protocol, or take another pool")
    if pool.ready >= need:
        return None
    text = f"{pool.ready} of {need} phones of pool {name} are ready"
    if pool.taken:
        text = f"{text} and free; {pool.taken} are claimed by others"
    if pool.quota_room is not None and pool.quota_room < need:
        text = f"{text}; the claim quota of namespace {run.namespace} allows {pool.quota_room} here at present"
    if pool.message:
        text = f"{text}; the pool reports: {pool.message}"
    if pool.largest < need:
        text = f"spec.cluster.minReadySlots is {need}, and pool {name} has {pool.largest} phones at most"
        return _stalled("PoolTooSmall", text)
    if later:
        return None
    plan.requeue(_REFRESH)  # claims cause no event
    return _busy("WaitingForPhones", text)


def own_pool(plan: PlanBuilder) -> Situation | None:
    """Has the run's own pool made, or made again; what keeps it from being there."""
    run, pool = plan.run, plan.observed.pool
    if pool is None:
        if (lost := templates_lost(plan)) is not None:
            return lost
        plan.do(create_pool=True)
        refusal = plan.observed.refusal
        if refusal is not None:
            plan.requeue(_REFRESH)
            return Situation("stalled" if refusal.stalls else "busy", refusal.reason, refusal.message)
        return _busy("WaitingForPhones", f"pool {run.name} is being made")
    if not pool.owned:
        text = f"EmulatorPool {run.name} exists and is not this run's: delete it, or give the run another name"
        return _stalled("PoolNameTaken", text)
    if pool.deleting:
        return _busy("WaitingForPhones", f"an earlier pool {run.name} is being deleted")
    if not run.status.start_time and pool.spec != pool_spec_hash(run):
        plan.do(delete_pool=pool.uid)
        return _busy("WaitingForPhones", f"pool {run.name} is made again: spec.environment was edited")
    return None


def _backoff(plan: PlanBuilder) -> Situation | None:
    """The more clusters were lost in a row, the longer until the next one is asked for."""
    lost, attempt = plan.failures + plan.history.disrupted, plan.attempt
    if not lost or attempt.reason in SUSPENSIONS:
        return None
    wait = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(lost - 1, 10))
    left = seconds(attempt.since) + wait - plan.now
    if left <= 0:
        return None
    plan.requeue(left)
    return _busy("Restarting", f"attempt {attempt.number + 1} begins soon; the last one ended: {attempt.message}")


def fewer_phones(plan: PlanBuilder) -> str:
    pool, want = plan.observed.pool, slots_of(plan.run)
    if pool is None or pool.largest >= want:
        return ""
    return f"; it could use {want} phones, and pool {pool.name} has {pool.largest} at most"


def _missing(plan: PlanBuilder, reason: str, message: str) -> Situation:
    arriving = plan.now - plan.run.created < _ARRIVAL_GRACE
    return Situation("busy" if arriving else "stalled", reason, message)


def _stalled(reason: str, message: str) -> Situation:
    return Situation("stalled", reason, message)


def _busy(reason: str, message: str) -> Situation:
    return Situation("busy", reason, message)
