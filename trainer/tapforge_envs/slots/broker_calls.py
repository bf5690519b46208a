"""The calls to the operator's broker over HTTPS, and where the broker is: three for claims (`tapforge_api.claims`), one
for a run's report (`tapforge_api.progress`).

What a run in a cluster reads from its environment, not from its spec:

| environment variable | holds |
|---|---|
| TAPFORGE_BROKER_URL | address of the broker, such as https://tapforge-broker.tapforge-system.svc:8443 |
| TAPFORGE_BROKER_CA | file with the certificates (PEM) that the broker's own is checked against |
| TAPFORGE_BROKER_TOKEN_FILE | file with a token of audience tapforge.dev/broker |
| TAPFORGE_NAMESPACE | namespace of the pool |

The operator sets them in the Pods of a run; outside a cluster the user does.

Promises:
1. Every call ends within the deadline that it is given (seconds).
2. The token is read for each acquire and each report, and the certificates when their file changes: both rotate. The
   token goes to the broker alone: TLS is verified, redirections are not followed, and plain http is for this machine
   only. Renewals and releases prove themselves by the claims' secrets and carry no token.
3. `BrokerAway` means: the same call may succeed later without any change. `BrokerRefused` says what has
   to change.
4. Fields that a newer broker adds to its answers are ignored.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import aiohttp
from pydantic import ValidationError
from yarl import URL

from tapforge_api.base import DNS_LABEL, Spec
from tapforge_api.claims import AUDIENCE, Acquire, Acquired, Refusal, Release, Released, Renew, RenewedAll
from tapforge_api.progress import REPORT, Orders, Progress
from tapforge_api.reading import read_json

from .source import SlotError

FIELD = "spec.environment.source.pool"
BROKER_URL, BROKER_CA = "TAPFORGE_BROKER_URL", "TAPFORGE_BROKER_CA"
BROKER_TOKEN_FILE, NAMESPACE = "TAPFORGE_BROKER_TOKEN_FILE", "TAPFORGE_NAMESPACE"

#: bytes of an answer; that to a renewal of 4096 claims has about a tenth
_MAX_ANSWER = 16 * 2**20

Answer = TypeVar("Answer", bound=Spec)


class BrokerAway(Exception):
    """No answer, or "not now". `pause`: seconds that the broker asked for; 0 for none. `sent`: it may have been
    carried out."""

    def __init__(self, message: str, pause: float = 0.0, *, sent: bool = True):
        super().__init__(message)
        self.pause = pause
        self.sent = sent


class BrokerRefused(SlotError):
    """The broker, or the way to it, wants something else than was given. The message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the broker is, and what proves the caller's identity."""

    url: URL
    token: Path
    namespace: str
    #: None only for plain http, that is on this machine
    ca: Path | None
    #: what needs the broker, as messages name it
    need: str = FIELD

    @staticmethod
    def of(environment: Mapping[str, str], need: str = FIELD) -> Access:
        """Pure: from environment variables. Raises SlotError."""
        wanted = {
            BROKER_URL: "the address of the operator's broker, https://...",
            BROKER_TOKEN_FILE: f"the file of a token of audience {AUDIENCE}",
            NAMESPACE: "the namespace of the pool",
        }
        url = _broker_url(environment[BROKER_URL], need) if environment.get(BROKER_URL) else None
        if url is None or url.scheme == "https":
            wanted[BROKER_CA] = "the file with the broker's CA certificates"
        if lacking := [name for name in wanted if not environment.get(name)]:
            listed = "".join(f"\n  {name}: {wanted[name]}" for name in lacking)
            raise SlotError(
                f"{need} needs environment variables that are not set (the operator sets them in the Pods of a run):"
                f"{listed}\nwithout a cluster use processes or urls"
            )
        assert url is not None
        namespace = environment[NAMESPACE]
        if not re.fullmatch(DNS_LABEL, namespace) or len(namespace) > 63:
            raise SlotError(f"{need} needs {NAMESPACE} to be the name of a namespace, not {namespace!r}")
        ca = Path(environment[BROKER_CA]) if url.scheme == "https" else None
        return Access(url, Path(environment[BROKER_TOKEN_FILE]), namespace, ca, need)


