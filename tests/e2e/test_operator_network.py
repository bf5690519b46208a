"""The way between the operator and the API server is bad: answers are lost, late, wrong or missing, watches are cut,
and a leader that is cut off for long enough is no leader any more, whatever it still believes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from claiming import Denied, account, caller
from e2e.cluster import Cluster, Refused, fake
from faulty_proxy import FaultyProxy
from holders import Holder, Judge
from live_pool import LivePool, name, phone, uid, uids
from operator_process import ACCOUNT, Ground, Operator

TTL = {"ttlSeconds": 600}


@pytest.fixture(scope="module")
def network(cluster: Cluster) -> Iterator[FaultyProxy]:
    with FaultyProxy(cluster) as proxy:
        yield proxy


def through(cluster: Cluster, ground: Ground, network: FaultyProxy, identity: str) -> Path:
    """The way of an operator that reaches the API server over the network only."""
    return network.kubeconfig(cluster.user_with_token(identity, cluster.token(ground.own, ACCOUNT)))


@pytest.fixture(scope="module")
def operator(cluster: Cluster, ground: Ground, network: FaultyProxy) -> Iterator[Operator]:
    way = through(cluster, ground, network, "behind")
    one = Operator(cluster, ground.own, ground.spaces, identity="behind", kubeconfig=way).start().wait_ready()
    yield one
    one.stop()


@pytest.fixture(autouse=True)
def repaired(network: FaultyProxy) -> Iterator[None]:
    yield
    network.clear()


# --- answers ----------------------------------------------------------------------------------------------------------


def test_wrong_lost_and_missing_answers_to_everything(
    cluster: Cluster, space: str, operator: Operator, network: FaultyProxy
) -> None:
    """Creates, claims, releases, deletes, statuses: nothing is done twice, nothing is forgotten."""
    here = f"/namespaces/{space}/"
    met = [
        network.fault("POST", f"{here}pods\\?", does, times, after)
        for after, (does, times) in enumerate([(500, 2), (429, 2), ("lost", 2), ("refused", 1), (409, 1), ("late", 1)])
    ]
    met += [
        network.fault("PATCH", f"{here}pods/", does, 2, after) for after, does in enumerate([500, "lost", 409, 429])
    ]
    met += [network.fault("DELETE", f"{here}pods/", does, 1, after) for after, does in enumerate(["lost", 500, 429])]
    met += [network.fault("PATCH", f"{here}emulatorpools/", does, 1) for does in (500, "lost", 409)]
    met += [network.fault("POST", f"{here}poddisruptionbudgets", "lost")]
    pool = LivePool(cluster, space, replicas=12, health={"maxReplacementsPercentPerHour": 10_000})
    who = caller(operator, space)
    pool.wait("the operator to know of the pool", pool.pods)
    judge = Judge()
    holders = [Holder(who, "phones", judge, seed, dirty=0.3) for seed in range(4)]
    for holder in holders:
        holder.start()
    most = 0

    def suffered() -> bool:
        nonlocal most
        most = max(most, len(pool.pods()))
        return all(fault.met == fault.times for fault in met) and judge.granted > 20

    pool.wait("all faults to have happened", suffered)
    for holder in holders:
        holder.stop()
    for holder in holders:
        holder.join(120)
        assert not holder.is_alive() and holder.error is None, holder.error
    pool.wait_ready(12)
    pool.wait("all to be free", lambda: pool.status()["claimed"] == 0)
    pool.wait("no mark to be left", lambda: not pool.marked())
    assert judge.accusations == [] and judge.lost == []
    assert most <= 12
    assert cluster.exists(f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets/phones-claimed")


def test_who_can_not_be_checked_now_may_ask_again(
    cluster: Cluster, space: str, operator: Operator, network: FaultyProxy
) -> None:
    pool = LivePool(cluster, space, replicas=1)
    pool.wait_ready(1)
    who = caller(operator, space)
    network.fault("POST", "/tokenreviews$", 500)
    with pytest.raises(Denied) as denied:
        who.acquire()
    assert (denied.value.status, denied.value.reason) == (503, "CannotAuthenticate")
    network.fault("POST", "/subjectaccessreviews$", "refused")
    with pytest.raises(Denied) as denied:
        who.acquire()
    assert denied.value.status == 503
    assert who.acquire_one(**TTL)


# --- watches ----------------------------------------------------------------------------------------------------------


def test_what_happened_behind_a_cut_watch_is_found_out(
    cluster: Cluster, space: str, operator: Operator, network: FaultyProxy
) -> None:
    pool = LivePool(cluster, space, replicas=4)
    leaving = LivePool(cluster, space, "leaving", replicas=1)
    pods = pool.wait_ready(4)
    leaving.wait_ready(1)
    who = caller(operator, space)
    held, gone = who.acquire_all(2, **TTL)
    away = network.fault("GET", "watch=", "refused", times=10_000)
    assert network.cut_watches() >= 4
    pool.annotate(gone.slot, {fake.EXIT: "0"})

    def crashed() -> bool:
        try:
            return bool(pool.pod(gone.slot)["status"]["phase"] == "Failed")
        except Refused as error:
            if error.status != 404:
                raise
            return True  # lists go on: the operator may be faster than this test

    pool.wait("the crash", crashed)
    (free, *_) = [pod for pod in pods if name(pod) not in (held.slot, gone.slot)]
    cluster.api("DELETE", pool.place(name(free)))
    pool.edit(replicas=5)
    leaving.delete()
    pool.wait("watches to be asked for in vain", lambda: away.met > 4)
    new = LivePool(cluster, space, "new", replicas=1)
    network.clear()
    pool.wait("the crash to be noticed", lambda: who.state(gone) == "lost")
    after = pool.wait_ready(5)
    assert not {uid(free), gone.id.rpartition(".")[0]} & set(uids(after))
    assert who.state(held) == "held"
    new.wait_ready(1)
    leaving.wait("its end", lambda: not leaving.all_pods())
    key = f"{space}/leaving"
    pool.wait("it to be forgotten", lambda: operator.metrics("tapforge_pool_slots", pool=key, state="desired") == 0)


def test_versions_that_the_server_forgot_are_read_anew(
    cluster: Cluster, space: str, operator: Operator, network: FaultyProxy
) -> None:
    """410 Gone, as a watch gets it that was away for too long."""
    pool = LivePool(cluster, space, replicas=2)
    pool.wait_ready(2)
    forgotten = network.fault("GET", "watch=", "expired", times=6)
    network.cut_watches()
    pool.edit(replicas=4)
    pool.wait_ready(4)
    pool.wait("all to have happened", lambda: forgotten.met == 6)
    pool.edit(replicas=3)
    pool.wait_ready(3)


def test_an_operator_that_can_list_no_more_goes_on_and_loses_nothing(
    cluster: Cluster, space: str, ground: Ground, operator: Operator, network: FaultyProxy
) -> None:
    """410 Gone in the middle of each list: it leads on, and sees what happened meanwhile when it can list again."""
    pool = LivePool(cluster, space, replicas=2)
    pods = pool.wait_ready(2)
    who = caller(operator, space)
    claim = who.acquire_one(**TTL)
    network.fault("GET", "watch=", "expired", times=10_000)
    lists = network.fault("GET", "/pods\\?.*limit=", 410, times=10_000)
    pid, term = cluster.pid(operator.name), operator.term
    network.cut_watches()
    cluster.wait_for("lists of Pods", lambda: lists.met > 2 * len(ground.spaces))
    assert who.state(claim) == "held"
    network.clear()
    pool.edit(replicas=3)
    assert set(uids(pods)) < set(uids(pool.wait_ready(3)))
    assert who.state(claim) == "held"
    assert (cluster.pid(operator.name), operator.term) == (pid, term), "the same process leads on"


# --- two at once ------------------------------------------------------------------------------------------------------


def writes(network: FaultyProxy, since: int) -> list[str]:
    """What was written over the network since then, but for the leader Lease."""
    return [
        f"{s.method} {s.path}" for s in network.seen[since:] if s.writes and "/leases/tapforge-operator" not in s.path
    ]


@pytest.fixture
def two(cluster: Cluster, ground: Ground, network: FaultyProxy, operator: Operator) -> Iterator[list[Operator]]:
    """The leader behind the network, and one that stands by on another way; in the place of the other operator."""
    operator.stop()
    leader, other = (
        Operator(
            cluster,
            ground.own,
            ground.spaces,
            identity=identity,
            kubeconfig=way,
        )
        for identity, way in (("leader", through(cluster, ground, network, "leader")), ("other", None))
    )
    leader.start().wait_ready()
    other.start().wait_ready(leads=False)
    yield [leader, other]
    leader.kill9()
    other.stop()
    operator.start().wait_ready()


def test_a_leader_that_was_cut_off_stops_and_another_goes_on(
    cluster: Cluster, space: str, network: FaultyProxy, two: list[Operator]
) -> None:
    leader, other = two
    pool = LivePool(cluster, space, replicas=4)
    pool.wait_ready(4)
    by_leader, by_other = caller(leader, space), caller(other, space)
    held = by_leader.acquire_one(**TTL)
    pool.wait("the standby to know the leader", lambda: other.role == "standing by; leader leads")
    by_other.release(by_other.acquire_one(**TTL))
    assert other.metrics("tapforge_forwarded_calls_total", answered="true") == 2, "the leader answered"
    with ThreadPoolExecutor(4) as threads:
        with network.silence():
            # For longer than the leadership lasts, however slow this test is: they end with it.
            late = [threads.submit(by_leader.acquire, waitSeconds=60, **TTL) for _ in range(3)]
            pool.annotate(name(pool.pods()[0]), {"something": "happens"})
            other.wait_ready()
            assert by_other.state(held) == "held", "the claim went over to the other one"
            rest = by_other.acquire_all(3, **TTL)
            cluster.wait_for("the old leader to stand by", lambda: leader.term == 0)
        # Whoever waited for the old leader was sent on by it; what it had sent to the API server arrives only now.
        for wish in late:
            with pytest.raises(Denied) as denied:
                wish.result(timeout=120)
            assert (denied.value.status, denied.value.reason) == (503, "NotLeader")
    assert min(claim.fence for claim in rest) > held.fence
    assert {said.state for said in by_other.renew(held, *rest)} == {"held"}
    by_other.release(held, *rest)
    pool.wait("all to be free", lambda: pool.status()["claimed"] == 0 and pool.status()["ready"] == 4)
    assert pool.status()["replacedTotal"] == 0


def test_a_leader_that_stood_still_writes_nothing_when_it_goes_on(
    cluster: Cluster, space: str, network: FaultyProxy, two: list[Operator]
) -> None:
    leader, other = two
    pool = LivePool(cluster, space, replicas=4)
    pods = pool.wait_ready(4)
    by_leader, by_other = caller(leader, space), caller(other, space)
    dead = by_leader.acquire_one(ttlSeconds=5, holdSeconds=5)
    with leader.paused():
        other.wait_ready()
        held = by_other.acquire_all(2, **TTL)
        pool.wait("the unrenewed claim to end", lambda: dead.id.rpartition(".")[0] not in uids(pool.pods()))
        pods = pool.wait_ready(4)
        # Enough for a leader to do, as soon as it looks: a crash, another size, another template.
        victim = next(name(pod) for pod in pods if name(pod) not in [claim.slot for claim in held])
        pool.annotate(victim, {fake.EXIT: "0"})
        pool.edit(replicas=5, template=phone("phone:2"))
        before = len(network.seen)
        time.sleep(0.5)
    cluster.wait_for("the old leader to stand by", lambda: leader.term == 0)
    cluster.wait_for("it to know the new one", lambda: leader.role == "standing by; other leads")
    # Another template is on its way, so they may be asked back.
    assert {said.state for said in by_leader.renew(*held)} <= {"held", "recalled"}, "it passes callers on"
    assert writes(network, before) == []
    pool.wait("the other one's work", lambda: len(pool.pods()) == 5 and pool.status()["updated"] == 3)
    assert by_other.release(*held)
    pool.wait("the rest of it", lambda: pool.status()["updated"] == pool.status()["ready"] == 5)


def test_an_operator_that_stands_by_takes_over_at_once_when_the_leader_leaves(
    cluster: Cluster, space: str, network: FaultyProxy, two: list[Operator]
) -> None:
    leader, other = two
    pool = LivePool(cluster, space, replicas=2)
    pool.wait_ready(2)
    claim = caller(leader, space).acquire_one(**TTL)
    term = leader.term
    assert other.term == 0
    leader.stop()
    other.wait_ready()
    assert other.term > term, "a larger one; whose first win is answered too late wins again, in a later term"
    who = caller(other, space)
    assert who.state(claim) == "held"
    who.release(claim)
    assert account(cluster, space)
