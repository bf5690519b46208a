"""The bridge on the wire: phones of any protocol that we have a client for, served as `tapforge/1` (`wire.py`).

- Slot i answers under /slot/i; / is slot 0, which may know the UID of the slot of a pool that it is.
- With a token every request but GET /health needs `Authorization: Bearer TOKEN`, compared in constant time; without
  one the bridge listens on this machine alone (`refusal_to_listen`).
- No page in a browser drives a phone: a request that has an `Origin` is refused. The page for people has a port of its
  own (`people/page.py`) and is a client beside programs.
- GET /tasks lists the tasks that it was given, else those that the server behind it lists, if it does: a reset may name
  others.
- SIGTERM and SIGINT: calls in flight get `GRACE` seconds, then every phone is let go (what was changed on it to drive
  it is undone), then the process ends.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from aiohttp import web

from ..clients.adb.device import AUTO
from ..clients.adb.wire import AdbServer, server_address
from ..clients.phones import PhoneAddress, PhoneClients
from ..people.episode import EpisodeWriter
from ..people.page import Page
from ..people.serve import names_of
from ..protocol import EnvironmentFault, Task
from ..serving.claims import Refused
from ..serving.http import (
    EpisodeRequest,
    ResetRequest,
    StepRequest,
    by_a_program,
    listen,
    read,
    slot_application,
    stop_signal,
)
from ..serving.page_site import CannotListen, page_served
from ..wire import CONTENT_TYPE, PROTOCOL, answers
from .adb_server import attached, own_adb_server
from .page_phone import BridgedPhone
from .slot import BridgeSlot

log = logging.getLogger(__name__)

#: by which adb's clients in this process find their server
ADB_SERVER = "ADB_SERVER_SOCKET"

#: seconds that a call in flight gets at the end, and each step in which a phone is let go: four of them fit into half a
#: minute, which is what Kubernetes grants
GRACE = 5.0
_TASK_LIMIT = 1000
#: characters
_TOKEN_LENGTH = range(16, 4097)


@dataclass(frozen=True, slots=True)
class Bridge:
    """What is served."""

    phones: Sequence[PhoneAddress]
    tasks: Sequence[Task] = ()
    host: str = "127.0.0.1"
    #: 0 takes a free one
    port: int = 0
    token: str = ""
    #: of the slot that the first phone is
    uid: str = ""


@dataclass(frozen=True, slots=True)
class PageOptions:
    """A page on which a person plays on the same phones. `port` 0 takes a free one."""

    port: int
    writer: EpisodeWriter


class Served:
    """One environment on the wire. `protocol`: what is spoken behind it, for people who read /health."""

    def __init__(self, slot: BridgeSlot, protocol: str, listing: Callable[[], Awaitable[Sequence[Task]]]):
        self._slot = slot
        self._protocol = protocol
        self._listing = listing

    async def health(self, request: web.Request) -> web.Response:
        status, sick = 200, ""
        try:
            await self._slot.health()
        except Refused as error:
            status, sick = 503, str(error)
        body = {
            "status": sick or "ok",
            "protocol": PROTOCOL,
            "instance": self._slot.instance,
            "episode": self._slot.episode,
            "slot": self._slot.claims.uid or None,
            "fence": self._slot.claims.fence,
            "behind": {"protocol": self._protocol, "phone": self._slot.name},
        }
        return web.json_response(body, status=status)

    async def tasks(self, request: web.Request) -> web.Response:
        text = request.query.get("limit", "100")
        limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
        if not 1 <= limit <= _TASK_LIMIT:
            raise Refused(400, f"limit is {text[:40]!r}, must be 1 to {_TASK_LIMIT}")
        suite = request.query.get("suite", "")
        try:
            listed = [task for task in await self._listing() if suite in ("", task.suite)]
        except EnvironmentFault as fault:
            raise Refused(502, str(fault)) from fault
        if suite and not listed:
            raise Refused(404, f"no task of suite {suite[:80]!r} is listed here")
        return web.json_response({"tasks": [task.model_dump() for task in listed[:limit]]})

    async def reset(self, request: web.Request) -> web.Response:
        body = await read(request, self._slot.claims, ResetRequest)
        answer = await self._slot.reset(body.episode, body.task)
        return _observation(answer, answers("reset", body.episode))

    async def step(self, request: web.Request) -> web.Response:
        body = await read(request, self._slot.claims, StepRequest)
        answer = await self._slot.step(body.episode, body.index, body.action)
        return _observation(answer, answers("step", body.episode, body.index))

    async def evaluate(self, request: web.Request) -> web.Response:
        body = await read(request, self._slot.claims, EpisodeRequest)
        score = await self._slot.evaluate(body.episode)
        verdict = {"value": score.value, "reason": score.reason, "side_effects": list(score.side_effects)}
        return web.json_response(verdict, headers=answers("evaluate", body.episode))

    async def close(self, request: web.Request) -> web.Response:
        body = await read(request, self._slot.claims, EpisodeRequest)
        await self._slot.close(body.episode)
        return web.json_response({})


def _observation(body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(body=body, content_type=CONTENT_TYPE, headers=headers)


def application(bridge: Bridge, clients: PhoneClients) -> tuple[web.Application, list[BridgeSlot]]:
    """The bridge over these connections, and what has to be stopped at its end."""
    slots, served = [], []
    for i, phone in enumerate(bridge.phones):
        slots.append(_slot(clients, phone, bridge.uid if i == 0 else ""))
        served.append(Served(slots[i], phone.protocol, _listing(bridge, clients, phone)))
    return served_application(served, bridge.token), slots


def served_application(served: Sequence[Served], token: str = "") -> web.Application:
    """One environment per slot."""
    return slot_application(
        served,
        get={"/health": Served.health, "/tasks": Served.tasks},
        post={"/reset": Served.reset, "/step": Served.step, "/evaluate": Served.evaluate, "/close": Served.close},
        admit=lambda request: _admit(request, token),
    )


def _slot(clients: PhoneClients, phone: PhoneAddress, uid: str) -> BridgeSlot:
    return BridgeSlot(phone.slot, lambda: clients.open(phone), lambda: clients.health(phone), phone.deadlines, uid)


def _page_phone(bridge: Bridge, clients: PhoneClients, phone: PhoneAddress, slot: BridgeSlot) -> BridgedPhone:
    """Over adb a goal needs no server that knows it."""
    return BridgedPhone(slot, _listing(bridge, clients, phone), own_goals=phone.protocol == "adb")


def _listing(bridge: Bridge, clients: PhoneClients, phone: PhoneAddress) -> Callable[[], Awaitable[Sequence[Task]]]:
    async def listing() -> Sequence[Task]:
        return bridge.tasks or await clients.tasks(phone, _TASK_LIMIT)

    return listing


def _admit(request: web.Request, token: str) -> None:
    by_a_program(request)
    if not token or request.path.rsplit("/", 1)[-1] == "health":
        return
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise Refused(401, "this bridge has a token: send it as Authorization: Bearer TOKEN")


def read_token(text: str, origin: str) -> str:
    """Raises ValueError when `text` is none that can be sent. `origin`: where it is from, for the error."""
    token = text.strip()
    if len(token) not in _TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"{origin} holds no token: it wants 16 to 4,096 ASCII characters without spaces; "
            "python3 -c 'import secrets; print(secrets.token_hex())' makes one"
        )
    return token


def refusal_to_listen(host: str, token: str) -> str:
    """Why the server may not listen there; "" when it may."""
    try:
        here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = False
    if here or token:
        return ""
    return f"{host} is reachable from outside, and so are the phones: set a token (--token-file), or use 127.0.0.1"


async def serve(bridge: Bridge, adb_port: int | None = None, page: PageOptions | None = None) -> int:
    """Until it is stopped. `adb_port`: where to have an adb server of its own, for phones of protocol adb. Returns 0; 1
    when that server ended by itself; 2 when it can't listen. Raises AdbServerError before it listens."""
    stopping = stop_signal()
    async with AsyncExitStack() as stack:
        server = None
        if adb_port is not None:
            server = await stack.enter_async_context(own_adb_server(adb_port))
            os.environ[ADB_SERVER] = f"tcp:127.0.0.1:{adb_port}"
        bridge = replace(bridge, phones=await _each(bridge.phones))
        clients = PhoneClients()
        stack.push_async_callback(clients.close)
        app, slots = application(bridge, clients)
        stack.push_async_callback(_stop, slots)
        more = {}
        if page is not None:
            phones = [_page_phone(bridge, clients, *both) for both in zip(bridge.phones, slots, strict=True)]
            people = Page(phones, names_of(bridge.host), stopping, page.writer, bridge.token).application()
            try:
                more["page"] = await stack.enter_async_context(page_served(people, bridge.host, page.port))
            except CannotListen as error:
                print(error, file=sys.stderr)
                return 2
        gone = asyncio.create_task(_gone(server, stopping))
        code = await listen(app, bridge.host, bridge.port, len(slots), stopping, GRACE, more)
        gone.cancel()
        if code == 0 and server is not None and server.returncode is not None:
            log.error("the adb server on port %s ended by itself: exit code %s", adb_port, server.returncode)
            return 1
        return code


async def _each(phones: Sequence[PhoneAddress]) -> list[PhoneAddress]:
    """With every device that is attached in place of `auto`."""
    found: dict[str, PhoneAddress] = {}
    for phone in phones:
        serials = [phone.url]
        if phone.protocol == "adb" and phone.url == AUTO:
            serials = await attached(AdbServer(server_address(os.environ)), phone.deadlines.health)
        for serial in serials:
            found.setdefault(serial, replace(phone, slot=serial, url=serial))
    return list(found.values())


async def _gone(server: asyncio.subprocess.Process | None, stopping: asyncio.Event) -> None:
    if server is not None:
        await server.wait()
        stopping.set()


async def _stop(slots: Sequence[BridgeSlot]) -> None:
    await asyncio.gather(*(slot.stop(GRACE) for slot in slots))
