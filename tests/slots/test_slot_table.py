"""No slot ever has two holders, and a dirty one comes back only through a healthy probe: for every order of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from tapforge_envs.slots.source import SlotError, Verdict
from tapforge_envs.slots.table import Backoff, SlotTable, State

NAMES = ["a", "b", "c"]
COMERS = ["c", "d", "e"]
LIMIT = 3
SICK = (State.SICK, State.QUARANTINED)


class Leases(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.table = SlotTable(NAMES, LIMIT)
        self.holders: dict[str, int] = {}
        #: largest ever, also of an earlier slot of the name
        self.fences: dict[str, int] = dict.fromkeys([*NAMES, *COMERS], 0)
        #: slots that may be granted: never returned dirty or dead since their last healthy probe
        self.proven = set(NAMES)
        self.doomed: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return self.table.names

    @rule(name=st.sampled_from(COMERS))
    def add(self, name):
        if name in self.names:
            with pytest.raises(SlotError):
                self.table.add(name)
            return
        self.table.add(name)
        self.proven.add(name)
        assert self.table.state(name) is State.FREE

    @rule(name=st.sampled_from(COMERS))
    def remove(self, name):
        if name in self.names:
            self.table.remove(name)
            self.proven.discard(name)
            self.doomed.discard(name)
            self.holders.pop(name, None)
        assert name not in self.names

    @rule(target=held, avoid=st.frozensets(st.sampled_from([*NAMES, *COMERS])))
    def take(self, avoid):
        taken = self.table.take(avoid)
        if taken is None:
            free = {n for n in self.names if self.table.state(n) is State.FREE}
            others = {n for n in self.names if self.table.state(n) is not State.QUARANTINED} - avoid
            assert not free - avoid
            assert not free or others
            return multiple()
        name, fence = taken
        assert name not in self.holders
        assert name in self.proven
        assert fence > self.fences[name]
        self.holders[name] = self.fences[name] = fence
        return taken

    @rule(lease=consumes(held), verdict=st.sampled_from(Verdict))
    def give(self, lease, verdict):
        name, fence = lease
        if self.holders.get(name) != fence:  # its slot left, and perhaps came again
            with pytest.raises(SlotError):
                self.table.give(name, fence, verdict)
            return
        state = self.table.give(name, fence, verdict)
        del self.holders[name]
        if verdict is Verdict.DIRTY or name in self.doomed:
            self.doomed.discard(name)
            self.proven.discard(name)
            assert state in SICK
        else:
            assert state is State.FREE
        with pytest.raises(SlotError):
            self.table.give(name, fence, Verdict.CLEAN)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def die(self, data):
        name = data.draw(st.sampled_from(self.names))
        if name in self.holders:
            self.doomed.add(name)
        else:
            self.proven.discard(name)
        self.table.died(name)

    @precondition(lambda self: any(self.table.state(n) in SICK for n in self.names))
    @rule(data=st.data(), healthy=st.booleans())
    def probe(self, data, healthy):
        name = data.draw(st.sampled_from([n for n in self.names if self.table.state(n) in SICK]))
        state = self.table.probed(name, healthy)
        assert (state is State.FREE) == healthy
        if healthy:
            self.proven.add(name)

    @invariant()
    def counts_agree(self):
        counts = self.table.counts()
        assert counts.leased == len(self.holders)
        assert counts.free + counts.leased + counts.sick + counts.quarantined == len(self.names)
        assert self.table.usable == len(self.names) - counts.quarantined
        for name in self.names:
            assert self.table.leased(name) == (name in self.holders)
            assert (self.table.state(name) is State.LEASED) == (name in self.holders)
            if self.table.state(name) is State.FREE:
                assert name in self.proven


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeases = Leases.TestCase


def test_a_phone_that_lies_about_its_health_ends_in_quarantine():
    table = SlotTable(["liar"], LIMIT)
    for episode in range(LIMIT):
        name, fence = table.take()
        state = table.give(name, fence, Verdict.DIRTY)
        if episode < LIMIT - 1:
            assert state is State.SICK
            table.probed(name, healthy=True)
    assert state is State.QUARANTINED
    assert (table.usable, table.counts().quarantines) == (0, 1)
    table.probed("liar", healthy=True)
    name, fence = table.take()
    assert table.give(name, fence, Verdict.DIRTY) is State.QUARANTINED
    assert table.counts().quarantines == 2


def test_a_clean_episode_clears_the_strikes():
    table = SlotTable(["phone"], LIMIT)
    for _ in range(5):
        for verdict in (Verdict.DIRTY, Verdict.CLEAN):
            state = table.give(*table.take(), verdict)
            if state is State.SICK:
                table.probed("phone", healthy=True)
    assert table.counts().quarantines == 0


def test_the_longest_idle_slot_is_next():
    table = SlotTable(NAMES, LIMIT)
    first, second = table.take(), table.take()
    assert (first[0], second[0]) == ("a", "b")
    table.give(*second, Verdict.CLEAN)
    table.give(*first, Verdict.CLEAN)
    assert [table.take()[0] for _ in NAMES] == ["c", "b", "a"]


@pytest.mark.parametrize(("strikes", "seconds"), [(1, 0.5), (2, 1), (4, 4), (7, 30), (8, 300), (9, 300)])
def test_pauses_between_probes_grow_to_a_cap(strikes, seconds):
    assert Backoff().delay(strikes) == seconds
