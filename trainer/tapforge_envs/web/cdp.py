"""A client of the Chrome DevTools Protocol: one websocket to a browser, one `Session` per page.

Rules, in order:
1. Every call has a deadline; a call without an answer by then raises TimeoutError and is never sent again.
2. When the browser or a page is gone, calls in flight and later ones raise `Gone` at once, with what is known of why.
3. What the browser refuses is a `CdpError` with its words.
Events go to the listener of their session, in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import aiohttp

#: bytes of one message; a screenshot in base64 is far smaller
_MAX_MESSAGE = 64 * 1024 * 1024

Listener = Callable[[str, dict[str, Any]], None]


class CdpError(Exception):
    """The browser refuses a call."""


class Gone(CdpError):
    """The browser or the page does not exist any more, or its connection broke."""


class Connection:
    """The websocket. `closed` is set when it is over, for whatever reason."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        self._sessions: dict[str, Session] = {}
        self._posts: set[asyncio.Task[None]] = set()
        self._why = "the browser's connection is closed"
        self.closed = asyncio.Event()
        self._reader = asyncio.create_task(self._read(), name="read a browser's answers")

    @classmethod
    async def open(
        cls, http: aiohttp.ClientSession, url: str, seconds: float, max_message: int = _MAX_MESSAGE
    ) -> Connection:
        async with asyncio.timeout(seconds):
            return cls(await http.ws_connect(url, max_msg_size=max_message, autoping=True))

    async def call(
        self, method: str, params: dict[str, Any] | None = None, *, seconds: float, session: str = ""
    ) -> dict[str, Any]:
        if self.closed.is_set():
            raise Gone(f"{method}: {self._why}")
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (session, answer)
        try:
            async with asyncio.timeout(seconds):
                await self._send(number, method, params, session)
                return await answer
        except TimeoutError as error:
            raise TimeoutError(f"{method} has no answer within {seconds:g} s") from error
        finally:
            self._waiting.pop(number, None)

    def post(self, method: str, params: dict[str, Any], session: str) -> None:
        """Sends a call without waiting for its answer."""

        async def send() -> None:
            if not self.closed.is_set():
                await self._send(next(self._numbers), method, params, session)

        task = asyncio.create_task(send())
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    def attach(self, id: str) -> Session:
        return self._sessions.setdefault(id, Session(self, id))

    def lose(self, session: str, why: str) -> None:
        """The page of a session is gone."""
        self._sessions.pop(session, None)
        for of, answer in list(self._waiting.values()):
            if of == session and not answer.done():
                answer.set_exception(Gone(why))

    async def close(self) -> None:
        self._end("the browser was closed")
        await self._socket.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, *self._posts, return_exceptions=True)

    async def _send(self, number: int, method: str, params: dict[str, Any] | None, session: str) -> None:
        message = {"id": number, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        try:
            await self._socket.send_str(json.dumps(message))
        except (aiohttp.ClientError, OSError) as error:
            self._end(f"the browser's connection broke: {error}")
            raise Gone(f"{method}: {self._why}") from error

    async def _read(self) -> None:
        why = "the browser closed the connection"
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._take(json.loads(message.data))
                elif message.type is aiohttp.WSMsgType.ERROR:
                    why = f"the browser's connection broke: {self._socket.exception()}"
        except ValueError as error:
            why = f"the browser sent what is not JSON, or not a message of the protocol: {error}"
        finally:
            self._end(why)

    def _take(self, message: Any) -> None:
        """Raises ValueError for what is neither an answer nor an event."""
        match message:
            case {"id": int(number), **rest}:
                _, answer = self._waiting.get(number, ("", None))
                if answer is None or answer.done():
                    return
                match rest:
                    case {"error": {"message": str(words)}}:
                        answer.set_exception(CdpError(words))
                    case {"error": wrong}:
                        answer.set_exception(CdpError(f"{wrong!r:.300}"))
                    case {"result": dict(result)}:
                        answer.set_result(result)
                    case _:
                        answer.set_exception(CdpError(f"the answer's result is not an object: {message!r:.300}"))
            case {"method": str(method), **rest}:
                session = self._sessions.get(str(rest.get("sessionId", "")))
                params = rest.get("params", {})
                if session is not None and isinstance(params, dict):
                    session.hear(method, params)
            case {"id": _}:
                pass
            case _:
                raise ValueError(f"no message: {message!r:.300}")

    def _end(self, why: str) -> None:
        if self.closed.is_set():
            return
        self._why = why
        self.closed.set()
        for session in list(self._sessions.values()):
            session.lose(why)
        for _, answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(Gone(why))


class Session:
    """One page. `gone` says why it is no more; None while it lives."""

    def __init__(self, connection: Connection, id: str) -> None:
        self.connection = connection
        self.id = id
        self.gone: str | None = None
        self.listener: Listener = lambda method, params: None

    async def call(self, method: str, params: dict[str, Any] | None = None, *, seconds: float) -> dict[str, Any]:
        if self.gone is not None:
            raise Gone(f"{method}: {self.gone}")
        return await self.connection.call(method, params, seconds=seconds, session=self.id)

    def post(self, method: str, params: dict[str, Any]) -> None:
        if self.gone is None:
            self.connection.post(method, params, self.id)

    def hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Inspector.targetCrashed":
            self.lose("the page crashed")
        elif method == "Inspector.detached":
            self.lose(f"the page is gone: {params.get('reason', 'closed')}")
        else:
            self.listener(method, params)

    def lose(self, why: str) -> None:
        if self.gone is None:
            self.gone = why
            self.connection.lose(self.id, why)
