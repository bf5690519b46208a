"""The claim of a slot as an annotation that only the operator can have written, and what proves that a claim is yours.

1. A record is JSON with a signature over its fields and the slot's UID: copied to another slot it is worth nothing.
2. A claim's id is `<slot uid>.<fence>`; its secret is derived from the id, so it is stored nowhere and survives a
   restart of the operator.
3. Secrets and signatures are compared in constant time.
4. Keys are a list: the first one signs, each of them verifies. So a key is replaced without the loss of a claim.
5. A record that was signed with a key that is not in the list (the operator's Secret was lost) is distinguished from a
   forged one: the slot may have a holder that can't be proved. What it says is handed on as `unproved`.

One patch writes a claim on a Pod or takes it off. Each comes in two forms, and either is carried out on what was seen
or not at all:

- A JSON patch that tests the Pod's UID, its fence and the word of the leader that confirmed its claim, and so what
  claims rest on: every claim writes a larger fence, and only one that is there can be taken off. Whatever else changes
  meanwhile, a condition in the Pod's status above all, does not conflict: a storm of changing Pods costs a claim no
  second try. One that does not fit is answered with 422.
- A merge patch with the resourceVersion, for Pods whose labels and annotations are not as the operator wrote them. One
  that does not fit is answered with 409.

Each patch also drops the Pod's `managedFields`, which nothing reads: without them the API server carries out a patch of
a Pod in less than half of its time, and the Pod is smaller by a third for every client that watches it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeGuard

from tapforge_api.claims import Acquire
from tapforge_operator import labels as wellknown
from tapforge_operator.kube.types import Slot, observe

_VERSION: Final = 1
#: no record of ours comes near; a longer one is not even parsed
_MAX_TEXT: Final = 8192
_MAX_FENCE: Final = 2**63 - 1
#: of any number in a record; JSON holds larger ones, which are errors to floats
_MOST: Final = 2**32
#: annotations that are remembered with what they prove
_READINGS: Final = 8192
_HOLD: Final = float(Acquire.model_fields["hold_seconds"].default)


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """What is written on a claimed slot: enough to rebuild its claim after a crash."""

    uid: str
    fence: int
    holder: str
    #: name of the holder's TrainingRun, "" for a holder that is none
    run: str
    request: str
    priority: int
    #: seconds without a renewal after which its holder is looked at
    ttl: float
    #: seconds without a renewal after which it is over, if that is longer
    hold: float = 0.0
    #: the holder's Pod as namespace/name/uid; "" for a holder that is in none
    pod: str = ""
    #: the holder's process, and which of its requests the claim answers; "" for one that doesn't say
    session: str = ""
    number: int = 0

    @property
    def id(self) -> str:
        return f"{self.uid}.{self.fence}"


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot as the API server had it at `version`: read off its Pod, or off the Lease of an external URL."""

    uid: str
    #: uid of its EmulatorPool
    pool: str
    namespace: str
    #: of the Pod or the Lease
    name: str
    #: resourceVersion; "" for a Lease that is not there
    version: str
    node: str = ""
    #: IP of the Pod, or the whole URL
    address: str = ""
    #: what several URLs may name (external URLs only): `devices.device_of`
    device: str = ""
    #: it can serve
    ready: bool = False
    #: why it never serves again; "" while it may
    ended: str = ""
    #: it has a node and was never ready, so it may soon be
    booting: bool = False
    #: an external URL: it outlives its claims
    lasting: bool = False
    fence: int = 0
    #: episodes run under claims that were given back
    episodes: int = 0
    #: fence of the claim that a later leader than its own reported, and wrote so
    confirmed: str = ""
    record: ClaimRecord | None = None
    #: what its record says, when that is signed with a key that is not ours: any client may have written it
    unproved: ClaimRecord | None = None
    #: times that it was claimed (external URLs only)
    transitions: int = 0
    #: claims in a row that ended badly (external URLs only)
    failures: int = 0
    #: seconds that it rests after its last claim (external URLs only)
    rest: float = 0.0

    @property
    def served(self) -> bool:
        """It was ready once, so it may have been granted."""
        return self.ready or (bool(self.node) and not self.booting)

    @property
    def is_confirmed(self) -> bool:
        """What the leader of its claim sent before it died is not carried out any more."""
        return self.record is not None and self.confirmed == str(self.record.fence)

    @property
    def order(self) -> int:
        """Versions of an object grow."""
        return int(self.version) if self.version.isdigit() else 0


