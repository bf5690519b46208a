"""HTTP as every client of an environment server speaks it.

1. Every exchange ends within its deadline (seconds), or is a fault with reason `deadline`.
2. No answer is read beyond a limit (bytes), no redirect is followed, nothing is decompressed.
3. Nothing is ever sent twice: a server of others may execute it twice.
4. Errors name the slot, the call and what was seen.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from yarl import URL

from ..protocol import EnvironmentFault, Reason

#: bytes of an answer, unless a client knows better
LIMIT: Final = 32 * 1024 * 1024
_JSON: Final = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that one call may take. Health is short: it only asks whether a server is there."""

    health: float = 5.0
    reset: float = 60.0
    step: float = 30.0
    evaluate: float = 30.0
    close: float = 5.0


class ConnectionBroke(EnvironmentFault):
    """The connection ended before the answer did. The call may have been carried out."""


def new_session(traces: list[aiohttp.TraceConfig] | None = None) -> aiohttp.ClientSession:
    """One session per process that plays: connections are reused, and the number of phones is the only limit.
    `traces`: observers of its requests."""
    # Servers in Python close a connection that was idle for five seconds; a POST that meets the closing is lost.
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=4)
    # Deadlines are set per exchange; the session's own would only hide which call ran out of time.
    session = aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        trace_configs=traces,
    )
    # A GET whose connection broke would be sent again unseen, and servers of others judge and build by GET. There is no
    # public switch; a test sees when this one is gone.
    session._retry_connection = False
    return session


class HttpServer:
    """The server of one phone. The session belongs to the caller."""

    def __init__(self, base: str, session: aiohttp.ClientSession, slot: str, limit: int = LIMIT):
        """`base`: URL that paths are appended to. `slot`: by which errors name it. `limit`: bytes of an answer."""
        self._base = URL(base)
        self._urls: dict[str, URL] = {}
        self._session = session
        self._limit = limit
        self.slot = slot

    async def exchange(
        self,
        call: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        seconds: float,
        headers: Mapping[str, str] | None = None,
        expected: Mapping[str, str] | None = None,
        into: bytearray | None = None,
    ) -> tuple[int, bytes]:
        """(status, body), whatever the status is. `call` is for errors; `body` is sent as JSON, with GET too;
        `expected`: headers that the answer has so or not at all. `into`: what a large answer is collected in, instead
        of the body, which is empty then: putting 30 MB together at the end would hold up the loop.

        Raises EnvironmentFault when there is no answer, too late a one (reason deadline), too long a one or another
        call's, and ConnectionBroke when it breaks off."""
        data = None if body is None else json.dumps(body).encode()
        sent = {**(_JSON if data is not None else {}), **(headers or {})}
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(
                    method, self._url(path), params=query, data=data, headers=sent, allow_redirects=False
                ) as response,
            ):
                for name, value in (expected or {}).items():
                    if (found := response.headers.get(name, value)) != value:
                        raise self.fault(call, f"answered with {name} {found[:200]!r} instead of {value!r}")
                if into is None:
                    return response.status, await self._read(call, response)
                await self._collect(call, response, into)
                return response.status, b""
        except TimeoutError as error:
            raise self.fault(call, f"no answer within {seconds:g} s", Reason.DEADLINE) from error
        except aiohttp.ClientConnectorError as error:
            raise self.fault(call, f"no server answers: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            what = f"{self.slot}: {call}: connection broke: {type(error).__name__}: {error}"
            raise ConnectionBroke(what) from error

    async def json(
        self,
        call: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The value that a 200 answer holds. Raises EnvironmentFault for any other status and for what is not JSON."""
        status, answer = await self.exchange(
            call, method, path, query=query, body=body, seconds=seconds, headers=headers
        )
        if status != 200:
            raise self.fault(call, f"answered {status}: {short(answer)}")
        return self.parsed(call, answer)

    def parsed(self, call: str, answer: bytes) -> Any:
        """The value that a body of JSON holds. Raises EnvironmentFault for anything else."""
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self.fault(call, f"answer is not JSON: {short(answer)}") from error

    def fault(self, call: str, what: str, reason: Reason = Reason.ENV_ERROR) -> EnvironmentFault:
        return EnvironmentFault(f"{self.slot}: {call}: {what}", reason)

    def _url(self, path: str) -> URL:
        path = path.lstrip("/")
        if (url := self._urls.get(path)) is None:
            url = self._urls[path] = self._base.with_path(f"{self._base.path.rstrip('/')}/{path}")
        return url

    async def _read(self, call: str, response: aiohttp.ClientResponse) -> bytes:
        length = response.content_length
        if length is not None:
            if length > self._limit:
                raise self.fault(call, f"answer of {length} bytes is longer than {self._limit} bytes")
            return await response.read()
        body = bytearray()
        await self._collect(call, response, body)
        return bytes(body)

    async def _collect(self, call: str, response: aiohttp.ClientResponse, body: bytearray) -> None:
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self._limit:
                raise self.fault(call, f"answer is longer than {self._limit} bytes")


def short(body: bytes) -> str:
    """The beginning of an answer, for errors."""
    text = body[:300].decode("utf-8", "replace")
    return text if len(body) <= 300 else text + "..."
