"""Calls to the API server: plain dicts in, plain dicts out, over one connection pool.

Promises:
1. Every call ends within its deadline, retries included.
2. What was certainly not carried out (429, a refused connection) is sent again while there is time, after the pause
   that the server asked for. Reads and deletes are sent again after any passing trouble.
3. A create or patch whose fate is unknown (connection lost, 5xx, deadline) is never sent again: it raises an `ApiError`
   with `unclear`, and the caller looks at the object.
4. Calls that the API server refused for their credentials (401) are sent again once, where there are others meanwhile.
5. At most `in_flight` calls are under way at once; the others wait in their order. An eighth of them is not for creates
   in bulk: a thousand of those delay no other call.

Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import aiohttp
import orjson

from tapforge_operator.kube.credentials import Access, Credentials, NoCluster

if TYPE_CHECKING:
    import kopf

Object = dict[str, Any]

MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
#: called after each attempt: verb, status (0: no answer), seconds
Watcher = Callable[[str, int, float], None]

_PAGE = 500
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0


class ApiError(Exception):
    """The API server said no, or nothing. `status` is 0 where there was no answer."""

    def __init__(self, what: str, status: int, reason: str, message: str, retry_after: float = 0.0):
        super().__init__(f"{what}: {status or 'no answer'} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        #: it may have been carried out
        self.unclear = status == 0 or status >= 500

    @property
    def passing(self) -> bool:
        """The same call may succeed later although nothing was changed."""
        return self.status in (0, 429) or self.status >= 500


class NotSent(ApiError):
    """It was not sent: no cluster, no connection or no time left."""

    def __init__(self, what: str, message: str):
        super().__init__(what, 0, "NoConnection", message)
        self.unclear = False


def path(kind: str, namespace: str = "", name: str = "", sub: str = "", group: str = "") -> str:
    """`path("pods", "default", "a")`; `group` is "apps/v1" and the like, "" for the core group. Names are escaped, so
    that none of them can reach another object. Raises ApiError 404 for what nothing can be called: others may write it
    into a reference, and the API server would normalise it into another path."""
    for part in (namespace, name, sub):
        if part in (".", ".."):
            raise ApiError(f"{kind} {namespace}/{name}", 404, "NotFound", f"no object can be called {part!r}")
    parts = ["/apis/" + group if group else "/api/v1"]
    parts += [f"namespaces/{quote(namespace, safe='')}"] if namespace else []
    parts += [kind, *(quote(part, safe="") for part in (name, sub) if part)]
    return "/".join(parts)


class Client:
    """`async with Client(credentials) as client`."""

    def __init__(
        self,
        credentials: Credentials | kopf.ConnectionInfo,
        in_flight: int = 64,
        deadline: float = 10.0,
        watcher: Watcher | None = None,
    ):
        """A `ConnectionInfo` is for credentials that stay as they are."""
        if not isinstance(credentials, Credentials):
            credentials = Credentials(Access.of(credentials))
        self._credentials = credentials
        self._base = credentials.server
        self._slots = asyncio.Semaphore(in_flight)
        self._bulk = asyncio.Semaphore(max(1, in_flight - in_flight // 8))
        self._deadline = deadline
        self._watcher = watcher
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"User-Agent": "tapforge-operator", "Accept": "application/json"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    # --- verbs --------------------------------------------------------------------------------------------------------

    async def get(self, path: str, deadline: float | None = None) -> Object:
        return await self._call("get", "GET", path, deadline=deadline, again=True)

    async def pages(
        self, path: str, selector: str = "", *, deadline: float = 60.0, size: int = _PAGE
    ) -> AsyncIterator[tuple[list[Object], str]]:
        """All objects that the label selector takes, page by page, so that twenty thousand are never there at once; and
        the list's resourceVersion with each page. Each page has the deadline. Raises ApiError 410 when the list took so
        long that the server forgot its version: begin again."""
        token = ""
        while True:
            query = {"limit": str(size)}
            query |= {"labelSelector": selector} if selector else {}
            query |= {"continue": token} if token else {}
            page = await self._call("list", "GET", path, query=query, deadline=deadline, again=True)
            about = page.get("metadata") or {}
            if not isinstance(page.get("items"), list) or "resourceVersion" not in about:
                raise _nonsense(f"LIST {path}", b"an object that is not a list")
            yield page["items"], about["resourceVersion"]
            token = about.get("continue") or ""
            if not token:
                return

    async def watch(
        self, path: str, selector: str = "", *, since: str, seconds: float = 270.0, silence: float = 100.0
    ) -> AsyncIterator[Object]:
        """What happens after that resourceVersion, as events, until the server ends the watch: after so many seconds at
        the latest. Not one of the calls that `in_flight` counts. Raises ApiError, also when the server was silent for
        too long (it sends bookmarks about once a minute) or says that the version is too old (410)."""
        query = {"watch": "1", "resourceVersion": since, "timeoutSeconds": f"{seconds:.0f}"}
        query |= {"allowWatchBookmarks": "true"} | ({"labelSelector": selector} if selector else {})
        what = f"WATCH {path}"
        timeout = aiohttp.ClientTimeout(total=seconds + silence, sock_read=silence)
        if self._session is None:
            raise RuntimeError("a Client is used inside `async with`")
        access = await self._access(what)
        try:
            async with self._session.get(
                self._base + path, params=query, headers=access.headers, timeout=timeout, **_connect(access)
            ) as response:
                if response.status == 401:  # the watch begins again, with other credentials if there are any
                    await self._credentials.renewed(access)
                if response.status >= 300:
                    raise _refusal(
                        what, response.status, await response.text(), response.headers.get("Retry-After", "")
                    )
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        event = _object(what, line)
                        said = event.get("object") or {}
                        if event.get("type") == "ERROR":
                            raise ApiError(what, said.get("code", 500), said.get("reason", ""), said.get("message", ""))
                        if "type" not in event or "resourceVersion" not in said.get("metadata", {}):
                            raise _nonsense(what, line)
                        yield event
        except (TimeoutError, aiohttp.ClientError) as error:
            raise ApiError(what, 0, "ConnectionLost", f"{type(error).__name__}: {error}") from error

    async def create(
        self,
        path: str,
        body: Object,
        deadline: float | None = None,
        *,
        dry_run: bool = False,
        strict: bool = False,
        bulk: bool = False,
    ) -> Object:
        """`dry_run`: the server says what it would say, and keeps nothing. `strict`: it refuses fields that it doesn't
        know, which it would leave out in silence. `bulk`: one of very many; the answer is the object's metadata."""
        query = ({"dryRun": "All"} if dry_run else {}) | ({"fieldValidation": "Strict"} if strict else {})
        return await self._call("create", "POST", path, body, deadline=deadline, query=query, bulk=bulk)

    async def patch(self, path: str, body: Object | list[Object], deadline: float | None = None) -> Object:
        """A merge patch, or a list: a JSON patch."""
        kind = JSON_PATCH if isinstance(body, list) else MERGE
        return await self._call("patch", "PATCH", path, body, kind, deadline=deadline)

    async def replace(self, path: str, body: Object, deadline: float | None = None) -> Object:
        return await self._call("update", "PUT", path, body, deadline=deadline)

    async def delete(self, path: str, body: Object | None = None, deadline: float | None = None) -> Object:
        """`body` is a DeleteOptions; with a precondition on the UID a repeated delete can't hit a successor."""
        return await self._call("delete", "DELETE", path, body, deadline=deadline, again=True)

    async def text(self, path: str, *, deadline: float | None = None, **params: str) -> str:
        """An answer that is not JSON: the log of a container."""
        said = await self._once("get", "GET", path, None, "", params, deadline or self._deadline)
        return said.decode("utf-8", "replace")

    # --- one call -----------------------------------------------------------------------------------------------------

    async def _call(
        self,
        verb: str,
        method: str,
        path: str,
        body: Object | list[Object] | None = None,
        content_type: str = "application/json",
        *,
        query: Mapping[str, str] | None = None,
        deadline: float | None = None,
        again: bool = False,
        bulk: bool = False,
    ) -> Object:
        end = time.monotonic() + (deadline or self._deadline)
        pause = _FIRST_PAUSE
        while True:
            try:
                left = end - time.monotonic()
                said = await self._once(verb, method, path, body, content_type, query or {}, left, bulk)
                return _object(f"{method} {path}", said)
            except ApiError as error:
                wait = max(error.retry_after, pause * random.uniform(0.5, 1.0))
                safe = error.status == 429 or isinstance(error, NotSent) or (again and error.passing)
                if not safe or time.monotonic() + wait >= end:
                    raise
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _access(self, what: str) -> Access:
        try:
            return await self._credentials.current()
        except NoCluster as error:
            raise NotSent(what, str(error)) from error

    async def _once(
        self,
        verb: str,
        method: str,
        path: str,
        body: Object | list[Object] | None,
        content_type: str,
        query: Mapping[str, str],
        deadline: float,
        bulk: bool = False,
    ) -> bytes:
        if self._session is None:
            raise RuntimeError("a Client is used inside `async with`")
        what = f"{method} {path}"
        status, began = 0, time.monotonic()
        sent = renewed = False
        try:
            lane = self._bulk if bulk else contextlib.nullcontext()
            async with asyncio.timeout(max(deadline, 0.001)), lane, self._slots:
                while True:
                    access = await self._access(what)
                    began, sent = time.monotonic(), True
                    async with self._session.request(
                        method,
                        self._base + path,
                        params=query,
                        data=None if body is None else orjson.dumps(body),
                        headers={**access.headers, "Content-Type": content_type or "application/json"}
                        | ({"Accept": _METADATA} if bulk else {}),
                        **_connect(access),
                    ) as response:
                        said = await response.read()
                        status = response.status
                    if status != 401 or renewed:
                        break
                    renewed, sent = True, False
                    if not await self._credentials.renewed(access):
                        break
        except TimeoutError as error:
            if not sent:
                raise NotSent(what, f"{deadline:g} s went by before it could be sent to the API server") from error
            raise ApiError(what, 0, "Deadline", f"no answer within {deadline:g} s") from error
        except (aiohttp.ClientConnectorError, aiohttp.ClientConnectorCertificateError) as error:
            raise NotSent(what, f"the API server at {self._base} can't be reached: {error}") from error
        except aiohttp.ClientError as error:
            raise ApiError(what, 0, "ConnectionLost", f"{type(error).__name__}: {error}") from error
        finally:
            if self._watcher is not None and (sent or status):
                self._watcher(verb, status, time.monotonic() - began)
        if status < 300:
            return said
        raise _refusal(what, status, said.decode("utf-8", "replace"), response.headers.get("Retry-After", ""))


def _connect(access: Access) -> dict[str, Any]:
    """How aiohttp gets to the API server; a new certificate is a new context, which gets connections of its own."""
    return {"ssl": access.ssl, "server_hostname": access.server_name, "proxy": access.info.proxy_url}


def _object(what: str, said: bytes) -> Object:
    """Raises ApiError: something between here and the API server may answer in its place."""
    try:
        found = orjson.loads(said)
    except ValueError as error:
        raise _nonsense(what, said) from error
    if not isinstance(found, dict):
        raise _nonsense(what, said)
    return found


def _nonsense(what: str, said: bytes) -> ApiError:
    text = said[:200].decode("utf-8", "replace")
    return ApiError(what, 0, "NotKubernetes", f"no answer of an API server: {text!r}; is a proxy in between?")


def _refusal(what: str, status: int, text: str, retry_after: str) -> ApiError:
    try:
        said = orjson.loads(text)
    except ValueError:
        said = {}
    if not isinstance(said, dict):
        said = {}
    seconds = float(retry_after) if retry_after.isdigit() else 0.0
    return ApiError(what, status, str(said.get("reason", "")), str(said.get("message", text[:500])), seconds)
