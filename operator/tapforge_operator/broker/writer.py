"""Claims written on the cluster, until it is certain what became of them.

1. A write whose fate is unknown (no answer, 5xx) is sent again under the same condition (claim_record.py;
   for a Lease it is the resourceVersion): either attempt can be carried out, never both, and the slot is not used for
   anything else before one of them is, or before the slot is seen in a state in which neither can be.
2. Nothing is sent unless this process leads at that moment; then `NotLeading` ends the wait.
3. Pauses between attempts grow and respect the server's Retry-After; every attempt has the client's deadline.

Writes in flight are found by what they write (`Writing`): the slot's UID, and the id of the claim that a write ends.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tapforge_operator.broker import claim_record, external
from tapforge_operator.broker.claim_record import ClaimRecord, Clear, Keys, SlotView
from tapforge_operator.broker.types import Answer, Remove, ServiceTimeouts
from tapforge_operator.kube.client import ApiError, path
from tapforge_operator.kube.leaderelection import NotLeading
from tapforge_operator.kube.types import Slot
from tapforge_operator.observability.logging import ref

Task = asyncio.Task[None]


class Writing:
    def __init__(self, ended: Callable[[BaseException | None], None]):
        """`ended` is called when a task ends by itself, with what it raised."""
        self._told = ended
        self._keys: dict[Task, tuple[str, ...]] = {}
        self._tasks: dict[str, set[Task]] = {}

    def begin(self, work: Coroutine[Any, Any, None], *keys: str) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._keys[task] = keys
        for key in keys:
            self._tasks.setdefault(key, set()).add(task)
        task.add_done_callback(self._ended)

    def of(self, keys: Iterable[str]) -> set[Task]:
        """Those under way for any of these slots or claims."""
        return {task for key in keys for task in self._tasks.get(key, ())}

    async def wait(self, keys: set[str], seconds: float) -> bool:
        """Until nothing is under way for them, also nothing that was begun meanwhile. False: the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while tasks := self.of(keys):
                    await asyncio.wait(tasks)
        except TimeoutError:
            return False
        return True

    def cancel(self) -> None:
        for task in self._keys:
            task.cancel()

    async def ended(self) -> None:
        await asyncio.gather(*self._keys, return_exceptions=True)

    def _ended(self, task: Task) -> None:
        for key in self._keys.pop(task):
            self._tasks[key].discard(task)
            if not self._tasks[key]:
                del self._tasks[key]
        if not task.cancelled():
            self._told(task.exception())


log = logging.getLogger(__name__)

Object = dict[str, Any]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
#: after an answer that no repetition changes: a missing permission, say
_REFUSED_PAUSE = 5.0


class Api(Protocol):
    """What is asked of the API server; `kube.client.Client` is one."""

    async def get(self, path: str) -> Object: ...
    async def create(self, path: str, body: Object) -> Object: ...
    async def patch(self, path: str, body: Any) -> Object:
        """A merge patch, or a list: a JSON patch."""
        ...

    async def delete(self, path: str, body: Object | None = None) -> Object: ...


