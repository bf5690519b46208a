"""What is known of the cluster's objects never goes back in time."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tapforge_operator.kube.store import Store


@dataclass(frozen=True)
class Thing:
    uid: str
    resource_version: str
    group: str = "a"


def _store(told: list | None = None) -> Store[Thing]:
    return Store(lambda t: t.group, None if told is None else lambda *change: told.append(change))


def test_an_older_version_is_passed_over():
    store = _store()
    assert store.put(Thing("1", "10")) and not store.put(Thing("1", "9")) and not store.put(Thing("1", "10"))
    assert store.get("1") == Thing("1", "10")


def test_versions_are_numbers_not_words():
    store = _store()
    store.put(Thing("1", "9"))
    assert store.put(Thing("1", "10"))


def test_what_was_deleted_stays_deleted():
    store = _store()
    store.put(Thing("1", "5"))
    assert store.drop("1") == Thing("1", "5")
    assert not store.put(Thing("1", "7")) and store.get("1") is None and store.drop("1") is None


def test_what_went_out_of_sight_is_known_again_at_a_later_version_only():
    store = _store()
    store.put(Thing("1", "5"))
    assert store.drop("1", "8") == Thing("1", "5")
    assert not store.put(Thing("1", "7")) and not store.put(Thing("1", "8")) and store.get("1") is None
    assert store.put(Thing("1", "9")) and store.get("1") == Thing("1", "9")
    assert store.replace(set(), "20") == ["1"], "a list that doesn't have it"
    assert not store.put(Thing("1", "15")) and store.put(Thing("1", "21"))
    store.drop("1")
    store.drop("1", "30")
    assert not store.put(Thing("1", "31")), "it was deleted for certain"


def test_groups_follow_their_members():
    store = _store()
    store.put(Thing("1", "1", "a"))
    store.put(Thing("2", "2", "a"))
    store.put(Thing("1", "3", "b"))
    assert set(store.of("a")) == {"2"} and set(store.of("b")) == {"1"} and not store.of("c")


def test_changes_are_told_with_what_was_before():
    told: list = []
    store = _store(told)
    store.put(Thing("1", "1"))
    store.put(Thing("1", "2"))
    store.put(Thing("1", "1"))
    store.drop("1")
    store.drop("1")
    one, two = Thing("1", "1"), Thing("1", "2")
    assert told == [("a", None, one), ("a", one, two), ("a", two, None)]


def test_a_list_removes_what_vanished_but_nothing_newer_and_nothing_of_others():
    store = _store()
    for thing in (Thing("old", "5"), Thing("new", "50"), Thing("there", "5"), Thing("elsewhere", "5", "b")):
        store.put(thing)
    assert store.replace({"there"}, "20", lambda t: t.group == "a") == ["old"]
    assert {t.uid for t in store.all()} == {"new", "there", "elsewhere"}


_EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.booleans()), max_size=40)


@given(_EVENTS, st.randoms())
def test_the_end_does_not_depend_on_the_order_of_events(events, random):
    """Watches, lists and answers tell the same story in any order; deletions are final."""
    deleted = {uid for uid, _, gone in events if gone}
    expected = {
        uid: max(v for u, v, gone in events if u == uid and not gone) for uid, _, gone in events if uid not in deleted
    }
    random.shuffle(events)
    store = _store()
    for uid, number, gone in events:
        if gone:
            store.drop(uid)
        else:
            store.put(Thing(uid, str(number)))
    assert {t.uid: int(t.resource_version) for t in store.all()} == expected
