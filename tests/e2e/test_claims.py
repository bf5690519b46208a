"""Claims from outside: over HTTPS, with real tokens, on a real API server. What a claim promises its holder, what is
written on the slot meanwhile, and how it ends.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from claiming import Caller, caller, run, run_pod, slots_of
from e2e.cluster import MERGE, Cluster, Refused, fake
from live_pool import LivePool, Object, name, note_of, only_on, own_nodes, phone, uid, uids
from operator_process import Operator

from tapforge_api.claims import Claim
from tapforge_operator import names

#: longer than any test takes: claims end here when they are meant to
TTL = {"ttlSeconds": 3600}


def slot_pod(pool: LivePool, claim: Claim) -> Object:
    return pool.pod(claim.slot)


def evict(cluster: Cluster, pool: LivePool, pod: str) -> int:
    """The status of the answer to an eviction, as a drain asks for it."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": pool.namespace}}
    try:
        cluster.api("POST", f"{pool.place(pod)}/eviction", body)
    except Refused as error:
        return error.status
    return 201


def wait_gone(pool: LivePool, pod: str) -> None:
    pool.wait(f"the end of Pod {pod}", lambda: pod not in [name(p) for p in pool.all_pods()])


# --- from acquire to release ------------------------------------------------------------------------------------------


def test_a_claim_is_written_on_its_slot_and_taken_off_again(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=2, port=9000)
    pool.wait_ready(2)
    who = caller(operator, space)
    claim = who.acquire_one(**TTL)
    pod = slot_pod(pool, claim)
    assert claim.url == f"http://{pod['status']['podIP']}:9000"
    assert claim.id == f"{uid(pod)}.{claim.fence}" and claim.ttl_seconds == 3600
    assert pod["metadata"]["labels"][names.CLAIMED] == "true"
    assert note_of(pod, names.SAFE_TO_EVICT) == "false" and note_of(pod, names.DO_NOT_DISRUPT) == "true"
    assert note_of(pod, names.FENCE) == str(claim.fence)
    assert claim.secret not in json.dumps(pod), "who can read Pods can't take claims over"
    (free,) = [p for p in pool.pods() if name(p) != claim.slot]
    assert names.CLAIMED not in free["metadata"]["labels"] and note_of(free, names.SAFE_TO_EVICT) == "true"
    pool.wait("the status to say so", lambda: pool.status()["claimed"] == 1)
    assert who.state(claim) == "held"
    who.renew(claim, episodes=3)
    assert who.release(claim, episodes=4)[0].state == "lost"
    pool.wait("the claim to be taken off", lambda: note_of(slot_pod(pool, claim), names.CLAIM) is None)
    after = slot_pod(pool, claim)
    assert uid(after) == uid(pod) and names.CLAIMED not in after["metadata"]["labels"]
    assert note_of(after, names.CLAIM) is None and note_of(after, names.DO_NOT_DISRUPT) is None
    assert note_of(after, names.SAFE_TO_EVICT) == "true" and note_of(after, names.EPISODES) == "4"
    assert note_of(after, names.FENCE) == str(claim.fence), "the next one's is larger"
    pool.wait("the status to say so", lambda: pool.status()["claimed"] == 0)
    assert who.state(claim) == "lost" and pool.status()["replacedTotal"] == 0


def test_fifty_callers_at_once_never_share_a_slot(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=10)
    pool.wait_ready(10)
    who = caller(operator, space)
    holders: defaultdict[str, list[Claim]] = defaultdict(list)
    shared: list[str] = []
    lock = threading.Lock()

    def play(_: int) -> None:
        claim = who.acquire_one(waitSeconds=300, **TTL)
        with lock:
            if holders[claim.slot] and holders[claim.slot][-1].id not in over:
                shared.append(claim.slot)
            holders[claim.slot].append(claim)
        assert who.state(claim) == "held"
        with lock:
            over.add(claim.id)
        who.release(claim)

    over: set[str] = set()
    with ThreadPoolExecutor(50) as threads:
        list(threads.map(play, range(50)))
    assert not shared
    claims = [claim for held in holders.values() for claim in held]
    assert len({claim.id for claim in claims}) == len(claims) == 50
    for held in holders.values():
        fences = [claim.fence for claim in held]
        assert fences == sorted(set(fences))
    pool.wait("no mark to be left", lambda: not pool.marked())
    assert len(pool.pods()) == 10 and pool.status()["replacedTotal"] == 0


