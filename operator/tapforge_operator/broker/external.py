"""A claim of an external URL: it has no Pod, so a `coordination.k8s.io` Lease carries its record. Pure.

1. One Lease for each URL of a pool, named by the pool's UID and the URL, made when the URL is first claimed. It goes
   with the pool (its owner), or when the URL was taken out of the pool, it has no holder any more and its rest is over.
2. The slot's UID is made of the same two, not the Lease's: a Lease that was deleted doesn't make a new slot.
3. `holderIdentity`, `leaseTransitions` and the times are for people and tools; what counts is the signed record and the
   fence annotation, as on a Pod.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tapforge_api.base import API_VERSION
from tapforge_operator import labels as wellknown
from tapforge_operator.broker.claim_record import ClaimRecord, Clear, Keys, SlotView
from tapforge_operator.broker.devices import device_of
from tapforge_operator.kube.client import path
from tapforge_operator.kube.types import PoolObject, written_number

Object = dict[str, Any]

_GROUP = "coordination.k8s.io/v1"
_HASH = 20
_LONGEST_REST = 7200


@dataclass(frozen=True, slots=True)
class Url:
    """An external URL of a pool."""

    pool: str
    pool_uid: str
    namespace: str
    url: str
    #: of its pool; "" where only its Lease is known
    protocol: str = ""

    @property
    def uid(self) -> str:
        return f"url-{self._digest}"

    @property
    def lease(self) -> str:
        """Name of its Lease."""
        return f"{self.pool[: 63 - _HASH - 1].rstrip('-.')}-{self._digest}"

    @property
    def _digest(self) -> str:
        return wellknown.digest(self.pool_uid, self.url, length=_HASH)


def urls_of(pool: PoolObject) -> list[Url]:
    listed = (pool.spec.get("external") or {}).get("urls") or ()
    protocol = str(pool.spec.get("protocol") or "")
    return [Url(pool.name, pool.uid, pool.namespace, str(url), protocol) for url in listed]


def url_of(lease: Mapping[str, Any]) -> Url | None:
    """What a Lease is of; None for a Lease of something else. Any client may write annotations, so the name has to
    agree."""
    metadata = lease["metadata"]
    owner = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), None)
    url = (metadata.get("annotations") or {}).get(wellknown.URL)
    if owner is None or owner.get("kind") != "EmulatorPool" or not url:
        return None
    known = Url(owner["name"], owner["uid"], metadata["namespace"], url)
    return known if known.lease == metadata["name"] else None


def slot_key(lease: Mapping[str, Any]) -> tuple[str, str] | None:
    """Namespace and slot that a Lease is of."""
    url = url_of(lease)
    return (url.namespace, url.uid) if url else None


class Leases:
    """Leases by their namespace and slot, also of URLs that are in no pool's list at present. One in another namespace
    than its pool's belongs to no slot: a client that may write it there may not write to the pool."""

    def __init__(self, leases: Iterable[Mapping[str, Any]] = ()):
        self._known = {key: lease for lease in leases if (key := slot_key(lease))}

    def get(self, url: Url) -> Mapping[str, Any] | None:
        return self._known.get((url.namespace, url.uid))

    def views(self, keys: Keys) -> list[SlotView]:
        return [view_of(url, lease, keys) for lease in self._known.values() if (url := url_of(lease))]

    def note(self, lease: Mapping[str, Any], deleted: bool) -> str | None:
        """Returns the slot that it is of."""
        key = slot_key(lease)
        if key is not None and deleted:
            self._known.pop(key, None)
        elif key is not None:
            self._known[key] = lease
        return None if key is None else key[1]

    def keep(self, there: Iterable[Mapping[str, Any]]) -> Set[tuple[str, str]]:
        """Forgets all that are not there. Returns namespaces and slots of those that are."""
        slots = {key for lease in there if (key := slot_key(lease))}
        self._known = {key: lease for key, lease in self._known.items() if key in slots}
        return slots


