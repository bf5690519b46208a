"""How claims end, seen from outside: what is thrown away, what the cluster takes away, and what the pool asks back.
Over HTTPS, with real tokens, on a real API server.
"""

from __future__ import annotations

import pytest
from claiming import caller, slots_of
from e2e.cluster import Cluster, Refused, fake
from live_pool import LivePool, name, only_on, own_nodes, phone, uid, uids
from operator_process import Operator

from tapforge_operator import labels

#: longer than any test takes: claims end here when they are meant to
TTL = {"ttlSeconds": 3600}


def evict(cluster: Cluster, pool: LivePool, pod: str) -> int:
    """The status of the answer to an eviction, as a drain asks for it."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": pool.namespace}}
    try:
        cluster.api("POST", f"{pool.place(pod)}/eviction", body)
    except Refused as error:
        return error.status
    return 201


# --- the ends that throw the slot away --------------------------------------------------------------------------------


def test_slots_that_came_back_bad_or_not_at_all_are_thrown_away(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    pool = LivePool(cluster, space, replicas=3)
    pool.wait_ready(3)
    who = caller(operator, space)
    dirty, broken = who.acquire_all(2, **TTL)
    held = who.acquire_one(**TTL)
    who.release(dirty, verdict="dirty")
    who.release(broken, verdict="broken")
    pool.wait_gone(dirty.slot)
    pool.wait_gone(broken.slot)
    assert who.state(held) == "held"
    who.release(held)
    pool.wait_ready(3)
    expires = who.acquire_one(ttlSeconds=5, holdSeconds=5)
    who.renew(expires)
    pool.wait_gone(expires.slot)
    said = who.renew(expires)[0]
    assert said.state == "lost" and said.reason
    fresh = pool.wait_ready(3)
    assert not {dirty.slot, broken.slot, expires.slot} & {name(pod) for pod in fresh}
    later = who.acquire_all(3, **TTL)
    assert {claim.id.split(".")[0] for claim in later} == set(uids(fresh))


def test_a_claim_ends_with_its_pod_and_the_holder_is_told_why(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=2)
    pool.wait_ready(2)
    who = caller(operator, space)
    crashes, deleted = who.acquire_all(2, **TTL)
    pool.annotate(crashes.slot, {fake.EXIT: "0"})
    cluster.api("DELETE", pool.place(deleted.slot))
    pool.wait_gone(crashes.slot)
    pool.wait_gone(deleted.slot)
    # The Pod that was deleted may be gone before the operator has heard of it.
    pool.wait("both to be lost", lambda: [answer.state for answer in who.renew(crashes, deleted)] == ["lost", "lost"])
    lost = who.renew(crashes, deleted)
    assert all(answer.reason for answer in lost)
    assert "ended" in lost[0].reason and "deleted" in lost[1].reason
    pool.wait_ready(2)


# --- what the cluster's other actors see ------------------------------------------------------------------------------


def test_drains_wait_for_claimed_slots_and_take_the_others(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=3)
    pool.wait_ready(3)
    who = caller(operator, space)
    claims = who.acquire_all(2, **TTL)
    budget = f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets/phones-claimed"
    pool.wait("the budget", lambda: cluster.exists(budget))
    pool.wait("the budget to count", lambda: cluster.api("GET", budget)["status"].get("currentHealthy") == 2)
    assert [evict(cluster, pool, claim.slot) for claim in claims] == [429, 429]
    (free,) = {name(pod) for pod in pool.pods()} - set(slots_of(claims))
    assert evict(cluster, pool, free) == 201
    pool.wait_gone(free)
    pool.wait_ready(3)
    who.release(claims[0])
    pool.wait("it to be free", lambda: labels.CLAIMED not in pool.pod(claims[0].slot)["metadata"]["labels"])
    assert evict(cluster, pool, claims[0].slot) == 201
    assert who.state(claims[1]) == "held"


def test_a_cordoned_node_asks_its_slots_back(cluster: Cluster, space: str, operator: Operator) -> None:
    here, there = own_nodes(cluster, space, 2, pods=1)
    try:
        pool = LivePool(cluster, space, replicas=1, template=phone(**only_on(space)))
        (pod,) = pool.wait_ready(1)
        who = caller(operator, space)
        claim = who.acquire_one(**TTL)
        cluster.kubectl("cordon", pod["spec"]["nodeName"])
        pool.wait("it to be asked back", lambda: who.state(claim) == "recalled")
        assert who.renew(claim)[0].reason == "Cordoned"
        assert uid(pool.pod(claim.slot)) == uid(pod), "not before the end of the episode"
        who.release(claim)
        pool.wait_gone(claim.slot)
        (after,) = pool.wait_ready(1)
        assert after["spec"]["nodeName"] != pod["spec"]["nodeName"]
    finally:
        for node in (here, there):
            cluster.nodes.remove(node)


def test_slots_of_a_cordoned_node_are_not_granted_until_it_is_uncordoned(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    """They can't be exchanged either: no node has room for what would come in their place."""
    (node,) = own_nodes(cluster, space, 1, pods=2)
    try:
        strategy = {"maxSurge": 1, "maxUnavailable": 0}
        pool = LivePool(cluster, space, replicas=2, template=phone(**only_on(space)), updateStrategy=strategy)
        slots = uids(pool.wait_ready(2))
        who = caller(operator, space)
        claim = who.acquire_one(**TTL)
        cluster.kubectl("cordon", node)
        pool.wait("a slot beside them, without a node", lambda: pool.status()["unschedulable"] == 1)
        assert who.acquire(waitSeconds=1) == []
        who.release(claim, verdict="clean")
        assert who.acquire(waitSeconds=1) == [], "what is given back goes to nobody else either"
        cluster.kubectl("uncordon", node)
        again = who.acquire_one(**TTL)
        assert uid(pool.pod(again.slot)) in slots
    finally:
        cluster.nodes.remove(node)