def test_who_waits_gets_the_slot_that_comes_free_and_who_went_away_does_not(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    pool = LivePool(cluster, space, replicas=1)
    pool.wait_ready(1)
    who = caller(operator, space)
    first = who.acquire_one(**TTL)
    assert who.acquire(waitSeconds=0.5) == []
    gone = _ask_and_leave(who)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(who.acquire_one, waitSeconds=300, **TTL)
        pool.wait("both to wait", lambda: operator.metrics("tapforge_claims_waiting", pool=f"{space}/phones") == 2)
        gone.close()
        pool.wait("one to be gone", lambda: operator.metrics("tapforge_claims_waiting", pool=f"{space}/phones") == 1)
        who.release(first)
        claim = second.result(timeout=300)
    assert claim.slot == first.slot and claim.fence > first.fence
    assert who.state(claim) == "held" and who.state(first) == "lost"


def _ask_and_leave(who: Caller) -> http.client.HTTPSConnection:
    """Somebody who asks for a slot and doesn't listen."""
    host, port = who.operator.broker.removeprefix("https://").split(":")
    connection = http.client.HTTPSConnection(host, int(port), timeout=who.patience, context=who._tls)
    body = json.dumps({"request": "gone-away-1", "waitSeconds": 300})
    headers = {"Authorization": f"Bearer {who.token}"}
    connection.request("POST", f"/v1/namespaces/{who.namespace}/pools/phones/claims", body, headers)
    return connection


def test_a_repeated_request_gets_the_same_claims_and_nobody_elses(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    pool = LivePool(cluster, space, replicas=3)
    pool.wait_ready(3)
    who, other = caller(operator, space), caller(operator, space)
    for number in range(20):  # until both slots are written within the time of one answer
        request = f"sent-twice-{number}"
        claims = who.acquire(request=request, slots=2, waitSeconds=60, **TTL)
        assert who.acquire(request=request, slots=2, **TTL) == claims
        if len(claims) == 2:
            break
        who.release(*claims)
    assert len(claims) == 2
    theirs = other.acquire(request=request, slots=2, waitSeconds=60, **TTL)
    assert len(theirs) == 1 and not set(slots_of(theirs)) & set(slots_of(claims))


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
    wait_gone(pool, dirty.slot)
    wait_gone(pool, broken.slot)
    assert who.state(held) == "held"
    who.release(held)
    pool.wait_ready(3)
    expires = who.acquire_one(ttlSeconds=5, holdSeconds=5)
    who.renew(expires)
    wait_gone(pool, expires.slot)
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
    wait_gone(pool, crashes.slot)
    wait_gone(pool, deleted.slot)
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
    wait_gone(pool, free)
    pool.wait_ready(3)
    who.release(claims[0])
    pool.wait("it to be free", lambda: names.CLAIMED not in pool.pod(claims[0].slot)["metadata"]["labels"])
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
        assert uid(slot_pod(pool, claim)) == uid(pod), "not before the end of the episode"
        who.release(claim)
        wait_gone(pool, claim.slot)
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
        assert uid(slot_pod(pool, again)) in slots
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
        wait_gone(pool, claim.slot)
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
    held = uid(slot_pod(pool, claim))
    pool.edit(template=phone("phone:2"))
    pool.wait("the free one to be new", lambda: pool.status()["updated"] == 1 and pool.status()["ready"] == 2)
    assert uid(slot_pod(pool, claim)) == held
    pool.wait("the claimed one to be asked back", lambda: who.state(claim) == "recalled")
    pool.wait("word of it", lambda: pool.says("Reconciling", "True", "RollingOut"))
    assert uid(slot_pod(pool, claim)) == held
    fresh = who.acquire_one(**TTL)
    assert slot_pod(pool, fresh)["spec"]["containers"][0]["image"] == "phone:2"
    who.release(claim)
    wait_gone(pool, claim.slot)
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
    wait_gone(pool, name(pod))
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
    wait_gone(pool, back.slot)
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


# --- several who want slots -------------------------------------------------------------------------------------------


def test_slots_are_shared_fairly_and_the_larger_priority_is_served_first(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    pool = LivePool(cluster, space, replicas=5)
    pool.wait_ready(5)
    greedy, modest, urgent = (caller(operator, space) for _ in range(3))
    kept = greedy.acquire_all(5, **TTL)

    def give_back(claims: list[Claim]) -> list[Claim]:
        """As a run does at the end of an episode; returns what it keeps."""
        states = greedy.renew(*claims)
        back = [claim for claim, said in zip(claims, states, strict=True) if said.state == "recalled"]
        if back:
            assert all("others wait" in said.reason for said in states if said.state == "recalled")
            greedy.release(*back)
        return [claim for claim in claims if claim not in back]

    wish: dict[str, Any] = {"waitSeconds": 300, **TTL}
    with ThreadPoolExecutor(2) as threads:

        def share(*wishes: Future[list[Claim]]) -> bool:
            kept[:] = give_back(kept)
            return all(wish.done() for wish in wishes)

        both = threads.submit(modest.acquire, slots=5, **wish), threads.submit(urgent.acquire, priority=10, **wish)
        pool.wait("both to be served", lambda: share(*both))
        got, first = both[0].result(), both[1].result()
        assert len(first) == 1
        while len(got) < 2:
            rest = threads.submit(modest.acquire, slots=2 - len(got), **wish)
            pool.wait("the rest to be served", lambda rest=rest: share(rest))
            got += rest.result()
    assert (len(kept), len(got)) == (2, 2)
    assert give_back(kept) == kept, "once shared, nothing moves"
    assert modest.acquire(slots=1, waitSeconds=0.2) == []


# --- what others write on slots ---------------------------------------------------------------------------------------


def test_marks_that_somebody_forged_give_nobody_anything(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=2)
    pods = pool.wait_ready(2)
    who = caller(operator, space)
    claim = who.acquire_one(**TTL)
    (free,) = [pod for pod in pods if name(pod) != claim.slot]
    mark = note_of(slot_pod(pool, claim), names.CLAIM)
    forged = {"labels": {names.CLAIMED: "true"}, "annotations": {names.CLAIM: mark, names.FENCE: "7"}}
    cluster.api("PATCH", pool.place(name(free)), {"metadata": forged}, MERGE)
    other = who.acquire_one(**TTL)
    assert other.slot == name(free), "a free slot stays free, whatever is copied onto it"
    assert other.fence > claim.fence and who.state(other) == "held"
    who.release(other)
    assert name(free) in [name(pod) for pod in pool.pods()]
    # A mark that is changed under its holder: nobody can say any more whose the slot is.
    pool.annotate(claim.slot, {names.CLAIM: '{"holder":"me"}'})
    wait_gone(pool, claim.slot)
    assert "changed by somebody else" in who.renew(claim)[0].reason
    pool.wait_ready(2)


def test_a_secret_opens_its_own_claim_only(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=2)
    pool.wait_ready(2)
    who = caller(operator, space)
    mine, theirs = who.acquire_all(2, **TTL)
    thief = theirs.model_copy(update={"secret": mine.secret})
    for answer in (who.renew(thief)[0], who.release(thief, verdict="broken")[0]):
        assert answer.state == "lost" and "secret" in answer.reason
    assert who.state(theirs) == "held" and uid(slot_pod(pool, theirs)) == theirs.id.split(".")[0]


# --- devices without Pods ---------------------------------------------------------------------------------------------


def test_external_devices_are_claimed_by_leases_and_rest_after_trouble(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    urls = [f"http://10.1.0.{n}:8000" for n in range(3)]
    pool = LivePool(cluster, space, external={"urls": urls})
    pool.wait("its status", lambda: pool.says("Ready", "True"))
    who = caller(operator, space)
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
    broken = who.acquire_one(**TTL)
    who.release(broken, verdict="broken")
    noted = f"{leases}/{broken.slot}"
    pool.wait("its strike", lambda: note_of(cluster.api("GET", noted), names.STRIKES) == "1")
    claims = who.acquire_all(3, **TTL)  # as soon as it has rested
    assert {claim.url for claim in claims} == set(urls)
    held = {item["metadata"]["name"]: item for item in cluster.api("GET", leases)["items"]}
    assert set(held) == set(slots_of(claims))
    for item in held.values():
        assert item["spec"]["holderIdentity"] and item["metadata"]["ownerReferences"][0]["uid"] == pool.uid
    pool.wait("the status to say so", lambda: pool.status()["claimed"] == 3)
    clean, dirty, removed = claims
    who.release(clean)
    again = who.acquire_one(**TTL)
    assert again.url == clean.url and again.fence > clean.fence
    # For a minute: the 10 s of the broken one would be over before all that follows was looked at.
    who.release(dirty, verdict="dirty")
    assert who.acquire(waitSeconds=1) == [], "it rests"
    pool.wait("word of it", lambda: pool.status()["ready"] == 2 and pool.status()["unhealthy"] == 1)
    pool.edit(external={"urls": [url for url in urls if url != removed.url]})
    pool.wait("the removed one to be asked back", lambda: who.state(removed) == "recalled")
    who.release(removed)
    pool.wait("it to be gone", lambda: (pool.status()["ready"], pool.status()["unhealthy"]) == (1, 1))
    assert who.acquire(waitSeconds=1) == [], "nobody gets it any more"
    assert who.state(again) == "held"
    pool.delete(claimed=True)
    pool.wait("its Leases to be collected", lambda: not cluster.api("GET", leases)["items"])
    assert who.state(again) == "lost"


def test_a_device_that_two_pools_name_has_one_holder(cluster: Cluster, space: str, operator: Operator) -> None:
    pools = [LivePool(cluster, space, name, external={"urls": ["http://10.3.0.1:8000"]}) for name in ("one", "two")]
    one, two = pools
    for pool in pools:
        pool.wait("its status", lambda pool=pool: pool.says("Ready", "True"))
    who = caller(operator, space)
    claim = who.acquire_one("one", **TTL)
    assert who.acquire("two", waitSeconds=1) == []
    two.wait("word of it", lambda: two.says("Degraded", "True", "DevicesUnavailable"))
    assert "another pool" in two.condition("Degraded")["message"] and one.says("Degraded", "False")
    operator.kill9()
    operator.start().wait_ready()
    assert who.acquire("two", waitSeconds=1) == [], "the next operator reads it off the Lease"
    assert who.state(claim) == "held"
    who.release(claim)
    assert who.acquire_one("two", **TTL).url == claim.url
    one.wait("word of it", lambda: one.says("Degraded", "True") and two.says("Degraded", "False"))


def test_runs_are_holders_by_name_on_the_slot(cluster: Cluster, space: str, operator: Operator) -> None:
    """What a person sees who asks which run holds a phone."""
    pool = LivePool(cluster, space, replicas=1)
    pool.wait_ready(1)
    token = run_pod(cluster, space, run(cluster, space, "learning"))
    claim = Caller(operator, space, token).acquire_one(**TTL)
    labels = slot_pod(pool, claim)["metadata"]["labels"]
    assert (labels[names.CLAIMED], labels[names.RUN]) == ("true", "learning")


def test_the_broker_saw_no_trouble(operator: Operator) -> None:
    """Last: after everything above."""
    assert operator.trouble() == []
