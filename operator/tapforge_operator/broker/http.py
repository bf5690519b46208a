"""The broker over HTTP: the paths of `tapforge_api.claims`, and a `Refusal` in words for everything else.

1. Every refusal is a Refusal; a 4xx names what was wrong with which value, and what would be right.
2. What is not proved is looked at in turns (`Turns`), and no further than is needed to prove it (`read_body`).
3. `waiting.py` limits how many acquires may wait, `server.py` how many connections there may be.
4. Only a leader answers; one that stands by passes callers on to it, if it can (`Forward`).
5. A caller that disconnects while it waits gets nothing, and nothing stays claimed for it.
6. Renewals and releases are proved by the claims' secrets alone: no question to the API server.
7. An unexpected error is a Refusal too (500), and is logged once, with the object that it was about.

Bodies: as much of a request is read as its caller has proved.

1. It has at most `limit` bytes and `READ` seconds to arrive; more is refused before it was read.
2. A batch of claims that is larger than `HEAD` bytes is read on only when one of the first claims in it is proved by
   its secret. That is looked for in the first `HEAD` bytes alone, and costs some microseconds: a caller that has no
   claim can't have thousands of them parsed.

Turns: how much of callers that have proved nothing yet is read and checked at once.

1. Of one caller `CHECKED_AT_ONCE` requests are read and checked at once, and `QUEUED` more wait for their turn, at
   most `TURN_WAIT` seconds. A request beyond that, or that waited so long, is refused; it delays no other caller.
2. A request that is refused keeps its place for `PENALTY` seconds, so that wrong ones come at a bounded rate.
3. A caller is its address. One that another operator passes on is named by it: such names share `FORWARDED_ROOM` times
   as much room, so that a caller that only pretends to pass another one on takes no place but those of its own address.

What is proved (a token that the API server knows, the secret of a claim) has other limits, which are not these.

Standby replicas pass their callers on to the leader, once.

1. A request goes on to the leader as it is (path, body, Authorization), over TLS that is checked against the broker's
   own authority. One that was passed on before is not passed on again: there is one hop, or `NotLeading` (503).
2. It ends with its caller: one that disconnects while it waits is disconnected from the leader as well, which then
   leaves nothing claimed.
3. It has an end: what the caller itself is ready to wait, and `MARGIN` seconds. A leader that can't be reached, that
   is silent for longer, or that is none any more by the Lease, is 503 too; then it is unknown whether the request was
   carried out, and it may be sent again, as always.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from itertools import islice
from typing import Final, TypeVar

import aiohttp
from aiohttp import web
from pydantic import ValidationError
from yarl import URL

from tapforge_api.base import Spec
from tapforge_api.claims import Acquire, Refusal, Release, Renew
from tapforge_api.errors import problems_of
from tapforge_api.reading import read_json
from tapforge_operator.broker.auth import Auth, Denied
from tapforge_operator.broker.renewals import Behind
from tapforge_operator.broker.service import Claims
from tapforge_operator.broker.types import PoolNotFound
from tapforge_operator.broker.waiting import WaitingRoom
from tapforge_operator.kube.leaderelection import NotLeading
from tapforge_operator.observability.logging import ref
from tapforge_operator.server import IDLE, Stage, keep

# --- bodies -----------------------------------------------------------------------------------------------------------


#: of a batch of claims, bytes
MAX_BODY: Final = 1 << 20
#: of everything else
SMALL: Final = 65_536
#: of a batch before anything in it is proved: some dozens of claims
HEAD: Final = 4096
READ: Final = 15.0
#: claims that are looked at: some may be of a time when the broker had another key
_TRIED: Final = 16
#: a claim is an object without objects in it
_OBJECT: Final = re.compile(rb"\{[^{}]*\}")

#: whether a claim's secret, the second, is that of the claim with that id
Proof = Callable[[str, str], bool]


async def read_body(request: web.Request, limit: int = SMALL, proof: Proof | None = None) -> bytes:
    """Raises Denied."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    body, proved = bytearray(), proof is None
    try:
        async with asyncio.timeout(READ):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > limit:
                    raise _too_large(limit)
                if not proved and len(body) > HEAD:
                    if proof is not None and not any(proof(*claim) for claim in first_claims(bytes(body[:HEAD]))):
                        raise Denied(
                            403,
                            "Unproved",
                            f"none of the first {_TRIED} claims of this batch has the secret that proves it; of claims "
                            f"without proof at most {HEAD} bytes are read",
                        )
                    proved = True
    except TimeoutError as error:
        raise Denied(408, "BodyTimeout", f"the body did not arrive within {READ:g} s") from error
    return bytes(body)


