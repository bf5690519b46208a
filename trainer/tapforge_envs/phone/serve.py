"""Phones at several ports at once: each speaks tapforge's protocol, MobileWorld's and adb, and all are on one page.

- Phone i is one phone whatever it is spoken to in: slot i of the tapforge server, server i of MobileWorld's (with one
  device), a port of its own for adb, and the i-th on the page. A task that starts ends the one that ran.
- Everything listens on one address; where others reach it the page needs a token.
- Nothing is served half: when one port can't be had, none is.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from ..people.episode import EpisodeWriter
from ..people.page import Page
from ..people.serve import names_of, refusal_to_show
from ..serving.http import address_of, site_at
from ..serving.page_site import CannotListen, page_served
from . import server as tapforge
from .adbd.android import Android
from .adbd.daemon import EMULATOR_PORTS, Daemon
from .adbd.keys import Keys
from .adbd.services import find
from .injection import Injector
from .mobileworld import server as mobileworld
from .mobileworld.devices import TaskNames
from .mobileworld.messages import DEVICE
from .mobileworld.server import MobileWorld
from .page_phone import SharedPhone
from .slot import Slot

#: seconds that calls in flight get at the end
_GRACE: Final = 0.5
#: tasks of each suite and split that MobileWorld's protocol has a name for
_NAMED_TASKS: Final = 100


class CannotServe(Exception):
    """A port or an address can't be had; says which and what would help."""


@dataclass(frozen=True)
class Ports:
    """0 takes a free one, None serves nothing. `adb` is the first phone's; the others follow."""

    page: int | None = 0
    tapforge: int | None = 0
    mobileworld: int | None = 0
    adb: int | None = 0


@dataclass(frozen=True)
class Served:
    #: "" where there is none
    page: str
    #: of each phone: protocol -> what a client of it is given
    phones: tuple[dict[str, str], ...]


@asynccontextmanager
async def serving(
    count: int,
    width: int,
    height: int,
    suites: tuple[str, ...],
    ports: Ports,
    host: str = "127.0.0.1",
    keys: Path | None = None,
    writer: EpisodeWriter | None = None,
    token: str = "",
) -> AsyncIterator[Served]:
    """`width`, `height`: pixels. `suites`: the first is that of a phone without a task. `keys`: a file of the keys that
    adb hosts need; None lets every host in. `writer`: of episodes that are played on the page; `token`: the page's.
    Raises CannotServe."""
    stopping = asyncio.Event()
    slots = [Slot(width, height, suites) for _ in range(count)]
    phones: list[dict[str, str]] = [{} for _ in slots]
    async with AsyncExitStack() as stack:
        if ports.tapforge is not None:
            here = await _http(stack, tapforge.application(slots, [], stopping), host, ports.tapforge, "tapforge")
            _name(phones, "tapforge", lambda number: f"{here}slot/{number}")
        if ports.mobileworld is not None:
            names = TaskNames(suites, _NAMED_TASKS)
            worlds = [
                MobileWorld(width, height, suites, names, Injector([], stopping), slots={DEVICE: slot})
                for slot in slots
            ]
            app = mobileworld.application(worlds)
            other = await _http(stack, app, host, ports.mobileworld, "mobileworld")
            _name(phones, "mobileworld", lambda number: f"{other}slot/{number}")
        if ports.adb is not None:
            daemons = [await _adb(stack, slot, host, ports.adb, n, keys) for n, slot in enumerate(slots)]
            _name(phones, "adb", lambda number: f"adb connect {daemons[number].address}")
        page = ""
        if ports.page is not None:
            if why := refusal_to_show(host, token):
                raise CannotServe(why)
            shown = [SharedPhone(slot, phones[number], number) for number, slot in enumerate(slots)]
            app = Page(shown, names_of(host), stopping, writer, token).application()
            try:
                page = await stack.enter_async_context(page_served(app, host, ports.page))
            except CannotListen as error:
                raise CannotServe(str(error)) from error
        # Last in, first out: whatever waits for a phone is let go before the servers end.
        stack.callback(stopping.set)
        yield Served(page, tuple(phones))


def _name(phones: list[dict[str, str]], protocol: str, address: Callable[[int], str]) -> None:
    for number, phone in enumerate(phones):
        phone[protocol] = address(number)


async def _http(stack: AsyncExitStack, app: web.Application, host: str, port: int, what: str) -> str:
    """The address that it listens on."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_GRACE)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        await site_at(runner, host, port).start()
    except OSError as error:
        raise CannotServe(_taken(what, host, port, error)) from error
    return address_of(runner, host)


async def _adb(stack: AsyncExitStack, slot: Slot, host: str, first: int, number: int, keys: Path | None) -> Daemon:
    port = first + number if first else 0
    if port in EMULATOR_PORTS:
        raise CannotServe(
            f"--adb {first}: phone {number} would be at port {port}, and adb servers take whatever answers at "
            f"{EMULATOR_PORTS.start} to {EMULATOR_PORTS.stop - 1} for an emulator; --adb {EMULATOR_PORTS.stop} is free "
            "of that"
        )
    daemon = Daemon(Android(slot), find, Keys(keys) if keys is not None else None, host=host, port=port)
    try:
        await daemon.start()
    except OSError as error:
        raise CannotServe(_taken("adb", host, port, error)) from error
    stack.push_async_callback(daemon.stop)
    return daemon


def _taken(what: str, host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{what}: port {port} on {host} is in use; --{what} 0 takes a free one"
    return f"{what}: can't listen on {host}:{port}: {error.strerror or error}"
