"""What one slot meets keeps no other slot waiting, and the status tells what is there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import kopf
import pytest
from aiohttp import web

from tapforge_api.pool import EmulatorPoolSpec
from tapforge_operator import labels as wellknown
from tapforge_operator.broker.claim_record import ClaimRecord, Keys
from tapforge_operator.broker.service import Claims
from tapforge_operator.broker.types import ClaimQuotas
from tapforge_operator.controller import WorkQueue
from tapforge_operator.emulatorpool import apply, controller, devices
from tapforge_operator.emulatorpool.controller import PoolController
from tapforge_operator.emulatorpool.state import template_hash
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.client import Client
from tapforge_operator.observability.metrics import Telemetry

Json = dict[str, Any]
PODS = "/api/v1/namespaces/lab/pods"
EVENTS = "/api/v1/namespaces/lab/events"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/lab/leases"
BUDGETS = "/apis/policy/v1/namespaces/lab/poddisruptionbudgets"
BUDGET = f"{BUDGETS}/phones-claimed"
IMAGE = {"spec": {"containers": [{"name": "emulator", "image": "phone:1"}]}}
POOL: Json = {
    "metadata": {"namespace": "lab", "name": "phones", "uid": "pool-1", "resourceVersion": "1", "generation": 1},
    "spec": {"replicas": 2, "template": IMAGE},
}
TEMPLATE = template_hash(EmulatorPoolSpec.model_validate_json(json.dumps(POOL["spec"])))


@dataclass
class SmallApiServer:
    pods: dict[str, Json] = field(default_factory=dict)
    undeletable: set[str] = field(default_factory=set)
    #: deletes of these are answered when the event is set
    hung: dict[str, asyncio.Event] = field(default_factory=dict)
    budgets: dict[str, Json] = field(default_factory=dict)
    statuses: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    #: how logs were asked for
    logs: list[dict[str, str]] = field(default_factory=list)
    #: no Event can be written
    eventless: bool = False
    pool: Json = field(default_factory=lambda: POOL)
    #: how many writes of a status fail
    deaf: int = 0
    #: why no Lease may be made
    closed: str = ""
    creates: int = 0
    version: int = 10

    def change(self, *, generation: int = 1, **more: Any) -> Json:
        """The pool as it is from now on, also in what the server answers to a status that is on its way."""
        self.version += 1000
        metadata = {**self.pool["metadata"], "generation": generation, "resourceVersion": str(self.version)}
        self.pool = {**self.pool, "metadata": metadata, **more}
        return self.pool

    async def handle(self, request: web.Request) -> web.Response:
        self.version += 1
        body = await request.json() if request.can_read_body else {}
        if request.path.endswith("/status"):
            if self.deaf:
                self.deaf -= 1
                return web.json_response({"message": "busy"}, status=503)
            self.statuses.append(body["status"])
            metadata = {**self.pool["metadata"], "resourceVersion": str(self.version)}
            return web.json_response({**self.pool, "metadata": metadata, "status": body["status"]})
        if request.path == EVENTS:
            self.events.append(body)
            return web.json_response({"message": "no room"}, status=507 if self.eventless else 201)
        if request.path.startswith(BUDGETS):
            return self.budget(request, body)
        if request.path == LEASES:
            assert request.query["dryRun"] == "All"
            text = f"denied request: {self.closed}" if self.closed else ""
            return web.json_response({"reason": "Forbidden", "message": text}, status=403 if text else 201)
        if request.path == PODS:
            self.creates += 1
            name = body["metadata"]["name"]
            if name in self.pods:
                return web.json_response({"reason": "AlreadyExists", "message": "it is there"}, status=409)
            return web.json_response(self.put(body))
        if request.path.endswith("/log"):
            self.logs.append(dict(request.query))
            return web.Response(text="the end\n")
        if request.path.startswith(PODS):
            name = request.path.removeprefix(PODS + "/")
            if name not in self.pods:
                return web.json_response({"reason": "NotFound", "message": "there is none"}, status=404)
            if request.method == "DELETE":
                if name in self.hung:
                    await self.hung[name].wait()
                if name not in self.pods:  # by now
                    return web.json_response({"reason": "NotFound", "message": "there is none"}, status=404)
                if name in self.undeletable:
                    return web.json_response({"reason": "Forbidden", "message": "a policy says no"}, status=403)
                exact = body["preconditions"]
                if any(self.pods[name]["metadata"][key] != value for key, value in exact.items()):
                    return web.json_response({"reason": "Conflict", "message": "not as you think"}, status=409)
                self.pods.pop(name)
                return web.json_response({"kind": "Status"})
            return web.json_response(self.pods[name])
        return web.json_response(body, status=201)

    def budget(self, request: web.Request, body: Json) -> web.Response:
        if request.method == "POST":
            self.budgets[f"{request.path}/{body['metadata']['name']}"] = body
            return web.json_response(body, status=201)
        found = self.budgets.get(request.path)
        return web.json_response(found or {"message": "there is none"}, status=200 if found else 404)

    def put(self, body: Json, **metadata: Any) -> Json:
        name = metadata.get("name") or body["metadata"]["name"]
        fresh = {
            "uid": f"uid-of-{name}",
            "resourceVersion": str(self.version),
            "creationTimestamp": "2026-11-20T10:00:00Z",
        }
        self.pods[name] = {**body, "metadata": {**body["metadata"], **fresh, **metadata}}
        return self.pods[name]


@asynccontextmanager
async def keeping(
    api: SmallApiServer, seen: Iterable[Json] = (), pool: Json = POOL, run: Json | None = None, **quotas: int
) -> AsyncIterator[tuple[Cache, Telemetry]]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    telemetry = Telemetry()

    def controller_of(uid: str) -> PoolController | None:
        pool, wake = cache.pools.get(uid), lambda: queue.wake(uid)
        return pool and PoolController(pool, cache, client, claims, telemetry, lambda: True, wake)

    queue = WorkQueue("EmulatorPool", controller_of, lambda: True, telemetry.reconciled)
    cache = Cache(telemetry, queue.wake)
    # What hangs is let go by the test: no deadline comes between.
    info = kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}")
    async with Client(info, deadline=300.0) as client:
        claims = Claims(client, Keys(b"k" * 32), lambda: True, quotas=ClaimQuotas(quotas))
        claims.begin(1, [], [])
        cache.observe_pool(pool)
        if run is not None:
            cache.observe_run(run)
        try:
            cache.slot_listeners.append(lambda before, after: claims.observe(after) if after else None)
            for pod in [*seen] or list(api.pods.values()):
                cache.observe_pod(pod)
            queue.start()
            queue.wake("pool-1")
            yield cache, telemetry
        finally:
            await queue.stop()
            await claims.end()
            await runner.cleanup()


async def until(true: Any) -> None:
    async with asyncio.timeout(120):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def slot(ordinal: int, phase: str = "Running", **labels: str | None) -> Json:
    of = {wellknown.POOL_UID: "pool-1", wellknown.ORDINAL: str(ordinal), wellknown.TEMPLATE: TEMPLATE, **labels}
    owner = {"kind": "EmulatorPool", "name": "phones", "uid": "pool-1", "controller": True}
    metadata = {
        "namespace": "lab",
        "name": f"pod-{ordinal}",
        "labels": {name: value for name, value in of.items() if value is not None},
        "ownerReferences": [owner],
    }
    return {"kind": "Pod", "metadata": metadata, "spec": {}, "status": {"phase": phase}}


async def test_a_pod_that_may_not_be_deleted_keeps_no_other_slot_from_being_made() -> None:
    api = SmallApiServer(undeletable={"pod-0"})
    api.put(slot(0, "Failed"))
    async with keeping(api):
        await until(lambda: len(api.pods) == 2 and api.statuses)
    assert api.statuses[0]["desiredReplicas"] == 2
    ordinals = [pod["metadata"]["labels"][wellknown.ORDINAL] for name, pod in api.pods.items() if name != "pod-0"]
    assert ordinals == ["1"], "the other slot's place is not free yet"


async def test_a_delete_that_hangs_keeps_nothing_waiting_but_its_own_successor() -> None:
    api = SmallApiServer(hung={"pod-0": asyncio.Event()})
    api.put(slot(0, "Failed"))
    sick = slot(1)
    api.put(sick)
    async with keeping(api) as (cache, _):
        await until(lambda: api.statuses)
        # what happens while it hangs is seen and done
        api.version += 1
        cache.observe_pod(api.put({**sick, "status": {"phase": "Failed"}}, resourceVersion=str(api.version)))
        await until(lambda: "pod-1" not in api.pods and len(api.pods) == 2)
        (made,) = api.pods.keys() - {"pod-0"}
        assert api.pods[made]["metadata"]["labels"][wellknown.ORDINAL] == "1"
        assert api.creates == 1, "the other one's place is not free yet"
        api.hung["pod-0"].set()
        await until(lambda: "pod-0" not in api.pods and len(api.pods) == 2)
        assert api.creates == 2


async def test_a_slot_on_another_place_waits_for_the_one_that_makes_room() -> None:
    """Ordinal 5 goes, ordinal 0 comes: with the first one still there that would be one too many."""
    api = SmallApiServer(hung={"pod-5": asyncio.Event()})
    api.put(slot(5, "Failed"))
    api.put(slot(1))
    async with keeping(api):
        await until(lambda: api.statuses)
        await asyncio.sleep(0.5)
        assert api.creates == 0
        api.hung["pod-5"].set()
        await until(lambda: api.creates)
        assert len(api.pods) == 2


async def test_external_devices_that_nobody_could_claim_stall_their_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LONGEST_NOT_ENABLED", 0.1)
    api = SmallApiServer(closed="namespace lab has no label tapforge.dev/workloads=enabled")
    api.pool = {**POOL, "spec": {"external": {"urls": ["http://127.0.0.1:9"]}}}

    def stalled(status: str) -> bool:
        found = [c for s in api.statuses[-1:] for c in s["conditions"] if c["type"] == "Stalled"]
        return [(c["status"], api.closed in c["message"]) for c in found] == [(status, True)]

    async with keeping(api, pool=api.pool):
        await until(lambda: stalled("True"))
        api.closed = ""
        await until(lambda: stalled("False"))


async def test_a_disruption_budget_that_somebody_deleted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_BUDGET_SECONDS", 0.3)
    api = SmallApiServer()
    async with keeping(api):
        await until(lambda: BUDGET in api.budgets and len(api.pods) == 2)
        del api.budgets[BUDGET]
        await until(lambda: BUDGET in api.budgets)
    assert api.creates == 2


async def test_a_disruption_budget_that_is_not_the_pools_own_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_BUDGET_SECONDS", 0.3)
    foreign = {"metadata": {"name": "phones-claimed"}, "spec": {"minAvailable": 1}}
    api = SmallApiServer(budgets={BUDGET: foreign})
    async with keeping(api):
        await until(lambda: api.statuses and degraded(api) == "DisruptionBudget")
        await until(lambda: len(api.pods) == 2)  # slots are made all the same
        assert api.budgets[BUDGET] is foreign
        del api.budgets[BUDGET]
        await until(lambda: degraded(api) == "AsExpected")
        api.budgets[BUDGET] = {**api.budgets[BUDGET], "spec": {**api.budgets[BUDGET]["spec"], "minAvailable": 0}}
        await until(lambda: degraded(api) == "DisruptionBudget")
        assert "was changed" in str(api.statuses[-1])


async def test_a_budget_that_was_put_right_is_no_trouble_any_more_of_an_empty_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apply, "_BUDGET_SECONDS", 0.3)
    api = SmallApiServer(budgets={BUDGET: {"metadata": {"name": "phones-claimed"}, "spec": {"minAvailable": 1}}})
    async with keeping(api) as (cache, _):
        await until(lambda: api.statuses and degraded(api) == "DisruptionBudget" and len(api.pods) == 2)
        cache.observe_pool(api.change(generation=2, spec={**POOL["spec"], "replicas": 0}))
        await until(lambda: not api.pods)
        await until(lambda: not cache.slots.of(POOL["metadata"]["uid"]))
        del api.budgets[BUDGET]
        await until(lambda: degraded(api) == "AsExpected")


def degraded(api: SmallApiServer) -> str:
    return next(str(c["reason"]) for c in api.statuses[-1]["conditions"] if c["type"] == "Degraded")


def passes(telemetry: Telemetry) -> float:
    lines = telemetry.render().decode().splitlines()
    counts = [line for line in lines if line.startswith("tapforge_reconcile_seconds_count{")]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


async def after_a_pass(api: SmallApiServer, cache: Cache, telemetry: Telemetry, **more: Any) -> None:
    """The pool is seen anew, and a pass over it ends."""
    before = passes(telemetry)
    cache.observe_pool(api.change(**more))
    await until(lambda: passes(telemetry) > before)


async def test_a_pod_that_lost_its_labels_holds_the_pool_instead_of_being_made_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [time.time()]
    monkeypatch.setattr(controller, "time", SimpleNamespace(time=lambda: now[0], monotonic=time.monotonic))
    api = SmallApiServer()
    async with keeping(api):
        await until(lambda: len(api.pods) == 2)
    for pod in api.pods.values():
        del pod["metadata"]["labels"][wellknown.POOL_UID]
    api.creates, api.statuses = 0, []
    async with keeping(api) as (cache, telemetry):
        await until(lambda: api.creates == 2 and api.statuses and "NameTaken" in str(api.statuses[-1]))
        assert "lost the labels" in str(api.statuses[-1])
        for _ in range(3):
            now[0] += 1.0
            await after_a_pass(api, cache, telemetry, status=api.statuses[-1])
        assert api.creates == 2, "the next try is seconds away"
        now[0] += 60.0
        await after_a_pass(api, cache, telemetry, status=api.statuses[-1])
        await until(lambda: api.creates == 3)


async def test_a_status_that_somebody_wrote_over_is_put_right_also_at_the_second_try() -> None:
    api = SmallApiServer()
    async with keeping(api) as (cache, _):
        await until(lambda: len(api.pods) == 2 and api.statuses and api.statuses[-1]["pods"] == 2)
        api.deaf, right = 1, api.statuses[-1]
        cache.observe_pool(api.change(status={**right, "claimed": 77}))
        api.statuses.clear()
        await until(lambda: api.statuses)
        assert api.statuses[0]["claimed"] == 0
        assert not api.deaf


@pytest.mark.parametrize("eventless", [False, True])
async def test_events_are_written_and_one_that_can_not_be_holds_up_nothing(eventless: bool) -> None:
    api = SmallApiServer(eventless=eventless)
    api.put(slot(0, "Failed"))
    async with keeping(api):
        await until(lambda: len(api.pods) == 2 and api.statuses and api.events)
    (event,) = api.events
    assert event["reason"] == "SlotFailed" and event["type"] == "Warning"
    assert event["involvedObject"]["uid"] == "pool-1" and event["involvedObject"]["kind"] == "EmulatorPool"


async def test_events_that_take_long_hold_up_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def slow(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(apply, "record", slow)
    monkeypatch.setattr("tapforge_operator.controller._STANDSTILL_SECONDS", 600.0)
    api = SmallApiServer()
    api.put(slot(0, "Failed"))
    async with keeping(api) as (cache, _):
        await until(lambda: begun.is_set() and len(api.pods) == 2 and api.statuses)
        cache.observe_pool(api.change(generation=2, spec={**POOL["spec"], "replicas": 3}))
        await until(lambda: api.statuses[-1]["observedGeneration"] == 2)


async def test_the_end_of_a_log_is_read_up_to_a_bound() -> None:
    api = SmallApiServer()
    state = {"terminated": {"exitCode": 1, "startedAt": "2026-11-20T10:00:00Z"}}
    broken = slot(0, "Failed")
    broken["status"]["containerStatuses"] = [{"name": "emulator", "state": state}]
    api.put(broken)
    async with keeping(api):
        await until(lambda: any(f["logTail"] == "the end\n" for s in api.statuses for f in s["lastFailures"]))
    (asked,) = api.logs
    # The answer ends at the bound, so as many lines as are asked for fit, of 16 KiB and what is written before each.
    assert int(asked["limitBytes"]) >= int(asked["tailLines"]) * (16 * 1024 + 64) and int(asked["limitBytes"]) < 1 << 20


async def test_a_spec_that_can_not_be_read_is_told_of_once() -> None:
    api = SmallApiServer()
    async with keeping(api) as (cache, telemetry):
        await until(lambda: len(api.pods) == 2 and api.statuses)
        spec = {**POOL["spec"], "replicas": "many"}
        cache.observe_pool(api.change(generation=2, spec=spec, status=api.statuses[-1]))
        await until(lambda: [event["reason"] for event in api.events] == ["InvalidSpec"])
        before = passes(telemetry)
        cache.observe_pool(api.change(generation=2, status=api.statuses[-1]))
        await until(lambda: passes(telemetry) > before)
        await asyncio.sleep(0.05)
        assert [event["reason"] for event in api.events] == ["InvalidSpec"]


async def test_a_pool_whose_status_can_not_be_read_keeps_its_slots_as_they_are() -> None:
    api = SmallApiServer()
    async with keeping(api) as (cache, _):
        await until(lambda: len(api.pods) == 2 and api.statuses)
        pods, said = dict(api.pods), api.statuses[-1]
        spec = {**POOL["spec"], "replicas": 0}
        cache.observe_pool(api.change(generation=2, spec=spec, status={**said, "replacedTotal": "many"}))
        await until(lambda: [event["reason"] for event in api.events] == ["UnreadableStatus"])
        (written,) = [status for status in api.statuses if set(status) == {"conditions"}]
        assert {c["type"]: (c["status"], c["reason"]) for c in written["conditions"]} == {
            "Ready": ("False", "UnreadableStatus"),
            "Reconciling": ("False", "Stalled"),
            "Stalled": ("True", "UnreadableStatus"),
            "Degraded": ("True", "UnreadableStatus"),
        }
        assert api.pods == pods
        cache.observe_pool(api.change(generation=2, status={**said, "conditions": written["conditions"]}))
        await until(lambda: not api.pods)  # it can be read again


async def test_the_end_of_a_pool_takes_no_metrics_of_its_successor() -> None:
    async with keeping(SmallApiServer()) as (cache, telemetry):
        await until(lambda: b'pool="lab/phones"' in telemetry.render())
        successor = {**POOL, "metadata": {**POOL["metadata"], "uid": "pool-2", "resourceVersion": "500"}}
        cache.observe_pool(successor)
        cache.observe_pool(POOL, deleted=True)
        await until(lambda: [task.get_name() for task in asyncio.all_tasks()].count("EmulatorPool lab/phones") == 1)
        assert b'pool="lab/phones"' in telemetry.render()
    async with keeping(SmallApiServer()) as (cache, telemetry):
        await until(lambda: b'pool="lab/phones"' in telemetry.render())
        cache.observe_pool(POOL, deleted=True)
        await until(lambda: b'pool="lab/phones"' not in telemetry.render())


async def test_a_slot_that_another_leader_has_just_claimed_is_asked_back_and_not_deleted() -> None:
    api = SmallApiServer()
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    for i in range(3):
        api.version += 1
        api.put({**slot(i), "status": status})
    seen = {name: {**pod, "metadata": dict(pod["metadata"])} for name, pod in api.pods.items()}
    key = Keys(b"k" * 32)
    for name, pod in api.pods.items():  # the watch has told nothing of it yet
        api.version += 1
        record = ClaimRecord(pod["metadata"]["uid"], 7, "user/ann", "", "request-1", 0, 60.0)
        annotations = {wellknown.CLAIM: key.write(record), wellknown.FENCE: "7"}
        api.put(seen[name], resourceVersion=str(api.version), annotations=annotations)
    async with keeping(api, seen.values()) as (cache, _):
        await until(lambda: any(slot.fence for slot in cache.slots.all()))
        await asyncio.sleep(1.0)
        assert sorted(api.pods) == ["pod-0", "pod-1", "pod-2"]


@pytest.mark.parametrize(("quotas", "made"), [({}, 3), ({"lab": 2}, 2)])
async def test_no_phone_boots_that_the_quota_lets_nobody_claim(quotas: dict[str, int], made: int) -> None:
    """What runs want that did not ask for claims yet counts as demand, as far as their namespace may have it."""
    scaled = {**POOL, "spec": {"scaling": {"minReplicas": 0, "maxReplicas": 10, "warmSpares": 0}, "template": IMAGE}}
    source = {"source": {"pool": {"name": "phones", "slots": 3}}}
    run = {
        "metadata": {"namespace": "lab", "name": "r", "uid": "r", "resourceVersion": "1"},
        "spec": {"environment": source},
    }
    async with keeping(api := SmallApiServer(pool=scaled), pool=scaled, run=run, **quotas):
        await until(lambda: len(api.pods) == made and api.statuses and api.statuses[-1]["desiredReplicas"] == made)