def test_a_lost_node_ends_no_claim_by_itself(cluster: Cluster, space: str, operator: Operator) -> None:
    """Its phone may well run on and be used; when the claim ends, the Pod goes by force."""
    (node,) = own_nodes(cluster, space, 1)
    try:
        pool = LivePool(cluster, space, replicas=1, template=phone(**only_on(space)))
        pool.wait_ready(1)
        who = caller(operator, space)
        claim = who.acquire_one(**TTL)
        cluster.nodes.lose(node)
        pool.wait("it to be asked back", lambda: who.state(claim) == "recalled")
        who.release(claim, verdict="broken")
        pool.wait_gone(claim.slot)
    finally:
        cluster.nodes.remove(node)


# --- what the pool wants back -----------------------------------------------------------------------------------------


def test_a_new_template_reaches_claimed_slots_when_they_are_given_back(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    pool = LivePool(cluster, space, replicas=2, updateStrategy={"maxUnavailable": 2})
    pool.wait_ready(2)
    who = caller(operator, space)
    claim = who.acquire_one(**TTL)
    held = uid(pool.pod(claim.slot))
    pool.edit(template=phone("phone:2"))
    pool.wait("the free one to be new", lambda: pool.status()["updated"] == 1 and pool.status()["ready"] == 2)
    assert uid(pool.pod(claim.slot)) == held
    pool.wait("the claimed one to be asked back", lambda: who.state(claim) == "recalled")
    pool.wait("word of it", lambda: pool.says("Reconciling", "True", "RollingOut"))
    assert uid(pool.pod(claim.slot)) == held
    fresh = who.acquire_one(**TTL)
    assert pool.pod(fresh.slot)["spec"]["containers"][0]["image"] == "phone:2"
    who.release(claim)
    pool.wait_gone(claim.slot)
    pool.wait("both to be new", lambda: pool.status()["updated"] == pool.status()["ready"] == 2)
    assert who.state(fresh) == "held"


def test_a_slot_that_played_enough_episodes_is_replaced(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=1, recycle={"afterEpisodes": 3})
    (pod,) = pool.wait_ready(1)
    who = caller(operator, space)
    first = who.acquire_one(**TTL)
    who.release(first, episodes=2)
    second = who.acquire_one(**TTL)
    assert second.slot == first.slot
    who.renew(second, episodes=1)
    pool.wait("it to be asked back", lambda: who.renew(second, episodes=1)[0].state == "recalled")
    who.release(second, episodes=1)
    pool.wait_gone(name(pod))
    assert who.acquire_one(**TTL).slot != first.slot


def test_scaling_in_asks_claimed_slots_back_and_a_deleted_pool_all_of_them(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    pool = LivePool(cluster, space, replicas=3)
    pool.wait_ready(3)
    who = caller(operator, space)
    claims = who.acquire_all(3, **TTL)
    pool.edit(replicas=2)
    pool.wait("one to be asked back", lambda: [r.state for r in who.renew(*claims)].count("recalled") == 1)
    (back,) = [claim for claim in claims if who.state(claim) == "recalled"]
    who.release(back)
    pool.wait_gone(back.slot)
    pool.wait("the status to say so", lambda: pool.status()["claimed"] == 2)
    with pytest.raises(Refused, match="2 slots of this pool are claimed"):
        pool.delete()
    pool.delete(claimed=True)
    rest = [claim for claim in claims if claim is not back]
    pool.wait("its claims to end", lambda: {r.state for r in who.renew(*rest)} == {"lost"})
    assert all(answer.reason for answer in who.renew(*rest))
    pool.wait("its Pods to be collected", lambda: not pool.all_pods())


def test_claims_make_a_scaling_pool_grow_and_shrink(cluster: Cluster, space: str, operator: Operator) -> None:
    scaling = {"maxReplicas": 3, "warmSpares": 1, "idleSeconds": 2}
    pool = LivePool(cluster, space, scaling=scaling)
    pool.wait("its first status", lambda: pool.says("Ready", "True"))
    who = caller(operator, space)
    first = who.acquire_one(**TTL)
    pool.wait("a spare", lambda: pool.status()["ready"] == 2)
    others = who.acquire_all(2, **TTL)
    pool.wait("word of it", lambda: pool.status()["desiredReplicas"] == 3)
    who.release(*others)
    pool.wait("the spare to be enough", lambda: len(pool.all_pods()) == 2)
    assert who.state(first) == "held"
    who.release(first)
    pool.wait("nobody to need it", lambda: not pool.all_pods())


def test_the_broker_saw_no_trouble(operator: Operator) -> None:
    """Last: after everything above."""
    assert operator.trouble() == []
