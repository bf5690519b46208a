"""A server of tapforge's own protocol (`wire.py`) over HTTP: what the simulated phone and the bridge have in common.

- Slot i answers under /slot/i; / is slot 0. Every refusal is {"error": words}, with "reason" where a program needs it.
- A request is read only from a client that may make it: `read` admits its claim before it looks at the body, and
  waits for nothing between the admission and its return.
- A body over `MAX_REQUEST` bytes gets 413.
- `listen` says in one line of JSON, {"port": N, "slots": K}, that the server is ready.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Final, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tapforge_envs.protocol import Action, Task
from tapforge_envs.wire import Fence

from .claims import Claims, Refused

#: bytes of a request's body
MAX_REQUEST = 1024 * 1024
#: hosts that mean every address of the machine
EVERYWHERE: Final = ("", "0.0.0.0", "::", "*")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EpisodeRequest(BaseModel):
    """The body of /evaluate and /close."""

    model_config = ConfigDict(extra="forbid")
    episode: str = Field(min_length=1, max_length=200)


class ResetRequest(EpisodeRequest):
    task: Task


class StepRequest(EpisodeRequest):
    index: int = Field(ge=0)
    action: Annotated[Action, Field(discriminator="type")]


_Body = TypeVar("_Body", bound=BaseModel)
_Server = TypeVar("_Server")


async def read(request: web.Request, claims: Claims, model: type[_Body]) -> _Body:
    """The request of a client that may make it. Nothing is waited for between this and what it does: a newer claim
    can't come in between. Raises Refused: 400 for what can't be read, 409 without a claim of the phone."""
    data = await request.read()
    try:
        fence = Fence.of(request.headers)
    except ValueError as error:
        raise Refused(400, f"{request.path}: {error}") from error
    claims.admit(fence)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise Refused(400, f"{request.path} can't read its body: {words(error)}") from error


def words(error: ValidationError) -> str:
    """The first five mistakes, by field."""
    return "; ".join(
        f"{'.'.join(str(part) for part in e['loc']) or 'body'}: {e['msg']}" for e in error.errors(include_url=False)[:5]
    )


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as error:
        reason = {"reason": error.reason} if error.reason else {}
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
        return web.json_response({"error": str(error), **reason}, status=error.status, headers=headers)
    except web.HTTPException as error:  # no such route, wrong method, body too large
        return web.json_response({"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status)
    except web.RequestPayloadError as error:  # a body that breaks off, or isn't compressed as it says
        answer = web.json_response(
            {"error": f"{request.method} {request.path}: its body can't be read: {error}"}, status=400
        )
        answer.force_close()  # where the next request begins is unknown
        return answer


def by_a_program(request: web.Request) -> None:
    """Raises Refused for what a page in a browser sends: any site's page could drive the phones of its visitors."""
    if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none":
        raise Refused(403, "a page in a browser drives no phone: send the request without Origin and Sec-Fetch-Site")


def slot_application(
    servers: Sequence[_Server],
    get: Mapping[str, Callable[[_Server, web.Request], Awaitable[web.StreamResponse]]],
    post: Mapping[str, Callable[[_Server, web.Request], Awaitable[web.StreamResponse]]],
    failures: Middleware = _refusals,
    admit: Callable[[web.Request], None] = by_a_program,
) -> web.Application:
    """One server per slot as an aiohttp application. `get`, `post`: what serves a path below the slot's. `failures`:
    makes an answer of a refusal, for a protocol that has its own. `admit` raises Refused for a request that is not even
    read."""

    def at(handler: Callable[[_Server, web.Request], Awaitable[web.StreamResponse]]) -> Handler:
        async def call(request: web.Request) -> web.StreamResponse:
            admit(request)
            name = request.match_info.get("slot", "0")
            if not (name.isascii() and name.isdecimal() and len(name) <= 9 and int(name) < len(servers)):
                raise Refused(404, f"no slot {name[:40]!r}; this server has slots 0 to {len(servers) - 1}")
            return await handler(servers[int(name)], request)

        return call

    app = web.Application(middlewares=[failures], client_max_size=MAX_REQUEST)
    for prefix in ("", "/slot/{slot}"):
        for path, handler in get.items():
            app.router.add_get(prefix + path, at(handler))
        for path, handler in post.items():
            app.router.add_post(prefix + path, at(handler))
    return app


def stop_signal() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def listen(
    app: web.Application,
    host: str,
    port: int,
    slots: int,
    stopping: asyncio.Event,
    grace: float,
    more: Mapping[str, str] | None = None,
) -> int:
    """Serves until `stopping` is set. Returns 0, or 2 when it can't listen, with the words on stderr. `grace`: seconds
    that calls in flight get at the end. `more`: said in the line that says it's ready."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=grace)
    await runner.setup()
    try:
        try:
            await site_at(runner, host, port).start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                print(f"port {port} on {host} is in use; --port 0 takes a free one", file=sys.stderr)
            else:
                print(f"can't listen on {host}:{port}: {error.strerror or error}", file=sys.stderr)
            return 2
        print(json.dumps({"port": runner.addresses[0][1], "slots": slots, **(more or {})}), flush=True)
        await stopping.wait()
        return 0
    finally:
        await runner.cleanup()


def site_at(runner: web.BaseRunner, host: str, port: int) -> web.BaseSite:
    """One port, also where `port` is 0 and `host` is every address of both families. `start` raises OSError, and this
    does where it listens on both."""
    both = socket_of_both(host, port)
    return web.TCPSite(runner, host, port) if both is None else web.SockSite(runner, both)


def socket_of_both(host: str, port: int) -> socket.socket | None:
    """Of IPv6 and IPv4 at one port, where `host` means every address of both. Raises OSError."""
    return _everywhere(port) if host in EVERYWHERE and host != "0.0.0.0" else None


def address_of(runner: web.BaseRunner, host: str) -> str:
    """Of a page that listens at `host`, as a browser of this machine takes it."""
    there, port = runner.addresses[0][:2]
    return f"http://{name_in_url(host, there)}:{port}/"


def name_in_url(host: str, listening: str) -> str:
    """By which this machine reaches a server that was told to listen at `host`, and listens at the address
    `listening`: of a server at every address, its own loopback."""
    name = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(listening, listening) if host in EVERYWHERE else host
    return f"[{name}]" if ":" in name else name


def logger_without_addresses(name: str) -> logging.Logger:
    """For a server of pages. It leaves out requests that are none: their words name the address, in which a token may
    stand."""
    found = logging.getLogger(name)
    found.addFilter(_of_ours)
    return found


def _of_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _everywhere(port: int) -> socket.socket:
    """Every address of the machine, of IPv6 and of IPv4, whichever it has: a cluster may have either alone."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    return socket.create_server(("", port))
