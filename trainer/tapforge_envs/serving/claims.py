"""Whose phone it is: admission of requests by the claim that they name, as `wire.py` says it.

- A request by another slot's claim, or by one that is older than the newest seen, is refused (`Refused`).
- A refused request changes nothing but the memory of the largest fence.

No I/O and no clock here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tapforge_envs.wire import NO_FENCE, STALE_FENCE, WRONG_SLOT, Fence

#: slots that a phone which doesn't know its own keeps fences of; the one that was not heard of for longest goes first
_MAX_SLOTS = 256


class Refused(Exception):
    """The call can't be served: an HTTP status, words that name the value and the remedy, and where a program has to
    tell it from others one word for it."""

    def __init__(self, status: int, message: str, reason: str = ""):
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass
class Claims:
    #: UID of the slot that the phone is; "" where it is not known
    uid: str = ""
    #: the largest fence seen, by the slot it was a claim of
    _fences: dict[str, int] = field(default_factory=dict)

    @property
    def fence(self) -> int | None:
        """The largest one that was seen for its own slot."""
        return self._fences.get(self.uid)

    def admit(self, fence: Fence | None) -> None:
        """Refuses a request without a claim of this phone, or with an old one. `fence`: of its claim, or None."""
        if fence is None:
            if self.uid and self._fences:
                raise Refused(
                    409, "this phone has been claimed: claim it, and send the claim's slot and fence", NO_FENCE
                )
            return
        if self.uid and fence.slot != self.uid:
            raise Refused(409, f"this phone is slot {self.uid!r}, the claim is of {fence.slot!r}", WRONG_SLOT)
        newest = self._fences.pop(fence.slot, 0)
        self._fences[fence.slot] = max(newest, fence.number)
        if len(self._fences) > _MAX_SLOTS:
            del self._fences[next(iter(self._fences))]
        if fence.number < newest:
            raise Refused(
                409, f"the claim with fence {fence.number} is over: this phone has seen fence {newest}", STALE_FENCE
            )
