"""Which removals a create waits for: a slot that was claimed meanwhile stays, and nothing is made in its place."""

from __future__ import annotations

from pools import NEW_IMAGE, NOW, decide, failed, pool, ready

from tapforge_operator.emulatorpool.apply import room_makers


def waits(*names: str) -> frozenset[str]:
    return frozenset(names)


def test_a_create_waits_for_the_slot_that_it_follows_and_for_no_other() -> None:
    of = pool(replicas=3)
    made = decide(of, [failed(of, i) for i in range(3)])
    assert {new.ordinal: room_makers(made)[new.name] for new in made.creates} == {
        i: waits(f"uid-{i}") for i in range(3)
    }


def test_what_was_missing_before_waits_for_nothing() -> None:
    made = decide(pool(replicas=3), [ready(pool(), 0)])
    assert set(room_makers(made).values()) == {waits()}


def test_who_has_no_predecessor_waits_for_one_of_those_that_go_each_for_another() -> None:
    old = pool(replicas=2)
    of = pool(replicas=2, template=NEW_IMAGE, updateStrategy={"maxUnavailable": 2})
    made = decide(of, [ready(old, 5), ready(old, 6)])
    assert [new.ordinal for new in made.creates] == [0, 1]
    assert sorted(room_makers(made).values(), key=sorted) == [waits("uid-5"), waits("uid-6")]


def test_a_slot_that_ends_already_makes_no_room() -> None:
    old = pool(replicas=1)
    of = pool(replicas=1, template=NEW_IMAGE, updateStrategy={"maxUnavailable": 1})
    gone = ready(old, 0, uid="ending", node="lost", deleting=True)
    made = decide(of, [gone, ready(old, 1)], nodes={"lost": "lost"})
    [new] = made.creates
    assert new.ordinal == 0 and {r.slot.uid for r in made.deletes} == {"ending", "uid-1"}
    assert room_makers(made)[new.name] == waits("ending", "uid-1")


def test_with_too_many_slots_every_create_waits_for_all_that_go() -> None:
    """One is dead, the other of an old template, and there may be one. If somebody claims the second before it goes, a
    successor is one too many."""
    old = pool(replicas=2)
    of = pool(replicas=1, template=NEW_IMAGE, updateStrategy={"maxSurge": 0, "maxUnavailable": 1})
    made = decide(of, [failed(old, 0), ready(old, 1, created=NOW - 60)])
    [new] = made.creates
    assert room_makers(made)[new.name] == waits("uid-0", "uid-1")