class Tickets:
    """Calls that wait for an answer of the ledger. Several may wait on one: a request that was sent again."""

    def __init__(self) -> None:
        self._calls: dict[int, list[asyncio.Future[Answer]]] = {}
        self._since: dict[int, float] = {}

    def wait_on(self, ticket: int) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls.setdefault(ticket, []).append(future)
        self._since.setdefault(ticket, time.monotonic())
        return future

    def answer(self, answer: Answer) -> None:
        for future in self._calls.get(answer.ticket, ()):
            if not future.done():
                future.set_result(answer)

    def leave(self, ticket: int, future: asyncio.Future[Answer]) -> bool:
        """True when no other call waits on the ticket."""
        futures = self._calls.get(ticket, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._calls.pop(ticket, None)
            self._since.pop(ticket, None)
        return not futures

    def waited(self, ticket: int) -> float | None:
        """Seconds since the first call."""
        since = self._since.get(ticket)
        return None if since is None else time.monotonic() - since

    def send_away(self) -> None:
        """Callers that wait have to ask another broker."""
        calls, self._calls, self._since = self._calls, {}, {}
        for future in (f for futures in calls.values() for f in futures if not f.done()):
            future.set_exception(NotLeading())


class Siblings:
    """How long the slots of a call that are written wait for its others: as long as these come one after the other,
    with no more than `siblings` seconds between them, but no longer than `settle` in all. What came too late would have
    to be given back, and asked for again."""

    def __init__(self, timeouts: ServiceTimeouts):
        self._timeouts = timeouts
        #: by ticket: the end of all waiting, and the timer of the present one
        self._calls: dict[int, tuple[float, asyncio.TimerHandle]] = {}

    def wait(self, ticket: int, conclude: Callable[[], None]) -> None:
        """A slot of the call was written, and others are not yet. `conclude`: they are waited for no longer."""
        loop = asyncio.get_running_loop()
        known = self._calls.get(ticket)
        end = known[0] if known is not None else loop.time() + self._timeouts.settle
        if known is not None:
            known[1].cancel()
        until = min(end, loop.time() + self._timeouts.siblings)
        self._calls[ticket] = end, loop.call_at(until, self._ended, ticket, conclude)

    def drop(self, ticket: int) -> None:
        """The call is answered, or no caller waits for its answer. May be called again."""
        known = self._calls.pop(ticket, None)
        if known is not None:
            known[1].cancel()

    def clear(self) -> None:
        for ticket in list(self._calls):
            self.drop(ticket)

    def _ended(self, ticket: int, conclude: Callable[[], None]) -> None:
        self.drop(ticket)
        conclude()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a write. `view`: the slot as it is now, None when it is gone."""

    done: bool
    view: SlotView | None
    #: seconds that the slot should be left alone
    pause: float = 0.0


class Writer:
    def __init__(
        self,
        api: Api,
        keys: Keys,
        leads: Callable[[], bool],
        pools: Callable[[str], str],
        observe_pod: Callable[[Mapping[str, Any]], Slot | None] | None = None,
    ):
        """`pools`: name of a pool by its UID, "" of one that is gone. `observe_pod` is called with every Pod that an
        answer shows, and returns the slot that is known then."""
        self._api = api
        self._keys = keys
        self._leads = leads
        self._pools = pools
        self._observe_pod = observe_pod

    async def claim(self, view: SlotView, record: ClaimRecord, replaces: Clear | None = None) -> Outcome:
        """Writes the record on the slot as it was seen; and what `replaces` would have written."""
        pause = _Pause()
        unclear = by_version = False
        while True:
            self._check()
            if view.lasting and not self._pools(view.pool):
                return _gone(view)  # a Lease without an owner would stay for ever
            try:
                return Outcome(True, await self._write_claim(view, record, replaces, by_version))
            except ApiError as error:
                unclear |= error.unclear
                if error.status == 404:
                    return _gone(view)
                unfit = error.status == 409 or (error.status == 422 and not by_version)
                if not unfit and error.passing:
                    await pause.wait(error)
                    continue
                if not unfit:
                    log.error("the claim of slot %s could not be written: %s", view.name, error, extra=_ref(view))
                    if not unclear:
                        return Outcome(False, view, _REFUSED_PAUSE)
            found = await self.get(view)
            if found is None:
                if view.lasting and unclear and not view.version:
                    await pause.wait()  # an earlier attempt may still create it
                    continue
                return _gone(view)
            if found.record == record:
                return Outcome(True, found)
            if found.fence != view.fence or found.record != view.record or (view.lasting and found.order > view.order):
                return Outcome(False, found)  # nor can an earlier attempt be carried out any more
            if found.ended or (not found.ready and not unclear):
                return Outcome(False, found)
            if unclear or by_version or view.lasting:
                await pause.wait()  # an earlier attempt may still be carried out
            if not view.lasting:
                view, by_version = found, True

    async def clear(self, work: Clear) -> SlotView | None:
        """Takes the record off the slot; returns it as it is now, None when it is gone."""
        view, pause, by_version = work.view, _Pause(), False
        while True:
            self._check()
            try:
                return await self._write_clear(view, work, by_version)
            except ApiError as error:
                if error.status == 404:
                    return None
                if error.status != 409 and (error.status != 422 or by_version):
                    if not error.passing:
                        log.error("slot %s could not be released: %s", view.name, error, extra=_ref(view))
                    await pause.wait(error)
            found = await self.get(view)
            there = None if found is None else found.record or found.unproved
            if found is None or there is None or there.fence != work.record.fence:
                return found
            view, by_version = found, not found.lasting

    async def remove(self, work: Remove) -> None:
        """Deletes the Pod of the slot, or its Lease, as it was seen: a delete that is late hits no claim of the next
        leader."""
        view, pause = work.view, _Pause()
        log.info("slot %s goes: %s", view.name, work.reason, extra=_ref(view))
        while True:
            self._check()
            try:
                if view.lasting:
                    pod = await self._api.delete(external.where(view), external.delete_options(view))
                else:
                    pod = await self._api.delete(_where(view), claim_record.delete_options(view))
            except ApiError as error:
                if error.status == 404:
                    return
                if error.status != 409:
                    if not error.passing:
                        log.error("slot %s could not be deleted: %s", view.name, error, extra=_ref(view))
                    await pause.wait(error)
                    continue
            else:
                if self._observe_pod is not None and pod.get("kind") == "Pod":
                    self._observe_pod(pod)
                return
            found = await self.get(view)
            if found is None or (found.record is not None and found.record.fence > work.fence):
                return
            if view.lasting:  # its URL may be in the pool again; if not, the next leader finds it
                return
            view = found

    async def confirm(self, view: SlotView) -> SlotView | None:
        """Writes on the slot without changing its claim, so that nothing is carried out any more that was sent for the
        slot as it was. Returns it as it is now, None when it is gone."""
        record, pause = view.record, _Pause()
        while True:
            self._check()
            try:
                patch = external.confirm_patch if view.lasting else claim_record.confirm_patch
                return self._read(view, await self._api.patch(_where(view), patch(view)))
            except ApiError as error:
                if error.status == 404:
                    return None
                if error.status != 409:
                    await pause.wait(error)
            found = await self.get(view)
            if found is None or found.record != record or found.is_confirmed:
                return found
            view = found

    async def get(self, view: SlotView) -> SlotView | None:
        """The slot as it is now; None when it is gone."""
        pause = _Pause()
        while True:
            self._check()
            try:
                found = await self._api.get(_where(view))
            except ApiError as error:
                if error.status == 404:
                    return None
                await pause.wait(error)
            else:
                return self._read(view, found)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _write_claim(
        self, view: SlotView, record: ClaimRecord, replaces: Clear | None, by_version: bool
    ) -> SlotView | None:
        if not view.lasting:
            write = claim_record.claim_by_version if by_version else claim_record.claim_patch
            return self._read(view, await self._api.patch(_where(view), write(view, record, self._keys, replaces)))
        body = external.claim_body(view, record, self._keys, self._pools(view.pool))
        if view.version:
            return self._read(view, await self._api.patch(external.where(view), body))
        return self._read(view, await self._api.create(external.collection(view), body))

    async def _write_clear(self, view: SlotView, work: Clear, by_version: bool) -> SlotView | None:
        if view.lasting:
            patch = external.clear_patch(view, work)
            return self._read(view, await self._api.patch(external.where(view), patch))
        if by_version:
            body: Any = claim_record.clear_by_version(view, work.episodes)
        else:
            body = claim_record.clear_patch(view, work.record, work.episodes)
        return self._read(view, await self._api.patch(_where(view), body))

    def _read(self, view: SlotView, found: Object) -> SlotView | None:
        if view.lasting:
            return external.with_lease(view, found, self._keys)
        slot = self._observe_pod(found) if self._observe_pod is not None else None
        if slot is not None and slot.resource_version == found["metadata"].get("resourceVersion"):
            seen: SlotView | None = claim_record.view_of(slot, self._keys)
        else:
            seen = claim_record.read(found, self._keys)
        return seen if seen is not None and seen.uid == view.uid else None

    def _check(self) -> None:
        if not self._leads():
            raise NotLeading


def _where(view: SlotView) -> str:
    return external.where(view) if view.lasting else path("pods", view.namespace, view.name)


def _ref(view: SlotView) -> Mapping[str, object]:
    return ref("Lease" if view.lasting else "Pod", view.namespace, view.name, "" if view.lasting else view.uid)


def _gone(view: SlotView) -> Outcome:
    # A URL without its Lease is tried again, and a missing namespace must not be asked in a tight circle.
    return Outcome(False, None, _REFUSED_PAUSE if view.lasting else 0.0)


class _Pause:
    """Growing pauses between attempts."""

    def __init__(self) -> None:
        self._next = _FIRST_PAUSE

    async def wait(self, error: ApiError | None = None) -> None:
        refused = error is not None and not error.passing
        wanted = _REFUSED_PAUSE if refused else self._next * random.uniform(0.5, 1.0)
        wanted = max(wanted, error.retry_after if error else 0.0)
        self._next = min(2 * self._next, _LONGEST_PAUSE)
        await asyncio.sleep(wanted)
