"""External devices: what is one and the same, whether it is in use, and which namespace may name it. Pure.

1. A device is known by the address that callers receive (`told`), in its normal form: however a pool spells it, it has
   one holder. Names are not resolved: a device that one pool names by its name and another one by its address counts as
   two. A server is one device, but for the phones that a MobileWorld server distinguishes by `?device=`.
2. Without rules every namespace may name any device; with them, only what is listed for it or for `*`.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

ADB: Final = "adb"
_MOBILEWORLD: Final = "mobileworld"
#: the namespace of rules that hold for all
EVERYBODY: Final = "*"
_PORTS: Final = {"http": 80, "https": 443}
#: `adb connect` without a port takes it
_ADB_PORT: Final = 5555
#: what may be an IPv4 address as a resolver reads it: 10.0.5, 0x0a000005, 167772165
_NUMBERS: Final = re.compile(r"[0-9a-fxA-FX.]+")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def told(url: str, protocol: str) -> str:
    """The address of a device for its holder: what its pool lists; with adb HOST:PORT, also where that is a URL."""
    _, found, rest = url.partition("://")
    if protocol != ADB:
        return url
    where = rest.partition("/")[0].partition("?")[0].rpartition("@")[2] if found else url
    return where if where.rpartition("]")[2].rpartition(":")[1] else f"{where}:{_ADB_PORT}"


def device_of(url: str, protocol: str = "") -> str:
    """Equal for addresses of the same server: how its host and its path are spelt, the scheme's own port, a query that
    names no phone and, with adb, the scheme make no difference."""
    address = told(url, protocol)
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        port = parts.port or _PORTS.get(parts.scheme, 0)
        host = _normal(parts.hostname or "")
    except ValueError:  # a spec of another release may hold something other than a URL: it is only like itself
        return url
    if protocol == ADB:
        return f"{ADB}://{host}:{port}"
    path = posixpath.normpath("/" + unquote(parts.path).lstrip("/")).rstrip("/")
    phone = (
        dict(reversed(parse_qsl(parts.query, keep_blank_values=True))).get("device", "")
        if protocol == _MOBILEWORLD
        else ""
    )
    return f"{parts.scheme}://{host}:{port}{path}" + (f"?device={phone}" if phone else "")


def _normal(host: str) -> str:
    address = _address(host)
    return host.lower().rstrip(".") if address is None else str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _numbers(host)
    return getattr(address, "ipv4_mapped", None) or address


def _numbers(host: str) -> ipaddress.IPv4Address | None:
    """An address in one of the forms that only resolvers know."""
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host)) if _NUMBERS.fullmatch(host) else None
    except OSError:
        return None


class Devices:
    """Slots by device, and whether the device is in use through them."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[str, bool]] = {}

    def note(self, device: str, uid: str, taken: bool) -> Sequence[str]:
        """The device is taken through that slot, or not. Returns the other slots that this changes."""
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
        """Only of a slot through which it is not in use."""
        slots = self._slots[device]
        del slots[uid]
        if not slots:
            del self._slots[device]


# --- which namespace may name which device ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceRules:
    """Networks and names of hosts by namespace, or by `*`. A name may begin with `*.`: every name below it."""

    networks: Mapping[str, Sequence[Network]] = field(default_factory=dict)
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.networks or self.names)

    def allow(self, namespace: str, url: str, protocol: str) -> bool:
        """A host that is an address is looked for in the networks, one that is a name among the names."""
        if not self:
            return True
        address = told(url, protocol)
        try:
            host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
        except ValueError:
            return False
        number = _address(host)
        if number is not None:
            return any(number in network for who in (namespace, EVERYBODY) for network in self.networks.get(who, ()))
        name = _normal(host)
        return any(_matches(name, pattern) for who in (namespace, EVERYBODY) for pattern in self.names.get(who, ()))


def _matches(name: str, pattern: str) -> bool:
    below = pattern.removeprefix("*")
    return name == pattern if below == pattern else name.endswith(below) and len(name) > len(below)
