"""What is known of the cluster's objects never goes back in time."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tapforge_operator.kube.cache import Index


@dataclass(frozen=True)
class Thing:
    uid: str
    resource_version: str
    group: str = "a"


def _index(told: list | None = None) -> Index[Thing]:
    return Index(lambda t: t.group, None if told is None else lambda *change: told.append(change))


def test_an_older_version_is_passed_over():
    index = _index()
    assert index.put(Thing("1", "10")) and not index.put(Thing("1", "9")) and not index.put(Thing("1", "10"))
    assert index.get("1") == Thing("1", "10")


def test_versions_are_numbers_not_words():
    index = _index()
    index.put(Thing("1", "9"))
    assert index.put(Thing("1", "10"))


def test_what_was_deleted_stays_deleted():
    index = _index()
    index.put(Thing("1", "5"))
    assert index.drop("1") == Thing("1", "5")
    assert not index.put(Thing("1", "7")) and index.get("1") is None and index.drop("1") is None


def test_what_went_out_of_sight_is_known_again_at_a_later_version_only():
    index = _index()
    index.put(Thing("1", "5"))
    assert index.drop("1", "8") == Thing("1", "5")
    assert not index.put(Thing("1", "7")) and not index.put(Thing("1", "8")) and index.get("1") is None
    assert index.put(Thing("1", "9")) and index.get("1") == Thing("1", "9")
    assert index.replace(set(), "20") == ["1"], "a list that doesn't have it"
    assert not index.put(Thing("1", "15")) and index.put(Thing("1", "21"))
    index.drop("1")
    index.drop("1", "30")
    assert not index.put(Thing("1", "31")), "it was deleted for certain"


def test_groups_follow_their_members():
    index = _index()
    index.put(Thing("1", "1", "a"))
    index.put(Thing("2", "2", "a"))
    index.put(Thing("1", "3", "b"))
    assert set(index.of("a")) == {"2"} and set(index.of("b")) == {"1"} and not index.of("c")


def test_changes_are_told_with_what_was_before():
    told: list = []
    index = _index(told)
    index.put(Thing("1", "1"))
    index.put(Thing("1", "2"))
    index.put(Thing("1", "1"))
    index.drop("1")
    index.drop("1")
    one, two = Thing("1", "1"), Thing("1", "2")
    assert told == [("a", None, one), ("a", one, two), ("a", two, None)]


def test_a_list_removes_what_vanished_but_nothing_newer_and_nothing_of_others():
    index = _index()
    for thing in (Thing("old", "5"), Thing("new", "50"), Thing("there", "5"), Thing("elsewhere", "5", "b")):
        index.put(thing)
    assert index.replace({"there"}, "20", lambda t: t.group == "a") == ["old"]
    assert {t.uid for t in index.all()} == {"new", "there", "elsewhere"}


_EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.booleans()), max_size=40)


@given(_EVENTS, st.randoms())
def test_the_end_does_not_depend_on_the_order_of_events(events, random):
    """Watches, lists and answers tell the same story in any order; deletions are final."""
    deleted = {uid for uid, _, gone in events if gone}
    expected = {
        uid: max(v for u, v, gone in events if u == uid and not gone) for uid, _, gone in events if uid not in deleted
    }
    random.shuffle(events)
    index = _index()
    for uid, number, gone in events:
        if gone:
            index.drop(uid)
        else:
            index.put(Thing(uid, str(number)))
    assert {t.uid: int(t.resource_version) for t in index.all()} == expected
