"""External devices that several pools name, in one namespace or in several: whoever has one through one pool keeps it
from all others, until it has rested there. Pure; keyed by the slots' UIDs, of which each pool has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

_PORTS: Final = {"http": 80, "https": 443}


def device_of(url: str) -> str:
    """Equal for URLs of the same server: capital letters of the host, the scheme's own port and a last slash make no
    difference."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:  # a spec of another release may hold what is no URL: it is only like itself
        return url
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.hostname or ''}:{port}{parts.path.rstrip('/')}{query}"


class Devices:
    def __init__(self) -> None:
        #: slots by device, and whether somebody has the device through them
        self._slots: dict[str, dict[str, bool]] = {}

    def note(self, device: str, uid: str, taken: bool) -> Sequence[str]:
        """The device is taken through that slot, or not. Returns the other slots that this is news for."""
        slots = self._slots.setdefault(device, {})
        if slots.get(uid, False) is taken:
            slots[uid] = taken
            return ()
        slots[uid] = taken
        return [other for other in slots if other != uid]

    def slots(self, device: str) -> Sequence[str]:
        return list(self._slots.get(device, ()))

    def taken_elsewhere(self, device: str, uid: str) -> bool:
        slots = self._slots.get(device, {})
        return any(taken for other, taken in slots.items() if other != uid)

    def drop(self, device: str, uid: str) -> None:
        """Only of a slot through which nobody has it."""
        slots = self._slots[device]
        del slots[uid]
        if not slots:
            del self._slots[device]
