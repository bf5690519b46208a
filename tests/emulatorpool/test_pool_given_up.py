"""Slots that were given up, or asked back, for a reason that has passed: nobody would get them any more, so they go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pools import NEW_IMAGE, NOW, booting, decide, gone, pool, ready

from tapforge_operator.broker.claim_record import Clear, SlotView
from tapforge_operator.broker.ledger import Ledger
from tapforge_operator.broker.types import Answer, Claim, Grant, Held, Want
from tapforge_operator.emulatorpool.state import History, Pool

CONDEMNED = Held("", draining=True)


def view(of: Pool, ordinal: int) -> SlotView:
    slot = ready(of, ordinal)
    return SlotView(slot.uid, of.uid, of.namespace, slot.name, "1", node=slot.node, ready=True)


class Broker:
    """A ledger whose every write succeeds at once."""

    def __init__(self, of: Pool, slots: int):
        self.ledger, self.pool = Ledger(1), of
        for i in range(slots):
            self.ledger.observe(view(of, i), 0.0)

    def claim(self, slots: int) -> tuple[Claim, ...]:
        self.ledger.enqueue(Want(self.pool.uid, "ann", "", f"request-{slots}", slots, 60.0), 0.0)
        self.ledger.assign(self.pool.uid, 0.0)
        answers = self._work()
        return answers[0].claims if answers else ()

    def give_back(self, claims: tuple[Claim, ...]) -> None:
        for claim in claims:
            self.ledger.give_back(claim, "clean", 1, 1.0)
        self._work()

    def held(self) -> Mapping[str, Held]:
        return self.ledger.held(self.pool.uid)

    def _work(self) -> list[Answer]:
        answers: list[Answer] = []
        while work := self.ledger.take_work():
            for piece in work:
                match piece:
                    case Grant(seen, record):
                        now = replace(seen, version="2", record=record, fence=record.fence)
                        self.ledger.granted(record.uid, record.fence, now, 0.0)
                    case Clear(view=seen):
                        self.ledger.cleared(seen.uid, replace(seen, version="3", record=None), 1.0)
                    case Answer():
                        answers.append(piece)
        return answers


def test_a_scale_in_that_was_taken_back_leaves_no_slot_that_nobody_gets() -> None:
    small, large = pool(replicas=1), pool(replicas=2, generation=2)
    broker = Broker(small, 2)
    claims = broker.claim(2)
    slots = [ready(small, 0), ready(small, 1)]
    made = decide(small, slots, held=broker.held())
    assert len(made.revoke) == 1
    for uid, reason in made.revoke.items():
        broker.ledger.revoke(uid, reason)
    assert decide(large, slots, made.history, held=broker.held()).quiet, "its holder plays on"
    broker.give_back(claims)
    made = decide(large, slots, made.history, held=broker.held())
    assert list(gone(made)) == [uid for uid, held in broker.held().items() if held.draining]
    assert len(made.creates) == 1
    assert set(gone(made).values()) == {"GivenUp"}


def test_a_delete_that_failed_is_repeated_when_nobody_wants_it_any_more() -> None:
    of = pool(replicas=2)
    broker = Broker(of, 2)
    assert broker.ledger.drain("uid-1")
    assert len(broker.claim(2)) == 1, "one is all that there is to get"
    assert gone(decide(of, [ready(of, 0), ready(of, 1)], held=broker.held())) == {"uid-1": "GivenUp"}


def test_slots_that_nobody_gets_go_first_when_there_are_too_many() -> None:
    of = pool(replicas=2)
    made = decide(of, [ready(of, i, created=NOW - 9000 + i) for i in range(4)], held={"uid-0": CONDEMNED})
    assert gone(made) == {"uid-0": "ScaleIn", "uid-3": "ScaleIn"}


def test_those_that_are_to_be_exchanged_wait_for_their_turn() -> None:
    old = pool(replicas=3)
    of = pool(replicas=3, template=NEW_IMAGE, updateStrategy={"maxSurge": 0, "maxUnavailable": 1})
    slots = [ready(old, 0), ready(old, 1), booting(of, 2, created=NOW)]
    assert decide(of, slots, held={"uid-0": CONDEMNED}).quiet, "one is missing already"


def test_they_are_no_ones_demand() -> None:
    of = pool(scaling={"minReplicas": 0, "maxReplicas": 5, "idleSeconds": 60})
    made = decide(of, [ready(of, 1)], History(needs=((NOW, 0),)), held={"uid-1": CONDEMNED})
    assert made.status.desired_replicas == made.status.claimed == 0
