"""Phones that are run elsewhere: a list of addresses, or a file with one per line.

In a file `#` begins a comment; a missing scheme means `http://`. Addresses of protocol adb are serials, HOST:PORT, or
`auto` for every device that the adb server here has at the start. With protocol mobileworld `?device=SERIAL` names one
of the phones behind a server; with osworld and androidlab `?workers=NUMBER` is a manager (`managed.py`), and a line may
hold several with commas. Every problem of the list is an error that names the line: no valid address, the same phone
twice (also under two names: of servers equal instance and path, of phones over adb equal instance). Phones that are
dead at the start are named and nursed like any sick slot; when all are dead the start fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from yarl import URL

from tapforge_api.pool import Protocol

from ..clients.adb.device import AUTO, is_address
from ..clients.adb.wire import AdbError, AdbServer, server_address
from ..clients.http import Deadlines
from ..clients.phones import PhoneAddress, PhoneOptions
from ..protocol import EnvironmentFault
from .leasing import LeasedSlots
from .source import HealthProbe, SlotError
from .table import Backoff

log = logging.getLogger(__name__)

#: servers asked for their health at the same time
PROBES_AT_ONCE = 64
_EMULATOR: Final = re.compile(r"emulator-([0-9]{4,5})", re.ASCII)
#: of one manager, which refuses more
_MAX_WORKERS: Final = 32


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    #: where it was written, for messages: "phones.txt:3"
    origin: str


def parse_urls(lines: Sequence[str], origin: str, protocol: Protocol = "tapforge") -> list[Address]:
    """Pure: the addresses in `lines`; `origin` is the name of the file or field."""
    found: dict[str, Address] = {}
    for number, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        here = f"{origin}:{number}"
        for url in _addresses(text, here, protocol):
            if earlier := found.get(_one_name(url)):
                raise SlotError(f"{earlier.origin} and {here} both name {url}: a phone can serve one episode at a time")
            found[_one_name(url)] = Address(url, here)
    if not found and protocol == "adb":
        raise SlotError(f"{origin} names no phone: write one serial or HOST:PORT per line, or auto")
    if not found:
        raise SlotError(f"{origin} names no server: write one URL per line, such as http://10.0.0.7:8000")
    if protocol == "mobileworld":
        _refuse_nameless(list(found.values()))
    return list(found.values())


def _refuse_nameless(addresses: Sequence[Address]) -> None:
    """A server that is listed for several phones: each has to be named, or one of them could be any of the others."""
    first: dict[URL, Address] = {}
    for address in addresses:
        url = URL(address.url)
        other = first.setdefault(url.with_query(None), address)
        if other is not address and not all(URL(a.url).query.get("device") for a in (other, address)):
            raise SlotError(
                f"{other.origin} ({other.url}) and {address.origin} ({address.url}) are phones of one server: "
                "name the device of each, ?device=SERIAL"
            )


def _addresses(text: str, here: str, protocol: Protocol) -> list[str]:
    if protocol == "adb":
        return [_device(text, here)]
    if protocol in ("osworld", "androidlab"):
        return [address for one in text.split(",") for address in _workers(one.strip(), here, protocol)]
    return [_normal(text, here, protocol)]


def _workers(text: str, here: str, protocol: Protocol) -> list[str]:
    """A manager's workers, by number; a worker that was made elsewhere, as it is."""
    base, mark, number = text.partition("?workers=")
    if not mark:
        return [_normal(text, here, protocol)]
    if not (number.isascii() and number.isdecimal() and len(number) <= 2 and 1 <= int(number) <= _MAX_WORKERS):
        raise SlotError(f"{here}: {text!r}: ?workers= is followed by a number from 1 to {_MAX_WORKERS}")
    return [f"{_normal(base, here, protocol)}#{n}" for n in range(1, int(number) + 1)]


def read_urls(path: Path, protocol: Protocol = "tapforge") -> list[Address]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SlotError(f"the list of phones {path} can't be read: {error}") from error
    return parse_urls(text.splitlines(), str(path), protocol)


