"""Every label, annotation and name that the operator writes on a cluster's objects.

Labels are for selecting, annotations for remembering. Only objects that the operator itself made carry them; a user's
own objects are never written to, except their status.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

from tapforge_api.base import POD_TEMPLATES_ANNOTATION

DOMAIN: Final = "tapforge.dev"

# --- labels of a slot's Pod, of an external URL's Lease and of a pool's other objects ---------------------------------

#: name of the EmulatorPool
POOL: Final = "tapforge.dev/pool"
#: metadata.uid of the EmulatorPool; the status' selector is made of it, so that a pool of the same name that was
#: deleted and made again shares no Pod with the first
POOL_UID: Final = "tapforge.dev/pool-uid"
#: number of the slot in its pool, from 0
ORDINAL: Final = "tapforge.dev/ordinal"
#: hash of the user's template that the Pod was made of
TEMPLATE: Final = "tapforge.dev/template"
#: "true" while the slot is claimed; absent otherwise. The disruption budget selects by it
CLAIMED: Final = "tapforge.dev/claimed"
#: name of the TrainingRun that holds the slot, where a run does; on a run's own objects that run's
RUN: Final = "tapforge.dev/run"

# --- labels of what is made for a run ---------------------------------------------------------------------------------

#: metadata.uid of the TrainingRun
RUN_UID: Final = "tapforge.dev/run-uid"
#: number of the attempt that a RayJob and its Pods are
ATTEMPT: Final = "tapforge.dev/attempt"

#: on a run, by its user: name of the LocalQueue of Kueue's that it waits in
QUEUE: Final = "kueue.x-k8s.io/queue-name"

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
OPERATOR: Final = "tapforge-operator"

# --- annotations ------------------------------------------------------------------------------------------------------

#: the claim of a slot as signed JSON (broker/claim_record.py); absent while the slot is free
CLAIM: Final = "tapforge.dev/claim"
#: episodes that the slot has run under claims that were given back
EPISODES: Final = "tapforge.dev/episodes"
#: the largest fence that the slot was ever claimed with
FENCE: Final = "tapforge.dev/fence"
#: fence of a claim that another leader reported than the one that wrote it
CONFIRMED: Final = "tapforge.dev/confirmed"
#: on the Lease of an external URL: the URL
URL: Final = "tapforge.dev/url"
#: on the Lease of an external URL: claims in a row that ended badly; absent after one that ended well
STRIKES: Final = "tapforge.dev/strikes"
#: on the Lease of an external URL: seconds that it rests after its last claim; absent when it need not
REST: Final = "tapforge.dev/rest"
#: on the leader's Lease: host and port of its broker
BROKER: Final = "tapforge.dev/broker"
#: why a Pod that failed is still there (recycle.retainFailed)
RETAINED: Final = "tapforge.dev/retained"
#: on a pool, by its user: "true" lets a pool with claimed slots be deleted
ALLOW_DELETE: Final = "tapforge.dev/allow-delete-claimed"

#: on a run's own pool: hash of what its run says about it
SPEC: Final = "tapforge.dev/spec"
#: on a run as it was resolved: digest of the Pod templates that it was started with
POD_TEMPLATES: Final = POD_TEMPLATES_ANNOTATION

#: on a namespace, by the cluster's administrator: "enabled" lets the operator create Pods and all else there,
#: "privileged" also Pods that own their node (manifests/components/confinement)
WORKLOADS: Final = "tapforge.dev/workloads"

SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
DO_NOT_DISRUPT: Final = "karpenter.sh/do-not-disrupt"

#: the container that is the phone
CONTAINER: Final = "emulator"

#: characters of a slot name's hash: 50 bits, and every name of a pool is compared with the pool's UID anyway
_HASH = 10
_LETTERS: Final = "0123456789abcdefghijklmnopqrstuv"
#: two letters for ten bits, the lower ones first
_PAIRS: Final = tuple(_LETTERS[bits & 31] + _LETTERS[bits >> 5] for bits in range(1024))
_MAX_NAME: Final = 63


def digest(*parts: object, length: int = _HASH) -> str:
    """A hash in the letters that names may have; equal exactly for equal parts."""
    whole = "\0".join(map(str, parts)).encode()
    number = int.from_bytes(hashlib.sha256(whole).digest(), "big") & ((1 << (5 * length)) - 1)
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in range(0, 5 * length, 10)])[:length]


def config_name(run: str, run_uid: str) -> str:
    """Name of the ConfigMap with a run as its attempts see it: the same for all of them, another one for a run of the
    same name that is made later."""
    return f"{run}-{digest(run_uid)}"


def broker_config_name(run: str, run_uid: str) -> str:
    """Name of the ConfigMap with the certificates that a run's Pods check the broker's by."""
    return f"{run}-broker-{digest(run_uid, length=5)}"


def network_name(run: str, run_uid: str) -> str:
    """Name of the NetworkPolicy of a run's Pods."""
    return f"{run}-network-{digest(run_uid, length=5)}"


def ray_job_name(run: str, attempt: int) -> str:
    """Name of an attempt's RayJob: at most 47 characters up to attempt 999."""
    return f"{run}-{attempt}"


@lru_cache(maxsize=16_384)  # plans that overlap name the same slots again
def slot_name(pool: str, pool_uid: str, ordinal: int, predecessor: str) -> str:
    """Name of the Pod of a slot. `predecessor` is the UID of the Pod that had the ordinal before, "" for none known: to
    create a slot twice is a conflict, never a second Pod. At most 63 characters, whatever the pool is called."""
    tail = digest(pool_uid, ordinal, predecessor)
    return f"{pool[: _MAX_NAME - len(tail) - 1].rstrip('-.')}-{tail}"