@dataclass(frozen=True, slots=True)
class Reading:
    """What a claim annotation was found to be. Neither: there is none, or it is forged and to be ignored."""

    record: ClaimRecord | None = None
    #: signed with a key that is not ours, or in a form that this release doesn't know: what can be read of it
    unproved: ClaimRecord | None = None


_NONE: Final = Reading()
MIN_KEY_BYTES: Final = 32


def key_name(key: bytes) -> str:
    """Is part of each record that the key signs; says nothing about the key."""
    return hmac.digest(key, b"tapforge.dev key name", hashlib.sha256).hex()[:12]


class _Key:
    def __init__(self, key: bytes):
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"the broker's key has {len(key)} bytes, it needs at least {MIN_KEY_BYTES}")
        self.name = key_name(key)
        self._signing = hmac.digest(key, b"tapforge.dev claim mark", hashlib.sha256)
        self._secrets = hmac.digest(key, b"tapforge.dev claim secret", hashlib.sha256)

    def secret(self, claim: str) -> str:
        return base64.urlsafe_b64encode(hmac.digest(self._secrets, claim.encode(), hashlib.sha256)).decode().rstrip("=")

    def sign(self, fields: dict[str, Any], uid: str) -> str:
        return hmac.digest(self._signing, f"{uid}\n{_canonical(fields)}".encode(), hashlib.sha256).hex()


class Keys:
    """Everything that is derived from the operator's secret keys."""

    def __init__(self, first: bytes, *others: bytes):
        self.replace((first, *others))

    def replace(self, keys: Sequence[bytes]) -> None:
        """Signs with the first of these from now on, and verifies with all of them."""
        first, *others = (_Key(key) for key in dict.fromkeys(keys))
        self._first, self._all = first, (first, *others)
        self._by_name = {key.name: key for key in self._all}
        #: a slot is seen many times with the same claim
        self._readings = lru_cache(maxsize=_READINGS)(self._read)

    def write(self, record: ClaimRecord) -> str:
        """The annotation's text."""
        fields = {
            "v": _VERSION,
            "key": self._first.name,
            "fence": record.fence,
            "holder": record.holder,
            "run": record.run,
            "request": record.request,
            "priority": record.priority,
            "ttl": record.ttl,
            "hold": record.hold,
            "pod": record.pod,
            "session": record.session,
            "number": record.number,
        }
        return _canonical({**fields, "signature": self._first.sign(fields, record.uid)})

    def read(self, text: str, uid: str) -> Reading:
        """What the annotation `text` on the slot `uid` proves. Fields of later versions are passed over."""
        return self._readings(text, uid) if text and len(text) <= _MAX_TEXT else _NONE

    def _read(self, text: str, uid: str) -> Reading:
        try:
            return self._understood(json.loads(text), uid)
        except (ValueError, RecursionError):  # of no JSON, of what JSON can't say, of nests too deep
            return _NONE

    def _understood(self, fields: Any, uid: str) -> Reading:
        json.dumps(fields, ensure_ascii=False).encode()  # half a character is an error to any program that passes it on
        if not isinstance(fields, dict) or not isinstance(signature := fields.pop("signature", None), str):
            return _NONE
        if not isinstance(name := fields.get("key"), str):
            return _NONE
        if (key := self._by_name.get(name)) is None:
            return Reading(unproved=_record(fields, uid) or _guess(fields, uid))
        if not _same(key.sign(fields, uid), signature):
            return _NONE
        # One that is ours and can't be read is a claim all the same, so the slot is not free.
        record = _record(fields, uid)
        return Reading(record) if record is not None else Reading(unproved=_guess(fields, uid))

    def secret(self, claim: str) -> str:
        """What renews and releases the claim with this id."""
        return self._first.secret(claim)

    def proved(self, claim: str, secret: str) -> bool:
        """Whether it is the secret of the claim with that id, whatever became of the claim."""
        return any(proves(key.secret(claim), secret) for key in self._all)


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(), b.encode("utf-8", "surrogatepass"))