def first_claims(head: bytes) -> list[tuple[str, str]]:
    """Ids and secrets of the first claims of a batch, of which this is the beginning. Pure."""
    found = []
    for match in islice(_OBJECT.finditer(head), _TRIED):
        try:
            claim = json.loads(match[0])
        except (ValueError, RecursionError):
            continue
        if isinstance(claim.get("id"), str) and isinstance(claim.get("secret"), str):
            found.append((claim["id"], claim["secret"]))
    return found


def _too_large(limit: int) -> Denied:
    return Denied(413, "BodyTooLarge", f"the body has more than {limit} bytes; send it in parts")


# --- turns of callers that proved nothing yet -------------------------------------------------------------------------


CHECKED_AT_ONCE: Final = 4
QUEUED: Final = 1024
FORWARDED_ROOM: Final = 16
TURN_WAIT: Final = 15.0
PENALTY: Final = 0.1


class Turns:
    def __init__(self) -> None:
        self._lines: dict[tuple[str, ...], _Line] = {}

    @asynccontextmanager
    async def turn(self, peer: str, behind: str = "") -> AsyncIterator[None]:
        """Waits for the turn of the caller at address `peer`, or of the one that it passes on. Raises Denied."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._place((peer, behind), 1))
            if behind:  # in this order: a request waiting in its own line takes no place in the shared one
                await stack.enter_async_context(self._place((peer,), FORWARDED_ROOM))
            try:
                yield
            except Denied as error:
                if error.status < 500:
                    await asyncio.sleep(PENALTY)
                raise

    @asynccontextmanager
    async def _place(self, key: tuple[str, ...], times: int) -> AsyncIterator[None]:
        line, most = self._lines.setdefault(key, _Line(CHECKED_AT_ONCE * times)), (CHECKED_AT_ONCE + QUEUED) * times
        if line.there >= most:
            raise _crowded(f"{line.there} requests of this caller, of at most {most}, wait until they are checked")
        line.there += 1
        try:
            try:
                async with asyncio.timeout(TURN_WAIT):
                    await line.room.acquire()
            except TimeoutError as error:
                raise _crowded(f"other requests of this caller were being checked for {TURN_WAIT:g} s") from error
            try:
                yield
            finally:
                line.room.release()
        finally:
            line.there -= 1
            if not line.there:
                del self._lines[key]


class _Line:
    def __init__(self, room: int):
        self.room = asyncio.Semaphore(room)
        #: requests that are checked or wait for it
        self.there = 0


def _crowded(why: str) -> Denied:
    return Denied(429, "TooManyCalls", f"{why}; ask again later")


# --- standby replicas -------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

#: identity of the process that passed a request on, and the address of the caller whose it is
FORWARDED: Final = "Tapforge-Forwarded"
FORWARDED_FOR: Final = "Tapforge-Forwarded-For"
#: what answers take beyond the caller's wait: tokens are checked, claims and status written
MARGIN: Final = 30.0
#: requests under way at once
FORWARDED_AT_ONCE: Final = 4096
_CONNECT: Final = 3.0
#: between two looks whether the leader still leads
_LEADER_CHECK: Final = 1.0
_HEADERS: Final = ("Retry-After", "WWW-Authenticate", "Allow")


class Forward:
    """Opens connections from the first call on; `close` ends them."""

    def __init__(
        self,
        leader: Callable[[], str],
        identity: str,
        name: str,
        trust: ssl.SSLContext,
        done: Callable[[bool], None] = lambda answered: None,
    ):
        """`leader`: host:port of the leader's broker now, "": unknown; `name`: what its certificate is for; `done` is
        called with whether the leader answered."""
        self._leader = leader
        self._identity = identity
        self._name = name
        self._trust = trust
        self._done = done
        self._in_flight = 0
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def __call__(self, request: web.Request, body: bytes, wait: float) -> web.Response:
        """The leader's answer. `wait`: seconds that the caller has. Raises NotLeading."""
        address = self._leader()
        if not address or FORWARDED in request.headers or self._in_flight >= FORWARDED_AT_ONCE:
            raise NotLeading
        self._in_flight += 1
        call = asyncio.create_task(self._send(address, request, body))
        answered = False
        try:
            end = time.monotonic() + wait + MARGIN
            while not call.done():
                await asyncio.wait({call}, timeout=_LEADER_CHECK)
                if not call.done() and (self._leader() != address or time.monotonic() > end):
                    raise NotLeading
            answer = call.result()
            answered = True
            return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("the leader at %s could not be asked: %s: %s", address, type(error).__name__, error)
            raise NotLeading from error
        finally:
            call.cancel()
            self._in_flight -= 1
            self._done(answered)

    async def _send(self, address: str, request: web.Request, body: bytes) -> web.Response:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._trust),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT),
            )
        headers = {"Content-Type": "application/json", FORWARDED: self._identity, FORWARDED_FOR: request.remote or ""}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        async with self._session.request(
            request.method,
            URL(f"https://{address}{request.rel_url.raw_path}", encoded=True),
            data=body,
            headers=headers,
            server_hostname=self._name,
            allow_redirects=False,
        ) as said:
            return web.Response(
                status=said.status,
                body=await said.read(),
                content_type=said.content_type,
                headers={name: said.headers[name] for name in _HEADERS if name in said.headers},
            )


