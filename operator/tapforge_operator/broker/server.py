"""The broker over HTTP: the paths of `tapforge_api.claims`, and a `Refusal` in words for everything else.

1. Every refusal is a Refusal; a 4xx names what was wrong with which value, and what would be right.
2. What is not proved is looked at in turns (`turns.py`), and no further than is needed to prove it (`body.py`).
3. A caller may wait in `WAITERS` acquires at once, all callers together in `ALL_WAITERS`.
4. Only a leader answers; one that stands by passes callers on to it, if it can (`forward.py`).
5. Whoever disconnects while it waits gets nothing, and nothing stays claimed for it.
6. Renewals and releases are proved by the claims' secrets alone: no question to the API server.
7. What nobody foresaw is a Refusal too (500), and is logged once, with the object that it was about.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final, TypeVar

from aiohttp import web
from pydantic import ValidationError

from tapforge_api.base import Spec
from tapforge_api.claims import Acquire, Refusal, Release, Renew
from tapforge_api.errors import problems_of

from ..logs import ref
from .auth import Auth, Denied
from .body import MAX_BODY, Proof, read_body
from .directory import PoolNotFound
from .forward import FORWARDED, FORWARDED_FOR, Forward
from .looking import Behind
from .service import Claims
from .turns import Turns
from .writes import NotLeading

log = logging.getLogger(__name__)

#: more than wait when the API server stands still for a second: who is refused waits longer than who queues
WAITERS: Final = 256
ALL_WAITERS: Final = 4096
_PROBLEMS: Final = 20
#: seconds after which a caller may ask again
_SOON: Final = 1

ACQUIRE: Final = "/v1/namespaces/{namespace}/pools/{pool}/claims"
RENEW: Final = "/v1/claims/renew"
RELEASE: Final = "/v1/claims/release"

TURNS: Final = web.AppKey("turns", Turns)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
S = TypeVar("S", bound=Spec)


def application(claims: Claims, auth: Auth, proof: Proof, forward: Forward | None = None) -> web.Application:
    """To be run with `handler_cancellation=True`: rule 5 needs it."""
    broker = _Broker(claims, auth, proof, forward)
    app = web.Application(middlewares=[_refuse, broker.pass_on])
    app[TURNS] = Turns()
    app.router.add_post(ACQUIRE, broker.acquire)
    app.router.add_post(RENEW, broker.renew)
    app.router.add_post(RELEASE, broker.release)
    return app


def runner(app: web.Application) -> web.AppRunner:
    return web.AppRunner(app, access_log=None, handler_cancellation=True)


class _Broker:
    def __init__(self, claims: Claims, auth: Auth, proof: Proof, forward: Forward | None):
        self._claims = claims
        self._auth = auth
        self._proof = proof
        self._forward = forward
        self._waiting: Counter[str] = Counter()

    async def acquire(self, request: web.Request) -> web.Response:
        namespace, pool = request.match_info["namespace"], request.match_info["pool"]
        shown = token(request)
        async with turn(request, proved=self._auth.knows(shown)):
            holder = await self._auth.holder(shown, namespace, pool)
            ask = parse(await read_body(request), Acquire)
        self._claims.find_pool(namespace, pool)
        async with self._place(holder.name):
            return answer(await self._claims.acquire(namespace, pool, holder, ask))

    async def renew(self, request: web.Request) -> web.Response:
        async with turn(request):
            ask = parse(await self._batch(request), Renew)
        return answer(await self._claims.renew(ask))

    async def release(self, request: web.Request) -> web.Response:
        async with turn(request):
            ask = parse(await self._batch(request), Release)
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
        return await self._forward(request, body, wait_of(body) if handler == self.acquire else 0.0)

    @asynccontextmanager
    async def _place(self, holder: str) -> AsyncIterator[None]:
        if self._waiting[holder] >= WAITERS or self._waiting.total() >= ALL_WAITERS:
            mine = self._waiting[holder]
            raise Denied(
                429,
                "TooManyWaiters",
                f"{holder} waits in {mine} acquires of at most {WAITERS}, all callers in {self._waiting.total()} of at "
                f"most {ALL_WAITERS}; ask for several slots at once, or ask again later",
            )
        self._waiting[holder] += 1
        try:
            yield
        finally:
            self._waiting[holder] -= 1
            if not self._waiting[holder]:
                del self._waiting[holder]


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
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        problems = [str(p) for p in problems_of(error, model, {}, _PROBLEMS)]
        more = f"; and {error.error_count() - _PROBLEMS} more" if error.error_count() > _PROBLEMS else ""
        raise Denied(400, "Invalid", "; ".join(problems) + more) from error


def wait_of(body: bytes) -> float:
    """Seconds that an acquire has; none where it is wrong, which the leader will say."""
    try:
        return Acquire.model_validate_json(body, strict=True).wait_seconds
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
        raise  # nobody is there to be answered
    except Exception:  # whatever it was: callers read reasons
        log.exception("%s %s failed", request.method, request.path, extra=_about(request))
        text = "this is a fault of the broker, whose log says more; ask again, or tell whoever runs the operator"
        return _refusal(500, "InternalError", text)


def _about(request: web.Request) -> dict[str, Mapping[str, str]]:
    """The object that a call names."""
    for kind, name in (("EmulatorPool", "pool"), ("TrainingRun", "run")):
        if name in request.match_info:
            return ref(kind, request.match_info["namespace"], request.match_info[name])
    return {}
