"""A claim on a Pod: how it is read, and the one patch that writes it or takes it off. Pure.

Each patch carries resourceVersion and UID: it is carried out on exactly the Pod that was seen, or not at all.

Each patch also drops the Pod's notes on who wrote which field, which nobody reads: without them the API server carries
out a patch of a Pod in less than half of its time, and the Pod is smaller by a third for everybody who watches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .. import names
from ..kube.client import path
from ..slots import Slot, observe
from .mark import Keys, Mark
from .records import SlotView

Object = dict[str, Any]

#: one empty entry is the API server's word for "forget them"; from then on it keeps none of this Pod
_NO_MANAGED_FIELDS: Final[list[Object]] = [{}]


def view_of(slot: Slot, keys: Keys) -> SlotView:
    reading = keys.read(slot.claim, slot.uid)
    return SlotView(
        uid=slot.uid,
        pool=slot.pool_uid,
        namespace=slot.namespace,
        name=slot.name,
        version=slot.resource_version,
        node=slot.node,
        address=slot.ip,
        ready=slot.ready and bool(slot.ip),
        ended=_end(slot),
        booting=bool(slot.node) and not slot.ever_ready,
        fence=slot.fence,
        episodes=slot.episodes,
        mark=reading.mark,
        foreign=reading.foreign,
    )


def _end(slot: Slot) -> str:
    if slot.terminal:
        return f"its Pod ended: {slot.end or slot.phase}"
    if slot.deleting:
        return "its Pod is being deleted"
    return "its Pod failed and is kept for a look at its log" if slot.retained else ""


def read(pod: Mapping[str, Any], keys: Keys) -> SlotView | None:
    """None for a Pod that is no slot (any more)."""
    slot = observe(pod)
    return view_of(slot, keys) if slot else None


def where(view: SlotView) -> str:
    return path("pods", view.namespace, view.name)


def claim_patch(view: SlotView, mark: Mark, keys: Keys) -> Object:
    labels = {names.CLAIMED: "true", names.RUN: mark.run or None}
    annotations = {
        names.CLAIM: keys.write(mark),
        names.FENCE: str(mark.fence),
        names.SAFE_TO_EVICT: "false",
        names.DO_NOT_DISRUPT: "true",
    }
    return _patch(view, labels, annotations)


def clear_patch(view: SlotView, episodes: int) -> Object:
    labels = {names.CLAIMED: None, names.RUN: None}
    annotations = {
        names.CLAIM: None,
        names.EPISODES: str(episodes),
        names.SAFE_TO_EVICT: "true",
        names.DO_NOT_DISRUPT: None,
    }
    return _patch(view, labels, annotations)


def confirm_patch(view: SlotView) -> Object:
    return _patch(view, {}, {names.CONFIRMED: view.version})


def _patch(view: SlotView, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]) -> Object:
    return {
        "metadata": {
            "uid": view.uid,
            "resourceVersion": view.version,
            "managedFields": _NO_MANAGED_FIELDS,
            "labels": dict(labels),
            "annotations": dict(annotations),
        }
    }


def delete_options(view: SlotView) -> Object:
    exact = {"uid": view.uid, "resourceVersion": view.version}
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": exact}
