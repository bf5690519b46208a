"""Many at once: hundreds of Pods that change while claims go on, many pools, many runs that come and go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from claiming import caller, run
from e2e.cluster import MERGE, Cluster, fake
from holders import Holder, Judge
from live_pool import LivePool, name, only_on, own_nodes, phone, uids
from operator_process import Operator

SLOTS = 300 if os.environ.get("CI") else 1000


@pytest.fixture(scope="module", autouse=True)
def room(cluster: Cluster) -> Iterator[None]:
    """Two nodes that take them all."""
    nodes = own_nodes(cluster, "storm", 2, pods=SLOTS)
    yield
    for node in nodes:
        cluster.nodes.remove(node)


def test_hundreds_of_pods_change_at_once_and_claims_go_on(cluster: Cluster, space: str, operator: Operator) -> None:
    generous = {"maxReplacementsPercentPerHour": 10_000}
    template = phone(**only_on("storm"), terminationGracePeriodSeconds=0)
    pool = LivePool(cluster, space, replicas=SLOTS, health=generous, template=template)
    before = pool.wait_ready(SLOTS)
    assert len({name(pod) for pod in before}) == SLOTS
    judge = Judge()
    who = caller(operator, space)
    holders = [Holder(who, "phones", judge, seed, dirty=0.0) for seed in range(4)]
    for holder in holders:
        holder.start()
    pool.wait("claims to be under way", lambda: judge.granted > 4)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda pod: pool.annotate(name(pod), {"storm": "1"}), before))
    assert set(uids(pool.pods())) == set(uids(before)), "changes of no meaning change nothing"
    sick = before[: SLOTS // 3]
    for pod in sick:
        judge.harm(pod["metadata"]["uid"])
    notes = {"metadata": {"annotations": {fake.EXIT: "0"}}}
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda pod: cluster.api("PATCH", pool.place(name(pod)), notes, MERGE), sick))
    pool.wait("all of the sick to be replaced", lambda: not set(uids(sick)) & set(uids(pool.pods())))
    after = pool.wait_ready(SLOTS)
    assert set(uids(before)) - set(uids(sick)) == set(uids(before)) & set(uids(after))
    for holder in holders:
        holder.stop()
    for holder in holders:
        holder.join(120)
        assert not holder.is_alive() and holder.error is None, holder.error
    assert judge.accusations == [] and judge.lost == []
    assert operator.trouble() == []
    pool.wait("the status to say so", lambda: pool.status()["replacedTotal"] == len(sick))
    assert operator.health("healthz") == ""
    pool.wait("all to be free", lambda: pool.status()["claimed"] == 0)
    pool.delete()
    pool.wait("all to be collected", lambda: not pool.all_pods())


def test_many_pools_and_runs_come_and_go(cluster: Cluster, space: str, operator: Operator) -> None:
    template = phone(**only_on("storm"))
    with ThreadPoolExecutor(8) as threads:
        pools = list(threads.map(lambda n: LivePool(cluster, space, f"pool-{n}", template=template), range(40)))
        list(threads.map(lambda n: run(cluster, space, f"run-{n}", f"pool-{n}"), range(40)))
    for pool in pools:
        pool.wait_ready(1)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda pool: pool.delete(), pools))
    pools[0].wait("all to be collected", lambda: not any(pool.all_pods() for pool in pools[::10]))
    pools[0].wait("all to be forgotten", lambda: f'pool="{space}/' not in operator._get("metrics"))