def proves(secret: str, given: str) -> bool:
    """Whether the secret that was given is the claim's."""
    return _same(secret, given)


def claim_parts(claim: str) -> tuple[str, int] | None:
    """Slot UID and fence of a claim's id; None for an id that is not ours."""
    uid, _, fence = claim.rpartition(".")
    if not uid or not fence.isascii() or not fence.isdigit() or len(fence) > 19 or int(fence) > _MAX_FENCE:
        return None
    return uid, int(fence)


def _canonical(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _record(fields: dict[str, Any], uid: str) -> ClaimRecord | None:
    """None for a record of ours in a form that this version does not know."""
    # An operator of before holds knew none of the last ones.
    texts = [fields.get(name) for name in ("holder", "run", "request")]
    fence, priority, ttl = fields.get("fence"), fields.get("priority"), fields.get("ttl")
    hold, number = fields.get("hold", _HOLD), fields.get("number", 0)
    more = [fields.get(name, "") for name in ("pod", "session")]
    if not (_is_fence(fence) and _is_whole(priority) and _is_whole(number) and _is_seconds(ttl) and _is_seconds(hold)):
        return None
    if ttl == 0 or not all(isinstance(t, str) for t in (*texts, *more)):
        return None
    holder, run, request, pod, session = map(str, (*texts, *more))
    return ClaimRecord(uid, fence, holder, run, request, priority, float(ttl), float(hold), pod, session, number)


def _guess(fields: dict[str, Any], uid: str) -> ClaimRecord:
    """Of a record that can't be read: it counts as a claim for as long as a claim can go unrenewed."""
    fence, holder = fields.get("fence"), fields.get("holder")
    known = fence if _is_fence(fence) else 0
    return ClaimRecord(uid, known, holder if isinstance(holder, str) else "", "", "", 0, _HOLD, _HOLD)


def _is_fence(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_FENCE


def _is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int and -_MOST <= value <= _MOST


def _is_seconds(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST  # which NaN is not


# --- a claim on a Pod -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clear:
    """Take the record off the slot and write these counts; then say `cleared`."""

    view: SlotView
    record: ClaimRecord
    episodes: int
    failures: int = 0
    #: seconds that the slot rests afterwards, should another leader read it
    rest: float = 0.0
    #: until `begin_clear` a grant may replace the record, which spares this write
    replaceable: bool = False


Object = dict[str, Any]
#: labels or annotations; None takes one away
Texts = Mapping[str, str | None]

#: one empty entry is the API server's word for "forget them"; from then on it keeps none of this Pod
_NO_MANAGED_FIELDS: Final[list[Object]] = [{}]


def view_of(slot: Slot, keys: Keys) -> SlotView:
    reading = keys.read(slot.claim, slot.uid)
    return SlotView(
        uid=slot.uid,
        pool=slot.pool_uid,
        namespace=slot.namespace,
        name=slot.name,
        version=slot.resource_version,
        node=slot.node,
        address=slot.ip,
        ready=slot.ready and bool(slot.ip),
        ended=_end(slot),
        booting=bool(slot.node) and not slot.ever_ready,
        fence=slot.fence,
        episodes=slot.episodes,
        confirmed=slot.confirmed,
        record=reading.record,
        unproved=reading.unproved,
    )


def _end(slot: Slot) -> str:
    if slot.terminal:
        return f"its Pod ended: {slot.end or slot.phase}"
    if slot.deleting:
        return "its Pod is being deleted"
    return "its Pod failed and is kept for a look at its log" if slot.retained else ""


def read(pod: Mapping[str, Any], keys: Keys) -> SlotView | None:
    """None for a Pod that is not a slot (any more)."""
    slot = observe(pod)
    return view_of(slot, keys) if slot else None


def claim_patch(view: SlotView, record: ClaimRecord, keys: Keys, replaces: Clear | None = None) -> list[Object]:
    return [*_tests(view, view.fence), *_changes(*_claimed(record, keys, replaces))]


def clear_patch(view: SlotView, record: ClaimRecord, episodes: int) -> list[Object]:
    return [*_tests(view, record.fence), *_changes(*_cleared(bool(record.run), episodes))]


def claim_by_version(view: SlotView, record: ClaimRecord, keys: Keys, replaces: Clear | None = None) -> Object:
    labels, annotations = _claimed(record, keys, replaces)
    return _merge(view, {wellknown.RUN: None, **labels}, annotations)


def clear_by_version(view: SlotView, episodes: int) -> Object:
    return _merge(view, *_cleared(True, episodes))


def _claimed(record: ClaimRecord, keys: Keys, replaces: Clear | None) -> tuple[Texts, Texts]:
    """Labels and annotations; also what is left to write of the claim that this one replaces."""
    annotations: dict[str, str | None] = {
        wellknown.CLAIM: keys.write(record),
        wellknown.FENCE: str(record.fence),
        wellknown.SAFE_TO_EVICT: "false",
        wellknown.DO_NOT_DISRUPT: "true",
    }
    labels: dict[str, str | None] = {wellknown.CLAIMED: "true"}
    if replaces is not None:
        annotations[wellknown.EPISODES] = str(replaces.episodes)
    if record.run:
        labels[wellknown.RUN] = record.run
    elif replaces is not None and replaces.record.run:
        labels[wellknown.RUN] = None
    return labels, annotations


def _cleared(run: bool, episodes: int) -> tuple[Texts, Texts]:
    annotations = {
        wellknown.CLAIM: None,
        wellknown.EPISODES: str(episodes),
        wellknown.SAFE_TO_EVICT: "true",
        wellknown.DO_NOT_DISRUPT: None,
    }
    return {wellknown.CLAIMED: None, **({wellknown.RUN: None} if run else {})}, annotations


def confirm_patch(view: SlotView) -> Object:
    return _merge(view, {}, {wellknown.CONFIRMED: str(view.fence)})


def _tests(view: SlotView, fence: int) -> list[Object]:
    """Without a value the test is that there is none."""
    return [
        {"op": "test", "path": "/metadata/uid", "value": view.uid},
        {"op": "test", "path": _place("annotations", wellknown.FENCE), "value": str(fence) if fence else None},
        {"op": "test", "path": _place("annotations", wellknown.CONFIRMED), "value": view.confirmed or None},
    ]


def _changes(labels: Texts, annotations: Texts) -> list[Object]:
    changes: list[Object] = [{"op": "add", "path": "/metadata/managedFields", "value": _NO_MANAGED_FIELDS}]
    for kind, texts in (("labels", labels), ("annotations", annotations)):
        for name, text in texts.items():
            gone = {"op": "remove", "path": _place(kind, name)}
            changes.append(gone if text is None else {"op": "add", "path": _place(kind, name), "value": text})
    return changes


def _place(kind: str, name: str) -> str:
    return f"/metadata/{kind}/{name.replace('~', '~0').replace('/', '~1')}"


def _merge(view: SlotView, labels: Texts, annotations: Texts) -> Object:
    return {
        "metadata": {
            "uid": view.uid,
            "resourceVersion": view.version,
            "managedFields": _NO_MANAGED_FIELDS,
            "labels": dict(labels),
            "annotations": dict(annotations),
        }
    }


def delete_options(view: SlotView) -> Object:
    exact = {"uid": view.uid, "resourceVersion": view.version}
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": exact}
