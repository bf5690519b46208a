"""Carries out a plan: removals and creates, side by side.

Promises:
1. Every single write asks first whether this process still leads.
2. A slot is deleted only after the ledger promised that it has no holder and is not granted again; a delete names the
   UID and, unless the slot is beyond use, the version that was decided about.
3. A create waits for the removals that make room for it (`room_makers`) and for no others. A removal that takes long
   is left behind, and the create with it: the next plan has it again. So there is never a slot too many.
4. The answer to every write is in the cache before a watch reports it: the next plan doesn't repeat it; nor does it
   repeat what is still in flight.
5. A create whose fate is unknown is read, never repeated blindly; its name makes a second one a conflict.
6. After the first refusal (quota, Pod Security, no right) no further create of the plan is begun.
7. The disruption budget of the pool's claimed slots is made with its first slot, and observed every few minutes: one
   that is deleted is created again. Objects of other owners are not changed; what keeps the budget from its wanted
   state is reported (`Budget.trouble`): the pool works without it, but drains don't wait for its claimed slots. No pass
   waits for it.

Times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Final, Literal, Protocol

from tapforge_operator import labels
from tapforge_operator.broker.types import Device, Held
from tapforge_operator.controller import InFlight
from tapforge_operator.emulatorpool.backoff import LONGEST_NOT_ENABLED, PER_PASS, refusal
from tapforge_operator.emulatorpool.devices import DeviceLeases
from tapforge_operator.emulatorpool.pod import disruption_budget, retain_patch, slot_pods
from tapforge_operator.emulatorpool.state import NewSlot, Plan, Pool, Refusal, Removal
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.client import ApiError, Client, Object, path
from tapforge_operator.kube.events import record
from tapforge_operator.kube.leaderelection import NotLeading
from tapforge_operator.kube.types import Event, Reference, Slot, belongs
from tapforge_operator.observability.logging import ref
from tapforge_operator.observability.metrics import Telemetry

log = logging.getLogger(__name__)

_LOG_LINES, _LOG_CHARACTERS, _LOG_SECONDS = 40, 4096, 5.0
#: of an answer. The API server counts from its beginning and its end is wanted, so it is as much as so many lines can
#: be: container runtimes write a longer line as several of 16 KiB
_LOG_BYTES = _LOG_LINES * 17 * 1024
_SUCCESSOR_SECONDS = 600.0
#: creates in flight that go on into the next pass: as many as the API server carries out while a pool is planned
#: and its status is written
_WINDOW = PER_PASS // 4
_POLICY: Final = "policy/v1"
_BUDGET_SECONDS: Final = 300.0
#: after a look that found nothing out, or the budget of a deleted pool of the same name: it is collected soon
_BUDGET_SOON: Final = 5.0

#: what is in flight: which call, and the UID or the name that it is about
Call = tuple[Literal["remove", "create", "budget", "leases", "events"], str]
_BUDGET: Final[Call] = ("budget", "")
_LEASES: Final[Call] = ("leases", "")


class Claims(Protocol):
    """What a pool's controller has to know of claims, and may ask of them."""

    def held(self, pool: str) -> Mapping[str, Held]: ...
    def waiting(self, pool: str) -> int: ...
    def quota(self, namespace: str) -> int | None: ...
    def quota_room(self, pool: str, namespace: str) -> int | None: ...
    def devices(self, pool: str) -> Sequence[Device]: ...
    def drain(self, uid: str) -> bool: ...
    def revoke(self, uid: str, reason: str) -> None: ...
    def withhold(self, pool: str, uids: Set[str]) -> None: ...


