"""Nothing is older than the time for which it was followed, whatever becomes of the API server and of clocks."""

from __future__ import annotations

from typing import Any

from tapforge_operator.kube.cache import GAP, NODE_GRACE, Cache, WatchFreshness
from tapforge_operator.observability.metrics import Telemetry

NOON = 1_800_000_000.0


class Clocks:
    def __init__(self) -> None:
        self.ran = 1000.0
        self.offset = NOON
        self.freshness = WatchFreshness(wall=lambda: self.ran + self.offset, clock=lambda: self.ran)

    @property
    def watched(self) -> float:
        return self.ran + self.offset - self.freshness.since

    def listen(self, seconds: float, every: float = 3.0) -> None:
        end = self.ran + seconds
        while self.ran < end:
            self.ran += every
            self.freshness.refresh()


def test_who_hears_all_the_time_has_watched_since_the_beginning() -> None:
    clocks = Clocks()
    clocks.listen(600)
    assert clocks.watched == 600


def test_in_a_gap_nothing_has_an_age_and_afterwards_it_begins_anew() -> None:
    clocks = Clocks()
    clocks.listen(600)
    clocks.ran += GAP + 1  # the API server is away, or the process was stopped
    assert clocks.watched == 0
    clocks.ran += 900
    assert clocks.watched == 0
    clocks.freshness.refresh()
    clocks.listen(30)
    assert clocks.watched == 30


def test_a_wall_clock_that_is_set_makes_nothing_older() -> None:
    for step in (3600.0, -3600.0):
        clocks = Clocks()
        clocks.listen(600)
        clocks.offset += step
        assert clocks.watched == 0
        clocks.listen(30)
        assert clocks.watched == 27, "since the first word after it"


def test_a_clock_that_is_kept_right_is_no_gap() -> None:
    clocks = Clocks()
    clocks.listen(300)
    clocks.offset += 0.5
    clocks.listen(300)
    assert 595 < clocks.watched < 605


def test_a_new_leader_begins_anew() -> None:
    clocks = Clocks()
    telemetry = Telemetry(freshness=clocks.freshness)
    clocks.listen(600)
    telemetry.leading(3)
    clocks.listen(30)
    assert clocks.watched == 30
    telemetry.leading(0)
    assert clocks.watched == 30


def test_every_answer_of_the_api_server_is_a_word_of_it() -> None:
    clocks = Clocks()
    telemetry = Telemetry(freshness=clocks.freshness)
    for say in (
        lambda: telemetry.event("pods"),
        lambda: telemetry.api_call("patch", 200, 0.1),
        lambda: telemetry.api_call("get", 404, 0.1),
    ):
        clocks.ran += GAP - 1
        say()
    assert clocks.watched == 3 * (GAP - 1)
    for status in (0, 500, 503):
        clocks.ran += GAP / 2
        telemetry.api_call("get", status, 5.0)
    assert clocks.watched == 0


# --- nodes ------------------------------------------------------------------------------------------------------------


def node(ready: str, version: int, name: str = "n", **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"{name}-1", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": spec, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


class Cluster(Clocks):
    def __init__(self) -> None:
        super().__init__()
        self.requeued: list[str] = []
        self.cache = Cache(Telemetry(freshness=self.freshness), self.requeued.append)
        self.cache.observe_node(node("True", 1))
        self.cache.observe_node(node("True", 1, "other"))


def test_a_node_is_lost_when_it_was_silent_for_a_while() -> None:
    cluster = Cluster()
    cluster.listen(600)
    cluster.cache.observe_node(node("Unknown", 2))
    assert cluster.cache.bad_nodes() == {} and cluster.cache.next_lost_node() == NODE_GRACE
    cluster.listen(NODE_GRACE - 3)
    cluster.cache.observe_node(node("Unknown", 3))  # what else changes of it is no news
    assert cluster.cache.bad_nodes() == {} and cluster.cache.next_lost_node() == 3
    cluster.listen(3)
    assert cluster.cache.bad_nodes() == {"n": "lost"} and cluster.cache.next_lost_node() is None
    cluster.cache.observe_node(node("True", 4))
    assert cluster.cache.bad_nodes() == {}


def test_nodes_that_an_outage_had_cut_off_are_not_lost() -> None:
    """They are Unknown when the API server is back, until their kubelets have spoken."""
    cluster = Cluster()
    cluster.listen(600)
    cluster.cache.observe_node(node("Unknown", 2))
    cluster.ran += 900
    assert cluster.cache.bad_nodes() == {}
    cluster.listen(NODE_GRACE - 3)
    assert cluster.cache.bad_nodes() == {}
    cluster.cache.observe_node(node("True", 3))
    cluster.listen(60)
    assert cluster.cache.bad_nodes() == {} and cluster.cache.next_lost_node() is None


def test_no_node_is_lost_where_none_answers() -> None:
    """Kubelets that are cut off, or late after an outage: phones go on, and there is no node to move them to."""
    cluster = Cluster()
    cluster.cache.observe_node(node("Unknown", 2))
    cluster.listen(NODE_GRACE - 3)
    cluster.cache.observe_node(node("Unknown", 2, "other"))
    cluster.listen(600)
    assert cluster.cache.bad_nodes() == {} and cluster.cache.next_lost_node() is None
    cluster.cache.observe_node(node("True", 1, "new"))
    assert cluster.cache.bad_nodes() == {} and cluster.cache.next_lost_node() == NODE_GRACE
    cluster.cache.observe_node(node("True", 3, "other"))
    cluster.cache.observe_node(node("True", 1, "new"), deleted=True)
    cluster.listen(NODE_GRACE - 3)
    assert cluster.cache.bad_nodes() == {} and cluster.cache.next_lost_node() == 3
    cluster.listen(3)
    assert cluster.cache.bad_nodes() == {"n": "lost"}


def test_a_cordoned_node_that_falls_silent_is_cordoned_until_it_is_lost() -> None:
    cluster = Cluster()
    cluster.cache.observe_node(node("Unknown", 2, unschedulable=True))
    assert cluster.cache.bad_nodes() == {"n": "cordoned"}
    cluster.listen(NODE_GRACE)
    assert cluster.cache.bad_nodes() == {"n": "lost"}
    cluster.cache.observe_node(node("Unknown", 2), deleted=True)
    assert cluster.cache.bad_nodes() == {} and cluster.cache.next_lost_node() is None


def test_a_node_that_an_autoscaler_takes_away_counts_as_cordoned() -> None:
    """Karpenter and cluster-autoscaler don't cordon such nodes: they taint them."""
    cluster = Cluster()
    for version, key in enumerate(("karpenter.sh/disrupted", "ToBeDeletedByClusterAutoscaler"), 2):
        cluster.cache.observe_node(node("True", 2 * version, taints=[{"key": key, "effect": "NoSchedule"}]))
        assert cluster.cache.bad_nodes() == {"n": "cordoned"}, key
        cluster.cache.observe_node(node("True", 2 * version + 1, taints=[{"key": "kvm", "effect": "NoSchedule"}]))
        assert cluster.cache.bad_nodes() == {}
