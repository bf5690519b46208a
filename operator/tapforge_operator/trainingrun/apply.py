"""Carries out a run's plan, and reads what only some plans need.

Promises:
1. Every single write checks first that this process still leads.
2. A RayJob is created only when everything that its Pods mount is there. After a create whose fate is unknown the
   object is read; the create is not repeated blindly, and its name makes a second one a conflict.
3. A delete names the UID.
4. What the API server refuses to make is remembered as a `Refusal` until the next create.
5. An Event that can't be written fails nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from tapforge_api.base import API_VERSION
from tapforge_operator import labels
from tapforge_operator.broker.material import CA
from tapforge_operator.broker.tls import CONFIG_MAP
from tapforge_operator.config import Settings
from tapforge_operator.emulatorpool.backoff import NEEDS_A_PERSON, refusal
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.client import ApiError, Client, Object, path
from tapforge_operator.kube.events import record
from tapforge_operator.kube.informers import KUBERAY_MISSING, KUBERAY_TOO_OLD, RAY, ray_jobs_unavailable
from tapforge_operator.kube.leaderelection import NotLeading
from tapforge_operator.kube.types import Event, RayJob, RayPod, Reference, RunObject, belongs, observe_ray_pod
from tapforge_operator.observability.logging import ref
from tapforge_operator.trainingrun import rayjob, templates
from tapforge_operator.trainingrun.network import network_policy
from tapforge_operator.trainingrun.rayjob import RUN_KEY, TEMPLATES_KEY, Broker
from tapforge_operator.trainingrun.state import DryRunResult, ObservedVolume, Refusal, Run
from tapforge_operator.trainingrun.templates import StoredConfig

log = logging.getLogger(__name__)

_PODS: Final = 500
#: how the API server names the field that KubeRay's kinds have since 1.5.1
_KUBERAY_TOO_OLD: Final = '"spec.rayClusterSpec.authOptions"'
_POD_SECURITY: Final = "pod-security.kubernetes.io/enforce"
_NETWORKING: Final = "networking.k8s.io/v1"
#: what the confinement policy says of an object that is neither a pool's nor a run's (manifests/components/confinement)
FOREIGN: Final = "the operator changes and deletes only what an EmulatorPool controls"
#: between two creates of what was refused
_REFUSED_SECONDS: Final = 15.0


class RunWrites:
    """The writes of one run, and its reads of what isn't watched."""

    def __init__(self, client: Client, cache: Cache, leads: Callable[[], bool], settings: Settings):
        self._client = client
        self._cache = cache
        self._leads = leads
        self._settings = settings
        #: why the last create was refused
        self.refusal: Refusal | None = None
        #: newest attempt whose RayJob was created
        self.created_job = 0
        self._refused_at = -_REFUSED_SECONDS

    def _check_leading(self) -> None:
        if not self._leads():
            raise NotLeading

    # --- creates ------------------------------------------------------------------------------------------------------

    async def create_job(self, run: Run, number: int) -> None:
        if self._cooling_down():
            return
        broker = await self._broker()
        await self.ensure_config(run, broker)
        if self.refusal is None:
            where = path("rayjobs", run.namespace, group=RAY)
            body = rayjob.ray_job(run, number, broker, restricted=await self._restricted(run))
            made = await self._create(run, where, body)
            if made is not None:
                self.created_job = number
                self._cache.observe_ray_job(made)

    async def dry_run_job(self, run: Run) -> DryRunResult:
        """Creates the RayJob with `dryRun`."""
        self._check_leading()
        number, restricted = max(1, run.status.attempts + 1), await self._restricted(run)
        body = rayjob.ray_job(run, number, await self._broker(), restricted=restricted)
        try:
            await self._client.create(path("rayjobs", run.namespace, group=RAY), body, dry_run=True, strict=True)
        except ApiError as error:
            refused = _refused(body, error) or _unavailable(error)
            if refused is None and error.status != 409:
                raise
            return DryRunResult(run.generation, refused)
        return DryRunResult(run.generation)

    async def create_pool(self, run: Run) -> None:
        if self._cooling_down():
            return
        self.refusal = None
        made = await self._create(run, path("emulatorpools", run.namespace, group=API_VERSION), rayjob.own_pool(run))
        if made is not None:
            self._cache.observe_pool(made)

    async def ensure_config(self, run: Run, broker: Broker | None = None) -> None:
        """What Pods of the run mount, and what reaches them: as it was and as it has to be."""
        self.refusal = None
        if templates.lost(run.spec, run.status.resolved, run.templates):
            text = templates.lost_message(labels.config_name(run.name, run.uid))
            self._refuse(Refusal("TemplatesLost", text, True))
            return
        bodies = [rayjob.config_map(run), rayjob.broker_config_map(run, broker or await self._broker())]
        if self._settings.run_network.closed:
            bodies.append(network_policy(run, self._settings.run_network))
        for body in bodies:
            await self._ensure(run, body)
            if self.refusal is not None:
                return

    async def _ensure(self, run: Run, body: Object) -> None:
        kind, name = body["kind"], body["metadata"]["name"]
        where, content = path("configmaps", run.namespace), "data"
        if kind == "NetworkPolicy":
            where, content = path("networkpolicies", run.namespace, group=_NETWORKING), "spec"
        try:
            there = await (self._find_config if kind == "ConfigMap" else self._find)(f"{where}/{name}")
        except ApiError as error:
            if (refused := _refused(body, error)) is None:
                raise
            self._refuse(refused)
            return
        if there is None and (there := await self._create(run, where, body)) is None:
            return
        if not belongs(there["metadata"], run.uid):
            self._refuse(Refusal("NameTaken", f"{kind} {name} exists and is not this run's: delete it", True))
        elif _holds(there.get(content), body):
            return
        elif body.get("immutable"):
            text = f"{kind} {name} is not as this run was resolved at its start: delete it, it is made again"
            self._refuse(Refusal("ConfigChanged", text, True))
        else:
            self._check_leading()
            await self._client.patch(f"{where}/{name}", {content: body[content]})

    def _cooling_down(self) -> bool:
        """The last create was refused a moment ago."""
        return self.refusal is not None and time.monotonic() < self._refused_at + _REFUSED_SECONDS

    def _refuse(self, refusal: Refusal) -> None:
        self.refusal, self._refused_at = refusal, time.monotonic()

    async def _broker(self) -> Broker:
        found = await self._client.get(path("configmaps", self._settings.namespace, CONFIG_MAP))
        authority = (found.get("data") or {}).get(CA, "")
        if not authority:  # the leader writes it back
            why = f"the ConfigMap holds no {CA}; the leader writes it back within seconds"
            raise ApiError(CONFIG_MAP, 0, "NotPublished", why)
        return Broker(self._settings.broker, authority)

    async def _create(self, run: Run, where: str, body: Object) -> Object | None:
        """The object, as it was made or as it was there; None when there is none, and `refusal` says why."""
        self._check_leading()
        try:
            # RayJobs hold templates that users wrote: what the API server doesn't know it would leave out in silence.
            made = await self._client.create(where, body, strict=body["kind"] == "RayJob")
        except ApiError as error:
            if error.status == 409 or error.unclear:
                return await self._after_conflict(run, where, body, error)
            refused = _refused(body, error)
            if refused is None:
                raise
            self._refuse(refused)
            return None
        log.info("%s %s created", body["kind"], body["metadata"]["name"], extra=_ref(run))
        return made

    async def _after_conflict(self, run: Run, where: str, body: Object, error: ApiError) -> Object | None:
        name = body["metadata"]["name"]
        find = self._find_config if body["kind"] == "ConfigMap" else self._find
        try:
            found = await find(f"{where}/{name}")
        except ApiError as trouble:
            # Whether it was made shows when RayJobs can be read again; its name makes a second one a conflict.
            if body["kind"] != "RayJob" or (refused := _unavailable(trouble)) is None:
                raise
            self._refuse(refused)
            return None
        if found is None:
            raise error
        if belongs(found["metadata"], run.uid):
            return found
        what = f"{body['kind']} {name} exists and is not this run's"
        if "deletionTimestamp" in found["metadata"]:
            self._refuse(Refusal("NameTaken", f"{what}; it is being deleted"))
        else:
            # An earlier run of this name that the garbage collector has not come to looks the same for some seconds.
            ours = (found["metadata"].get("labels") or {}).get(labels.MANAGED_BY) == labels.OPERATOR
            self._refuse(Refusal("NameTaken", f"{what}: delete it, or give the run another name", not ours))
        return None

    # --- deletes ------------------------------------------------------------------------------------------------------

    async def delete_job(self, run: Run, job: RayJob) -> None:
        where = path("rayjobs", job.namespace, job.name, group=RAY)
        left = await self._delete(where, job.uid)
        log.info("RayJob %s is deleted", job.name, extra=_ref(run))
        if left is not None and left.get("kind") == "RayJob":
            self._cache.observe_ray_job(left)
        elif left is None:
            self._cache.ray_jobs.drop(job.uid)

    async def delete_pool(self, run: Run, uid: str) -> None:
        left = await self._delete(path("emulatorpools", run.namespace, run.name, group=API_VERSION), uid)
        log.info("own pool is deleted", extra=_ref(run))
        if left is not None and left.get("kind") == "EmulatorPool":
            self._cache.observe_pool(left)
        elif left is None:
            self._cache.pools.drop(uid)

    async def _delete(self, where: str, uid: str) -> Object | None:
        """What is left of the object: itself while it terminates, or the API server's answer that it is gone; None
        when there was none."""
        self._check_leading()
        try:
            return await self._client.delete(where, {"preconditions": {"uid": uid}, "propagationPolicy": "Background"})
        except ApiError as error:
            if error.status not in (404, 409):  # 409: another one has the name by now
                raise
            return None

    # --- reads --------------------------------------------------------------------------------------------------------

    async def read_volume(self, run: Run) -> ObservedVolume:
        storage = run.spec.checkpoints.storage
        if storage is None:
            return ObservedVolume(False)
        found = await self._find(path("persistentvolumeclaims", run.namespace, storage.volume_claim.claim_name))
        return ObservedVolume(found is not None, tuple((found or {}).get("spec", {}).get("accessModes") or ()))

    async def read_config(self, run: RunObject) -> StoredConfig:
        """Raises ApiError: admission of the cluster has a say in it, as in every write."""
        found = await self._find_config(path("configmaps", run.namespace, labels.config_name(run.name, run.uid)))
        mine = found is not None and belongs(found["metadata"], run.uid)
        data = (found.get("data") or {}) if found is not None and mine else {}
        return StoredConfig(data.get(RUN_KEY, ""), data.get(TEMPLATES_KEY, ""))

    @staticmethod
    def refused_config(run: RunObject, error: ApiError) -> Refusal | None:
        """Why it can't be read; None for trouble that passes."""
        return _refused({"kind": "ConfigMap", "metadata": {"name": labels.config_name(run.name, run.uid)}}, error)

    async def read_pods(self, run: Run, number: int) -> tuple[RayPod, ...]:
        selector = f"{labels.RUN_UID}={run.uid},{labels.ATTEMPT}={number}"
        pods: list[RayPod] = []
        async for page, _ in self._client.pages(path("pods", run.namespace), selector, size=_PODS):
            pods += map(observe_ray_pod, page)
        return tuple(pods)

    async def _find_config(self, where: str) -> Object | None:
        """A ConfigMap, read by a patch that changes nothing. A right to get them would be one to read every ConfigMap
        where runs may be, because RBAC has no patterns for names; of a patch the confinement policy asks whose it is.
        One that it refuses has another owner: its metadata are empty here."""
        self._check_leading()
        try:
            return await self._client.patch(where, {})
        except ApiError as error:
            if error.status == 403 and FOREIGN in error.message:
                return {"metadata": {}}
            if error.status != 404:
                raise
            return None

    async def _restricted(self, run: Run) -> bool:
        """Whether Pod Security's level `restricted` is enforced in its namespace."""
        try:
            found = await self._find(path("namespaces", name=run.namespace))
        except ApiError as error:
            if error.status != 403:
                raise
            return False  # a right that an earlier release's roles don't have: Pods are as that release made them
        return ((found or {}).get("metadata", {}).get("labels") or {}).get(_POD_SECURITY) == "restricted"

    async def _find(self, where: str) -> Object | None:
        try:
            return await self._client.get(where)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    # --- Events -------------------------------------------------------------------------------------------------------

    async def record_events(self, about: Reference, events: Iterable[Event]) -> None:
        for event in events:
            self._check_leading()
            await record(self._client, about, event)


