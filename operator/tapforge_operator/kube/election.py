"""Who leads: one `coordination.k8s.io/v1` Lease.

Promises:
1. A leader that could not renew for `renew_seconds` (on its own clock, which can't be set and goes on while the machine
   sleeps, counted from before the renewal was sent) stops leading by itself, before anybody else may begin
   (`lease_seconds` of seeing no change on *their* clock). No clock of another machine is ever compared.
2. The term (`leaseTransitions`) grows with every change of the holder, and with every start of a process: the same
   identity that comes back after a crash begins a new term, and need not wait.
3. Losing the Lease is final for this process: `lost` is set, and it ends. What it had in memory is of no use any more.

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

from .. import names
from .client import ApiError, Client, Object, path

log = logging.getLogger(__name__)

_GROUP = "coordination.k8s.io/v1"
#: until a renewal that failed is tried again; its answer may be all that was lost, and half the time with it
_AGAIN_SECONDS = 0.5
#: to give up a Lease that is being renewed
_TRIES = 3


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
    ):
        self._client = client
        self._clock = clock
        self._path = path("leases", namespace, name, group=_GROUP)
        self._collection = path("leases", namespace, group=_GROUP)
        self._name = name
        self.identity = identity
        self.timing = timing or Timing()
        #: number of this leadership; 0 before the first
        self.term = 0
        #: set once when a leadership ended
        self.lost = asyncio.Event()
        self._until = 0.0
        self._lease: Object = {}

    @property
    def leads(self) -> bool:
        """True while nobody else can be leading."""
        return not self.lost.is_set() and self._clock() < self._until

    async def win(self) -> int:
        """Waits until this process leads; returns the term. Runs until cancelled."""
        seen, since = "", self._clock()
        while True:
            began = self._clock()
            try:
                lease = await self._read()
                version = lease.get("metadata", {}).get("resourceVersion", "")
                if version != seen:
                    seen, since = version, began
                if self._free(lease, began - since) and await self._take(lease, began):
                    log.info("leads as %s in term %d", self.identity, self.term)
                    return self.term
            except ApiError as error:
                if not error.passing and error.status != 409:
                    raise
                log.warning("no leadership yet: %s", error)
            await asyncio.sleep(min(1.0, self.timing.every_seconds))

    async def keep(self) -> None:
        """Renews until the leadership is lost; then sets `lost` and returns."""
        pause = self.timing.every_seconds
        try:
            while self.leads:
                await asyncio.sleep(max(0.0, min(pause, self._until - self._clock())))
                began, pause = self._clock(), self.timing.every_seconds
                try:
                    await self._write(began, self._until - began)
                except ApiError as error:
                    pause = min(pause, _AGAIN_SECONDS)
                    if error.status in (404, 409) and not self._mine(await self._reread()):
                        log.error("somebody else leads now: %s", error)
                        return
                    log.warning("the leader Lease could not be renewed: %s", error)
        finally:
            self._until = 0.0
            self.lost.set()

    async def resign(self) -> None:
        """Lets the next one begin at once."""
        if self.leads:
            self._until = 0.0
            self.lost.set()
            try:
                await self._give_up()
            except ApiError as error:
                log.warning("the leader Lease could not be given up, others wait for its end: %s", error)

    # --- the Lease ----------------------------------------------------------------------------------------------------

    def _free(self, lease: Object, unchanged: float) -> bool:
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        # The holder's own promise counts, should it be longer than ours.
        life = max(self.timing.lease_seconds, float(spec.get("leaseDurationSeconds") or 0))
        return holder in ("", self.identity) or unchanged > life

    def _mine(self, lease: Object) -> bool:
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") == self.identity and spec.get("leaseTransitions") == self.term:
            self._lease = lease
            return True
        return False

    async def _read(self) -> Object:
        try:
            return await self._client.get(self._path, deadline=5.0)
        except ApiError as error:
            if error.status == 404:
                return {}
            raise

    async def _reread(self) -> Object:
        try:
            return await self._read()
        except ApiError as error:
            log.warning("the leader Lease could not be read: %s", error)
            return self._lease

    async def _take(self, lease: Object, began: float) -> bool:
        term = int((lease.get("spec") or {}).get("leaseTransitions") or 0) + 1
        spec = self._spec(term) | {"acquireTime": _now()}
        try:
            if lease:
                body = {"metadata": {"resourceVersion": lease["metadata"]["resourceVersion"]}, "spec": spec}
                self._lease = await self._client.patch(self._path, body, deadline=5.0)
            else:
                named = {"apiVersion": _GROUP, "kind": "Lease", "metadata": self._metadata(), "spec": spec}
                self._lease = await self._client.create(self._collection, named, deadline=5.0)
        except ApiError as error:
            if error.status == 409:
                return False
            raise
        self.term, self._until = term, began + self.timing.renew_seconds
        return True

    async def _give_up(self) -> None:
        for left in reversed(range(_TRIES)):
            body = {"metadata": {"resourceVersion": self._lease["metadata"]["resourceVersion"]}}
            try:
                await self._client.patch(self._path, body | {"spec": {"holderIdentity": ""}}, deadline=3.0)
                return
            except ApiError as error:
                # A renewal that was on its way may have come first.
                if error.status != 409 or not left or not self._mine(await self._read()):
                    raise

    async def _write(self, began: float, deadline: float) -> None:
        body = {
            "metadata": {"resourceVersion": self._lease["metadata"]["resourceVersion"]},
            "spec": self._spec(self.term),
        }
        self._lease = await self._client.patch(self._path, body, deadline=max(0.1, min(5.0, deadline)))
        # An answer that came too late revives nothing: whoever asked meanwhile has stopped for good.
        if self.leads:
            self._until = began + self.timing.renew_seconds

    def _metadata(self) -> Object:
        # The label makes it part of what is watched: a leader hears of its own renewals, so it knows that watches live.
        return {"name": self._name, "labels": {names.MANAGED_BY: names.OPERATOR}}

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
