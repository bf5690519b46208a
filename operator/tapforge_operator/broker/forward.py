"""What a broker that stands by does with its callers: it passes them on to the leader, once.

1. A request goes on to the leader as it is (path, body, Authorization), over TLS that is checked against the broker's
   own authority. One that was passed on before is not passed on again: there is one hop, or `NotLeading` (503).
2. It ends with its caller: who disconnects while it waits is disconnected from the leader as well, which then leaves
   nothing claimed.
3. It has an end: what the caller itself is ready to wait, and `MARGIN` seconds. A leader that can't be reached, that
   is silent for longer, or that is none any more by the Lease, is 503 too; then nobody knows whether the request was
   carried out, and it may be sent again, as always.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import Final

import aiohttp
from aiohttp import web
from yarl import URL

from .writes import NotLeading

log = logging.getLogger(__name__)

#: identity of the process that passed a request on, and the address of the caller whose it is
FORWARDED: Final = "Tapforge-Forwarded"
FORWARDED_FOR: Final = "Tapforge-Forwarded-For"
#: what answers take beyond the caller's wait: tokens are checked, claims and status written
MARGIN: Final = 30.0
#: requests under way at once
AT_ONCE: Final = 4096
_CONNECT: Final = 3.0
#: between two looks whether the leader still leads
_LOOK: Final = 1.0
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
        """`leader`: host:port of the leader's broker now, "" for nobody knows; `name`: what its certificate is for;
        `done` is called with whether the leader answered."""
        self._leader = leader
        self._identity = identity
        self._name = name
        self._trust = trust
        self._done = done
        self._under_way = 0
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def __call__(self, request: web.Request, body: bytes, wait: float) -> web.Response:
        """The leader's answer. `wait`: seconds that the caller has. Raises NotLeading."""
        address = self._leader()
        if not address or FORWARDED in request.headers or self._under_way >= AT_ONCE:
            raise NotLeading
        self._under_way += 1
        call = asyncio.create_task(self._send(address, request, body))
        answered = False
        try:
            end = time.monotonic() + wait + MARGIN
            while not call.done():
                await asyncio.wait({call}, timeout=_LOOK)
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
            self._under_way -= 1
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
