"""The identity of a caller, and as which holder it may claim slots of a pool.

1. A token is good when the API server says so, for our audience. What it said is used again for at most `_TRUST`
   seconds and never beyond the token's own end. What is still used after half of that time is asked again meanwhile, so
   that a caller that keeps asking never waits for a review; what was refused is not.
2. A token that is bound to a Pod of a TrainingRun (traced over controllers, each of them read and compared by UID)
   makes the run the holder: all its Pods are one. The run has to be in the pool's namespace and to use that pool, and
   has no more slots and no larger priority there than its spec says.
3. Every other caller needs the right to create `emulatorpools/claim` of that pool (RBAC).
4. A caller that can't be checked now is refused for now (503), never let through.

Times are seconds. Every question has the client's deadline.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from tapforge_api.base import GROUP
from tapforge_api.claims import AUDIENCE
from tapforge_api.environment import PoolReference
from tapforge_operator.broker.evidence import pod_name
from tapforge_operator.broker.types import Holder, PoolNotFound, run_holder
from tapforge_operator.broker.writer import Api
from tapforge_operator.kube.client import ApiError, path
from tapforge_operator.kube.types import PoolObject

log = logging.getLogger(__name__)

Object = Mapping[str, Any]

_TRUST: Final = 10.0
_ENTRIES: Final = 4096
_MAX_TOKEN: Final = 16_384
#: questions to the API server at once: forged tokens must not take the place of everything else
_AT_ONCE: Final = 16
#: Pod, Job or RayCluster, RayJob, TrainingRun; one more than there are
_MAX_DEPTH: Final = 5
_POD: Final = "authentication.kubernetes.io/pod-name"
_POD_UID: Final = "authentication.kubernetes.io/pod-uid"
_SERVICE_ACCOUNT: Final = "system:serviceaccount:"
#: group and kind of what may stand between a Pod and its run, and where it is read
_OWNERS: Final = {
    ("batch", "Job"): "jobs",
    ("ray.io", "RayCluster"): "rayclusters",
    ("ray.io", "RayJob"): "rayjobs",
    (GROUP, "TrainingRun"): "trainingruns",
}
#: what a run has that doesn't say
_DEFAULT: Final = PoolReference(name="any")
_VERSION = re.compile(r"v[0-9][a-z0-9]{0,30}")

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Denied(Exception):
    """The call is refused with this status; `reason` for programs, the message for people."""

    def __init__(self, status: int, reason: str, message: str):
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Run:
    """The TrainingRun that a Pod works for."""

    namespace: str
    name: str
    uid: str
    #: EmulatorPool that it claims from, "" for none and for its own
    pool: str
    #: phones that it may have in all
    slots: int
    priority: int

    @property
    def holder(self) -> Holder:
        name = run_holder(self.namespace, self.name, self.uid)
        return Holder(name, self.name, slots=self.slots, priority=self.priority)


@dataclass(frozen=True, slots=True)
class Caller:
    """What the API server says of a token."""

    user: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    #: as JSON, for comparing
    extra: str = "{}"
    run: Run | None = None
    #: the Pod that it is bound to, as namespace/name/uid; "" for none that this operator can read
    pod: str = ""


class Auth:
    def __init__(
        self,
        api: Api,
        pools: Callable[[str, str], PoolObject],
        audience: str = AUDIENCE,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ):
        """`pools` finds a pool by namespace and name, or raises PoolNotFound."""
        self._api = api
        self._pools = pools
        self._audience = audience
        self._wall = wall
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._callers: AnswerCache[bytes, Caller | Denied] = AnswerCache(monotonic)
        self._rights: AnswerCache[tuple[Caller, str, str], bool] = AnswerCache(monotonic)

    async def holder(self, token: str, namespace: str, pool: str) -> Holder:
        """The holder as which the bearer of the token may claim slots of the pool. Raises Denied."""
        caller = await self.caller(token)
        if caller.run is not None:
            self._check_run(caller.run, namespace, pool)
            return replace(caller.run.holder, pod=caller.pod)
        if not await self._rights.get(
            (caller, namespace, pool), lambda: self._ask_right(caller, namespace, pool), bool
        ):
            raise Denied(
                403,
                "Forbidden",
                f"{caller.user} may not claim slots of EmulatorPool {pool} in namespace {namespace}: it is not a "
                f"Pod of a TrainingRun, and RBAC does not allow it to create emulatorpools/claim in apiGroup {GROUP}",
            )
        return Holder(f"user/{caller.user}", pod=caller.pod)

    def knows(self, token: str) -> bool:
        """Whether the API server accepted it lately. It may have ended since."""
        return isinstance(self._callers.last(token_key(token)), Caller)

    async def caller(self, token: str) -> Caller:
        """Whose token it is. Raises Denied."""
        if not token or len(token) > _MAX_TOKEN:
            raise Denied(401, "Unauthorized", "the token is empty or too long to be one")
        left = _token_end(token) - self._wall()
        found = await self._callers.get(
            token_key(token), lambda: self._review(token), _accepted, life=min(_TRUST, left)
        )
        if isinstance(found, Denied):
            raise Denied(found.status, found.reason, str(found))
        return found

    # --- questions to the API server ----------------------------------------------------------------------------------

    async def _review(self, token: str) -> Caller | Denied:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self._audience]},
        }
        where = path("tokenreviews", group="authentication.k8s.io/v1")
        status = (await self._ask(self._api.create(where, body))).get("status") or {}
        # An API server that knows no audiences says so by naming none: then the token may be meant for another service.
        if not status.get("authenticated") or self._audience not in (status.get("audiences") or ()):
            said = status.get("error") or f"it is not valid for audience {self._audience}, or it has expired"
            return Denied(401, "Unauthorized", f"the token was not accepted: {said}")
        user = status.get("user") or {}
        if not user.get("username"):
            return Denied(401, "Unauthorized", "the token was accepted, but the API server named no user for it")
        extra = user.get("extra") or {}
        pod = await self._own_pod(user["username"], extra)
        return Caller(
            user=user["username"],
            uid=user.get("uid") or "",
            groups=tuple(user.get("groups") or ()),
            extra=json.dumps(extra, sort_keys=True),
            run=await self._trace(pod) if pod is not None else None,
            pod="" if pod is None else pod_name(*(pod["metadata"][key] for key in ("namespace", "name", "uid"))),
        )

    async def _own_pod(self, user: str, extra: Object) -> Object | None:
        """The Pod that the token is bound to."""
        names, uids = list(extra.get(_POD) or ()), list(extra.get(_POD_UID) or ())
        if not user.startswith(_SERVICE_ACCOUNT) or len(names) != 1 or len(uids) != 1:
            return None
        namespace = user[len(_SERVICE_ACCOUNT) :].partition(":")[0]
        found = await self._find("pods", namespace, names[0])
        return found if found is not None and found["metadata"]["uid"] == uids[0] else None

    async def _trace(self, pod: Object) -> Run | None:
        """The run that the Pod works for; None where there is none."""
        found, namespace = pod, pod["metadata"]["namespace"]
        for _ in range(_MAX_DEPTH):
            owners = found["metadata"].get("ownerReferences") or ()
            owner = next((o for o in owners if o.get("controller")), None)
            group, _, version = (owner.get("apiVersion", "") if owner else "").rpartition("/")
            kind = _OWNERS.get((group, owner["kind"])) if owner else None
            if owner is None or kind is None or not _VERSION.fullmatch(version):
                return None
            above = await self._find(kind, namespace, owner["name"], f"{group}/{version}")
            if above is None or above["metadata"]["uid"] != owner["uid"]:
                return None
            if above.get("kind") == "TrainingRun":
                return _run(namespace, above)
            found = above
        return None

    def _check_run(self, run: Run, namespace: str, pool: str) -> None:
        if run.namespace != namespace:
            raise Denied(
                403,
                "Forbidden",
                f"TrainingRun {run.name} is in namespace {run.namespace}: it can't use pools of namespace {namespace}",
            )
        if run.pool == pool:
            return
        if not self._owns(run, pool):
            raise Denied(
                403,
                "Forbidden",
                f"TrainingRun {run.name} uses {f'EmulatorPool {run.pool}' if run.pool else 'no EmulatorPool'}, not "
                f"{pool}: that is spec.environment.source.pool.name of the run",
            )

    def _owns(self, run: Run, pool: str) -> bool:
        """The pool was made for the run."""
        try:
            metadata = self._pools(run.namespace, pool).body["metadata"]
        except PoolNotFound:
            return False
        return any(o.get("controller") and o.get("uid") == run.uid for o in metadata.get("ownerReferences") or ())

    async def _ask_right(self, caller: Caller, namespace: str, pool: str) -> bool:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": caller.user,
                "uid": caller.uid,
                "groups": list(caller.groups),
                "extra": json.loads(caller.extra),
                "resourceAttributes": {
                    "namespace": namespace,
                    "verb": "create",
                    "group": GROUP,
                    "resource": "emulatorpools",
                    "subresource": "claim",
                    "name": pool,
                },
            },
        }
        where = path("subjectaccessreviews", group="authorization.k8s.io/v1")
        status = (await self._ask(self._api.create(where, body))).get("status") or {}
        return bool(status.get("allowed")) and not status.get("denied")

    async def _find(self, kind: str, namespace: str, name: str, group: str = "") -> Object | None:
        """None: there is none of that name, or it can't be read."""
        if not name:  # that would be a list of them
            return None
        try:
            where = path(kind, namespace, name, group=group)
            async with self._gate:
                return await self._api.get(where)
        except ApiError as error:
            if error.status == 404:
                return None
            if error.status == 403:  # not this operator's namespace: what is there can't be proved, and never will be
                log.warning("what a caller's Pod belongs to can't be read: %s", error)
                return None
            raise _unchecked(error) from error

    async def _ask(self, question: Awaitable[Object]) -> Object:
        try:
            async with self._gate:
                return await question
        except ApiError as error:
            raise _unchecked(error) from error


