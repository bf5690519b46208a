"""What has to be there before an attempt begins, in the order in which a person would put it right.

A thing that is missing may be on its way when the run was made a moment ago (tools apply files side by side): only
after `_ARRIVAL` is it somebody's business.
"""

from __future__ import annotations

from typing import Final

from tapforge_api.gpus import cluster_gpus_error
from tapforge_api.run_status import MAX_RESOLVED

from .conditions import Situation
from .draft import UNDECIDED, Draft
from .manifests import pool_spec_hash, ray_pods
from .records import MAX_ATTEMPTS, seconds
from .resolved import pool_of, resolve, slots_of

#: seconds
_ARRIVAL: Final = 60.0
_LOOK: Final = 15.0
_KUBERAY_LOOK: Final = 60.0
#: between the loss of a cluster and the next attempt: the first pause, and the longest
_FIRST_PAUSE: Final = 5.0
_LONGEST_PAUSE: Final = 300.0

_SEVERAL: Final = ("ReadWriteMany",)
_WRITABLE: Final = ("ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")


def obstacle(draft: Draft) -> Situation | None:
    """What keeps the next attempt from beginning."""
    return _written(draft) or _storage(draft) or _tried(draft) or _phones(draft) or _pause(draft)


def _written(draft: Draft) -> Situation | None:
    """What the file lacks, and the cluster."""
    run = draft.run
    if run.spec.cluster is None:
        text = "spec.cluster is missing: on a cluster a run has to say which image and machines it runs on"
        return _stalled("ClusterMissing", text)
    if wrong := cluster_gpus_error(run.spec):
        return _stalled("GPUsMissing", wrong)
    if run.status.attempts >= MAX_ATTEMPTS:
        return _stalled("TooManyAttempts", f"{MAX_ATTEMPTS} attempts were made, and a RayJob's name takes no more")
    if draft.seen.no_ray_jobs:
        draft.again(_KUBERAY_LOOK)
        return _stalled("KubeRayMissing", draft.seen.no_ray_jobs)
    if not run.status.resolved and (size := len(resolve(run))) > MAX_RESOLVED:
        text = f"the run has {size:,} characters when everything is written out, more than {MAX_RESOLVED:,}"
        return _stalled("SpecTooLarge", f"{text}: name a file of URLs or tasks instead of listing them")
    return None


def _storage(draft: Draft) -> Situation | None:
    storage, cluster = draft.run.spec.checkpoints.storage, draft.run.spec.cluster
    if storage is None or cluster is None:
        return None
    name, volume = storage.volume_claim.claim_name, draft.seen.volume
    draft.do(look_at_volume=True)
    if volume is None:
        return UNDECIDED
    draft.again(_LOOK)
    if not volume.found:
        return _missing(draft, "VolumeNotFound", f"there is no PersistentVolumeClaim {name} in {draft.run.namespace}")
    modes, pods = ", ".join(volume.modes) or "none", ray_pods(cluster)
    if not set(volume.modes) & set(_WRITABLE):
        text = f"PersistentVolumeClaim {name} can't be written to (access modes: {modes})"
        return _stalled("VolumeReadOnly", text)
    if pods > 1 and not set(volume.modes) & set(_SEVERAL):
        text = f"{pods} Ray Pods on several nodes write checkpoints, and PersistentVolumeClaim {name} is for one node"
        help_ = "take a ReadWriteMany claim, or leave spec.cluster.workers out"
        return _stalled("VolumeNotShared", f"{text} (access modes: {modes}): {help_}")
    return None


def _tried(draft: Draft) -> Situation | None:
    """Before the start, as long as the file can be put right: would its RayJob be taken?"""
    run, trial = draft.run, draft.seen.trial
    if run.status.start_time:
        return None
    if trial is None or trial.generation != run.generation:
        draft.do(try_job=True)
        return UNDECIDED
    if trial.refusal is None:
        return None
    draft.do(try_job=True)
    draft.again(_LOOK)
    return Situation("stalled" if trial.refusal.stalls else "busy", trial.refusal.reason, trial.refusal.message)


def _phones(draft: Draft) -> Situation | None:
    run, pool = draft.run, draft.seen.pool
    cluster, name = run.spec.cluster, pool_of(draft.run)
    if not name or cluster is None:
        return None
    need = cluster.min_ready_slots
    if run.spec.environment.source.own_pool is not None:
        if (waits := own_pool(draft)) is not None:
            return waits
    elif pool is None:
        draft.again(_LOOK)
        return _missing(draft, "PoolNotFound", f"there is no EmulatorPool {name} in namespace {run.namespace}")
    if pool is None:
        return None
    if pool.protocol != run.spec.environment.protocol:
        text = f"the phones of pool {name} speak {pool.protocol}, and the run expects {run.spec.environment.protocol}"
        return _stalled("ProtocolMismatch", f"{text}: set spec.environment.protocol, or take another pool")
    if pool.ready >= need:
        return None
    said = f"{pool.ready} of {need} phones of pool {name} are ready"
    if pool.taken:
        said = f"{said} and free; {pool.taken} are claimed by others"
    if pool.trouble:
        said = f"{said}; the pool says: {pool.trouble}"
    if pool.largest < need:
        text = f"spec.cluster.minReadySlots is {need}, and pool {name} has {pool.largest} phones at most"
        return _stalled("PoolTooSmall", text)
    draft.again(_LOOK)  # claims come and go without a word
    return _busy("WaitingForPhones", said)


def own_pool(draft: Draft) -> Situation | None:
    """Has the run's own pool made, or made again; what keeps it from being there."""
    run, pool = draft.run, draft.seen.pool
    if pool is None:
        draft.do(create_pool=True)
        refusal = draft.seen.refusal
        if refusal is not None:
            draft.again(_LOOK)
            return Situation("stalled" if refusal.stalls else "busy", refusal.reason, refusal.message)
        return _busy("WaitingForPhones", f"pool {run.name} is being made")
    if not pool.owned:
        text = f"EmulatorPool {run.name} exists and is not this run's: delete it, or give the run another name"
        return _stalled("PoolNameTaken", text)
    if pool.deleting:
        return _busy("WaitingForPhones", f"an earlier pool {run.name} is being deleted")
    if not run.status.start_time and pool.spec != pool_spec_hash(run):
        draft.do(delete_pool=pool.uid)
        return _busy("WaitingForPhones", f"pool {run.name} is made again: spec.environment was edited")
    return None


def _pause(draft: Draft) -> Situation | None:
    """The more clusters were lost in a row, the longer until the next one is asked for."""
    lost, attempt = draft.failures + draft.history.disrupted, draft.attempt
    if not lost or attempt.reason == "Suspended":
        return None
    pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(lost - 1, 10))
    left = seconds(attempt.since) + pause - draft.now
    if left <= 0:
        return None
    draft.again(left)
    return _busy("Restarting", f"attempt {attempt.number + 1} begins soon; the last one ended: {attempt.message}")


def fewer_phones(draft: Draft) -> str:
    pool, want = draft.seen.pool, slots_of(draft.run)
    if pool is None or pool.largest >= want:
        return ""
    return f"; it could use {want} phones, and pool {pool.name} has {pool.largest} at most"


def _missing(draft: Draft, reason: str, message: str) -> Situation:
    arriving = draft.now - draft.run.created < _ARRIVAL
    return Situation("busy" if arriving else "stalled", reason, message)


def _stalled(reason: str, message: str) -> Situation:
    return Situation("stalled", reason, message)


def _busy(reason: str, message: str) -> Situation:
    return Situation("busy", reason, message)
