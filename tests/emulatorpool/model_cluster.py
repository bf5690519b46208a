"""A cluster small enough to think about: an API server, a scheduler, kubelets and a ledger of claims, as dictionaries.

It keeps Pods as the API server would and refuses what it would refuse. Whatever breaks a promise of the planner raises
at the moment of the write.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tapforge_operator import labels
from tapforge_operator.broker.types import Held
from tapforge_operator.emulatorpool.apply import room_makers
from tapforge_operator.emulatorpool.plan import plan
from tapforge_operator.emulatorpool.pod import retain_patch, slot_pods
from tapforge_operator.emulatorpool.rollout import limits
from tapforge_operator.emulatorpool.state import History, NodeState, Observed, Plan, Pool, Refusal, Removal
from tapforge_operator.kube.types import Slot, observe

Json = dict[str, Any]


class Cluster:
    def __init__(self, nodes: int, room: int, now: float):
        self.now = now
        self.room = room
        self.nodes: dict[str, str] = {f"node-{i}": "" for i in range(nodes)}
        self.pods: dict[str, Json] = {}
        self.claims: dict[str, Held] = {}
        self.quota: int | None = None
        self.waiting = 0
        self.wanted = 0
        self.bad_boots: set[str] = set()
        self.created = 0
        self._uids = itertools.count()
        self._stages: dict[str, tuple[object, float]] = {}

    # --- what the operator sees ---------------------------------------------------------------------------------------

    def slots(self) -> list[Slot]:
        """Seen as soon as something is so, as by an operator that is always there."""
        found = [slot for pod in self.pods.values() if (slot := observe(pod)) is not None]
        for slot in found:
            stage, _ = self._stages.get(slot.uid, (None, 0.0))
            if stage != slot.stage:
                self._stages[slot.uid] = slot.stage, self.now
        return [replace(slot, since=self._stages[slot.uid][1]) for slot in found]

    def seen(self, refusals: tuple[Refusal, ...] = ()) -> Observed:
        nodes: dict[str, NodeState] = {n: s for n, s in self.nodes.items() if s}  # type: ignore[misc]
        return Observed(
            slots=self.slots(),
            held=dict(self.claims),
            waiting=self.waiting,
            wanted=self.wanted,
            nodes=nodes,
            refusals=refusals,
        )

    def standing(self) -> list[Slot]:
        return [slot for slot in self.slots() if not slot.deleting and not slot.retained]

    # --- what the operator does ---------------------------------------------------------------------------------------

    def drain(self, slot: Slot) -> bool:
        claim = self.claims.get(slot.uid)
        return claim is None or claim.expired or slot.terminal

    def create(self, pod: Json, most: int) -> Refusal | None:
        name = pod["metadata"]["name"]
        if name in self.pods:
            owner = self.pods[name]["metadata"]["ownerReferences"][0]["uid"]
            assert owner == pod["metadata"]["ownerReferences"][0]["uid"]
            assert "deletionTimestamp" not in self.pods[name]["metadata"], "a conflict for nothing"
            return None
        if self.quota is not None and len(self.pods) >= self.quota:
            return Refusal("QuotaExceeded", "exceeded quota: pods")
        self.created += 1
        metadata = {
            **pod["metadata"],
            "uid": f"uid-{next(self._uids)}",
            "resourceVersion": "1",
            "creationTimestamp": _time(self.now),
        }
        self.pods[name] = {**pod, "metadata": metadata, "spec": dict(pod["spec"]), "status": {"phase": "Pending"}}
        alive = [slot for slot in self.standing() if not slot.terminal]
        assert len(alive) <= most, f"{len(alive)} slots live, {most} may"
        return None

    def delete(self, uid: str, force: bool = False) -> None:
        pod = self._by_uid(uid)
        if pod is None:
            return
        slot = observe(pod)
        assert slot is not None
        assert self.drain(slot), f"{slot.name} is claimed and lives"
        self._end(pod, force)

    def evict(self, uid: str) -> None:
        """Somebody else deletes it, claimed or not."""
        pod = self._by_uid(uid)
        assert pod is not None
        self._end(pod, force=False)

    def retain(self, removal: Removal) -> None:
        pod = self._by_uid(removal.slot.uid)
        if pod is None:
            return
        slot = observe(pod)
        assert slot is not None
        assert slot.terminal and self.drain(slot)
        patch = retain_patch(removal.reason)["metadata"]["annotations"]
        annotations = {**pod["metadata"]["annotations"], **patch}
        pod["metadata"]["annotations"] = {k: v for k, v in annotations.items() if v is not None}
        self.claims.pop(removal.slot.uid, None)

    def _end(self, pod: Json, force: bool) -> None:
        pod["metadata"]["deletionTimestamp"] = _time(self.now)
        if force or "nodeName" not in pod["spec"]:
            self._vanish(pod)

    def _vanish(self, pod: Json) -> None:
        del self.pods[pod["metadata"]["name"]]
        self.claims.pop(pod["metadata"]["uid"], None)

    def _by_uid(self, uid: str) -> Json | None:
        return next((pod for pod in self.pods.values() if pod["metadata"]["uid"] == uid), None)

    # --- what happens by itself ---------------------------------------------------------------------------------------

    def tick(self) -> None:
        """The scheduler and the kubelets take one step each; a second passes."""
        self.now += 1.0
        crowd = Counter(pod["spec"].get("nodeName") for pod in self.pods.values())
        for pod in list(self.pods.values()):
            node, status = pod["spec"].get("nodeName"), pod["status"]
            if node is None:
                free = [n for n, state in self.nodes.items() if not state and crowd[n] < self.room]
                if free:
                    pod["spec"]["nodeName"] = free[0]
                    crowd[free[0]] += 1
                scheduled = {"type": "PodScheduled", "status": "True"} if free else _UNSCHEDULABLE
                status["conditions"] = [scheduled]
            elif self.nodes[node] == "lost":
                continue
            elif "deletionTimestamp" in pod["metadata"]:
                self._vanish(pod)
            elif status["phase"] == "Pending":
                status["phase"] = "Running"
                running = {"running": {"startedAt": _time(self.now)}}
                status["containerStatuses"] = [{"name": labels.CONTAINER, "state": running}]
                self._turn(pod, "False")
            elif status["phase"] == "Running" and not _was_ready(pod):
                if pod["metadata"]["labels"][labels.TEMPLATE] in self.bad_boots:
                    self.fail(pod["metadata"]["uid"])
                else:
                    self._turn(pod, "True")
        self.claims = {uid: claim for uid, claim in self.claims.items() if self._by_uid(uid) is not None}

    def _turn(self, pod: Json, ready: str) -> None:
        others = [c for c in pod["status"].get("conditions", ()) if c["type"] != "Ready"]
        turned = {"type": "Ready", "status": ready, "lastTransitionTime": _time(self.now)}
        pod["status"]["conditions"] = [*others, turned]

    def sicken(self, uid: str) -> None:
        pod = self._by_uid(uid)
        assert pod is not None
        self._turn(pod, "False")

    def recover(self, uid: str) -> None:
        pod = self._by_uid(uid)
        assert pod is not None
        self._turn(pod, "True")

    def fail(self, uid: str) -> None:
        pod = self._by_uid(uid)
        assert pod is not None
        pod["status"]["phase"] = "Failed"
        state = pod["status"]["containerStatuses"][0]["state"]
        pod["status"]["containerStatuses"][0]["state"] = {
            "terminated": {"startedAt": state["running"]["startedAt"], "reason": "Error"}
        }
        self._turn(pod, "False")


class Operator:
    """The planner's shell, as the real one does it: one write after the other, and it may die after any of them."""

    def __init__(self, cluster: Cluster, pool: Pool):
        self.cluster, self.pool = cluster, pool
        self.history = History.of(pool.status)
        self.refusals: tuple[Refusal, ...] = ()

    def look(self) -> Plan:
        made = plan(self.pool, self.cluster.seen(self.refusals), self.history, self.cluster.now)
        self.history, self.refusals = made.history, ()
        return made

    def restart(self) -> None:
        self.history, self.refusals = History.of(self.pool.status), ()

    def act(self, made: Plan, writes: int | None = None, between: Callable[[], None] = lambda: None) -> None:
        """`writes`: it dies after so many. `between`: what happens after it looked and before it acts."""
        between()
        left = itertools.count() if writes is None else iter(range(writes))
        most = made.status.desired_replicas
        most += limits(self.pool.spec.update_strategy, most).surge
        not_done, makers = set[str](), room_makers(made)
        for removal in (*made.deletes, *made.retain):
            slot = next((s for s in self.cluster.slots() if s.uid == removal.slot.uid), None)
            if slot is not None and not self.cluster.drain(slot):
                not_done.add(removal.slot.uid)
                continue
            if next(left, None) is None:
                return self.restart()
            if removal in made.retain:
                self.cluster.retain(removal)
            else:
                self.cluster.delete(removal.slot.uid, removal.force)
        build = slot_pods(self.pool) if made.creates else None
        for new in made.creates:
            if makers[new.name] & not_done:
                continue
            if next(left, None) is None:
                return self.restart()
            assert build is not None
            refusal = self.cluster.create(build(new), most)
            if refusal is not None:
                self.refusals = (refusal,)
                break
        for uid, reason in made.revoke.items():
            if uid in self.cluster.claims:
                self.cluster.claims[uid] = replace(self.cluster.claims[uid], revoked=reason)
        self.pool = replace(self.pool, status=made.status)
        return None


_UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


def _was_ready(pod: Json) -> bool:
    ready = next((c for c in pod["status"].get("conditions", ()) if c["type"] == "Ready"), None)
    started = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    return ready is not None and (ready["status"] == "True" or ready["lastTransitionTime"] > started)


def _time(now: float) -> str:
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
