"""A page in the browser that shows phones and takes clicks, drags, keys and typing: a person plays a task, sees its
score, and keeps the episode or discards it.

- The page acts on phones, so it answers its own pages alone: a Host that isn't its own name (a name that was rebound
  to this address), an Origin of another site, or a request that the browser marks as another site's gets 403. On other
  addresses than this machine's own it needs a token. It may not be framed, and it loads nothing from elsewhere.
- What changes a phone is a POST of JSON. An action is one of `protocol.Action`, in relative coordinates.
- The state is asked for with the key of what was seen last, and answered when it is another one, or after `_WAIT`.
- One page plays on a phone at a time (`page_lock.py`). When its browser is closed, the phone is given back and what was
  played is forgotten. A page that shows one phone keeps the others that it plays on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from importlib.resources import files
from typing import Annotated, Any, Final, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import protocol as p
from ..serving.claims import Refused
from ..serving.http import Handler, words
from ..serving.page_token import PageToken
from ..serving.same_site import LOOPBACK, check_same_site, seal
from .episode import CannotKeep, EpisodeWriter, HumanAttempt
from .page_lock import PageLock
from .phone import PagePhone, StartRequest

#: seconds after which a state that has not changed is answered
_WAIT: Final = 10.0
#: seconds after which a page that isn't heard of is gone
TIMEOUT: Final = 30.0
#: seconds between two looks at a phone
_LOOK: Final = 0.08
#: seconds between two looks for pages that are gone
_WATCH: Final = 0.5
#: requests that may wait at a time; more are answered at once
_MAX_WAITING: Final = 64
#: bytes of a request's body
_MAX_REQUEST: Final = 128 * 1024
#: by which a page of a browser says which one it is, and characters of its name
PAGE_HEADER: Final = "Tapforge-Page"
_MAX_NAME: Final = 64
_COOKIE: Final = "tapforge_phones"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ActRequest(_Body):
    action: Annotated[p.Action, Field(discriminator="type")]
    screen: tuple[int, int] | None = Field(None, description="width and height of the picture that was touched")


class FinishRequest(_Body):
    status: Literal["success", "failure", "infeasible"] | None = None
    answer: str | None = Field(None, max_length=10_000)


class KeepRequest(_Body):
    outcome: Literal["success", "failure"] | None = Field(None, description="where nothing judged it")


_Model = TypeVar("_Model", bound=BaseModel)


class Page:
    """`names`: hosts by which the page may be called, beside this machine's own; None: any, which needs a token.
    `writer`: None where nothing is written down. `timeout`: seconds after which a page that isn't heard of is
    gone."""

    def __init__(
        self,
        phones: Sequence[PagePhone],
        names: Sequence[str] | None,
        stopping: asyncio.Event,
        writer: EpisodeWriter | None = None,
        token: str = "",
        timeout: float = TIMEOUT,
    ):
        if names is None and not token:
            raise ValueError("a page that may be called by any name needs a token")
        self._phones = list(phones)
        self._locks = [PageLock(timeout) for _ in self._phones]
        self._names = None if names is None else {name.strip("[]").lower() for name in (*LOOPBACK, *names)}
        self._stopping, self._writer, self._token = stopping, writer, PageToken(token, _COOKIE)
        self._keeping = asyncio.Lock()
        self._waiting = 0
        #: phones that are being given back
        self._leaving = set[asyncio.Task[None]]()
        folder = files("tapforge_envs.people")
        script = (folder / "page.js").read_text(encoding="utf-8")
        self._html = (folder / "page.html").read_text(encoding="utf-8").replace("{{script}}", script)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=_MAX_REQUEST)
        app.cleanup_ctx.append(self._watched)
        app.router.add_get("/", self.html)
        app.router.add_get("/api/catalog", self.catalog)
        at = "/api/phones/{phone}"
        app.router.add_get(at, self.state)
        app.router.add_get(f"{at}/catalog", self.tasks)
        app.router.add_get(f"{at}/frame", self.frame)
        for name in ("act", "task", "finish", "keep", "discard", "take"):
            app.router.add_post(f"{at}/{name}", getattr(self, name))
        return app

    # --- what is shown ---

    async def html(self, request: web.Request) -> web.Response:
        if (opened := self._token.opened(request)) is not None:
            return opened
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data:; "
            "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )
        return web.Response(
            text=self._html.replace("{{nonce}}", nonce),
            content_type="text/html",
            headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"},
        )

    async def catalog(self, request: web.Request) -> web.Response:
        return web.json_response({"phones": [phone.name for phone in self._phones], "keeps": self._writer is not None})

    async def tasks(self, request: web.Request) -> web.Response:
        return web.json_response(await self._phones[self._number(request)].catalog())

    async def state(self, request: web.Request) -> web.Response:
        number, page, seen = self._number(request), _page_of(request), request.query.get("seen", "")
        with ExitStack() as there:
            for lock in self._locks:
                there.enter_context(lock.request(page))
            state = self._state(number, page)
            if state["seen"] == seen and self._waiting < _MAX_WAITING:
                self._waiting += 1
                try:
                    now = asyncio.get_running_loop().time
                    end = now() + _WAIT
                    while state["seen"] == seen and now() < end and not self._stopping.is_set():
                        await asyncio.sleep(_LOOK)
                        state = self._state(number, page)
                finally:
                    self._waiting -= 1
        return web.json_response(state)

    async def frame(self, request: web.Request) -> web.Response:
        if (frame := self._phones[self._number(request)].frame()) is None:
            raise Refused(404, "there is no picture of this phone before a task is started")
        return web.Response(body=frame.data, content_type=frame.media_type)

    def _state(self, number: int, page: str) -> dict[str, Any]:
        """`seen` is its key."""
        phone, owner = self._phones[number], self._locks[number].owner
        attempt = phone.attempt
        shown = {
            **phone.state(),
            "held": owner is not None and owner != page,
            "keep": attempt.told() if attempt is not None and self._writer is not None else None,
        }
        seen = hashlib.blake2b(json.dumps(shown, sort_keys=True).encode(), digest_size=12).hexdigest()
        return {**shown, "seen": seen}

    # --- what is done ---

    async def act(self, request: web.Request) -> web.Response:
        body = await _read(request, ActRequest)
        number, page = self._admitted(request)
        frame = self._phones[number].frame()
        if body.screen is not None and frame is not None and body.screen != (frame.width, frame.height):
            raise Refused(
                409,
                f"the screen is {frame.width}x{frame.height} pixels now and was {body.screen[0]}x{body.screen[1]} when "
                "it was touched: look at it again",
            )
        with self._locks[number].request(page):
            await self._phones[number].act(body.action)
        return web.json_response(self._state(number, page))

    async def task(self, request: web.Request) -> web.Response:
        body = await _read(request, StartRequest)
        number, page = self._number(request), _page_of(request)
        lock, phone = self._locks[number], self._phones[number]
        if not body.take:
            lock.admit(page)
        # A free phone is this page's from now on: no other page interferes while it is prepared.
        free, before = lock.owner is None, phone.attempt
        if free:
            lock.take(page)
        with lock.request(page):
            try:
                await phone.start(body)
            except Refused:
                if phone.attempt is None and (free or before is not None):
                    lock.release()
                raise
            if not free:
                lock.take(page)
        return web.json_response(self._state(number, page))

    async def finish(self, request: web.Request) -> web.Response:
        body = await _read(request, FinishRequest)
        if (body.answer is None) == (body.status is None):
            raise Refused(400, "give a status, or an answer")
        number, page = self._admitted(request)
        action: p.Answer | p.Terminate
        if body.answer is not None:
            action = p.Answer(text=body.answer)
        else:
            assert body.status is not None
            action = p.Terminate(status=body.status)
        with self._locks[number].request(page):
            await self._phones[number].finish(action)
        return web.json_response(self._state(number, page))

    async def keep(self, request: web.Request) -> web.Response:
        body = await _read(request, KeepRequest)
        number, page = self._admitted(request)
        attempt = self._phones[number].attempt
        if self._writer is None:
            raise Refused(409, "nothing is kept here: the server was started without a folder for it")
        if attempt is None:
            raise Refused(409, "no task was played; start one")
        with self._locks[number].request(page):
            async with self._keeping:
                await self._keep(self._writer, attempt, body)
            if self._phones[number].attempt is attempt:
                self._locks[number].release()
        return web.json_response(self._state(number, page))

    async def _keep(self, writer: EpisodeWriter, attempt: HumanAttempt, body: KeepRequest) -> None:
        try:
            attempt.kept = await writer.keep(attempt.played(None if body.outcome is None else p.Outcome(body.outcome)))
        except CannotKeep as error:
            raise Refused(409, str(error)) from error

    async def discard(self, request: web.Request) -> web.Response:
        await _read(request, _Body)
        number, page = self._admitted(request)
        with self._locks[number].request(page):
            await self._phones[number].leave()
            self._locks[number].release()
        return web.json_response(self._state(number, page))

    async def take(self, request: web.Request) -> web.Response:
        """The phone as it is, from another page."""
        await _read(request, _Body)
        number, page = self._number(request), _page_of(request)
        if self._locks[number].owner is not None:
            self._locks[number].take(page)
        return web.json_response(self._state(number, page))

    # --- whose browser was closed ---

    async def _watched(self, app: web.Application) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        yield
        watching.cancel()
        await asyncio.wait([watching, *self._leaving])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH)
            for phone, lock in zip(self._phones, self._locks, strict=True):
                if lock.expired():
                    lock.release()
                    leaving = asyncio.create_task(phone.leave())
                    self._leaving.add(leaving)
                    leaving.add_done_callback(self._leaving.discard)

    # --- who may ask ---

    def _number(self, request: web.Request) -> int:
        number = request.match_info["phone"]
        if not (number.isascii() and number.isdecimal() and len(number) < 6 and int(number) < len(self._phones)):
            raise Refused(404, f"no phone {number[:40]!r}; there are 0 to {len(self._phones) - 1}")
        return int(number)

    def _admitted(self, request: web.Request) -> tuple[int, str]:
        """The phone, and the page that plays on it."""
        number, page = self._number(request), _page_of(request)
        self._locks[number].admit(page)
        return number, page

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._admit(request)
            answer = await handler(request)
        except Refused as error:
            reason = {"reason": error.reason} if error.reason else {}
            answer = web.json_response({"error": str(error), **reason}, status=error.status)
        except web.HTTPException as error:
            answer = web.json_response(
                {"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status
            )
        answer.headers["Cache-Control"] = "no-store"
        seal(answer)
        return answer

    def _admit(self, request: web.Request) -> None:
        """Raises Refused for what another site's page asks."""
        check_same_site(request, self._names)
        host = request.headers.get("Host", "").lower()
        origin = request.headers.get("Origin")
        # https: a proxy in front that speaks TLS.
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise Refused(403, f"a page of {origin[:200]!r} asks; only the phones' own page may")
        self._token.admit(request)


def _page_of(request: web.Request) -> str:
    return request.headers.get(PAGE_HEADER, "")[:_MAX_NAME]


async def _read(request: web.Request, model: type[_Model]) -> _Model:
    if request.content_type != "application/json":
        raise Refused(
            415, f"{request.path}: the body has to be application/json, and is {request.content_type[:100]!r}"
        )
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        raise Refused(400, f"{request.path} can't read its body: {words(error)}") from error
