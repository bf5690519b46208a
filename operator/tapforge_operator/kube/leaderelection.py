"""Leader election by one `coordination.k8s.io/v1` Lease.

Promises:
1. A leader that could not renew for `renew_seconds` (on its own clock, which can't be set and goes on while the machine
   sleeps, counted from before the renewal was sent) stops leading by itself, before another process may begin
   (`lease_seconds` of seeing no change on *their* clock). No clock of another machine is ever compared.
2. The term (`leaseTransitions`) grows with every win, also with that of the holder itself: the identity that comes back
   after a crash or an outage begins a new term, and need not wait.
3. A lost term is over for good: no answer that comes late revives it. The process may win another one.
4. A renewal counts from when it was sent, also when its answer was lost and the Lease shows that it was carried out.
   The next one doesn't wait for the answer of the last.
5. Whatever the API server answers, `win` goes on trying: an outage, or rights that are missing for a moment while the
   API server starts, does not end the process.
6. A leader writes with its Lease where its broker is reached; a standby knows that address, and may send callers.
7. A Lease that is deleted ends no term: its leader writes it back, and a process that knows of that leader, or that
   there was one (`led_before`), leaves it the time to. Terms grow on beyond every one that this process has seen.

Times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from tapforge_operator import labels
from tapforge_operator.kube.client import ApiError, Client, Object, path
from tapforge_operator.kube.objectmeta import version

log = logging.getLogger(__name__)

_GROUP = "coordination.k8s.io/v1"
#: between two renewals while none of them is known to have been carried out
_AGAIN_SECONDS = 0.5
#: renewals under way: with one in half a second each has the time that the API server may take
_AT_ONCE = 8
#: to give up a Lease that is being renewed
_TRIES = 3


class NotLeading(Exception):
    """Another process may be leading: nothing more is written."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How quickly leadership changes."""

    lease_seconds: float = 15.0
    renew_seconds: float = 10.0
    every_seconds: float = 3.0

    def __post_init__(self) -> None:
        if not self.every_seconds < self.renew_seconds < self.lease_seconds:
            raise ValueError(
                f"a leader tries every {self.every_seconds:g} s, gives up after {self.renew_seconds:g} s and is "
                f"replaced after {self.lease_seconds:g} s: these have to grow in this order"
            )


def since_boot() -> float:
    """Seconds of a clock that only goes forward, also while the machine sleeps: `time.monotonic` stands still then."""
    return time.clock_gettime(time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC)