def token_key(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _unchecked(error: ApiError) -> Denied:
    log.warning("a caller could not be checked: %s", error)
    return Denied(503, "CannotAuthenticate", "the API server could not be asked to check the caller's token; try again")


def _run(namespace: str, found: Object) -> Run:
    metadata, spec = found["metadata"], found.get("spec") or {}
    source = (spec.get("environment") or {}).get("source") or {}
    pool = source.get("pool") or {}
    given = pool or source.get("ownPool") or {}
    return Run(
        namespace,
        metadata["name"],
        metadata["uid"],
        pool.get("name") or "",
        int(given.get("slots") or _DEFAULT.slots),
        int(given.get("priority") or _DEFAULT.priority),
    )


def _token_end(token: str) -> float:
    """When a JWT ends, seconds since the epoch; infinity for what says nothing about it. Nothing is verified here."""
    parts = token.split(".")
    if len(parts) != 3:
        return float("inf")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return float("inf")
    end = claims.get("exp") if isinstance(claims, dict) else None
    return float(end) if isinstance(end, int | float) and not isinstance(end, bool) else float("inf")


def _accepted(found: Caller | Denied) -> bool:
    return isinstance(found, Caller)


@dataclass(frozen=True, slots=True)
class _Known(Generic[V]):
    value: V
    #: from when on it is asked again when it is used, and until when it is used
    stale: float
    until: float


class AnswerCache(Generic[K, V]):
    """Answers that are used again for a while. A question that is being asked is not asked a second time."""

    def __init__(self, monotonic: Callable[[], float]):
        self._monotonic = monotonic
        self._known: OrderedDict[K, _Known[V]] = OrderedDict()
        self._asking: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, ask: Callable[[], Awaitable[V]], good: Callable[[V], bool], life: float = _TRUST) -> V:
        """`good`: answers that are asked for again before they end."""
        known, now = self._known.get(key), self._monotonic()
        if known is not None and known.until > now:
            if known.stale <= now and good(known.value):
                self._begin(key, ask, life)
            return known.value
        # One caller that goes away must not end the question of the others.
        return await asyncio.shield(self._begin(key, ask, life))

    def _begin(self, key: K, ask: Callable[[], Awaitable[V]], life: float) -> asyncio.Task[V]:
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.ensure_future(self._ask(key, ask, life))
            # Callers may have gone away by the time that it fails, and those that were answered already need no answer.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def last(self, key: K) -> V | None:
        """What was answered last, however long ago."""
        return self._known[key].value if key in self._known else None

    async def _ask(self, key: K, ask: Callable[[], Awaitable[V]], life: float) -> V:
        began = self._monotonic()
        try:
            value = await ask()
        finally:
            del self._asking[key]
        self._known[key] = _Known(value, began + life / 2, began + life)
        self._known.move_to_end(key)
        while len(self._known) > _ENTRIES:
            self._known.popitem(last=False)
        return value