# --- the server -------------------------------------------------------------------------------------------------------


_PROBLEMS: Final = 20
#: seconds after which a caller may ask again
_SOON: Final = 1

ACQUIRE: Final = "/v1/namespaces/{namespace}/pools/{pool}/claims"
RENEW: Final = "/v1/claims/renew"
RELEASE: Final = "/v1/claims/release"

TURNS: Final = web.AppKey("turns", Turns)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
S = TypeVar("S", bound=Spec)


def application(
    claims: Claims, auth: Auth, proof: Proof, room: WaitingRoom, forward: Forward | None = None
) -> web.Application:
    """To be run with `handler_cancellation=True`: rule 5 needs it."""
    broker = _Broker(claims, auth, proof, room, forward)
    app = web.Application(middlewares=[_refuse, broker.pass_on])
    app[TURNS] = Turns()
    app.router.add_post(ACQUIRE, broker.acquire)
    app.router.add_post(RENEW, broker.renew)
    app.router.add_post(RELEASE, broker.release)
    return app


def runner(app: web.Application) -> web.AppRunner:
    return web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=IDLE)


class _Broker:
    def __init__(self, claims: Claims, auth: Auth, proof: Proof, room: WaitingRoom, forward: Forward | None):
        self._claims = claims
        self._auth = auth
        self._proof = proof
        self._forward = forward
        self._room = room

    async def acquire(self, request: web.Request) -> web.Response:
        namespace, pool = request.match_info["namespace"], request.match_info["pool"]
        shown = token(request)
        async with turn(request, proved=self._auth.knows(shown)):
            holder = await self._auth.holder(shown, namespace, pool)
            ask = parse(await read_body(request), Acquire)
        self._claims.find_pool(namespace, pool)
        async with self._room.place(holder.name):
            with keep(request):
                return answer(await self._claims.acquire(namespace, pool, holder, ask))

    async def renew(self, request: web.Request) -> web.Response:
        async with turn(request):
            ask = parse(await self._batch(request), Renew)
        with keep(request):
            return answer(await self._claims.renew(ask))

    async def release(self, request: web.Request) -> web.Response:
        async with turn(request):
            ask = parse(await self._batch(request), Release)
        with keep(request):
            return answer(await self._claims.release(ask))

    async def _batch(self, request: web.Request) -> bytes:
        return await read_body(request, MAX_BODY, self._proof)

    @web.middleware
    async def pass_on(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._claims.leading or request.match_info.http_exception is not None:
            return await handler(request)
        if self._forward is None or FORWARDED in request.headers:
            raise NotLeading
        async with turn(request):
            body = await (self._batch(request) if handler in (self.renew, self.release) else read_body(request))
        with keep(request, Stage.PASSED_ON):
            return await self._forward(request, body, wait_of(body) if handler == self.acquire else 0.0)


# --- in and out -------------------------------------------------------------------------------------------------------


def token(request: web.Request) -> str:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given.strip():
        raise Denied(401, "Unauthorized", "the header `Authorization: Bearer <token>` is missing")
    return given.strip()


def turn(request: web.Request, proved: bool = False) -> AbstractAsyncContextManager[None]:
    """What has proved nothing yet waits for its turn. Raises Denied."""
    if proved:
        return nullcontext()
    behind = request.headers.get(FORWARDED_FOR, "")[:64] if FORWARDED in request.headers else ""
    return request.app[TURNS].turn(request.remote or "", behind)


def parse(body: bytes, model: type[S]) -> S:
    """Callers of a later release may say more: what isn't known here is left out."""
    try:
        return read_json(model, body)
    except ValidationError as error:
        problems = [str(p) for p in problems_of(error, model, {}, _PROBLEMS)]
        more = f"; and {error.error_count() - _PROBLEMS} more" if error.error_count() > _PROBLEMS else ""
        raise Denied(400, "Invalid", "; ".join(problems) + more) from error


def wait_of(body: bytes) -> float:
    """Seconds that an acquire has; none where it is wrong, which the leader will say."""
    try:
        return read_json(Acquire, body).wait_seconds
    except ValidationError:
        return 0.0


def answer(message: Spec) -> web.Response:
    return web.Response(body=message.model_dump_json(by_alias=True).encode(), content_type="application/json")


def _refusal(status: int, reason: str, message: str, **headers: str) -> web.Response:
    body = Refusal(reason=reason[:64], message=message[:4096]).model_dump_json(by_alias=True)
    return web.Response(
        status=status,
        body=body.encode(),
        content_type="application/json",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


@web.middleware
async def _refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns what went wrong into a Refusal."""
    soon = {"Retry_After": str(_SOON)}
    try:
        return await handler(request)
    except Denied as error:
        headers = {"WWW_Authenticate": "Bearer"} if error.status == 401 else soon if error.status in (429, 503) else {}
        return _refusal(error.status, error.reason, str(error), **headers)
    except PoolNotFound as error:
        return _refusal(404, "PoolNotFound", str(error))
    except NotLeading:
        return _refusal(503, "NotLeader", "this broker does not lead now; ask again, another one may answer", **soon)
    except Behind as error:
        return _refusal(503, "Behind", str(error), **soon)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        text = f"{request.path} takes {allowed}, not {request.method}"
        return _refusal(405, "MethodNotAllowed", text, Allow=allowed)
    except web.HTTPNotFound:
        text = f"there is no {request.path[:200]}; there are POST {ACQUIRE}, {RENEW} and {RELEASE}"
        return _refusal(404, "NotFound", text)
    except web.HTTPException as error:
        return _refusal(error.status, error.reason.replace(" ", ""), error.text or error.reason)
    except ConnectionError:
        raise  # there is no caller left to answer
    except Exception:  # whatever it was: callers read reasons
        log.exception("%s %s failed", request.method, request.path, extra=_about(request))
        text = "this is a fault of the broker, whose log says more; try again, or inform the operator's administrator"
        return _refusal(500, "InternalError", text)


def _about(request: web.Request) -> dict[str, Mapping[str, str]]:
    """The object that a call names."""
    for kind, name in (("EmulatorPool", "pool"), ("TrainingRun", "run")):
        if name in request.match_info:
            return ref(kind, request.match_info["namespace"], request.match_info[name])
    return {}
