"""Claims from outside: over HTTPS, with real tokens, on a real API server. Who gets which slot, what a claim promises
its holder, and what is written on the slot meanwhile; how it ends is in test_claim_ends.py.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from claiming import Caller, caller, run, run_pod, slots_of
from e2e.cluster import MERGE, Cluster
from live_pool import LivePool, name, note_of, uid
from operator_process import Operator

from tapforge_api.claims import Claim
from tapforge_operator import labels as wellknown

#: longer than any test takes: claims end here when they are meant to
TTL = {"ttlSeconds": 3600}


# --- from acquire to release ------------------------------------------------------------------------------------------


def test_a_claim_is_written_on_its_slot_and_taken_off_again(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=2, port=9000)
    pool.wait_ready(2)
    who = caller(operator, space)
    claim = who.acquire_one(**TTL)
    pod = pool.pod(claim.slot)
    assert claim.url == f"http://{pod['status']['podIP']}:9000"
    assert claim.id == f"{uid(pod)}.{claim.fence}" and claim.ttl_seconds == 3600
    assert pod["metadata"]["labels"][wellknown.CLAIMED] == "true"
    assert note_of(pod, wellknown.SAFE_TO_EVICT) == "false" and note_of(pod, wellknown.DO_NOT_DISRUPT) == "true"
    assert note_of(pod, wellknown.FENCE) == str(claim.fence)
    assert claim.secret not in json.dumps(pod), "who can read Pods can't take claims over"
    (free,) = [p for p in pool.pods() if name(p) != claim.slot]
    assert wellknown.CLAIMED not in free["metadata"]["labels"] and note_of(free, wellknown.SAFE_TO_EVICT) == "true"
    pool.wait("the status to say so", lambda: pool.status()["claimed"] == 1)
    assert who.state(claim) == "held"
    who.renew(claim, episodes=3)
    assert who.release(claim, episodes=4)[0].state == "lost"
    pool.wait("the claim to be taken off", lambda: note_of(pool.pod(claim.slot), wellknown.CLAIM) is None)
    after = pool.pod(claim.slot)
    assert uid(after) == uid(pod) and wellknown.CLAIMED not in after["metadata"]["labels"]
    assert note_of(after, wellknown.CLAIM) is None and note_of(after, wellknown.DO_NOT_DISRUPT) is None
    assert note_of(after, wellknown.SAFE_TO_EVICT) == "true" and note_of(after, wellknown.EPISODES) == "4"
    assert note_of(after, wellknown.FENCE) == str(claim.fence), "the next one's is larger"
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
    mark = note_of(pool.pod(claim.slot), wellknown.CLAIM)
    forged = {"labels": {wellknown.CLAIMED: "true"}, "annotations": {wellknown.CLAIM: mark, wellknown.FENCE: "7"}}
    cluster.api("PATCH", pool.place(name(free)), {"metadata": forged}, MERGE)
    other = who.acquire_one(**TTL)
    assert other.slot == name(free), "a free slot stays free, whatever is copied onto it"
    assert other.fence > claim.fence and who.state(other) == "held"
    who.release(other)
    assert name(free) in [name(pod) for pod in pool.pods()]
    # A mark that is changed under its holder: nobody can say any more whose the slot is.
    pool.annotate(claim.slot, {wellknown.CLAIM: '{"holder":"me"}'})
    pool.wait_gone(claim.slot)
    assert "changed by another client" in who.renew(claim)[0].reason
    pool.wait_ready(2)


def test_a_secret_opens_its_own_claim_only(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=2)
    pool.wait_ready(2)
    who = caller(operator, space)
    mine, theirs = who.acquire_all(2, **TTL)
    thief = theirs.model_copy(update={"secret": mine.secret})
    for answer in (who.renew(thief)[0], who.release(thief, verdict="broken")[0]):
        assert answer.state == "lost" and "secret" in answer.reason
    assert who.state(theirs) == "held" and uid(pool.pod(theirs.slot)) == theirs.id.split(".")[0]


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
    pool.wait("its strike", lambda: note_of(cluster.api("GET", noted), wellknown.STRIKES) == "1")
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
    labels = pool.pod(claim.slot)["metadata"]["labels"]
    assert (labels[wellknown.CLAIMED], labels[wellknown.RUN]) == ("true", "learning")


def test_the_broker_saw_no_trouble(operator: Operator) -> None:
    """Last: after everything above."""
    assert operator.trouble() == []
