"""Long absences, with the flags that users get: of the API server, of the operator, of both, and of a driver's node.
Nobody loses a claim by any of the first three, and no claimed Pod is deleted; by the last one the phones are soon free.

It has a cluster of its own: the API server is away for minutes, which no other test can share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from claiming import Caller, Denied, caller, run, run_pod
from e2e.cluster import API_SERVER, Cluster, Options
from live_pool import LivePool, only_on, own_nodes, uids
from operator_process import MANIFESTS, Ground, Operator

from tapforge_api.claims import Claim, Renewed

pytestmark = pytest.mark.long

INSIDE, OUTSIDE = 20, 4
#: the life of a claim without a renewal, that callers get who ask for no other
TTL = 60.0
#: what nobody answers with
AWAY = {"ConnectionRefusedError", "TimeoutError", "ConnectionResetError", "OSError", "SSLEOFError"}
CRDS = sorted((MANIFESTS.parent / "crds").glob("*.yaml"))


@pytest.fixture(scope="module")
def cluster(built: None) -> Iterator[Cluster]:
    with Cluster(Options(nodes=3, qps=200)) as up:
        up.apply(*CRDS)
        up.wait_kinds()
        yield up


class Holder(threading.Thread):
    """Renews its claims every few seconds, at whichever broker answers, and keeps what it is told."""

    def __init__(self, brokers: list[Caller], claims: list[Claim]) -> None:
        super().__init__(name=f"holder of {len(claims)}", daemon=True)
        self._brokers, self._claims = brokers, claims
        self._over = threading.Event()
        self.answered = 0
        self.refused: set[str] = set()
        self.lost: list[Renewed] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._over.wait(5.0):
                self._renew()
        except BaseException as error:  # noqa: BLE001 it belongs to the test, which asks for it
            self.error = error

    def _renew(self) -> None:
        for broker in self._brokers:
            try:
                said = broker.renew(*self._claims)
            except Denied as error:
                assert error.status == 503, error
                self.refused.add(error.reason)
            except OSError as error:
                self.refused.add(type(error).__name__)
            else:
                self.answered += 1
                self.lost += [claim for claim in said if claim.state != "held"]
                return

    def stop(self) -> None:
        self._over.set()
        self.join(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def standby(cluster: Cluster, ground: Ground, operator: Operator) -> Iterator[Operator]:
    two = Operator(cluster, ground.own, ground.spaces, identity="operator-1").start().wait_ready(leads=False)
    yield two
    two.stop()


class Fleet:
    """A pool of which one run in a Pod has most phones, and somebody outside of the cluster some."""

    def __init__(self, cluster: Cluster, space: str, operators: list[Operator]) -> None:
        self.cluster = cluster
        self.operators = operators
        self.pool = LivePool(cluster, space, replicas=INSIDE + OUTSIDE)
        self.pods = uids(self.pool.wait_ready(INSIDE + OUTSIDE))
        token = run_pod(cluster, space, run(cluster, space, "train", slots=INSIDE))
        inside = [Caller(one, space, token, patience=10.0) for one in operators]
        outside = [caller(one, space) for one in operators]
        claims = inside[0].acquire_all(INSIDE)
        assert {claim.hold_seconds for claim in claims} == {None}, "in a Pod one goes on until a leader says lost"
        self.holders = [Holder(inside, claims), Holder(outside, outside[0].acquire_all(OUTSIDE))]
        for holder in self.holders:
            holder.start()

    def settle(self) -> None:
        """Somebody leads again, for long enough that claims which were not heard of would have ended."""
        self.cluster.wait_for("an operator to lead", lambda: any(one.term for one in self.operators))
        before = [holder.answered for holder in self.holders]
        time.sleep(TTL + 15.0)
        for holder, answered in zip(self.holders, before, strict=True):
            assert holder.answered > answered, f"nobody answers {holder.name}: {holder.refused}"

    def check(self) -> None:
        """Nothing was lost, and what was claimed is there."""
        for holder in self.holders:
            holder.stop()
            assert holder.lost == []
            assert holder.refused <= {"NotLeader", "TooManyCalls", *AWAY}, holder.refused
        assert uids(self.pool.pods()) == self.pods


def test_ninety_seconds_without_the_api_server_cost_nothing(
    cluster: Cluster, space: str, operator: Operator, standby: Operator
) -> None:
    """Nor does the change of leadership right after it."""
    fleet = Fleet(cluster, space, [operator, standby])
    pids = [cluster.pid(one.name) for one in (operator, standby)]
    with cluster.without(API_SERVER):
        time.sleep(90.0)
    fleet.settle()
    assert [cluster.pid(one.name) for one in (operator, standby)] == pids, "neither process ended"
    leader, other = (operator, standby) if operator.term else (standby, operator)
    leader.kill9()
    cluster.wait_for("the other to lead", lambda: other.term > 0)
    leader.start().wait_ready(leads=False)
    fleet.check()


def test_long_absences_of_the_operator_and_of_the_api_server_cost_nothing(
    cluster: Cluster, space: str, operator: Operator, standby: Operator
) -> None:
    fleet = Fleet(cluster, space, [operator, standby])
    operator.kill9()
    standby.kill9()
    time.sleep(300.0)
    operator.start()
    standby.start()
    fleet.settle()
    with cluster.without(API_SERVER):
        time.sleep(300.0)
        operator.kill9()
        standby.kill9()
        time.sleep(300.0)
        operator.start()
        standby.start()
        time.sleep(300.0)
    fleet.settle()
    fleet.check()


def test_a_dead_node_of_a_driver_gives_its_phones_back(cluster: Cluster, space: str, operator: Operator) -> None:
    """Within 120 s, half of which the cluster takes to notice."""
    (node,) = own_nodes(cluster, "drivers", 1)
    pool = LivePool(cluster, space, replicas=64)
    pool.wait_ready(64)
    token = run_pod(cluster, space, run(cluster, space, "train", slots=64), **only_on("drivers"))
    driver = Caller(operator, space, token)
    cluster.wait_for("the driver to run", lambda: pool.pod("driver")["status"]["phase"] == "Running")
    claims = driver.acquire_all(64)
    assert {said.state for said in driver.renew(*claims)} == {"held"}
    cluster.nodes.lose(node, at_once=False)
    pool.wait("its phones to be free or replaced", lambda: not pool.marked() and pool.status()["ready"] == 64, 120.0)
    assert {said.state for said in driver.renew(*claims)} == {"lost"}
    assert len(caller(operator, space).acquire_all(64)) == 64
