"""A broker for tests of its client: a ledger of a few dozen lines behind the real messages, over TLS.

It keeps every promise of `tapforge_api.claims` and accuses whoever makes it break one: `broken` lists slots that had
two holders. Life is counted by the loop's clock, from when it heard of a claim. What a test may do to it stands under
"what tests do".
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from phones import put_forward, until
from pydantic import ValidationError

from tapforge_api.claims import (
    Acquire,
    Acquired,
    Claim,
    Given,
    Refusal,
    Release,
    Released,
    Renew,
    Renewed,
    RenewedAll,
)
from tapforge_envs.slots.broker_calls import Access

POOL, NAMESPACE = "phones", "lab"


def loop_time() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Phone:
    name: str
    url: str
    fence: int = 0
    holder: Claim | None = None
    #: thrown away: nobody gets it again
    gone: bool = False


@dataclass
class SmallBroker:
    ttl: float
    #: where it serves, again and again
    port: int
    #: claims end by themselves after their ttl, as those of external devices do after their hold; otherwise never
    lasting: bool = True
    phones: dict[str, Phone] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=lambda: {"first-token"})
    #: request -> its claims
    requests: dict[str, list[Claim]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    recalls: dict[str, str] = field(default_factory=dict)
    #: claim id -> episodes that were reported last
    episodes: dict[str, int] = field(default_factory=dict)
    given: list[Given] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    #: calls by name, as they came in
    calls: list[str] = field(default_factory=list)
    acquires: list[Acquire] = field(default_factory=list)
    renewals: list[Renew] = field(default_factory=list)
    #: names of calls that are carried out and never answered, each once
    lost_answers: list[str] = field(default_factory=list)
    #: name of call -> (status, body) instead of what would be done
    refusing: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    # --- what tests do ---

    async def put(self, *urls: str) -> None:
        async with self.changed:
            for url in urls:
                name = f"slot-{len(self.phones)}"
                self.phones[name] = Phone(name, url)
            self.changed.notify_all()

    def recall(self, slot: str, why: str = "another run needs it") -> None:
        claim = self.phones[slot].holder
        assert claim is not None
        self.recalls[claim.id] = why

    def end(self, slot: str) -> None:
        """The claim ends as if it had expired."""
        claim = self.phones[slot].holder
        assert claim is not None
        self.ends[claim.id] = 0.0
        self._expire()

    async def hears(self) -> None:
        """It is time for the next renewal, and the broker has answered it."""
        before = len(self.renewals)
        put_forward(self.ttl / 3 + 1)
        await until(lambda: len(self.renewals) > before)

    @property
    def held(self) -> set[str]:
        self._expire()
        return {p.name for p in self.phones.values() if p.holder}

    # --- the ledger ---

    def _expire(self) -> None:
        for phone in self.phones.values():
            if self.lasting and phone.holder and self.ends[phone.holder.id] <= loop_time():
                phone.holder, phone.gone = None, True

    def _grant(self, most: int) -> list[Claim]:
        self._expire()
        claims = []
        for phone in [p for p in self.phones.values() if not p.holder and not p.gone][:most]:
            phone.fence += 1
            identity = f"{phone.name}-uid.{phone.fence}"
            claim = Claim(
                id=identity,
                secret=f"secret-of-{identity}-------",
                slot=phone.name,
                url=phone.url,
                fence=phone.fence,
                ttl_seconds=self.ttl,
                hold_seconds=self.ttl if self.lasting else None,
            )
            if phone.holder:
                self.broken.append(phone.name)
            phone.holder, self.ends[claim.id] = claim, loop_time() + self.ttl
            claims.append(claim)
        return claims

    def _claimed(self, name: str, secret: str) -> Phone | None:
        self._expire()
        for phone in self.phones.values():
            if phone.holder and phone.holder.id == name and phone.holder.secret == secret:
                return phone
        return None

    # --- the server ---

    async def acquire(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return _refuse(401, "Unauthorized", "the token is not known")
        if (request.match_info["namespace"], request.match_info["pool"]) != (NAMESPACE, POOL):
            return _refuse(404, "PoolNotFound", f"no pool {request.match_info['pool']}")
        asked = Acquire.model_validate_json(await request.read())
        self.acquires.append(asked)
        # Sent again, a request is heard where it was sent last: an earlier call that still waits is not served.
        turn = self.turns[asked.request] = self.turns.get(asked.request, 0) + 1
        if asked.request not in self.requests:
            claims: list[Claim] = []
            try:
                async with asyncio.timeout(asked.wait_seconds), self.changed:
                    while turn == self.turns[asked.request] and not (claims := self._grant(asked.slots)):
                        await self.changed.wait()
            except TimeoutError:
                pass
            if not claims:
                return _json(Acquired(claims=(), waiting="every phone is taken"))
            self.requests[asked.request] = claims
        alive = [c for c in self.requests[asked.request] if self._claimed(c.id, c.secret)]
        return _json(Acquired(claims=tuple(alive)))

    async def renew(self, request: web.Request) -> web.Response:
        asked = Renew.model_validate_json(await request.read())
        self.renewals.append(asked)
        answers = []
        for held in asked.claims:
            if self._claimed(held.id, held.secret) is None:
                answers.append(Renewed(id=held.id, state="lost", reason="it expired"))
                continue
            self.ends[held.id] = loop_time() + self.ttl
            self.episodes[held.id] = held.episodes
            why = self.recalls.get(held.id, "")
            answers.append(Renewed(id=held.id, state="recalled" if why else "held", reason=why))
        return _json(RenewedAll(claims=tuple(answers)))

    async def release(self, request: web.Request) -> web.Response:
        asked = Release.model_validate_json(await request.read())
        async with self.changed:
            for given in asked.claims:
                phone = self._claimed(given.id, given.secret)
                if phone is not None:
                    phone.holder, phone.gone = None, given.verdict != "clean"
                    self.given.append(given)
                    self.episodes[given.id] = given.episodes
            self.changed.notify_all()
        return _json(Released(claims=tuple(Renewed(id=g.id, state="lost") for g in asked.claims)))

    def application(self) -> web.Application:
        @web.middleware
        async def around(request: web.Request, handler: Callable) -> web.StreamResponse:
            name = handler.__name__
            self.calls.append(name)
            if name in self.refusing:
                status, body = self.refusing[name]
                return web.Response(status=status, body=body, headers={"Location": "/elsewhere"})
            if name != "acquire" and "Authorization" in request.headers:
                self.broken.append(f"{name} shows the token")
            try:
                answer = await handler(request)
            except ValidationError as error:
                return _refuse(400, "BadRequest", str(error))
            if name in self.lost_answers:
                self.lost_answers.remove(name)
                assert request.transport is not None
                request.transport.abort()
            return answer

        application = web.Application(middlewares=[around])
        application.add_routes(
            [
                web.post("/v1/namespaces/{namespace}/pools/{pool}/claims", self.acquire),
                web.post("/v1/claims/renew", self.renew),
                web.post("/v1/claims/release", self.release),
            ]
        )
        return application

    @asynccontextmanager
    async def serving(self, authority: Authority) -> AsyncIterator[None]:
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=0.05)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=authority.server(), reuse_address=True).start()
        try:
            yield
        finally:
            await runner.cleanup()


def _json(answer: Acquired | RenewedAll | Released) -> web.Response:
    # A newer broker may say more than this client knows.
    return web.json_response({**answer.model_dump(mode="json", by_alias=True), "sinceTheNextVersion": 1})


def _refuse(status: int, reason: str, message: str) -> web.Response:
    return web.json_response(Refusal(reason=reason, message=message).model_dump(), status=status)


class Authority:
    """A CA in a folder, and a certificate for 127.0.0.1 that it signed."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.ca = folder / "ca.crt"
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"CA of {folder.name}")])
        root = _certificate(name, name, key, key, x509.BasicConstraints(ca=True, path_length=0))
        self.ca.write_bytes(root.public_bytes(serialization.Encoding.PEM))
        own = ec.generate_private_key(ec.SECP256R1())
        here = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        leaf = _certificate(here, name, own, key, names)
        self._chain = folder / "server.pem"
        self._chain.write_bytes(
            own.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + leaf.public_bytes(serialization.Encoding.PEM)
        )

    def server(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._chain)
        return context

    def access(self, port: int, token: str = "first-token") -> Access:
        path = self.folder / "token"
        path.write_text(token + "\n")
        return Access.of(
            {
                "TAPFORGE_BROKER_URL": f"https://127.0.0.1:{port}",
                "TAPFORGE_BROKER_CA": str(self.ca),
                "TAPFORGE_BROKER_TOKEN_FILE": str(path),
                "TAPFORGE_NAMESPACE": NAMESPACE,
            }
        )


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(extension, critical=True)
        .sign(signer, hashes.SHA256())
    )
