"""An API server in memory, honest about what claims rest on: resourceVersions, UIDs, merge patches, preconditions,
watch events; and a broker process in front of it that can lose its connection, its answers or its life at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

from tapforge_api.claims import Acquire, Given, Held, Release, Renew
from tapforge_operator import labels as wellknown
from tapforge_operator.broker.claim_record import Keys
from tapforge_operator.broker.devices import DeviceRules
from tapforge_operator.broker.renewals import RunningClock
from tapforge_operator.broker.service import Claims
from tapforge_operator.broker.types import ClaimQuotas, Holder, LedgerTimeouts, ServiceTimeouts
from tapforge_operator.kube.client import ApiError
from tapforge_operator.kube.types import observe, observe_pool

Object = dict[str, Any]
KEYS = Keys(b"k" * 32)
NAMESPACE = "lab"
POOL = "phones"
LEASES = "/apis/coordination.k8s.io/v1"


class Cluster:
    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.version = 100
        self.watchers: list[Callable[[str, str, Object], None]] = []
        self._uids = itertools.count(1)

    # --- what users and kubelets do -----------------------------------------------------------------------------------

    def put(self, path: str, body: Object) -> Object:
        self.version += 1
        fresh = path not in self.objects
        body = copy.deepcopy(body)
        body.setdefault("metadata", {})["resourceVersion"] = str(self.version)
        body["metadata"].setdefault("uid", f"uid-{next(self._uids)}")
        self.objects[path] = body
        self._tell("ADDED" if fresh else "MODIFIED", path)
        return body

    def drop(self, path: str) -> None:
        body = self.objects.pop(path)
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        for watcher in self.watchers:
            watcher("DELETED", path, copy.deepcopy(body))

    def touch(self, path: str, **annotations: str) -> None:
        """Somebody else changes the object."""
        body = self.objects[path]
        body["metadata"].setdefault("annotations", {}).update(annotations)
        self.put(path, body)

    def _tell(self, event: str, path: str) -> None:
        for watcher in self.watchers:
            watcher(event, path, copy.deepcopy(self.objects[path]))

    # --- what the API answers -----------------------------------------------------------------------------------------

    def get(self, path: str) -> Object:
        if path not in self.objects:
            raise refusal(404, path)
        return copy.deepcopy(self.objects[path])

    def create(self, path: str, body: Object) -> Object:
        where = f"{path}/{body['metadata']['name']}"
        if where in self.objects:
            raise refusal(409, where)
        return copy.deepcopy(self.put(where, body))

    def patch(self, path: str, body: Object | list[Object]) -> Object:
        if path not in self.objects:
            raise refusal(404, path)
        current = self.objects[path]
        if isinstance(body, list):
            return copy.deepcopy(self.put(path, changed(current, body)))
        for name in ("resourceVersion", "uid"):
            wanted = body.get("metadata", {}).get(name)
            if wanted is not None and wanted != current["metadata"][name]:
                raise refusal(409, path)
        merged = merge(current, body)
        merged["metadata"] |= {name: current["metadata"][name] for name in ("uid",)}
        return copy.deepcopy(self.put(path, merged))

    def delete(self, path: str, body: Object | None = None) -> Object:
        if path not in self.objects:
            raise refusal(404, path)
        for name, wanted in ((body or {}).get("preconditions") or {}).items():
            if wanted != self.objects[path]["metadata"][name]:
                raise refusal(409, path)
        gone = copy.deepcopy(self.objects[path])
        self.drop(path)
        return gone


def merge(current: Any, change: Any) -> Any:
    """JSON merge patch."""
    if not isinstance(change, dict):
        return copy.deepcopy(change)
    result = dict(current) if isinstance(current, dict) else {}
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def changed(current: Object, changes: list[Object]) -> Object:
    """JSON patch: tests, additions and removals in objects."""
    result = copy.deepcopy(current)
    for change in changes:
        *way, name = (part.replace("~1", "/").replace("~0", "~") for part in change["path"].split("/")[1:])
        place = result
        for part in way:
            if part not in place:
                raise refusal(422, change["path"])
            place = place[part]
        match change["op"]:
            case "test" if place.get(name) != change["value"]:
                raise refusal(422, change["path"])
            case "add":
                place[name] = change["value"]
            case "remove" if name not in place:
                raise refusal(422, change["path"])
            case "remove":
                del place[name]
    return result


def refusal(status: int, what: str) -> ApiError:
    return ApiError(what, status, {404: "NotFound", 409: "Conflict"}.get(status, "Error"), "refused")


class Door:
    """One process' way to the cluster. `script` decides the fate of each write: None (fine), a status (refused),
    "lost before" and "lost after" (no answer; not carried out, or carried out), "late" (carried out when `release` is
    called, answered never), "die" (carried out, then nothing ever answers any more)."""

    def __init__(self, cluster: Cluster, script: Callable[[int], str | int | None] = lambda number: None):
        self.cluster = cluster
        self.script = script
        self.writes = 0
        self.dead = False
        self._late: list[Callable[[], object]] = []

    async def get(self, path: str) -> Object:
        await self._way()
        return self.cluster.get(path)

    async def create(self, path: str, body: Object) -> Object:
        return await self._write(lambda: self.cluster.create(path, body))

    async def patch(self, path: str, body: Object) -> Object:
        return await self._write(lambda: self.cluster.patch(path, body))

    async def delete(self, path: str, body: Object | None = None) -> Object:
        return await self._write(lambda: self.cluster.delete(path, body))

    def release_late(self) -> None:
        late, self._late = self._late, []
        for act in late:
            with contextlib.suppress(ApiError):
                act()

    async def _way(self) -> None:
        if self.dead:
            await asyncio.Event().wait()
        await asyncio.sleep(0)

    async def _write(self, act: Callable[[], Object]) -> Object:
        await self._way()
        self.writes += 1
        fate = self.script(self.writes)
        if fate is None:
            answer = act()
            await self._way()
            return answer
        if isinstance(fate, int):
            raise refusal(fate, "write")
        if fate == "late":
            self._late.append(act)
        if fate in ("die", "lost after"):
            with contextlib.suppress(ApiError):
                act()
        if fate == "die":
            self.dead = True
            await self._way()
        raise ApiError("write", 0, "Deadline", "no answer")


def pod_path(name: str) -> str:
    return f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"


class Lab:
    """A cluster with one pool, and the brokers that look at it."""

    def __init__(self, slots: int = 0, nodes: int = 1, urls: tuple[str, ...] = (), **spec: Any):
        self.cluster = Cluster()
        external = {"external": {"urls": list(urls)}} if urls else {}
        body = {"kind": "EmulatorPool", "metadata": {"name": POOL, "namespace": NAMESPACE}, "spec": external | spec}
        self.pool = self.cluster.put(f"/apis/tapforge.dev/v1alpha1/namespaces/{NAMESPACE}/emulatorpools/{POOL}", body)
        self.pool_uid = self.pool["metadata"]["uid"]
        for number in range(slots):
            self.add_slot(number, f"n{number % nodes}")

    def add_slot(self, number: int, node: str = "n0", ready: bool = True) -> str:
        name = f"phone-{number}"
        owner = {"kind": "EmulatorPool", "name": POOL, "uid": self.pool_uid, "controller": True}
        labels = {wellknown.POOL: POOL, wellknown.POOL_UID: self.pool_uid, wellknown.ORDINAL: str(number)}
        body = {
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "labels": labels,
                "annotations": {wellknown.SAFE_TO_EVICT: "true"},
                "ownerReferences": [owner],
            },
            "spec": {"nodeName": node},
        }
        self.cluster.put(pod_path(name), body)
        self.set_ready(name, ready)
        return name

    def set_ready(self, name: str, ready: bool = True, phase: str = "Running") -> None:
        body = self.cluster.objects[pod_path(name)]
        body["status"] = {
            "phase": phase,
            "podIP": "10.0.0.7",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        }
        self.cluster.put(pod_path(name), body)

    def pod(self, name: str) -> Object:
        return self.cluster.objects[pod_path(name)]

    def leases(self) -> list[Object]:
        return [body for path, body in self.cluster.objects.items() if path.startswith(LEASES)]


TIMEOUTS = ServiceTimeouts(tick=0.01, settle=1.0, siblings=0.1, release=1.0, refresh=1.0, holders=0.05, quotas=0.01)
LEDGER_TIMEOUTS = LedgerTimeouts(
    revoke_after=0.05, linger=0.02, remember=5.0, step_deadline=0.2, first_pause=0.1, longest_pause=0.4
)


class Broker:
    """A broker process: a leadership over the lab, fed by a watch that may be late. It lives by the loop's time."""

    def __init__(
        self,
        lab: Lab,
        term: int = 1,
        door: Door | None = None,
        ledger_timeouts: LedgerTimeouts = LEDGER_TIMEOUTS,
        speed: float = 1.0,
        timeouts: ServiceTimeouts = TIMEOUTS,
        quotas: ClaimQuotas | None = None,
        on_quota: Callable[[str], None] = lambda namespace: None,
        keys: Keys = KEYS,
        devices: DeviceRules | None = None,
        elsewhere: Callable[[str], bool] | None = None,
        listed: int = 0,
    ):
        """`listed`: version of an earlier list of Leases."""
        self.lab = lab
        loop = asyncio.get_running_loop()
        self.door = door or Door(lab.cluster)
        self.leading = True
        #: events wait here while it is a list
        self.held_back: list[tuple[str, str, Object]] | None = None
        self.requeued: set[str] = set()
        #: holders whose run wants no phones any more, and nodes that are lost
        self.idle: set[str] = set()
        self.lost_nodes: set[str] = set()
        self.claims = Claims(
            self.door,
            keys,
            lambda: self.leading,
            on_change=self.requeued.add,
            on_quota=on_quota,
            idle=lambda holder: holder in self.idle,
            lost=lambda node: node in self.lost_nodes,
            elsewhere=elsewhere,
            ledger_timeouts=ledger_timeouts,
            timeouts=timeouts,
            clock=RunningClock(speed, lambda: loop.time() * speed),
            quotas=quotas,
            devices=devices,
        )
        objects = list(lab.cluster.objects.items())
        pods = [slot for path, body in objects if "/pods/" in path and (slot := observe(copy.deepcopy(body)))]
        leases = [copy.deepcopy(body) for path, body in objects if path.startswith(LEASES)]
        pools = [observe_pool(copy.deepcopy(body)) for path, body in objects if "/emulatorpools/" in path]
        self.claims.keep_leases(leases, "", str(listed))
        self.claims.begin(term, pools, pods, leases)
        lab.cluster.watchers.append(self._event)

    def _event(self, event: str, path: str, body: Object) -> None:
        if self.held_back is not None:
            self.held_back.append((event, path, body))
        else:
            self._hear(event, path, body)

    def _hear(self, event: str, path: str, body: Object) -> None:
        if self.door.dead:
            return
        deleted = event == "DELETED"
        if "/pods/" in path and (slot := observe(body)):
            self.claims.forget(slot) if deleted else self.claims.observe(slot)
        elif "/emulatorpools/" in path:
            pool = observe_pool(body)
            self.claims.forget_pool(pool.uid) if deleted else self.claims.observe_pool(pool)
        elif path.startswith(LEASES):
            self.claims.observe_lease(body, deleted)

    def hear_all(self) -> None:
        events, self.held_back = self.held_back or [], None
        for event in events:
            self._hear(*event)

    async def acquire(self, holder: str = "a", request: str = "", pod: str = "", **ask: Any):
        times = {"wait_seconds": 0.5, "ttl_seconds": 5.0, "hold_seconds": 5.0}
        ask = {"request": request or f"request-{next(_REQUESTS)}", **times, **ask}
        who = Holder(f"run/{NAMESPACE}/{holder}/u", holder, pod)
        return list((await self.claims.acquire(NAMESPACE, POOL, who, Acquire(**ask))).claims)

    async def renew(self, *claims: Any, episodes: int = 0, **session: Any):
        held = tuple(Held(id=c.id, secret=c.secret, episodes=episodes) for c in claims)
        ask = Renew(claims=held, **session)
        return list((await self.claims.renew(ask)).claims)

    async def release(self, *claims: Any, verdict: str = "clean", episodes: int = 0):
        given = tuple(Given(id=c.id, secret=c.secret, episodes=episodes, verdict=verdict) for c in claims)
        return list((await self.claims.release(Release(claims=given))).claims)

    async def die(self) -> None:
        """As by kill -9: nothing more is written or answered."""
        self.door.dead = True
        self.lab.cluster.watchers.remove(self._event)
        await self.claims.end()

    async def end(self) -> None:
        if self._event in self.lab.cluster.watchers:
            self.lab.cluster.watchers.remove(self._event)
        await self.claims.end()


_REQUESTS = itertools.count(10_000_000)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for something that has to become true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
