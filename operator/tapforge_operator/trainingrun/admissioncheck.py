"""The AdmissionCheck controller's reads and writes: Kueue's Workloads and AdmissionChecks.

1. Our AdmissionChecks are set `Active`: a ClusterQueue with a check that is not admits nothing.
2. Of a Workload only our check's entry is written, and only on the version that was decided on: Kueue and other
   controllers write to the same list.
3. Kueue may be absent, installed later, or not answer. No run without a queue is held up by that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from tapforge_operator.kube.cache import Index, K
from tapforge_operator.kube.client import ApiError, Client, Object, path
from tapforge_operator.kube.leaderelection import NotLeading
from tapforge_operator.kube.objectmeta import timestamp
from tapforge_operator.kube.reflector import Kind, Reflector
from tapforge_operator.trainingrun.kueue import (
    AdmissionCheck,
    CheckUpdate,
    Workload,
    demand_since,
    observe_check,
    observe_workload,
)

log = logging.getLogger(__name__)

_WHY: Final = {
    403: "the operator may not; manifests/components/kueue, or the chart's value kueue, gives it the rights",
    404: "Kueue 0.15 or newer is not installed",
}

#: served since Kueue 0.15 and stored since 0.16; v1beta1 ends with 0.17
GROUP: Final = "kueue.x-k8s.io/v1beta2"
_WORKLOADS: Final = Kind("Kueue's Workloads", "workloads", "", GROUP)
_CHECKS: Final = Kind("Kueue's AdmissionChecks", "admissionchecks", "", GROUP)
#: seconds
_RETRY: Final = 15.0
#: for which a term's first lists may keep all runs waiting, seconds; the reflectors go on listing afterwards
SYNC_SECONDS: Final = 4.0


class Queues:
    """Workloads and AdmissionChecks, kept by reflectors, and the writes to them."""

    def __init__(
        self,
        client: Client,
        spaces: tuple[str, ...],
        leads: Callable[[], bool],
        job_changed: Callable[[str], None],
        changed: Callable[[], None],
    ):
        """`spaces`: namespaces, "" for all of them. `job_changed` is called with the UID of a RayJob whose Workload
        changed, `changed` when the cluster has got a check of ours or lost it, and when `knows` changes."""
        self._client = client
        self._leads = leads
        self._workloads: Index[Workload] = Index(_place, lambda _, old, new: self._workload_changed(old, new))
        self._job_changed = job_changed
        self._checks: Index[AdmissionCheck] = Index(lambda _: "", lambda _, old, new: self._check_changed(old, new))
        self._changed = changed
        self._inactive = asyncio.Event()
        #: why a kind can't be had, by kind and namespace
        self._missing: dict[tuple[str, str], str] = {}
        #: what was listed or refused once, by kind and namespace
        self._answered: set[tuple[str, str]] = set()
        self._reflectors = (
            Reflector(client, _CHECKS, ("",), self._check, self._listed_checks, missing=self._lacks(_CHECKS)),
            Reflector(
                client, _WORKLOADS, spaces, self._workload, self._listed_workloads, missing=self._lacks(_WORKLOADS)
            ),
        )

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def ours(self) -> frozenset[str]:
        """Names of this controller's checks."""
        return frozenset(check.name for check in self._checks.all())

    def of(self, namespace: str, job_uid: str) -> Workload | None:
        """Of a RayJob of that namespace: what names it in another one is not its Workload."""
        return next(iter(self._workloads.of(f"{namespace}/{job_uid}").values()), None)

    def knows(self, namespace: str) -> bool:
        """Whether what Kueue has of that namespace was read in this term, or the API server said that it can't be."""
        workloads = {(_WORKLOADS.plural, space) for space in ("", namespace)}
        return (_CHECKS.plural, "") in self._answered and not workloads.isdisjoint(self._answered)

    # --- following ----------------------------------------------------------------------------------------------------

    async def sync(self) -> None:
        """Lists everything once. A Kueue that does not answer delays runs without queues for `SYNC_SECONDS` at most."""
        await asyncio.gather(*(reflector.begin(SYNC_SECONDS) for reflector in self._reflectors))

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run())
            group.create_task(self._activate())

    def _workload(self, body: Mapping[str, Any], deleted: bool = False) -> None:
        seen = observe_workload(body)
        if seen is not None:
            known = self._workloads.get(seen.uid)
            same = known is not None and demand_since(known, self.ours) == demand_since(seen, self.ours)
            seen = replace(seen, seen=known.seen if known is not None and same else time.time())
        _keep(self._workloads, seen, body, deleted)

    def _check(self, body: Mapping[str, Any], deleted: bool = False) -> None:
        seen = observe_check(body)
        _keep(self._checks, seen, body, deleted)

    def _workload_changed(self, old: Workload | None, new: Workload | None) -> None:
        for workload in (new or old,):
            if workload is not None:
                self._job_changed(workload.job_uid)

    def _check_changed(self, old: AdmissionCheck | None, new: AdmissionCheck | None) -> None:
        if new is not None and not new.active:
            self._inactive.set()
        if old is None or new is None:
            self._changed()

    def _listed_checks(self, space: str, uids: set[str], as_of: str) -> None:
        self._checks.replace(uids, as_of)
        self._has(_CHECKS, space)

    def _listed_workloads(self, space: str, uids: set[str], as_of: str) -> None:
        self._workloads.replace(uids, as_of, (lambda w: w.namespace == space) if space else None)
        self._has(_WORKLOADS, space)

    def _answer(self, kind: Kind, space: str) -> None:
        if (kind.plural, space) not in self._answered:
            self._answered.add((kind.plural, space))
            self._changed()

    def _has(self, kind: Kind, space: str) -> None:
        self._answer(kind, space)
        if self._missing.pop((kind.plural, space), ""):
            log.info("queues: %s can be read%s", kind.name, f" (in namespace {space})" if space else "")

    def _lacks(self, kind: Kind) -> Callable[[str, ApiError], None]:
        def lacks(space: str, error: ApiError) -> None:
            # Without the rights an API server says so also where there is no Kueue.
            why = _WHY.get(error.status, error.message)
            # One 403 may be an API server that has just started; a kind that it does not know is gone. Any other
            # trouble says nothing of what queues hold.
            again = error.status in _WHY and self._missing.get((kind.plural, space)) == why
            if error.status == 404 or again:
                self._forget(kind, space)
                self._answer(kind, space)
            if self._missing.get((kind.plural, space)) != why:
                self._missing[(kind.plural, space)] = why
                log.info("queues: %s are not read%s: %s", kind.name, f" (in namespace {space})" if space else "", why)

        return lacks

    def _forget(self, kind: Kind, space: str) -> None:
        if kind is _CHECKS:
            self._checks.forget()
        else:
            self._workloads.forget((lambda w: w.namespace == space) if space else None)

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _activate(self) -> None:
        """Sets the condition of our checks: a ClusterQueue with a check that is not active admits nothing."""
        said: dict[str, str] = {}
        while True:
            await self._inactive.wait()
            self._inactive.clear()
            failed = False
            for check in [check for check in self._checks.all() if not check.active]:
                if not self._leads():
                    return
                condition = {
                    "type": "Active",
                    "status": "True",
                    "reason": "Active",
                    "message": "tapforge-operator sets the state of this check",
                    "lastTransitionTime": timestamp(time.time()),
                    "observedGeneration": check.generation,
                }
                metadata = {"uid": check.uid, "resourceVersion": check.resource_version}
                body = {"metadata": metadata, "status": {"conditions": [condition]}}
                try:
                    made = await self._client.patch(path("admissionchecks", "", check.name, "status", GROUP), body)
                    said.pop(check.uid, None)
                    log.info("queues: AdmissionCheck %s is active", check.name)
                    self._check(made)
                except ApiError as error:
                    if error.status in (404, 409):  # the watch delivers what it is now
                        continue
                    if said.get(check.uid) != (why := f"{error.status} {error.reason}"):
                        said[check.uid] = why
                        log.warning("queues: AdmissionCheck %s: %s", check.name, error)
                    failed = True
            if failed:
                await asyncio.sleep(_RETRY)
                self._inactive.set()

    async def write(self, update: CheckUpdate, now: float) -> None:
        """Raises ApiError; a Workload that has changed meanwhile is left as it is."""
        if not self._leads():
            raise NotLeading
        workload = update.workload
        where = path("workloads", workload.namespace, workload.name, "status", GROUP)
        try:
            made = await self._client.patch(where, _steps(update, now))
        except ApiError as error:
            if error.status not in (404, 409, 422):  # 422: a test in the patch failed
                raise
            log.info("queues: Workload %s/%s has changed: %s", workload.namespace, workload.name, error)
            return
        self._workload(made)


def _place(workload: Workload) -> str:
    return f"{workload.namespace}/{workload.job_uid}"


def _keep(index: Index[K], seen: K | None, body: Mapping[str, Any], deleted: bool) -> None:
    if seen is not None and not deleted:
        index.put(seen)
    else:  # one that is not ours yet may be later: a Workload can be there before its owner
        index.drop(body["metadata"]["uid"], "" if deleted else body["metadata"]["resourceVersion"])


def _steps(update: CheckUpdate, now: float) -> list[Object]:
    """A JSON patch: the list is several controllers', and a merge patch would replace it."""
    workload = update.workload
    place = next(i for i, check in enumerate(workload.checks) if check.name == update.check)
    entry = f"/status/admissionChecks/{place}"
    fields: dict[str, Any] = {
        "state": update.state,
        "message": update.message,
        "lastTransitionTime": timestamp(now),
    }
    if update.requeue_after is not None:
        fields["requeueAfterSeconds"] = update.requeue_after
    return [
        {"op": "test", "path": "/metadata/resourceVersion", "value": workload.resource_version},
        {"op": "test", "path": f"{entry}/name", "value": update.check},
        *({"op": "add", "path": f"{entry}/{name}", "value": value} for name, value in fields.items()),
    ]
