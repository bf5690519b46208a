"""The claim of a slot as an annotation that only the operator can have written, and what proves that a claim is yours.

1. A mark is JSON with a signature over its fields and the slot's UID: copied to another slot it is worth nothing.
2. A claim's id is `<slot uid>.<fence>`; its secret is derived from the id, so it is stored nowhere and survives a
   restart of the operator.
3. Secrets and signatures are compared in constant time.
4. A mark that was signed with another key (the operator's Secret was replaced) is told apart from a forged one: the
   slot may have a holder that can no longer be proved.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from tapforge_api.claims import Acquire

_VERSION: Final = 1
#: no mark of ours comes near; a longer one is not even parsed
_MAX_TEXT: Final = 8192
_MAX_FENCE: Final = 2**63 - 1
#: annotations that are remembered with what they prove
_READINGS: Final = 8192
_HOLD: Final = float(Acquire.model_fields["hold_seconds"].default)


@dataclass(frozen=True, slots=True)
class Mark:
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
class Reading:
    """What a claim annotation was found to be. Neither: there is none, or it is forged and to be ignored."""

    mark: Mark | None = None
    #: signed with a key that is not (or no longer) ours
    foreign: bool = False


_NONE: Final = Reading()


class Keys:
    """Everything that is derived from the operator's secret key."""

    def __init__(self, key: bytes):
        if len(key) < 32:
            raise ValueError(f"the broker's key has {len(key)} bytes, it needs at least 32; delete it to get a new one")
        self._signing = hmac.digest(key, b"tapforge.dev claim mark", hashlib.sha256)
        self._secrets = hmac.digest(key, b"tapforge.dev claim secret", hashlib.sha256)
        #: a slot is seen many times with the same claim
        self._readings = lru_cache(maxsize=_READINGS)(self._read)
        self._name = hmac.digest(key, b"tapforge.dev key name", hashlib.sha256).hex()[:12]

    def write(self, mark: Mark) -> str:
        """The annotation's text."""
        fields = {
            "v": _VERSION,
            "key": self._name,
            "fence": mark.fence,
            "holder": mark.holder,
            "run": mark.run,
            "request": mark.request,
            "priority": mark.priority,
            "ttl": mark.ttl,
            "hold": mark.hold,
            "pod": mark.pod,
            "session": mark.session,
            "number": mark.number,
        }
        return _canonical({**fields, "signature": self._sign(fields, mark.uid)})

    def read(self, text: str, uid: str) -> Reading:
        """What the annotation `text` on the slot `uid` proves. Fields of later versions are passed over."""
        return self._readings(text, uid) if text and len(text) <= _MAX_TEXT else _NONE

    def _read(self, text: str, uid: str) -> Reading:
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            return _NONE
        if not isinstance(fields, dict) or not isinstance(signature := fields.pop("signature", None), str):
            return _NONE
        if fields.get("key") != self._name:
            return Reading(foreign=isinstance(fields.get("key"), str))
        if not _same(self._sign(fields, uid), signature):
            return _NONE
        return Reading(_mark(fields, uid))

    def secret(self, claim: str) -> str:
        """What renews and releases the claim with this id."""
        digest = hmac.digest(self._secrets, claim.encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")

    def proved(self, claim: str, secret: str) -> bool:
        """Whether it is the secret of the claim with that id, whatever became of the claim."""
        return proves(self.secret(claim), secret)

    def _sign(self, fields: dict[str, Any], uid: str) -> str:
        return hmac.digest(self._signing, f"{uid}\n{_canonical(fields)}".encode(), hashlib.sha256).hex()


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(), b.encode("utf-8", "surrogatepass"))


def proves(secret: str, given: str) -> bool:
    """Whether the secret that was given is the claim's."""
    return _same(secret, given)


def claim_parts(claim: str) -> tuple[str, int] | None:
    """Slot UID and fence of a claim's id; None for what is no id of ours."""
    uid, _, fence = claim.rpartition(".")
    if not uid or not fence.isascii() or not fence.isdigit() or len(fence) > 19 or int(fence) > _MAX_FENCE:
        return None
    return uid, int(fence)


def _canonical(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _mark(fields: dict[str, Any], uid: str) -> Mark | None:
    """None for a mark of ours in a form that this version does not know."""
    fence, priority, ttl = fields.get("fence"), fields.get("priority"), fields.get("ttl")
    texts = [fields.get(name) for name in ("holder", "run", "request")]
    if not (isinstance(fence, int) and isinstance(priority, int) and isinstance(ttl, int | float)):
        return None
    if not (0 <= fence <= _MAX_FENCE and math.isfinite(ttl) and ttl > 0 and all(isinstance(t, str) for t in texts)):
        return None
    # An operator of before holds knew none of the others.
    hold, number = fields.get("hold", _HOLD), fields.get("number", 0)
    more = [fields.get(name, "") for name in ("pod", "session")]
    if not (isinstance(hold, int | float) and math.isfinite(hold) and isinstance(number, int)):
        return None
    if not all(isinstance(t, str) for t in more):
        return None
    holder, run, request, pod, session = map(str, (*texts, *more))
    return Mark(uid, fence, holder, run, request, priority, float(ttl), float(hold), pod, session, number)