class Election:
    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        identity: str,
        timing: Timing | None = None,
        clock: Callable[[], float] = since_boot,
        address: str = "",
    ):
        """`address`: host:port of this process' broker; "": not published."""
        self._client = client
        self._clock = clock
        self._path = path("leases", namespace, name, group=_GROUP)
        self._collection = path("leases", namespace, group=_GROUP)
        self._name = name
        self.identity = identity
        self.address = address
        #: the process that leads instead of this one, and where its broker is, as the Lease said last; "": unknown
        self.holder = self.leader = ""
        self.timing = timing or Timing()
        #: number of the newest term of this process; 0 before the first
        self.term = 0
        #: a process has led, as far as is known: where there is no Lease it may have been deleted, and be written back
        self.led_before = False
        #: the largest term that a Lease named, and the holder that the newest one named
        self._highest, self._named = 0, ""
        self._until = 0.0
        self._lease: Object = {}
        #: when the renewals of this term were sent, by the time that they wrote
        self._sent: dict[str, float] = {}
        #: when the newest renewal was sent that is known to have been carried out
        self._renewed = 0.0
        #: the present term was given up by this process itself
        self._resigned = False
        #: held while the Lease is being taken: whose it is then only the answer says
        self._taking = asyncio.Lock()

    @property
    def leads(self) -> bool:
        """True while no other process can be leading."""
        return self._clock() < self._until

    async def win(self) -> int:
        """Waits until this process leads; returns the term. Runs until cancelled."""
        seen, since = "", self._clock()
        while True:
            began = self._clock()
            try:
                lease = await self._read()
                self._observe(lease)
                written = lease.get("metadata", {}).get("resourceVersion", "")
                if written != seen:  # it may have been written at any moment until now
                    seen, since = written, self._clock()
                if self._free(lease, began - since):
                    async with self._taking:
                        taken = await self._take(lease, began)
                    if taken:
                        log.info("leads as %s in term %d", self.identity, self.term)
                        return self.term
            except ApiError as error:
                level = logging.WARNING if error.passing or error.status == 409 else logging.ERROR
                log.log(level, "no leadership yet: %s", error)
            except (ValueError, OSError) as error:  # an answer that is none, or no token to ask with
                log.error("no leadership yet: %r", error)
            await asyncio.sleep(min(1.0, self.timing.every_seconds))

    async def find_leader(self) -> str:
        """The Lease's holder, also when that one died; "" when it has none, or this process. Raises ApiError."""
        self._observe(await self._read())
        return self.holder

    async def keep(self) -> None:
        """Renews until the term is lost; then returns."""
        in_flight: set[asyncio.Task[None]] = set()
        try:
            while self.leads:
                now = self._clock()
                if len(in_flight) < _AT_ONCE and now >= self._renewed + self.timing.every_seconds:
                    in_flight.add(asyncio.create_task(self._renew(now)))
                # An answer may be all that was lost: the next attempt doesn't wait for it.
                pause = min(_AGAIN_SECONDS, self.timing.every_seconds, max(0.0, self._until - now))
                await asyncio.sleep(pause)
                in_flight = {task for task in in_flight if not task.done()}
        finally:
            self._until = 0.0
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)
        if not self._resigned:
            log.error("term %d of the leadership is over: the Lease could not be kept", self.term)

    async def resign(self) -> None:
        """Lets the next one begin at once, also when the Lease is just being taken: that is waited for, and undone."""
        async with self._taking:
            if not self.leads:
                return
            self._until, self._resigned = 0.0, True
            try:
                await self._give_up()
            except ApiError as error:
                log.warning("the leader Lease could not be given up, others wait for its end: %s", error)

    # --- renewals -----------------------------------------------------------------------------------------------------

    async def _renew(self, began: float) -> None:
        spec = self._spec(self.term)
        self._sent[spec["renewTime"]] = began
        body = {"metadata": self._next(self._lease), "spec": spec}
        try:
            lease = await self._client.patch(self._path, body, deadline=max(0.1, min(5.0, self._until - began)))
        except ApiError as error:
            if error.status == 404:
                await self._write_back(spec)
            elif error.status == 409:  # perhaps by a renewal whose answer was lost
                await self._reread(error)
            else:
                log.warning("the leader Lease could not be renewed: %s", error)
        else:
            self._count(lease)

    async def _write_back(self, spec: Object) -> None:
        """The Lease was deleted."""
        if not self.leads:
            return
        body = {"apiVersion": _GROUP, "kind": "Lease", "metadata": self._metadata(), "spec": spec}
        try:
            lease = await self._client.create(self._collection, body, deadline=5.0)
        except ApiError as error:
            if error.status == 409:  # by another renewal of ours, or by another process
                await self._reread(error)
            else:
                log.warning("the leader Lease was deleted and could not be written back: %s", error)
        else:
            log.warning("the leader Lease was deleted: it was written back in term %d", self.term)
            self._count(lease)

    async def _reread(self, why: ApiError) -> None:
        try:
            lease = await self._read()
        except ApiError as error:
            log.warning("the leader Lease could not be read: %s", error)
            return
        if self._mine(lease):
            self._count(lease)
        elif self.leads:
            log.error("another process leads now: %s", why)
            self._until = 0.0

    def _count(self, lease: Object) -> None:
        """The Lease is like this, and ours."""
        if _version(lease) > _version(self._lease):
            self._lease = lease
        sent = self._sent.get(lease["spec"].get("renewTime", ""))
        # What came too late revives nothing: callers that checked meanwhile have stopped for good.
        if sent is not None and self.leads:
            self._renewed = max(self._renewed, sent)
            self._until = max(self._until, sent + self.timing.renew_seconds)
            self._sent = {text: at for text, at in self._sent.items() if at >= sent}

    # --- the Lease ----------------------------------------------------------------------------------------------------

    def _free(self, lease: Object, unchanged: float) -> bool:
        spec = lease.get("spec") or {}
        holder = (spec.get("holderIdentity") or "") if lease else self._named
        # The holder's own promise counts, should it be longer than ours.
        life = max(self.timing.lease_seconds, float(spec.get("leaseDurationSeconds") or 0))
        unknown = not lease and not holder and self.led_before
        return (holder in ("", self.identity) and not unknown) or unchanged > life

    def _observe(self, lease: Object) -> None:
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if lease:
            self._named, self.led_before = holder, True
        self._highest = max(self._highest, int(spec.get("leaseTransitions") or 0))
        noted = lease.get("metadata", {}).get("annotations") or {}
        self.holder = holder if holder != self.identity else ""
        self.leader = noted.get(labels.BROKER, "") if self.holder else ""

    def _mine(self, lease: Object) -> bool:
        spec = lease.get("spec") or {}
        return spec.get("holderIdentity") == self.identity and spec.get("leaseTransitions") == self.term

    async def _read(self) -> Object:
        try:
            return await self._client.get(self._path, deadline=5.0)
        except ApiError as error:
            if error.status == 404:
                return {}
            raise

    async def _take(self, lease: Object, began: float) -> bool:
        term = max(int((lease.get("spec") or {}).get("leaseTransitions") or 0), self._highest, self.term) + 1
        spec = self._spec(term) | {"acquireTime": _now()}
        try:
            if lease:
                body = {"metadata": self._next(lease), "spec": spec}
                self._lease = await self._client.patch(self._path, body, deadline=5.0)
            else:
                named = {"apiVersion": _GROUP, "kind": "Lease", "metadata": self._metadata(), "spec": spec}
                self._lease = await self._client.create(self._collection, named, deadline=5.0)
        except ApiError as error:
            if error.status == 409:
                return False
            raise
        self.term, self._until, self._renewed = term, began + self.timing.renew_seconds, began
        self._sent, self._resigned = {}, False
        self.holder = self.leader = ""
        self.led_before = True
        return True

    async def _give_up(self) -> None:
        for left in reversed(range(_TRIES)):
            body = {"metadata": {"resourceVersion": self._lease["metadata"]["resourceVersion"]}}
            try:
                await self._client.patch(self._path, body | {"spec": {"holderIdentity": ""}}, deadline=3.0)
                return
            except ApiError as error:
                # A renewal that was on its way may have come first.
                if error.status != 409 or not left or not self._mine(lease := await self._read()):
                    raise
                self._lease = lease

    def _metadata(self) -> Object:
        # The label makes it part of what is watched: a leader receives its own renewals, so it knows that watches live.
        return {"name": self._name, "labels": {labels.MANAGED_BY: labels.OPERATOR}, "annotations": self._noted()}

    def _next(self, lease: Object) -> Object:
        return {"resourceVersion": lease["metadata"]["resourceVersion"], "annotations": self._noted()}

    def _noted(self) -> Object:
        # Also when it is "": the address of an earlier leader must not be beside another one's name.
        return {labels.BROKER: self.address}

    def _spec(self, term: int) -> Object:
        seconds = int(self.timing.lease_seconds)
        return {
            "holderIdentity": self.identity,
            "leaseTransitions": term,
            "leaseDurationSeconds": seconds,
            "renewTime": _now(),
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _version(lease: Object) -> int:
    return version((lease.get("metadata") or {}).get("resourceVersion", ""))