def _normal(text: str, here: str, protocol: Protocol) -> str:
    full = text if "://" in text else f"http://{text}"
    try:
        url = URL(full)
        port = url.port
    except ValueError as error:
        raise SlotError(f"{here}: {text!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or port is None or any(c.isspace() for c in text):
        raise SlotError(f"{here}: {text!r} is not an http(s) URL such as http://10.0.0.7:8000")
    device = url.query.get("device", "") if protocol == "mobileworld" and list(url.query) == ["device"] else ""
    if url.fragment or (url.query_string and not device) or text.endswith("?"):
        may = "; with protocol mobileworld ?device=SERIAL names the phone" if protocol == "mobileworld" else ""
        raise SlotError(f"{here}: {text!r}: a phone's URL ends with its path, without '?' or '#'{may}")
    base = str(url.with_query(None).with_path(url.path.rstrip("/") or "/")).rstrip("/")
    return f"{base}?{url.raw_query_string}" if device else base


def _device(text: str, here: str) -> str:
    if text != AUTO and not is_address(text):
        raise SlotError(f"{here}: {text!r} is neither a serial (`adb devices` lists them) nor HOST:PORT nor auto")
    return text


def _one_name(address: str) -> str:
    """adb gives an emulator on this machine a serial by the port of its console; its adbd listens at the next one."""
    if match := _EMULATOR.fullmatch(address):
        return f"127.0.0.1:{int(match[1]) + 1}"
    return address.replace("localhost:", "127.0.0.1:", 1) if address.startswith("localhost:") else address


class UrlSlots(LeasedSlots):
    def __init__(
        self,
        addresses: Sequence[Address],
        deadlines: Deadlines | None = None,
        backoff: Backoff | None = None,
        health: HealthProbe | None = None,
        protocol: Protocol = "tapforge",
        options: PhoneOptions | None = None,
    ) -> None:
        super().__init__([a.url for a in addresses if a.url != AUTO], backoff, health)
        self._addresses = {a.url: a for a in addresses if a.url != AUTO}
        self._auto = next((a for a in addresses if a.url == AUTO), None)
        self._deadlines = deadlines or Deadlines()
        self._protocol: Protocol = protocol
        self._options = options or PhoneOptions()
        #: instance and place of phones that answered -> slot
        self._known: dict[tuple[str, str], str] = {}
        self._started = False

    def address(self, slot: str) -> PhoneAddress:
        return PhoneAddress(slot, slot, self._deadlines, protocol=self._protocol, options=self._options)

    async def probe(self, slot: str) -> str:
        """Of two names of one phone the second one stays sick, also when both were dead at the start."""
        instance = await super().probe(slot)
        if instance and self._started:
            twin = self._known.setdefault(self._place(slot, instance), slot)
            if twin != slot:
                raise EnvironmentFault(f"{slot}: is the same phone as {twin} ({instance}): list it once")
        return instance

    def _place(self, slot: str, instance: str) -> tuple[str, str]:
        """Equal for one phone: of URLs with the path, because a server may have many."""
        return instance, "" if self._protocol == "adb" else URL(slot).path

    async def start(self) -> None:
        """Asks every phone for its health once. Raises SlotError when none answers or one is listed twice."""
        if self._auto is not None:
            await self._find_devices(self._auto)
        gate = asyncio.Semaphore(PROBES_AT_ONCE)

        async def ask(slot: str) -> str | EnvironmentFault:
            async with gate:
                try:
                    return await self.probe(slot)
                except EnvironmentFault as fault:
                    return fault

        answers = dict(zip(self._addresses, await asyncio.gather(*map(ask, self._addresses)), strict=True))
        dead = {slot: a for slot, a in answers.items() if isinstance(a, EnvironmentFault)}
        try:
            if len(dead) == len(answers):
                listed = "".join(f"\n  {self._addresses[s].origin}: {fault}" for s, fault in dead.items())
                raise SlotError(f"none of the {len(answers)} phones answers:{listed}")
            self._refuse_twins({s: a for s, a in answers.items() if isinstance(a, str)})
        except SlotError:
            await self.close()
            raise
        for slot, fault in dead.items():
            log.warning("%s: %s; it is asked again with growing pauses", self._addresses[slot].origin, fault)
            self._mark_dead(slot, str(fault))

    async def _find_devices(self, auto: Address) -> None:
        """Adds every device that is attached and can be used. Raises SlotError when there is none at all."""
        try:
            async with asyncio.timeout(self._deadlines.health):
                devices = await AdbServer(server_address(os.environ)).devices()
        except TimeoutError as error:
            raise SlotError(f"{auto.origin}: auto: no answer from the adb server") from error
        except (AdbError, ValueError) as error:
            raise SlotError(f"{auto.origin}: auto: {error}") from error
        known = {_one_name(url) for url in self._addresses}
        for device in devices:
            if device.state != "device":
                log.warning("%s: auto: %s is left out: it is %s", auto.origin, device.serial, device.state)
            elif is_address(device.serial) and _one_name(device.serial) not in known:
                known.add(_one_name(device.serial))
                self._addresses[device.serial] = Address(device.serial, auto.origin)
                self._table.add(device.serial)
        if not self._addresses:
            listed = "".join(f"; {d.serial} is {d.state}" for d in devices) or ": `adb devices` lists none"
            raise SlotError(f"{auto.origin}: auto: no phone can be used{listed}")

    def _refuse_twins(self, instances: dict[str, str]) -> None:
        """The same phone under two names: equal instance, and of URLs equal path: a server may host many phones."""
        for slot, instance in instances.items():
            twin = self._known.setdefault(self._place(slot, instance), slot) if instance else slot
            if twin != slot:
                a, b = self._addresses[twin], self._addresses[slot]
                raise SlotError(f"{a.origin} ({a.url}) and {b.origin} ({b.url}) are the same server ({instance})")
        self._started = True
