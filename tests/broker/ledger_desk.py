"""A ledger with a clock and a shell that carries out its writes, for tests of its rules one by one."""

from __future__ import annotations

from dataclasses import replace

from tapforge_operator.broker.claim_record import Clear, SlotView
from tapforge_operator.broker.ledger import Ledger
from tapforge_operator.broker.types import Answer, ClaimQuotas, Grant, LedgerTimeouts, Remove, Want

TIMEOUTS = LedgerTimeouts(
    revoke_after=10.0,
    linger=1.0,
    remember=100.0,
    step_deadline=60.0,
    first_pause=10.0,
    longest_pause=35.0,
)
TTL = 30.0


class Desk:
    """A ledger with a clock, and the writes that it asks for."""

    def __init__(
        self,
        slots: int = 0,
        term: int = 1,
        nodes: int = 1,
        lasting: bool = False,
        person: int | None = None,
        **quotas: int,
    ):
        self.ledger = Ledger(term, TIMEOUTS, ClaimQuotas(quotas, person=person))
        self.now = 1000.0
        self.version = 0
        self.views: dict[str, SlotView] = {}
        self.answers: dict[int, list] = {}
        self.todo: list = []
        for number in range(slots):
            self.see(f"s{number}", node=f"n{number % nodes}", ready=True, address=f"http://s{number}", lasting=lasting)

    def see(self, uid: str, **changes) -> SlotView:
        self.version += 1
        old = self.views.get(uid) or SlotView(uid, changes.pop("pool", "pool"), "lab", f"pod-{uid}", "")
        self.views[uid] = replace(old, version=str(self.version), **changes)
        self.ledger.observe(self.views[uid], self.now)
        return self.views[uid]

    def write(self, uid: str, **changes) -> SlotView:
        """A write of ours: the ledger hears of it by its answer."""
        self.version += 1
        self.views[uid] = replace(self.views[uid], version=str(self.version), **changes)
        return self.views[uid]

    def ask(
        self, holder: str, slots: int = 1, priority: int = 0, request: str = "", limit: int = 0, pool: str = "pool"
    ) -> int:
        name = request or f"request-{len(self.answers)}-{holder}-{self.version}-{self.now}"
        return self.ledger.enqueue(Want(pool, holder, "", name, slots, TTL, priority, limit=limit), self.now)

    def collect(self) -> list:
        for work in self.ledger.take_work():
            if isinstance(work, Answer):
                self.answers[work.ticket] = list(work.claims)
                self.ledger.delivered(work.ticket)
            else:
                self.todo.append(work)
        return self.todo

    def serve(self) -> None:
        """Assigns, and carries out everything."""
        while self._assign() or self.collect():
            work = self.todo.pop(0)
            if isinstance(work, Grant):
                view = self.write(work.view.uid, record=work.record, fence=work.record.fence)
                self.ledger.granted(work.view.uid, work.record.fence, view, self.now)
            elif isinstance(work, Clear) and self.ledger.begin_clear(work, self.now):
                view = self.write(work.view.uid, record=None, unproved=None, failures=work.failures, rest=work.rest)
                self.ledger.cleared(work.view.uid, view, self.now)
            elif isinstance(work, Remove):
                del self.views[work.view.uid]
                self.ledger.forget(work.view.uid, self.now)

    def _assign(self) -> None:
        for pool in dict.fromkeys(view.pool for view in self.views.values()):
            self.ledger.assign(pool, self.now)

    def take(self, holder: str, slots: int = 1, priority: int = 0) -> list:
        ticket = self.ask(holder, slots, priority)
        self.serve()
        return self.answers.get(ticket, [])

    def give(self, claim, verdict: str = "clean") -> None:
        self.ledger.give_back(claim, verdict, 0, self.now)
        self.serve()

    def wait(self, seconds: float, *alive) -> None:
        """Time passes; these claims are renewed meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TTL / 3)
            for claim in alive:
                self.ledger.renew(claim, 0, self.now)
            self.ledger.expire(self.now)
            self.ledger.balance("pool", self.now)
        self.serve()

    @property
    def free(self) -> int:
        return self.ledger.counts("pool").free
