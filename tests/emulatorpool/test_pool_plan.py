"""Rules 1 to 4 of the planner, and what comes: which slots go, which stay, how new ones are called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pools import (
    NOW,
    booting,
    decide,
    failed,
    gone,
    pool,
    pulling,
    ready,
    unready,
    unschedulable,
)

from tapforge_operator import labels
from tapforge_operator.broker.types import Held
from tapforge_operator.emulatorpool.state import Plan, Pool
from tapforge_operator.kube.types import Slot

HELD = Held("run-1")


def full(of: Pool, n: int = 3) -> list[Slot]:
    return [ready(of, i) for i in range(n)]


def after(of: Pool, before: Plan, slots: list[Slot], now: float = NOW, **seen: object) -> Plan:
    return decide(of, slots, before.history, now, **seen)


# --- nothing to do ----------------------------------------------------------------------------------------------------


def test_a_full_and_healthy_pool_is_left_alone_for_ever() -> None:
    of = pool()
    made = decide(of, full(of))
    assert made.quiet
    assert made.requeue_after is None
    later = after(of, made, full(of), NOW + 90 * 86_400)
    assert later.quiet
    assert later.status == made.status, "nothing to write"


def test_without_memory_a_full_pool_is_left_alone_too() -> None:
    of = pool()
    assert decide(of, full(of)).quiet


def test_pods_of_another_pool_of_the_same_name_are_not_looked_at() -> None:
    of, before = pool(), pool(uid="pool-0")
    made = decide(of, [*full(of), *(ready(before, i, uid=f"old-{i}") for i in range(3))])
    assert made.quiet
    assert made.status.pods == 3


# --- too few ----------------------------------------------------------------------------------------------------------


def test_an_empty_pool_is_filled_on_the_lowest_ordinals() -> None:
    of = pool(replicas=5)
    made = decide(of, [ready(of, 1), ready(of, 3)])
    assert [new.ordinal for new in made.creates] == [0, 2, 4]
    assert [new.name for new in made.creates] == [labels.slot_name("phones", "pool-1", o, "") for o in (0, 2, 4)]


def test_creates_are_bounded_and_the_rest_follows_at_once() -> None:
    of = pool(replicas=5000)
    made = decide(of)
    assert len(made.creates) == 1000
    assert made.requeue_after == 0.0


def test_what_was_not_seen_yet_has_the_same_name_again() -> None:
    of = pool()
    first = decide(of)
    second = after(of, first, [])
    assert first.creates == second.creates


def test_a_slot_is_named_after_the_one_before_it_also_when_that_one_is_gone() -> None:
    of = pool()
    two = full(of)[:2]
    made = decide(of, [*two, failed(of, 2)])
    expected = labels.slot_name("phones", "pool-1", 2, "uid-2")
    assert [new.name for new in made.creates] == [expected]
    for slots in ([*two, replace(failed(of, 2), deleting=True)], two):
        made = after(of, made, slots)
        assert [new.name for new in made.creates] == [expected]
        assert not made.deletes


def test_without_memory_a_pod_that_still_ends_is_the_predecessor() -> None:
    of = pool()
    made = decide(of, [*full(of)[:2], replace(ready(of, 2), deleting=True)])
    assert [new.predecessor for new in made.creates] == ["uid-2"]


def test_a_create_that_was_not_carried_out_keeps_its_predecessor_when_that_one_is_gone() -> None:
    of = pool()
    two = full(of)[:2]
    made = decide(of, [*two, replace(ready(of, 2), deleting=True)])
    assert after(of, made, two).creates == made.creates


def test_no_name_is_taken_that_an_ending_pod_still_has() -> None:
    of = pool(replicas=1)
    first = decide(of).creates[0]
    one = replace(ready(of, 0, uid="a", name=first.name), deleting=True)
    second = decide(of, [one]).creates[0]
    two = replace(ready(of, 0, uid="b", name=second.name), deleting=True)  # in the same second
    third = decide(of, [one, two]).creates[0]
    assert len({first.name, second.name, third.name}) == 3


# --- rule 1: claimed slots --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "touched",
    [
        lambda of: unready(of, 2, NOW - 3600),
        lambda of: booting(of, 2),
        lambda of: ready(of, 2, template="old"),
        lambda of: booting(of, 2, template="old"),
        lambda of: ready(of, 2, node="cordoned"),
        lambda of: ready(of, 2, node="lost"),
        lambda of: ready(of, 2, episodes=100),
        lambda of: ready(of, 2, started=NOW - 90 * 86_400),
        lambda of: ready(of, 1, uid="uid-2"),
        lambda of: ready(of, 7, uid="uid-2"),
    ],
    ids=[
        "unready",
        "not ready",
        "old",
        "old and not ready",
        "cordoned",
        "lost",
        "episodes",
        "age",
        "duplicate",
        "high ordinal",
    ],
)
@pytest.mark.parametrize("replicas", [3, 0])
def test_a_claimed_slot_is_never_deleted_while_it_lives(touched: object, replicas: int) -> None:
    of = pool(replicas=replicas, recycle={"afterEpisodes": 10, "afterSeconds": 3600})
    slots = [*full(of)[:2], touched(of)]  # type: ignore[operator]
    nodes = {"cordoned": "cordoned", "lost": "lost"}
    made = decide(of, slots, held={"uid-2": HELD}, nodes=nodes)
    assert "uid-2" not in gone(made)


def test_a_claimed_slot_that_ended_goes_and_is_replaced() -> None:
    of = pool()
    made = decide(of, [*full(of)[:2], failed(of, 2)], held={"uid-2": HELD})
    assert gone(made) == {"uid-2": "Failed"}
    assert [new.ordinal for new in made.creates] == [2]


def test_a_claimed_slot_that_is_being_deleted_is_replaced_at_once() -> None:
    of = pool()
    made = decide(of, [*full(of)[:2], replace(ready(of, 2), deleting=True)], held={"uid-2": HELD})
    assert not made.deletes
    assert [new.ordinal for new in made.creates] == [2]


# --- rule 2: expired and lost -----------------------------------------------------------------------------------------


def test_a_slot_whose_claim_expired_goes_without_costing_the_budget() -> None:
    of = pool()
    made = decide(of, full(of), held={"uid-1": replace(HELD, expired=True)})
    assert gone(made) == {"uid-1": "ClaimExpired"}
    assert [new.ordinal for new in made.creates] == [1]
    assert made.history.spent == ()
    assert made.status.claimed == 0


def test_lost_nodes_block_no_replacement() -> None:
    of = pool()
    slots = [ready(of, 0), ready(of, 1, node="lost"), ready(of, 2, node="lost")]
    made = decide(of, slots, nodes={"lost": "lost"}, held={"uid-2": HELD})
    assert gone(made) == {"uid-1": "NodeLost"}
    assert made.deletes[0].force
    assert [new.ordinal for new in made.creates] == [1]
    assert made.revoke == {"uid-2": "NodeLost"}
    expired = decide(of, slots, nodes={"lost": "lost"}, held={"uid-2": replace(HELD, expired=True)})
    assert gone(expired) == {"uid-1": "NodeLost", "uid-2": "ClaimExpired"}


def test_a_pod_that_hangs_on_a_lost_node_is_deleted_by_force_now_and_then() -> None:
    of = pool()
    slots = [*full(of), replace(ready(of, 0, uid="stuck", node="lost"), deleting=True)]
    made = decide(of, slots, nodes={"lost": "lost"})
    assert [(removal.slot.uid, removal.force) for removal in made.deletes] == [("stuck", True)]
    assert not made.creates
    assert after(of, made, slots, NOW + 30, nodes={"lost": "lost"}).quiet
    assert not after(of, made, slots, NOW + 61, nodes={"lost": "lost"}).quiet
    assert decide(of, slots, nodes={"lost": "lost"}, held={"stuck": HELD}).quiet


# --- rule 3: sick slots -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda of: failed(of, 2), "Failed"),
        (lambda of: replace(failed(of, 2), phase="Succeeded", end="Completed"), "Failed"),
        (lambda of: booting(of, 2, started=NOW - 601), "BootDeadline"),
        (lambda of: booting(of, 2, started=NOW - 599), None),
        (lambda of: pulling(of, 2, created=NOW - 86_400), None),
        (lambda of: unschedulable(of, 2, created=NOW - 86_400), None),
        (lambda of: unready(of, 2, NOW - 61), "Unready"),
        (lambda of: unready(of, 2, NOW - 59), None),
        (lambda of: unready(of, 2, NOW + 3600), None),
        # A node's clock is behind, or ahead: what counts is when the operator saw it.
        (lambda of: unready(of, 2, NOW - 3600, seen=NOW - 1), None),
        (lambda of: unready(of, 2, NOW + 3600, seen=NOW - 61), "Unready"),
        (lambda of: booting(of, 2, started=NOW - 3600, seen=NOW - 5), None),
        (lambda of: booting(of, 2, started=NOW + 3600, seen=NOW - 601), "BootDeadline"),
    ],
)
def test_what_counts_as_sick(make: object, reason: str | None) -> None:
    of = pool()
    made = decide(of, [*full(of)[:2], make(of)])  # type: ignore[operator]
    assert gone(made) == ({"uid-2": reason} if reason else {})
    assert len(made.creates) == (reason is not None)


@pytest.mark.parametrize(
    ("make", "deadline", "reason"),
    [
        (lambda of: unready(of, 2, NOW - 3600), 60, "Unready"),
        (lambda of: booting(of, 2, started=NOW - 3600), 600, "BootDeadline"),
    ],
)
def test_what_nobody_watched_makes_no_slot_sick(make: object, deadline: float, reason: str) -> None:
    """A phone that is well could not say so while the API server was away."""
    of = pool()
    slots = [*full(of)[:2], make(of)]  # type: ignore[operator]
    made = decide(of, slots, watching_since=NOW - 5)
    assert gone(made) == {} and not made.creates
    assert made.requeue_after is not None and deadline - 6 < made.requeue_after < deadline - 3
    later = after(of, made, slots, NOW + made.requeue_after, watching_since=NOW - 5)
    assert gone(later) == {"uid-2": reason}


def test_it_looks_again_when_a_silent_node_is_lost() -> None:
    of = pool()
    assert decide(of, full(of), next_lost_node=12.0).requeue_after == 12.0
    assert decide(of, full(of)).requeue_after is None


def test_it_looks_again_when_the_deadline_passes_and_not_before() -> None:
    of = pool()
    slots = [*full(of)[:2], booting(of, 2, started=NOW - 100)]
    made = decide(of, slots)
    assert made.requeue_after is not None
    assert 500 < made.requeue_after < 502
    later = after(of, made, slots, NOW + made.requeue_after)
    assert gone(later) == {"uid-2": "BootDeadline"}


def test_the_newest_failures_are_kept_aside_and_replaced_at_once() -> None:
    of = pool(recycle={"retainFailed": 2})
    slots = [failed(of, 0, created=NOW - 300), failed(of, 1, created=NOW - 200), failed(of, 2, created=NOW - 100)]
    made = decide(of, slots)
    assert gone(made) == {"uid-0": "Failed"}
    assert {removal.slot.uid for removal in made.retain} == {"uid-1", "uid-2"}
    assert [new.ordinal for new in made.creates] == [0, 1, 2]
    kept = [replace(slot, retained=True) for slot in slots[1:]]
    fresh = [ready(of, i, uid=f"new-{i}", created=NOW) for i in range(3)]
    settled = after(of, made, [*kept, *fresh])
    assert settled.quiet
    assert settled.status.pods == 3
    again = after(of, settled, [*kept, *fresh[:2], failed(of, 2, uid="new-2", created=NOW)])
    assert gone(again) == {"uid-1": "Retained"}
    assert [removal.slot.uid for removal in again.retain] == ["new-2"]


def test_a_slot_that_runs_on_is_not_kept_aside() -> None:
    of = pool(recycle={"retainFailed": 5})
    made = decide(of, [*full(of)[:2], booting(of, 2, started=NOW - 3600)])
    assert gone(made) == {"uid-2": "BootDeadline"}
    assert not made.retain


def test_a_phone_that_ended_without_an_error_failed_too() -> None:
    of = pool(recycle={"retainFailed": 5})
    made = decide(of, [*full(of)[:2], replace(failed(of, 2), phase="Succeeded")])
    assert [removal.slot.uid for removal in made.retain] == ["uid-2"]


def test_kept_pods_go_when_none_are_wanted_any_more() -> None:
    of = pool()
    made = decide(of, [*full(of), replace(failed(of, 1, uid="kept"), retained=True)])
    assert gone(made) == {"kept": "Retained"}
    assert not made.creates


# --- rule 4: duplicates -----------------------------------------------------------------------------------------------


def test_of_two_slots_with_one_ordinal_the_newer_goes() -> None:
    of = pool()
    made = decide(of, [*full(of), ready(of, 1, uid="twin", created=NOW - 60)])
    assert gone(made) == {"twin": "Duplicate"}
    assert not made.creates


def test_of_two_slots_with_one_ordinal_the_claimed_one_stays() -> None:
    of = pool()
    slots = [*full(of), ready(of, 1, uid="twin", created=NOW - 60)]
    assert gone(decide(of, slots, held={"twin": HELD})) == {"uid-1": "Duplicate"}
    both = decide(pool(replicas=4), slots, held={"twin": HELD, "uid-1": HELD})
    assert both.deletes == both.creates == ()
    assert both.revoke == {"twin": "Duplicate"}