def _unavailable(error: ApiError) -> Refusal | None:
    """Trouble of RayJobs' API that passes: a server that failed, or did not answer."""
    if not error.passing or error.status == 429:
        return None
    found = ray_jobs_unavailable(error)
    return Refusal(found.reason, found.message)


def _refused(body: Object, error: ApiError) -> Refusal | None:
    """None for trouble that passes, and is to be tried again."""
    if error.status == 404 and body["kind"] == "RayJob":
        return Refusal("KubeRayMissing", KUBERAY_MISSING)
    if error.status == 400 and body["kind"] == "RayJob" and _KUBERAY_TOO_OLD in error.message:
        return Refusal("KubeRayTooOld", KUBERAY_TOO_OLD, stalls=True)
    known = refusal(error.status, error.reason, error.message)
    if known is None:
        return None
    what = f"{body['kind']} {body['metadata']['name']} was refused: {known.message}"
    if body["kind"] == "NetworkPolicy" and known.reason == "Forbidden":
        what = f"{what}; give the operator the right to make it, or start the operator with --no-run-network"
    return Refusal(known.reason, what, stalls=known.reason in NEEDS_A_PERSON)


def _holds(there: Object | None, body: Object) -> bool:
    """What is immutable may have more than this release knows: a later one has made it."""
    wanted: Object = body["spec" if body["kind"] == "NetworkPolicy" else "data"]
    return there == wanted or (bool(body.get("immutable")) and wanted.items() <= (there or {}).items())


def _ref(run: Run) -> Object:
    return ref("TrainingRun", run.namespace, run.name, run.uid)
