"""A claim on a Pod: how it is read, and the one patch that writes it or takes it off. Pure.

Each write comes in two forms, and either is carried out on what was seen or not at all:

- A JSON patch that tests the Pod's UID, its fence and the word of the leader that confirmed its claim, and so what
  claims rest on: every claim writes a larger fence, and only one that is there can be taken off. Whatever else changes
  meanwhile, a condition in the Pod's status above all, is no conflict: a storm of changing Pods costs a claim no second
  try. One that does not fit is answered with 422.
- A merge patch with the resourceVersion, for Pods whose labels and annotations are not as the operator wrote them. One
  that does not fit is answered with 409.

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
from .records import Clear, SlotView

Object = dict[str, Any]
#: labels or annotations; None takes one away
Texts = Mapping[str, str | None]

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
        confirmed=slot.confirmed,
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


def claim_patch(view: SlotView, mark: Mark, keys: Keys, replaces: Clear | None = None) -> list[Object]:
    return [*_tests(view, view.fence), *_changes(*_claimed(mark, keys, replaces))]


def clear_patch(view: SlotView, mark: Mark, episodes: int) -> list[Object]:
    return [*_tests(view, mark.fence), *_changes(*_cleared(bool(mark.run), episodes))]


def claim_by_version(view: SlotView, mark: Mark, keys: Keys, replaces: Clear | None = None) -> Object:
    labels, annotations = _claimed(mark, keys, replaces)
    return _merge(view, {names.RUN: None, **labels}, annotations)


def clear_by_version(view: SlotView, episodes: int) -> Object:
    return _merge(view, *_cleared(True, episodes))


def _claimed(mark: Mark, keys: Keys, replaces: Clear | None) -> tuple[Texts, Texts]:
    """Labels and annotations; also what is left to write of the claim that this one replaces."""
    annotations: dict[str, str | None] = {
        names.CLAIM: keys.write(mark),
        names.FENCE: str(mark.fence),
        names.SAFE_TO_EVICT: "false",
        names.DO_NOT_DISRUPT: "true",
    }
    labels: dict[str, str | None] = {names.CLAIMED: "true"}
    if replaces is not None:
        annotations[names.EPISODES] = str(replaces.episodes)
    if mark.run:
        labels[names.RUN] = mark.run
    elif replaces is not None and replaces.mark.run:
        labels[names.RUN] = None
    return labels, annotations


def _cleared(run: bool, episodes: int) -> tuple[Texts, Texts]:
    annotations = {
        names.CLAIM: None,
        names.EPISODES: str(episodes),
        names.SAFE_TO_EVICT: "true",
        names.DO_NOT_DISRUPT: None,
    }
    return {names.CLAIMED: None, **({names.RUN: None} if run else {})}, annotations


def confirm_patch(view: SlotView) -> Object:
    return _merge(view, {}, {names.CONFIRMED: str(view.fence)})


def _tests(view: SlotView, fence: int) -> list[Object]:
    """Without a value the test is that there is none."""
    return [
        {"op": "test", "path": "/metadata/uid", "value": view.uid},
        {"op": "test", "path": _place("annotations", names.FENCE), "value": str(fence) if fence else None},
        {"op": "test", "path": _place("annotations", names.CONFIRMED), "value": view.confirmed or None},
    ]


def _changes(labels: Texts, annotations: Texts) -> list[Object]:
    changes: list[Object] = [{"op": "add", "path": "/metadata/managedFields", "value": _NO_MANAGED_FIELDS}]
    for kind, texts in (("labels", labels), ("annotations", annotations)):
        for name, text in texts.items():
            gone = {"op": "remove", "path": _place(kind, name)}
            changes.append(gone if text is None else {"op": "add", "path": _place(kind, name), "value": text})
    return changes


def _place(kind: str, name: str) -> str:
    return f"/metadata/{kind}/{name.replace('~', '~0').replace('/', '~1')}"


def _merge(view: SlotView, labels: Texts, annotations: Texts) -> Object:
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