class SlotWrites:
    """The writes of one pool."""

    def __init__(
        self,
        client: Client,
        cache: Cache,
        claims: Claims,
        telemetry: Telemetry,
        leads: Callable[[], bool],
        requeue: Callable[[], None],
        devices: bool,
    ):
        """`requeue` is called when something has ended that a pass left behind. `devices`: external ones can be
        claimed."""
        self._client = client
        self._cache = cache
        self._claims = claims
        self._telemetry = telemetry
        self._leads = leads
        self._in_flight: InFlight[Call] = InFlight(requeue)
        self._budget = Budget(client, self._ask_leave)
        self._leases = DeviceLeases(client, devices)
        #: what the last plan knew of the budget and of the Leases
        self._reported: tuple[str, Refusal | None] = "", None
        self._refusals: list[Refusal] = []
        self._tails: dict[str, str] = {}
        #: since when an ordinal's slot is known to be sick
        self._sick: dict[int, float] = {}
        self._builder: tuple[tuple[str, int], Callable[[NewSlot], Object]] | None = None

    @property
    def has_news(self) -> bool:
        """There is something that the next plan should know at once."""
        said = self._budget.trouble, self._leases.refusal
        return bool(self._refusals or self._tails) or said != self._reported

    def take_news(self) -> tuple[Sequence[Refusal], Mapping[str, str], str, Refusal | None]:
        """What was refused, and the ends of logs by Pod; each is handed out once. And for as long as it is so, what is
        wrong with the disruption budget, and why external devices can't be claimed."""
        refusals, tails, self._refusals, self._tails = tuple(self._refusals), self._tails, [], {}
        self._reported = self._budget.trouble, self._leases.refusal
        return refusals, tails, *self._reported

    @property
    def wait(self) -> float:
        """Seconds until there is something to do without any plan."""
        return self._budget.wait or self._leases.wait

    async def end(self) -> None:
        """Nothing is written any more afterwards."""
        await self._in_flight.end()

    async def carry_out(self, pool: Pool, planned: Plan) -> None:
        """Raises ApiError for what should be tried again, NotLeading; after everything else was done."""
        for uid, reason in planned.revoke.items():
            self._claims.revoke(uid, reason)
        self._claims.withhold(pool.uid, planned.withhold)
        self._keep_budget(pool, planned)
        self._probe_leases(pool)
        self._remove(pool, planned)
        self._make(pool, planned)
        # While there are more to create than one plan has, the next plan begins before the last of this one are there.
        try:
            await self._in_flight.end_pass(_WINDOW if len(planned.creates) == PER_PASS else 0)
        finally:
            self.record(Reference("EmulatorPool", pool.namespace, pool.name, pool.uid), planned.events)

    def record(self, about: Reference, events: Sequence[Event]) -> None:
        """No pass waits for them, and one that can't be written is lost."""
        call: Call = ("events", str(self._in_flight.turn))
        if events and call not in self._in_flight:
            self._in_flight.begin(call, self._record(about, events), background=True)

    async def _record(self, about: Reference, events: Sequence[Event]) -> None:
        for event in events:
            self._ask_leave()
            await record(self._client, about, event)

    def _keep_budget(self, pool: Pool, planned: Plan) -> None:
        slots = pool.spec.template is not None and bool(self._cache.slots.of(pool.uid))
        # A budget in trouble is checked again also when no slot is left: a person may have corrected it.
        needed = bool(planned.creates) or slots or bool(self._budget.trouble)
        if needed and not pool.deleting and not self._budget.wait and _BUDGET not in self._in_flight:
            self._in_flight.begin(_BUDGET, self._budget.keep(pool))

    def _probe_leases(self, pool: Pool) -> None:
        external = pool.spec.template is None and not pool.deleting
        if external and not self._leases.wait and _LEASES not in self._in_flight:
            self._in_flight.begin(_LEASES, self._leases.probe(pool))

    def _remove(self, pool: Pool, planned: Plan) -> None:
        began = time.monotonic()
        # A sick slot of a pool that shrinks gets no successor: a much later one is none.
        self._sick = {ordinal: since for ordinal, since in self._sick.items() if began - since < _SUCCESSOR_SECONDS}
        for removals, remove in ((planned.retain, self._retain), (planned.deletes, self._delete)):
            for removal in removals:
                if ("remove", removal.slot.uid) in self._in_flight:
                    continue
                if removal.sick:
                    self._sick[removal.slot.ordinal] = began
                self._in_flight.begin(("remove", removal.slot.uid), remove(pool, removal))

    def _make(self, pool: Pool, planned: Plan) -> None:
        if not planned.creates:
            return
        build, makers = self._pods(pool), room_makers(planned)
        # Those in flight count: whatever this plan calls its new slots, there are not more of them.
        left = len(planned.creates) - sum(call == "create" for call, _ in self._in_flight)
        for new in planned.creates:
            before = [task for uid in makers[new.name] if (task := self._in_flight.get(("remove", uid)))]
            if left <= 0 or ("create", new.name) in self._in_flight:
                continue
            left -= 1
            work = self._create_after(before, pool, build, new) if before else self._create(pool, build, new)
            self._in_flight.begin(("create", new.name), work)

    def _ask_leave(self) -> None:
        if not self._leads():
            raise NotLeading

    # --- creates ------------------------------------------------------------------------------------------------------

    def _pods(self, pool: Pool) -> Callable[[NewSlot], Object]:
        key = (pool.template, pool.generation)
        if self._builder is None or self._builder[0] != key:
            self._builder = key, slot_pods(pool)
        return self._builder[1]

    async def _create_after(
        self, removals: Sequence[asyncio.Task[bool]], pool: Pool, build: Callable[[NewSlot], Object], new: NewSlot
    ) -> None:
        """When the removals were carried out, unless the next plan has begun by then."""
        turn = self._in_flight.turn
        await asyncio.wait(removals)
        went = all(not task.cancelled() and task.exception() is None and task.result() for task in removals)
        if went and turn == self._in_flight.turn:
            await self._create(pool, build, new)

    async def _create(self, pool: Pool, build: Callable[[NewSlot], Object], new: NewSlot) -> None:
        if self._refusals:
            return
        self._ask_leave()
        try:
            made = await self._client.create(path("pods", pool.namespace), build(new), strict=True, bulk=True)
        except ApiError as error:
            if error.status == 409 or error.unclear:
                await self._adopt(pool, new.name, error)
            elif (refused := refusal(error.status, error.reason, error.message)) is not None:
                self._refusals.append(refused)
            else:
                raise
            return
        self._cache.observe_pod(made)  # its metadata: a new Pod has nothing more to observe
        if (since := self._sick.pop(new.ordinal, None)) is not None:
            self._telemetry.replaced(f"{pool.namespace}/{pool.name}", time.monotonic() - since)

    async def _adopt(self, pool: Pool, name: str, error: ApiError) -> None:
        """The Pod is there already, or may be."""
        try:
            found = await self._client.get(path("pods", pool.namespace, name))
        except ApiError as missing:
            if missing.status == 404 and error.status == 409:
                return  # it was there and is gone by now
            if missing.status == 404:
                raise error from missing
            raise
        if not belongs(found["metadata"], pool.uid):
            self._refusals.append(Refusal("NameTaken", f"the Pod {name} exists and is not this pool's: delete it"))
        elif self._cache.observe_pod(found) is None:
            self._refusals.append(Refusal("NameTaken", f"the Pod {name} lost the labels of a slot: delete it"))

    # --- removals: True when the slot is on its way out ---------------------------------------------------------------

    async def _delete(self, pool: Pool, removal: Removal) -> bool:
        slot = removal.slot
        if not self._claims.drain(slot.uid):
            return False
        await self._prepare(removal)
        exact = {"uid": slot.uid}
        if not slot.terminal and not removal.force:
            # As it was seen: a delete that is late, or sent by a leader of the past, hits no claim of the next one.
            exact["resourceVersion"] = slot.resource_version
        options: Object = {"preconditions": exact} | ({"gracePeriodSeconds": 0} if removal.force else {})
        try:
            last = await self._client.delete(path("pods", slot.namespace, slot.name), options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            if error.status == 409 and await self._still_there(slot):
                return False
            self._cache.slots.drop(slot.uid)
            return True
        log.info("slot %s goes: %s", slot.name, removal.reason, extra=_ref(pool))
        if last.get("kind") == "Pod" and "deletionTimestamp" in last["metadata"] and not removal.force:
            self._cache.observe_pod(last)
        else:
            self._cache.slots.drop(slot.uid)
        return True

    async def _still_there(self, slot: Slot) -> bool:
        """True: the Pod is no longer as it was seen, and the next plan decides about what it is now. False: another Pod
        has the name, or none."""
        try:
            found = await self._client.get(path("pods", slot.namespace, slot.name))
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        if found["metadata"]["uid"] != slot.uid:
            return False
        self._cache.observe_pod(found)
        return True

    async def _retain(self, pool: Pool, removal: Removal) -> bool:
        slot = removal.slot
        if not self._claims.drain(slot.uid):
            return False
        await self._prepare(removal)
        body = retain_patch(removal.reason)
        body["metadata"] = {**body["metadata"], "uid": slot.uid}
        try:
            self._cache.observe_pod(await self._client.patch(path("pods", slot.namespace, slot.name), body))
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            self._cache.slots.drop(slot.uid)
            return True
        return True

    async def _prepare(self, removal: Removal) -> None:
        self._ask_leave()
        if removal.tail:
            self._tails[removal.slot.name] = await self._tail(removal.slot)
            self._ask_leave()

    async def _tail(self, slot: Slot) -> str:
        """The end of the phone's log, or of that of what broke beside it."""
        where = path("pods", slot.namespace, slot.name, "log")
        container, lines, most = slot.broken or labels.CONTAINER, str(_LOG_LINES), str(_LOG_BYTES)
        try:
            said = await self._client.text(
                where, deadline=_LOG_SECONDS, container=container, tailLines=lines, limitBytes=most
            )
        except ApiError as error:  # no reason to keep a dead phone
            help_ = f"; bind ClusterRole tapforge-operator-logs in namespace {slot.namespace}" * (error.status == 403)
            said = f"(its log could not be read: {error.message}{help_})"
        return said[-_LOG_CHARACTERS:]


def _ref(pool: Pool) -> dict[str, Mapping[str, str]]:
    return ref("EmulatorPool", pool.namespace, pool.name, pool.uid)


# --- which removals make room for which creates -----------------------------------------------------------------------


def room_makers(planned: Plan) -> Mapping[str, frozenset[str]]:
    """UIDs of the slots that have to go before each create, by the new slot's name, so that there is never a slot more
    than may be.

    A removal may fail to be carried out: the slot was claimed since it was planned. A create waits for the removals of
    its own ordinal, and for one slot that goes; no two creates wait for the same one. What takes long delays nothing
    else.

    A pool that has too many slots is different: the first removals make room for nothing. There each create waits for
    all.
    """
    wanted = {new.ordinal for new in planned.creates}
    of_ordinal: defaultdict[int, set[str]] = defaultdict(set)
    #: ordinals whose slot stands until it is removed here, and slots that go without a successor
    standing: set[int] = set()
    others: list[str] = []
    every: set[str] = set()
    for removal in (*planned.retain, *planned.deletes):
        slot = removal.slot
        stands = not (slot.deleting or slot.retained)  # the others hold no place any more
        if slot.ordinal in wanted:
            of_ordinal[slot.ordinal].add(slot.uid)
            standing |= {slot.ordinal} if stands else set()
        elif stands:
            others.append(slot.uid)
        every |= {slot.uid} if stands else set()
    found: dict[str, frozenset[str]] = {}
    for new in planned.creates:
        makers = set(of_ordinal.get(new.ordinal, ()))
        if planned.too_many:
            makers |= every
        elif new.ordinal not in standing and others:
            makers.add(others.pop())
        found[new.name] = frozenset(makers)
    return found


# --- the disruption budget --------------------------------------------------------------------------------------------


class Budget:
    """That of one pool."""

    def __init__(self, client: Client, ask_leave: Callable[[], None]):
        """`ask_leave` is called before each write, and raises what ends everything."""
        self._client = client
        self._ask_leave = ask_leave
        self._next = -_BUDGET_SECONDS
        #: what is wrong with it, in words; "" when nothing is known to be
        self.trouble = ""

    @property
    def wait(self) -> float:
        """Until it should be read again."""
        return max(0.0, self._next - time.monotonic())

    async def keep(self, pool: Pool) -> None:
        """Looks whether it is there, and makes it."""
        self._next = time.monotonic() + _BUDGET_SECONDS
        wanted = disruption_budget(pool)
        name = wanted["metadata"]["name"]
        try:
            there = await self._find_or_make(path("poddisruptionbudgets", pool.namespace, group=_POLICY), name, wanted)
        except ApiError as error:
            self._next = time.monotonic() + _BUDGET_SOON
            about = ref("EmulatorPool", pool.namespace, pool.name, pool.uid)
            log.warning("pool %s/%s has no disruption budget yet: %s", pool.namespace, pool.name, error, extra=about)
            if not error.passing and error.status != 409:
                refused = refusal(error.status, error.reason, error.message)
                waits_for_label = refused is not None and refused.reason == "NamespaceNotEnabled"
                self._next = time.monotonic() + (LONGEST_NOT_ENABLED if waits_for_label else _BUDGET_SECONDS)
                why = (refused.message if refused is not None else error.message).rstrip(".")
                self.trouble = f"the PodDisruptionBudget {name} can't be made: {why}"
            return
        if _is_left_over(there, pool):
            self._next = time.monotonic() + _BUDGET_SOON
        else:
            self.trouble = _trouble(there, wanted, pool)

    async def _find_or_make(self, where: str, name: str, wanted: Object) -> Object:
        try:
            return await self._client.get(f"{where}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
        self._ask_leave()
        return await self._client.create(where, wanted)


def _is_left_over(there: Object, pool: Pool) -> bool:
    """It was made for a deleted pool of the same name."""
    owners = there["metadata"].get("ownerReferences") or ()
    return any((o.get("kind"), o.get("name")) == ("EmulatorPool", pool.name) and o["uid"] != pool.uid for o in owners)


def _trouble(there: Object, wanted: Object, pool: Pool) -> str:
    name, spec = wanted["metadata"]["name"], there.get("spec") or {}
    if not belongs(there["metadata"], pool.uid):
        return f"the PodDisruptionBudget {name} has another owner"
    if any(spec.get(field) != value for field, value in wanted["spec"].items()):
        return f"the PodDisruptionBudget {name} was changed by another client"
    return ""