def view_of(url: Url, lease: Mapping[str, Any] | None, keys: Keys) -> SlotView:
    """The slot as its Lease records it, or without one."""
    base = SlotView(
        uid=url.uid,
        pool=url.pool_uid,
        namespace=url.namespace,
        name=url.lease,
        version="",
        address=url.url,
        device=device_of(url.url, url.protocol),
        ready=True,
        lasting=True,
    )
    return with_lease(base, lease, keys) if lease else base


def with_lease(view: SlotView, lease: Mapping[str, Any], keys: Keys) -> SlotView:
    metadata, spec = lease["metadata"], lease.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    reading = keys.read(annotations.get(wellknown.CLAIM, ""), view.uid)
    return SlotView(
        uid=view.uid,
        pool=view.pool,
        namespace=view.namespace,
        name=view.name,
        version=metadata["resourceVersion"],
        address=view.address,
        device=view.device,
        ready=True,
        lasting=True,
        transitions=int(spec.get("leaseTransitions") or 0),
        fence=written_number(annotations.get(wellknown.FENCE)),
        episodes=written_number(annotations.get(wellknown.EPISODES)),
        confirmed=annotations.get(wellknown.CONFIRMED, ""),
        failures=written_number(annotations.get(wellknown.STRIKES)),
        # Any client may write annotations: none of them withholds a phone for ever.
        rest=float(min(written_number(annotations.get(wellknown.REST)), _LONGEST_REST)),
        record=reading.record,
        unproved=reading.unproved,
    )


def where(view: SlotView) -> str:
    return path("leases", view.namespace, view.name, group=_GROUP)


def collection(view: SlotView) -> str:
    return path("leases", view.namespace, group=_GROUP)


def claim_body(view: SlotView, record: ClaimRecord, keys: Keys, pool: str) -> Object:
    """The patch of a Lease that is there, or the whole of one that is not. `pool`: its name."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    labels = {wellknown.CLAIMED: "true", wellknown.RUN: record.run or None}
    annotations: dict[str, str | None] = {wellknown.CLAIM: keys.write(record), wellknown.FENCE: str(record.fence)}
    spec = {
        "holderIdentity": record.holder,
        "leaseDurationSeconds": max(1, int(record.ttl)),
        "acquireTime": now,
        "renewTime": now,
        "leaseTransitions": view.transitions + 1,
    }
    if view.version:
        metadata: Object = {"resourceVersion": view.version, "labels": labels, "annotations": annotations}
        return {"metadata": metadata, "spec": spec}
    owner = {"apiVersion": API_VERSION, "kind": "EmulatorPool", "name": pool, "uid": view.pool, "controller": True}
    ours = {wellknown.POOL: pool, wellknown.POOL_UID: view.pool, wellknown.MANAGED_BY: wellknown.OPERATOR}
    metadata = {
        "name": view.name,
        "namespace": view.namespace,
        "labels": {name: value for name, value in {**ours, **labels}.items() if value is not None},
        "annotations": {**annotations, wellknown.URL: view.address},
        "ownerReferences": [owner],
    }
    return {"apiVersion": _GROUP, "kind": "Lease", "metadata": metadata, "spec": spec}


def confirm_patch(view: SlotView) -> Object:
    return {"metadata": {"resourceVersion": view.version, "annotations": {wellknown.CONFIRMED: str(view.fence)}}}


def clear_patch(view: SlotView, work: Clear) -> Object:
    return {
        "metadata": {
            "resourceVersion": view.version,
            "labels": {wellknown.CLAIMED: None, wellknown.RUN: None},
            "annotations": {
                wellknown.CLAIM: None,
                wellknown.EPISODES: str(work.episodes),
                wellknown.STRIKES: str(work.failures) if work.failures else None,
                wellknown.REST: str(math.ceil(work.rest)) if work.rest else None,
            },
        },
        "spec": {"holderIdentity": None},
    }


def delete_options(view: SlotView) -> Object:
    """Of the Lease as it was seen: should the URL have been claimed since, it stays."""
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"resourceVersion": view.version}}
