"""Asks endpoints over HTTP.

- Questions at once are bounded per url. A request waits for its place, its connection and its answer, each with an end,
  and all of them, retries included, end at the caller's deadline.
- Asked again, after a pause that doubles and is drawn at random below it: what didn't connect or didn't answer in time,
  429 and errors of the server until the deadline; an answer that isn't what it should be a few times. `Retry-After`
  holds for every question of the endpoint.
- Not asked again: what is refused (a key, an image, a model), another model's answer, a redirection.
- A model that the run serves has several addresses, which may change: the one with the fewest questions is asked, and
  where there is none for now, it is waited for.
- An answer is read up to `MAX_ANSWER` bytes. Errors name the endpoint without its user and query, quote at most a line
  of what came, and never hold the key.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import aiohttp
from yarl import URL

from tapforge_api.judge import ApiKey, JudgeModel

from .openai_chat import WrongAnswer
from .usage import Usage
from .verdicts import shortened
from .waiting import Waiting

T = TypeVar("T")

MAX_ANSWER: Final = 1024 * 1024
#: how often an answer may be wrong before the question is given up
_WRONG: Final = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
#: asked again until the deadline; other refusals stay
_AGAIN: Final = frozenset({408, 425, 429})
#: refusals of what is asked: too long, too many screens, or what a filter won't have
_OF_QUESTION: Final = frozenset({"status 400", "status 413", "status 422"})
_EXCERPT: Final = 200


class EndpointError(Exception):
    """No answer. The message names the endpoint, what came, and the remedy. `permanent`: it would be the same again;
    `of_question`: for this question, and another one may be answered."""

    def __init__(self, message: str, permanent: bool = False, of_question: bool = False):
        super().__init__(message)
        self.permanent, self.of_question = permanent, of_question


#: what becomes of a request that fails: its kind, for counting, and words
Failing: TypeAlias = Callable[[str, str], None]


class _Failed(Exception):
    """One request failed. `after`: seconds until it may be sent again, as the endpoint says."""

    def __init__(
        self, kind: str, message: str, permanent: bool = False, wrong: bool = False, after: float | None = None
    ):
        super().__init__(message)
        self.kind, self.permanent, self.wrong, self.after = kind, permanent, wrong, after


@dataclass(frozen=True, slots=True)
class Served:
    """Where servers of one of `spec.models` answer, and what they ask for. `failure`: why none ever will."""

    urls: tuple[str, ...]
    token: str = field(repr=False)
    failure: str = ""


class Endpoints:
    """The endpoints of one event loop; judges that share one share its places. Close it."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """`say`: which one is waited for, for people."""
        self._say = say
        self._session: aiohttp.ClientSession | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._closed = False

    def of(self, model: JudgeModel) -> Endpoint:
        if model.url is None:
            endpoint = self._of_run(model.model)
        else:
            endpoint = self._endpoints.setdefault(model.url, Endpoint(model.url, self._opened, say=self._say))
        endpoint.limit = min(endpoint.limit, model.concurrency)
        return endpoint

    def serve(self, models: Mapping[str, Served]) -> None:
        """From here on the run's own models, by name, are asked there."""
        for name, served in models.items():
            self._of_run(name).served = served

    def _of_run(self, name: str) -> Endpoint:
        key = f"spec.models[{name}]"
        if key not in self._endpoints:
            self._endpoints[key] = Endpoint("", self._opened, key, self._say)
        return self._endpoints[key]

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("a question was asked of endpoints that are closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)
        return self._session

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None


class Endpoint:
    def __init__(
        self,
        url: str,
        session: Callable[[], aiohttp.ClientSession],
        shown: str = "",
        say: Callable[[str], None] | None = None,
    ):
        """`shown`: what it is called, of a model that the run serves; `say`: as of `Endpoints`."""
        self.url = url.rstrip("/")
        self.shown = shown or public(self.url)
        self._waiting = Waiting(self.shown, say)
        #: of such a model, once its servers answer
        self.served: Served | None = None
        #: questions under way by address
        self._asked: Counter[str] = Counter()
        #: questions at once; what counts is what it is at the first question
        self.limit = 1_000_000
        self._session = session
        self._places: asyncio.Semaphore | None = None
        #: loop time before which nothing is sent, and why
        self._not_before, self._put_off = 0.0, ""

    async def ask(
        self,
        path: str,
        body: Callable[[], bytes],
        headers: Mapping[str, str],
        model: JudgeModel,
        deadline: float,
        read: Callable[[Any], T],
        usage: Usage,
        secret: str | None = None,
        failing: Failing | None = None,
    ) -> T:
        """What `read` makes of the answer; it may raise WrongAnswer. `body` is called in a thread, once it is the
        question's turn: encoded screens are large. `deadline`: loop time. `failing` is called for each request that
        fails, also if the next one doesn't. Raises EndpointError."""
        loop = asyncio.get_running_loop()
        what = f"{model.name} at {self.shown}{path} (model {model.model})"
        pause, wrong, last = _FIRST_PAUSE, 0, ""
        while True:
            sent = False
            try:
                async with asyncio.timeout_at(deadline), self._place():
                    sent = True
                    found = await self._once(path, body, headers, model, read, usage, secret)
                self._waiting.answered()
                return found
            except TimeoutError:
                turn = self._put_off if self._not_before > deadline else "other questions were waiting"
                why = "no answer came" if sent else f"it wasn't its turn: {turn}"
                if sent:
                    self._waiting.failed(why, loop.time(), 0.0)
                if sent and failing is not None:
                    failing("slow", why)
                raise EndpointError(f"{what}: no usable answer before the deadline; last: {last or why}") from None
            except _Failed as failed:
                last, wrong = str(failed), wrong + failed.wrong
                if failing is not None:
                    failing(failed.kind, last)
                if failed.permanent or wrong >= _WRONG:
                    again = "" if failed.permanent else f", {wrong} times"
                    raise EndpointError(
                        f"{what}: {last}{again}", failed.permanent, failed.kind in _OF_QUESTION
                    ) from failed
                wait = random.uniform(0, pause) if failed.after is None else failed.after
                pause = min(2 * pause, _LONGEST_PAUSE)
                if failed.after is not None:
                    self._not_before = max(self._not_before, loop.time() + failed.after)
                    self._put_off = f"the endpoint asked for a pause of {failed.after:g} s: {last}"
                given_up = loop.time() + wait >= deadline
                self._waiting.failed(last, loop.time(), 0.0 if given_up else deadline - loop.time())
                if given_up:
                    raise EndpointError(f"{what}: {last}; no time is left to ask again before the deadline") from failed
            await asyncio.sleep(wait)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places, once the endpoint may be asked."""
        loop = asyncio.get_running_loop()
        if self._places is None:
            self._places = asyncio.Semaphore(self.limit)
        async with self._places:
            while (left := self._not_before - loop.time()) > 0:  # noqa: ASYNC110 - it may be put off meanwhile
                await asyncio.sleep(left)
            yield

    async def _once(
        self,
        path: str,
        body: Callable[[], bytes],
        headers: Mapping[str, str],
        model: JudgeModel,
        read: Callable[[Any], T],
        usage: Usage,
        secret: str | None,
    ) -> T:
        data = await asyncio.to_thread(body)
        url, headers = self._address(headers)
        self._asked[url] += 1
        began, good = time.monotonic(), False
        limits = aiohttp.ClientTimeout(
            total=model.request_seconds, connect=model.connect_seconds, sock_connect=model.connect_seconds
        )
        try:
            async with self._session().post(
                url + path,
                data=data,
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **headers},
                timeout=limits,
                allow_redirects=False,
            ) as response:
                found = read(await self._read(response, secret))
            good = True
            return found
        except WrongAnswer as error:
            raise _Failed("answer", _hidden(str(error), secret), permanent=error.permanent, wrong=True) from error
        except (aiohttp.ServerTimeoutError, TimeoutError) as error:
            raise _Failed("slow", f"no answer within {model.request_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            words = shortened(_hidden(f"{type(error).__name__}: {error}", secret), _EXCERPT)
            raise _Failed("unreachable", f"can't be reached: {words}; is it running, and is the url right?") from error
        finally:
            self._asked[url] -= 1
            usage.sent(time.monotonic() - began, failed=not good)

    def _address(self, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        """Where to ask now, and what to send with it. Raises _Failed."""
        if self.url:
            return self.url, headers
        served = self.served
        if served is not None and served.failure:
            raise _Failed("unreachable", served.failure, permanent=True)
        if served is None or not served.urls:
            raise _Failed("unreachable", "none of its servers answers now; they are started again")
        url = min(served.urls, key=lambda one: self._asked[one])
        return url, {**headers, "Authorization": f"Bearer {served.token}"}

    async def _read(self, response: aiohttp.ClientResponse, secret: str | None) -> Any:
        """The JSON of an answer. Raises _Failed."""
        chunks, size = [], 0
        async for chunk in response.content.iter_chunked(65_536):
            size += len(chunk)
            if size > MAX_ANSWER:
                response.close()
                raise _Failed("long", f"the answer is longer than {MAX_ANSWER} bytes; is the url right?", wrong=True)
            chunks.append(chunk)
        text = b"".join(chunks).decode("utf-8", "replace")
        excerpt = shortened(_hidden(text, secret), _EXCERPT) or "an empty body"
        if (status := response.status) != 200:
            again = status in _AGAIN or status >= 500
            after = _retry_after(response.headers.get("Retry-After")) if again else None
            words = f"{status} {_REMEDIES.get(status, '')}: {excerpt}".replace(" :", ":")
            raise _Failed(f"status {status}", words, not again, after=after)
        if response.content_type != "application/json" and not response.content_type.endswith("+json"):
            kind = shortened(response.content_type, 60)
            words = f"the answer is {kind} and no JSON; is the url right? It begins: {excerpt}"
            raise _Failed("no json", words, wrong=True)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _Failed("no json", f"the answer is not JSON; it begins: {excerpt}", wrong=True) from error


_REMEDIES: Final = {
    301: "(redirected; name the url that it redirects to)",
    302: "(redirected; name the url that it redirects to)",
    307: "(redirected; name the url that it redirects to)",
    308: "(redirected; name the url that it redirects to)",
    400: "(refused; does the model take images, and so many?)",
    401: "(the key is refused; see apiKey)",
    403: "(the key may not do this; see apiKey)",
    404: "(no such path or model; url ends with the version, as in /v1)",
    413: "(the question is too large; fewer screens may fit)",
    415: "(refused; does the model take images?)",
    422: "(refused; does the model take images, and so many?)",
    429: "(too many requests)",
}


def _retry_after(value: str | None) -> float | None:
    """Seconds, of a number or a date."""
    if value is None:
        return None
    try:
        return min(max(0.0, float(value)), 86_400.0) if value.strip().isdecimal() else _until(value)
    except (ValueError, OverflowError):
        return None


def _until(date: str) -> float:
    return min(max(0.0, parsedate_to_datetime(date).timestamp() - time.time()), 86_400.0)


def _hidden(text: str, secret: str | None) -> str:
    return text if not secret else text.replace(secret, "***")


def public(url: str) -> str:
    """An address without user, password and query."""
    return str(URL(url).with_user(None).with_query(None)).rstrip("/")


def key_of(where: ApiKey | None, environ: Mapping[str, str], model: str) -> str | None:
    """The key of an endpoint. Raises ValueError, which names where it should be."""
    if where is None:
        return None
    if where.environment is not None:
        key, what = environ.get(where.environment, ""), f"environment variable {where.environment}"
    else:
        what = f"file {where.file}"
        try:
            key = Path(str(where.file)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"judge {model}: the key's {what} can't be read: {error}") from error
    key = key.strip()
    if not key or not key.isprintable() or not key.isascii():
        raise ValueError(f"judge {model}: the {what} holds no key: one line of printable ASCII is expected")
    return key
