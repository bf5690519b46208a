"""The planner in a cluster where everything happens: whatever does, no claimed slot that lives is deleted, no more
slots live than may, and when the world calms down the pool is what was asked for and nothing is written any more.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from model_cluster import Cluster, Operator
from pools import IMAGE, NEW_IMAGE, NOW, conditions, pool

from tapforge_operator.broker.types import Held
from tapforge_operator.emulatorpool.plan import plan
from tapforge_operator.emulatorpool.state import History, Observed, Plan
from tapforge_operator.kube.types import Slot

SIZES = st.one_of(
    st.builds(lambda n: {"replicas": n}, st.integers(0, 8)),
    st.builds(
        lambda least, spares: {
            "scaling": {"minReplicas": least, "maxReplicas": 8, "warmSpares": spares, "idleSeconds": 30}
        },
        st.integers(0, 4),
        st.integers(0, 3),
    ),
)
SPECS = st.fixed_dictionaries(
    {
        "updateStrategy": st.sampled_from(
            [{"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 2, "maxUnavailable": 0}, {"maxSurge": "25%"}]
        ),
        "recycle": st.sampled_from([{}, {"afterEpisodes": 3}, {"retainFailed": 2}]),
        "health": st.sampled_from([{}, {"unreadyGraceSeconds": 5, "maxReplacementsPercentPerHour": 50}]),
        "template": st.sampled_from([IMAGE, NEW_IMAGE]),
    }
)


def settle(cluster: Cluster, operator: Operator, rounds: int = 400) -> Plan:
    """Calm: nodes and quota are fine, phones boot, holders give back what is asked for. Until nothing happens."""
    cluster.nodes = dict.fromkeys(cluster.nodes, "")
    cluster.room, cluster.quota, cluster.bad_boots = 100, None, set()
    for slot in cluster.slots():
        if slot.ever_ready and not slot.ready and slot.phase == "Running":
            cluster.recover(slot.uid)
    for _ in range(rounds):
        made = operator.look()
        operator.act(made)
        before = cluster.slots(), cluster.claims
        cluster.claims = {uid: held for uid, held in cluster.claims.items() if not held.revoked and not held.expired}
        cluster.tick()
        if made.quiet and (cluster.slots(), cluster.claims) == before:
            if made.requeue_after is None:
                return made
            cluster.now += made.requeue_after
    raise AssertionError(f"no end after {rounds} rounds: {made}")


class Storm(RuleBasedStateMachine):
    @initialize(size=SIZES, spec=SPECS, nodes=st.integers(1, 3))
    def begin(self, size: dict, spec: dict, nodes: int) -> None:
        self.size, self.spec, self.generation = size, spec, 1
        self.cluster = Cluster(nodes, room=4, now=NOW)
        self.operator = Operator(self.cluster, pool(**size, **spec))

    def pick(self, of: list[Slot], at: int) -> Slot | None:
        return of[at % len(of)] if of else None

    @rule()
    def reconcile(self) -> None:
        self.operator.act(self.operator.look())

    @rule(writes=st.integers(0, 6))
    def die_in_the_middle(self, writes: int) -> None:
        self.operator.act(self.operator.look(), writes)

    @rule(at=st.integers(0, 50))
    def act_on_what_changed_meanwhile(self, at: int) -> None:
        self.operator.act(self.operator.look(), between=lambda: self.claim(at))

    @rule()
    def act_twice_on_one_view(self) -> None:
        seen = self.cluster.seen()
        first = self.operator.look()
        self.operator.act(first)
        created = self.cluster.created
        again = plan(self.operator.pool, seen, first.history, self.cluster.now)
        self.operator.act(again)
        assert self.cluster.created == created, "a slot was created twice"

    @rule()
    def forget(self) -> None:
        self.operator.restart()

    @rule(ticks=st.integers(1, 4))
    def world(self, ticks: int) -> None:
        for _ in range(ticks):
            self.cluster.tick()

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0, 700.0, 4000.0, -5000.0, 1e6]))
    def time(self, seconds: float) -> None:
        self.cluster.now += seconds

    @rule(at=st.integers(0, 50))
    def claim(self, at: int) -> None:
        free = [s for s in self.cluster.standing() if s.ready and s.uid not in self.cluster.claims]
        if (slot := self.pick(free, at)) is not None:
            self.cluster.claims[slot.uid] = Held("run")

    @rule(at=st.integers(0, 50))
    def play(self, at: int) -> None:
        if held := sorted(self.cluster.claims):
            uid = held[at % len(held)]
            self.cluster.claims[uid] = replace(self.cluster.claims[uid], episodes=self.cluster.claims[uid].episodes + 1)

    @rule(at=st.integers(0, 50))
    def give_back(self, at: int) -> None:
        if held := sorted(uid for uid, claim in self.cluster.claims.items() if not claim.expired):
            del self.cluster.claims[held[at % len(held)]]

    @rule(at=st.integers(0, 50))
    def expire(self, at: int) -> None:
        if held := sorted(self.cluster.claims):
            uid = held[at % len(held)]
            self.cluster.claims[uid] = replace(self.cluster.claims[uid], expired=True)

    @rule(at=st.integers(0, 50), how=st.sampled_from(["fail", "sicken", "recover", "evict"]))
    def trouble(self, at: int, how: str) -> None:
        running = [s for s in self.cluster.slots() if s.phase == "Running"]
        slot = self.pick([s for s in running if s.ever_ready] if how in ("sicken", "recover") else running, at)
        if slot is not None:
            getattr(self.cluster, how)(slot.uid)

    @rule(at=st.integers(0, 2), state=st.sampled_from(["", "cordoned", "lost"]))
    def node(self, at: int, state: str) -> None:
        name = f"node-{at % len(self.cluster.nodes)}"
        self.cluster.nodes[name] = state

    @rule(quota=st.one_of(st.none(), st.integers(0, 6)))
    def limit(self, quota: int | None) -> None:
        self.cluster.quota = quota

    @rule(spec=SPECS)
    def edit(self, spec: dict) -> None:
        self.spec = spec
        self._apply()

    @precondition(lambda self: "replicas" in self.size)
    @rule(replicas=st.integers(0, 8))
    def resize(self, replicas: int) -> None:
        self.size = {"replicas": replicas}
        self._apply()

    def _apply(self) -> None:
        self.generation += 1
        of = pool(**self.size, **self.spec, generation=self.generation)
        self.operator.pool = replace(of, status=self.operator.pool.status)

    @rule(broken=st.booleans())
    def break_boots(self, broken: bool) -> None:
        self.cluster.bad_boots = {self.operator.pool.template} if broken else set()

    @rule(waiting=st.integers(0, 5), wanted=st.integers(0, 10))
    def demand(self, waiting: int, wanted: int) -> None:
        self.cluster.waiting, self.cluster.wanted = waiting, wanted

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        last = settle(self.cluster, self.operator)
        standing, template = self.cluster.standing(), self.operator.pool.template
        assert all(slot.ready for slot in standing)
        assert all(slot.template == template for slot in standing)
        assert len(standing) == last.status.desired_replicas == last.status.ready == last.status.updated
        assert len({slot.ordinal for slot in standing}) == len(standing)
        assert {kind: status for kind, (status, _) in conditions(last).items()} == {
            "Ready": "True",
            "Reconciling": "False",
            "Stalled": "False",
            "Degraded": "False",
        }
        for history in (History(), History.of(last.status), last.history):
            again = plan(self.operator.pool, self.cluster.seen(), history, self.cluster.now)
            assert again.quiet
            assert again.history.status.conditions == last.status.conditions or history == History()


def test_whatever_happens_claims_hold_and_the_pool_comes_to_rest() -> None:
    run_state_machine_as_test(Storm, settings=settings(max_examples=60, stateful_step_count=40))


@given(replicas=st.integers(1, 12), writes=st.lists(st.integers(0, 5), max_size=12))
def test_a_crash_after_any_write_creates_nothing_twice(replicas: int, writes: list[int]) -> None:
    cluster = Cluster(3, room=100, now=NOW)
    operator = Operator(cluster, pool(replicas=replicas))
    for n in writes:
        operator.act(operator.look(), n)
    settle(cluster, operator)
    assert cluster.created == replicas


@given(
    replicas=st.integers(1, 12),
    dead=st.sets(st.integers(0, 11), min_size=1),
    writes=st.lists(st.integers(0, 3), max_size=30),
)
def test_a_crash_during_repairs_creates_one_slot_for_each_that_died(
    replicas: int, dead: set[int], writes: list[int]
) -> None:
    cluster = Cluster(3, room=100, now=NOW)
    operator = Operator(cluster, pool(replicas=replicas, recycle={"retainFailed": 1}))
    settle(cluster, operator)
    victims = [slot.uid for slot in cluster.slots() if slot.ordinal in dead]
    for uid in victims:
        cluster.fail(uid)
    for n in writes:
        operator.act(operator.look(), n)
        cluster.tick()
    settle(cluster, operator)
    assert cluster.created == replicas + len(victims)


@pytest.mark.parametrize("strategy", [{"maxSurge": 1, "maxUnavailable": 0}, {"maxSurge": 0, "maxUnavailable": 2}, {}])
def test_a_roll_out_keeps_enough_slots_ready_all_the_time(strategy: dict) -> None:
    cluster = Cluster(3, room=100, now=NOW)
    operator = Operator(cluster, pool(replicas=10, updateStrategy=strategy))
    settle(cluster, operator)
    operator.pool = replace(
        pool(replicas=10, updateStrategy=strategy, template=NEW_IMAGE, generation=2), status=operator.pool.status
    )
    least, most = 10, 10
    for _ in range(200):
        operator.act(operator.look())
        cluster.tick()
        standing = cluster.standing()
        least = min(least, sum(slot.ready for slot in standing))
        most = max(most, len(standing))
    assert all(slot.template == operator.pool.template for slot in standing)
    assert least >= 10 - {0: 0, 2: 2}.get(strategy.get("maxUnavailable", 1), 1)
    assert most <= 10 + strategy.get("maxSurge", 0)


def test_a_template_that_never_boots_costs_no_slot_that_serves_but_those_that_may_be_missing() -> None:
    cluster = Cluster(3, room=100, now=NOW)
    operator = Operator(cluster, pool(replicas=10))
    settle(cluster, operator)
    bad = pool(replicas=10, template=NEW_IMAGE, generation=2)
    operator.pool, cluster.bad_boots = replace(bad, status=operator.pool.status), {bad.template}
    created = cluster.created
    for _ in range(2000):
        made = operator.look()
        operator.act(made)
        cluster.tick()
    assert sum(slot.ready for slot in cluster.standing()) == 9
    assert cluster.created - created <= 12, "slower and slower"
    assert conditions(made)["Degraded"][0] == "True"
    good = pool(replicas=10, template=IMAGE, generation=3)
    operator.pool = replace(good, status=made.status)
    assert settle(cluster, operator).status.ready == 10


def test_an_empty_view_plans_the_whole_pool_and_no_more() -> None:
    of = pool(replicas=20_000)
    made = plan(of, Observed(), History(), NOW)
    assert len({new.name for new in made.creates}) == len(made.creates) == 1000