def _broker_url(text: str, need: str) -> URL:
    try:
        url = URL(text)
        port = url.port
    except ValueError as error:
        raise SlotError(f"{need} needs {BROKER_URL} to be a URL; {text!r} is none: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or port is None or url.user or url.query_string:
        raise SlotError(f"{need} needs {BROKER_URL} to be a URL such as https://broker.example:8443, not {text!r}")
    if url.scheme == "http" and not _is_loopback(url.host):
        raise SlotError(f"{need} needs {BROKER_URL} to begin with https: {text!r} would show the token to the network")
    return url.with_path(url.path.rstrip("/") or "/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BrokerCalls:
    """Opens connections from the first call on; `close` ends them."""

    def __init__(self, access: Access):
        self.access = access
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | None = None
        self._tls_of: tuple[int, int] | None = None

    async def acquire(self, pool: str, request: Acquire, seconds: float) -> Acquired:
        path = f"v1/namespaces/{self.access.namespace}/pools/{pool}/claims"
        here = self.access.namespace
        remedies = {
            403: ": the token's owner may not claim these phones; a Pod must belong to a TrainingRun that names the "
            f"pool, others need the permission to create emulatorpools/claim in namespace {here!r}",
            404: f": `kubectl get emulatorpools -n {here}` lists the pools that are there; {FIELD}.name says which one "
            "is wanted",
        }
        what = f"claims on the pool {pool!r} in namespace {here!r}"
        return await self._call(what, path, request, Acquired, seconds, self._proof(), remedies)

    async def report(self, run: str, report: Progress, seconds: float) -> Orders:
        here = self.access.namespace
        remedies = {
            403: f": only a Pod of the TrainingRun {run!r} in namespace {here!r} may report for it",
            404: f": there is no TrainingRun {run!r} in namespace {here!r} any more",
        }
        path = REPORT.format(namespace=here, run=run).lstrip("/")
        return await self._call(f"a report of the run {run!r}", path, report, Orders, seconds, self._proof(), remedies)

    async def renew(self, request: Renew, seconds: float) -> RenewedAll:
        return await self._call("renewal", "v1/claims/renew", request, RenewedAll, seconds)

    async def release(self, request: Release, seconds: float) -> Released:
        return await self._call("release", "v1/claims/release", request, Released, seconds)

    async def close(self) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(
        self,
        what: str,
        path: str,
        request: Spec,
        answer: type[Answer],
        seconds: float,
        proof: Mapping[str, str] | None = None,
        remedies: Mapping[int, str] | None = None,
    ) -> Answer:
        url = self.access.url
        body = request.model_dump_json(by_alias=True).encode()
        all_headers = {"Content-Type": "application/json", **(proof or {})}
        tls = self._verified() if url.scheme == "https" else False
        if self._session is None:
            # An address may move to another replica of the operator at any time: names are looked up often.
            connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=10)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.post(
                    url.joinpath(*path.split("/")),
                    data=body,
                    headers=all_headers,
                    ssl=tls,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as response,
            ):
                status, said = response.status, await _bounded(response)
                if status >= 500:
                    response.close()  # this replica is not the one; a new connection may find another
        except TimeoutError as error:
            raise BrokerAway(f"the broker at {url} gave no answer within {seconds:g} s") from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._mistrusted(error) from error
        except (aiohttp.ClientError, OSError) as error:
            sent = not isinstance(error, aiohttp.ClientConnectorError)
            message = f"the broker at {url} can't be reached: {type(error).__name__}: {error}"
            raise BrokerAway(message, sent=sent) from error
        if status == 200:
            try:
                return read_json(answer, said)
            except ValidationError as error:
                raise BrokerRefused(
                    f"the broker at {url} answered {what}, but not with {answer.__name__}: {_wrong(said, error)}; is "
                    f"{BROKER_URL} the address of tapforge's broker, and of this version?"
                ) from error
        refusal = _refusal(status, said)
        if status >= 500 or status in (408, 429):
            pause = response.headers.get("Retry-After", "")
            raise BrokerAway(f"the broker at {url} says: {refusal}", float(pause) if pause.isdecimal() else 0.0)
        remedy = {401: self._unknown(), **(remedies or {})}.get(status, "") if proof else ""
        raise BrokerRefused(f"the broker at {url} refused {what} ({refusal}){remedy}")

    def _proof(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token()}"}

    def _token(self) -> str:
        path = self.access.token
        try:
            token = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BrokerRefused(
                f"{self.access.need}: the token file {path} ({BROKER_TOKEN_FILE}) can't be read: {error}"
            ) from error
        if not token or not token.isprintable() or " " in token:
            raise BrokerRefused(f"{self.access.need}: the token file {path} ({BROKER_TOKEN_FILE}) holds no token")
        return token

    def _verified(self) -> ssl.SSLContext:
        path = self.access.ca
        assert path is not None
        try:
            now = path.stat()
            seen = now.st_mtime_ns, now.st_size
            if self._tls is None or self._tls_of != seen:
                self._tls, self._tls_of = ssl.create_default_context(cafile=str(path)), seen
        except (OSError, ssl.SSLError) as error:
            raise BrokerRefused(
                f"{self.access.need}: the CA file {path} ({BROKER_CA}) can't be used: {error}"
            ) from error
        return self._tls

    def _mistrusted(self, error: aiohttp.ClientConnectorCertificateError) -> BrokerRefused:
        return BrokerRefused(
            f"the broker at {self.access.url} shows a certificate that {self.access.ca} ({BROKER_CA}) doesn't vouch "
            f"for: {error.certificate_error}; give the file of the CA that signed it, and the name that it is for"
        )

    def _unknown(self) -> str:
        return (
            f": the token in {self.access.token} is not valid; a Pod of a run has one projected with audience "
            f"{AUDIENCE}, others get one by `kubectl create token SERVICEACCOUNT --audience {AUDIENCE} "
            f"-n {self.access.namespace}`"
        )


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _MAX_ANSWER:
            raise aiohttp.ClientPayloadError(f"an answer of more than {_MAX_ANSWER} bytes")
    return bytes(body)


def _refusal(status: int, said: bytes) -> str:
    try:
        refusal = read_json(Refusal, said)
    except ValidationError:  # a proxy's page, perhaps
        return f"{status}: {_short(said)}"
    return f"{status} {refusal.reason}: {refusal.message}"


def _wrong(said: bytes, error: ValidationError) -> str:
    """An answer may hold secrets of claims: what is JSON is not repeated."""
    if not said.lstrip().startswith(b"{"):
        return _short(said)
    wrong = error.errors(include_input=False, include_context=False, include_url=False)
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong[:3])


def _short(said: bytes) -> str:
    text = said[:200].decode("utf-8", "replace")
    return repr(text if len(said) <= 200 else text + "...")
