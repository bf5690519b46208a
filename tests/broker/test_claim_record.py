"""Only the operator can write a record, and only on the slot that it was written for."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_operator.broker.claim_record import ClaimRecord, Keys, Reading, claim_parts, proves

KEYS = Keys(b"a" * 32)
MARK = ClaimRecord("uid-1", 7 << 24, "run/lab/train/u-1", "train", "request-1", -5, 60.0)

texts = st.text(max_size=50)
records = st.builds(
    ClaimRecord,
    uid=texts,
    fence=st.integers(0, 2**63 - 1),
    holder=texts,
    run=texts,
    request=texts,
    priority=st.integers(-1000, 1000),
    ttl=st.floats(5, 3600),
)


@given(records)
def test_what_was_written_is_read(record):
    assert KEYS.read(KEYS.write(record), record.uid) == Reading(record)


def test_on_another_slot_it_is_worth_nothing():
    assert KEYS.read(KEYS.write(MARK), "uid-2") == Reading()


@pytest.mark.parametrize(
    "change",
    [{"fence": 8 << 24}, {"holder": "run/lab/other/u-2"}, {"ttl": 1e9}, {"v": 2}, {"more": 1}, {"signature": "0" * 64}],
)
def test_a_changed_mark_is_forged(change):
    text = json.dumps({**json.loads(KEYS.write(MARK)), **change})
    assert KEYS.read(text, "uid-1") == Reading()


def test_fields_of_a_later_release_are_passed_over():
    fields = json.loads(KEYS.write(MARK))
    del fields["signature"]
    fields["weather"] = "fine"
    fields["signature"] = KEYS._first.sign(fields | {}, "uid-1")
    assert KEYS.read(json.dumps(fields), "uid-1") == Reading(MARK)


def test_a_form_of_a_later_release_makes_no_slot_free():
    fields = json.loads(KEYS.write(MARK))
    del fields["signature"]
    fields["fence"] = "7/24"
    fields["signature"] = KEYS._first.sign(fields | {}, "uid-1")
    reading = KEYS.read(json.dumps(fields), "uid-1")
    assert reading.record is None and reading.unproved is not None and reading.unproved.holder == MARK.holder


def test_another_key_is_told_apart_from_a_forgery():
    text = Keys(b"b" * 32).write(MARK)
    assert KEYS.read(text, "uid-1") == Reading(unproved=MARK)


@given(st.one_of(st.text(max_size=200), st.recursive(st.none() | st.integers() | texts, st.lists).map(json.dumps)))
def test_anything_else_is_no_mark(text):
    assert KEYS.read(text, "uid-1") == Reading()


FIELDS = ("v", "fence", "holder", "run", "request", "priority", "ttl", "hold", "pod", "session", "number")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(st.characters(), max_size=9),
    st.lists,
    max_leaves=3,
)


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, values)), st.sampled_from([KEYS, Keys(b"b" * 32)]))
def test_what_is_read_of_any_record_is_a_claim_that_can_be_kept(fields, keys):
    fields["key"] = keys._first.name
    reading = KEYS.read(json.dumps({**fields, "signature": keys._first.sign(fields, "uid-1")}), "uid-1")
    for said in filter(None, (reading.record, reading.unproved)):
        assert claim_parts(said.id) == ("uid-1", said.fence)
        assert said.ttl > 0 and max(said.ttl, said.hold) <= 2**32
        assert abs(said.priority) <= 2**32 and abs(said.number) <= 2**32
        "".join((said.holder, said.run, said.request, said.pod, said.session)).encode()


@pytest.mark.parametrize(
    "text", ["[" * 5000, "x" * 100_000, '{"signature": "\\ud800"}', '{"signature": 5}', "{}", "null"]
)
def test_hostile_text_is_no_mark(text):
    assert KEYS.read(text, "uid-1").record is None


def test_secrets_belong_to_one_claim_and_one_key():
    ids = [MARK.id, replace(MARK, fence=1).id, replace(MARK, uid="uid-2").id]
    secrets = [keys.secret(i) for keys in (KEYS, Keys(b"b" * 32)) for i in ids]
    assert len(set(secrets)) == len(secrets)
    assert proves(KEYS.secret(MARK.id), secrets[0])
    assert not proves(KEYS.secret(MARK.id), secrets[1])
    assert not proves(KEYS.secret(MARK.id), "ü\ud800")
    assert 16 <= len(secrets[0]) <= 128


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a-b.c.12", ("a-b.c", 12)),
        (".5", None),
        ("uid.", None),
        ("uid", None),
        ("uid.x", None),
        ("uid.-1", None),
        ("uid.²", None),
        (f"uid.{2**63}", None),
        (f"uid.{'9' * 400}", None),
        (f"uid.{2**63 - 1}", ("uid", 2**63 - 1)),
    ],
)
def test_ids_of_claims(text, parts):
    assert claim_parts(text) == parts


def test_a_short_key_is_refused():
    with pytest.raises(ValueError, match="5 bytes"):
        Keys(b"short")


def test_a_record_is_forged_however_deep_it_is_nested() -> None:
    """Key names stand in every record. At each depth something else runs out: reading, writing, or what is signed."""
    name = json.loads(KEYS.write(MARK))["key"]
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 10):
        text = f'{{"key":"{name}","signature":"s","x":{"[" * depth}{"]" * depth}}}'
        assert KEYS.read(text, "uid-1") == Reading(), depth
