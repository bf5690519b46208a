"""What the broker serves TLS with, its keys for claims, and what callers verify its certificate by.

1. All is kept in the Secret `tapforge-broker`, and the authorities are published in the ConfigMap `tapforge-broker-ca`.
   They are made when they are missing; several operators that begin at once end with the same ones.
2. A running operator has all of it in memory. The leader reads both objects every few seconds and restores what another
   client removed or overwrote; one that stands by reads, and writes nothing. What is new in the Secret counts from then
   on (`material.py`), so a key for claims is replaced by writing another one in front of it.
3. Certificates are renewed long before they end (`certificates.py`); a client that reads the ConfigMap again trusts the
   new ones before the old ones end.
4. A certificate that is mounted (cert-manager's, or a person's) is served instead, and its `ca.crt` published. It is
   taken over only when a caller that trusts that bundle would accept it for every name, and while a replacement is not,
   the earlier one is served on. Connections that are open stay open. The Secret holds the keys for claims then.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tapforge_operator import labels
from tapforge_operator.broker.certificates import expires
from tapforge_operator.broker.material import (
    CA,
    CERTIFICATE,
    KEY,
    NOTHING,
    PRIVATE_KEY,
    Material,
    completed,
    decoded,
    fields,
    has_keys,
    made_key,
    merged,
)
from tapforge_operator.broker.writer import Api
from tapforge_operator.kube.client import ApiError, path
from tapforge_operator.observability.metrics import Telemetry

log = logging.getLogger(__name__)

Object = dict[str, Any]

SECRET: Final = "tapforge-broker"
CONFIG_MAP: Final = "tapforge-broker-ca"
_TRIES: Final = 8
#: of a handshake; more than there are
_FLIGHTS: Final = 6


class KeysMissing(Exception):
    """The Secret holds no key for claims, and the leader may have it."""


class Unusable(Exception):
    """A mounted certificate can't be served: which file, why, and what to do."""


def mounted(folder: Path, keys: tuple[bytes, ...] = ()) -> Material:
    """What the volume of a Secret of type kubernetes.io/tls holds now. Raises Unusable."""
    # The kubelet exchanges all files at once by this link: read through it, they are of one Secret.
    link = folder / "..data"
    where = link.resolve() if link.exists() else folder
    if (where / KEY).exists():
        raise Unusable(
            f"{folder} has {KEY}: it is the operator's own Secret {SECRET}, which holds the key for claims and "
            "which no other program renews; mount a Secret with a certificate of yours"
        )
    found = {}
    for name in (CERTIFICATE, PRIVATE_KEY, CA):
        try:
            found[name] = (where / name).read_bytes()
        except OSError as error:
            found[name] = b""
            log.debug("%s: %s", where / name, error)
        if not found[name].strip():
            more = " (ACME issuers give none: put the certificate of the issuer there)" if name == CA else ""
            raise Unusable(
                f"{folder / name} is missing or empty: mount a Secret of type kubernetes.io/tls that has "
                f"{CERTIFICATE}, {PRIVATE_KEY} and {CA}{more}"
            )
    return Material(keys, found[CA], (), found[CERTIFICATE], found[PRIVATE_KEY])


def check(material: Material, names: Sequence[str], folder: Path) -> None:
    """Raises Unusable unless a caller that trusts the bundle accepts the certificate for all these names now."""
    try:
        server = context(material)
    except (ssl.SSLError, OSError) as error:
        raise Unusable(
            f"{folder / CERTIFICATE} and {folder / PRIVATE_KEY} can't be loaded: {_reason(error)}; the key has to be "
            "that of the first certificate, as PEM without a passphrase"
        ) from error
    try:
        client = ssl.create_default_context(cadata=material.ca.decode())
    except (ssl.SSLError, ValueError) as error:
        raise Unusable(f"{folder / CA} can't be loaded: {_reason(error)}; it has to be certificates as PEM") from error
    for name in names:
        try:
            _handshake(server, client, name)
        except ssl.SSLCertVerificationError as error:
            raise Unusable(
                f"{folder / CERTIFICATE} is rejected by clients that trust {folder / CA} and call {name}: "
                f"{error.verify_message}; issue it anew for {', '.join(names)} by an authority in {CA}"
            ) from error
        except ssl.SSLError as error:
            raise Unusable(f"{folder / CERTIFICATE} can't be served to {name}: {_reason(error)}") from error


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """In memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_FLIGHTS):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
    if ends:
        raise ssl.SSLError(f"no handshake after {_FLIGHTS} flights")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", "") or str(error)


async def ensure(
    api: Api,
    namespace: str,
    dns_names: Sequence[str],
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    folder: Path | None = None,
    *,
    held: Material = NOTHING,
    create: bool = True,
) -> Material:
    """Reads the Secret, writes what it lacks of `held`, makes or renews what is missing or ends soon, and publishes the
    authorities. With `folder` the certificate is the one that is mounted there. Raises ApiError, Unusable; KeysMissing
    instead of making keys, unless `create`."""
    given = mounted(folder) if folder is not None else None
    if given is not None and folder is not None:
        check(given, dns_names, folder)
    return await _ensure(api, namespace, dns_names, now, given, held, create)


async def _ensure(
    api: Api,
    namespace: str,
    dns_names: Sequence[str],
    now: Callable[[], datetime],
    given: Material | None,
    held: Material,
    create: bool = True,
) -> Material:
    for _ in range(_TRIES):
        secret = await _find(api, path("secrets", namespace, SECRET))
        data = decoded(secret)
        if not create and not held.keys and not has_keys(data):
            raise KeysMissing(f"Secret {namespace}/{SECRET} is not there, or holds no key for claims ({KEY})")
        found = merged(data, held, dns_names, now())
        if given is not None:
            material = replace(given, keys=found.keys or (made_key(),))
        else:
            material = completed(found, dns_names, now())
        wanted = fields(material, data)
        if any(data.get(name) != value for name, value in wanted.items()):
            lost = [name for name, value in fields(held, data).items() if name not in data] if held.keys else []
            if not await _store(api, namespace, secret, wanted, lost):
                continue  # another client was faster: what it wrote counts
        await _publish(api, namespace, material)
        return material
    raise RuntimeError(f"Secret {namespace}/{SECRET} changed at each of {_TRIES} attempts: another client writes it")


async def observe(
    api: Api,
    namespace: str,
    dns_names: Sequence[str],
    held: Material,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Material:
    """What the Secret holds and what this process has, together; nothing is written. Raises ApiError."""
    secret = await _find(api, path("secrets", namespace, SECRET))
    found = merged(decoded(secret), held, dns_names, now())
    if not found.certificate:  # it can't be served, or is not there: the leader makes one
        found = replace(found, certificate=held.certificate, private_key=held.private_key)
    return found


def context(material: Material) -> ssl.SSLContext:
    """For the server."""
    result = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    result.minimum_version = ssl.TLSVersion.TLSv1_2
    load(result, material)
    return result


def load(into: ssl.SSLContext, material: Material) -> None:
    """Gives a server's context another certificate; connections that are made from now on get it."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "tls.crt", Path(folder) / "tls.key"
        for file, content in zip(files, (material.certificate, material.private_key), strict=True):
            file.touch(mode=0o600)
            file.write_bytes(content)
        into.load_cert_chain(*files, password="")  # without one, OpenSSL would ask the terminal for it


def _pass(keys: tuple[bytes, ...]) -> None:
    """Other keys are not reported."""


class Own:
    """Serves a certificate of an authority of the broker's own, through its renewals."""

    #: what is wrong; nothing can be, for good
    problem = ""
    usable = True

    def __init__(
        self,
        names: Sequence[str],
        into: ssl.SSLContext,
        trust: ssl.SSLContext,
        now: Material,
        telemetry: Telemetry,
        on_keys: Callable[[tuple[bytes, ...]], None] = _pass,
    ):
        """`now`: what `into` serves and `trust`, a caller's, trusts. `on_keys` receives other keys for claims."""
        self._names = names
        self._into = into
        self._trust = trust
        self._telemetry = telemetry
        self._on_keys = on_keys
        self.material = now
        telemetry.certificate(expires(now.certificate), refused=False)

    async def refresh(self, api: Api, namespace: str, *, write: bool) -> None:
        """Takes over what is new in the Secret; with `write`, puts back what it lacks. Raises ApiError,
        RuntimeError."""
        if write:
            fresh = await ensure(api, namespace, self._names, held=self.material)
        else:
            fresh = await observe(api, namespace, self._names, self.material)
        before, self.material = self.material, fresh
        if fresh.ca != before.ca:
            self._trust.load_verify_locations(cadata=fresh.ca.decode())
        if fresh.certificate != before.certificate:
            load(self._into, fresh)
            self._telemetry.certificate(expires(fresh.certificate), refused=False)
            log.info("the broker serves a new certificate")
        if fresh.keys != before.keys:
            self._on_keys(fresh.keys)


class Mounted:
    """Serves the certificate of a mounted Secret, through its renewals."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        into: ssl.SSLContext,
        trust: ssl.SSLContext,
        now: Material,
        telemetry: Telemetry,
        on_keys: Callable[[tuple[bytes, ...]], None] = _pass,
    ):
        """`now`: what `into` serves and `trust`, a caller's, trusts. `on_keys` receives other keys for claims."""
        self._telemetry = telemetry
        self._on_keys = on_keys
        self._folder = folder
        self._names = names
        self._into = into
        self._trust = trust
        self._serves = now
        #: what is wrong with the mounted files; "" when nothing is
        self.problem = ""
        #: callers accept what is served
        self.usable = True
        telemetry.certificate(expires(now.certificate), refused=False)

    def reload(self) -> None:
        """Takes over what is new and good."""
        problem = ""
        try:
            fresh = mounted(self._folder, self._serves.keys)
            check(fresh, self._names, self._folder)
        except Unusable as error:
            problem = str(error)
            self.usable = self._still_good()
        else:
            self.usable = True
            if fresh != self._serves:
                self._trust.load_verify_locations(cadata=fresh.ca.decode())
                load(self._into, fresh)
                self._serves = fresh
                log.info("the broker serves a new certificate from %s", self._folder)
        if problem and problem != self.problem:
            what = "the earlier one is served on" if self.usable else "callers refuse the one that is served"
            log.error("%s; %s", problem, what)
        self.problem = problem
        self._telemetry.certificate(expires(self._serves.certificate), refused=bool(problem))

    def _still_good(self) -> bool:
        try:
            check(self._serves, self._names, self._folder)
        except Unusable:
            return False
        return True

    async def refresh(self, api: Api, namespace: str, *, write: bool) -> None:
        """Takes over what is new in the files, and what keys the Secret holds; with `write`, puts back what the Secret
        lacks and publishes the authority. Raises ApiError, RuntimeError."""
        self.reload()
        if write:
            now = lambda: datetime.now(UTC)  # noqa: E731
            fresh = await _ensure(api, namespace, self._names, now, self._serves, self._serves)
        else:
            fresh = await observe(api, namespace, self._names, Material(self._serves.keys))
        if fresh.keys != self._serves.keys:
            self._serves = replace(self._serves, keys=fresh.keys)
            self._on_keys(fresh.keys)


async def keep(
    served: Own | Mounted, api: Api, namespace: str, every: float = 5.0, leads: Callable[[], bool] = lambda: True
) -> None:
    """Looks after what is served, the keys and the two objects, `every` so many seconds. Until cancelled."""
    failing = False
    while True:
        await asyncio.sleep(every)
        try:
            await served.refresh(api, namespace, write=leads())
        except (ApiError, RuntimeError) as error:  # all of it is in memory: the next look is in time
            if not failing:
                log.warning("Secret %s/%s can't be looked after, what it held is used on: %s", namespace, SECRET, error)
            failing = True
        else:
            failing = False


# --- the two objects --------------------------------------------------------------------------------------------------


async def _find(api: Api, where: str) -> Object | None:
    try:
        return await api.get(where)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


async def _store(
    api: Api, namespace: str, secret: Object | None, data: Mapping[str, bytes], lost: Sequence[str]
) -> bool:
    """False when another client wrote it meanwhile, or may have."""
    encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    try:
        if secret is None:
            body = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": _metadata(SECRET)}
            await api.create(path("secrets", namespace), {**body, "data": encoded})
        else:
            version = {"resourceVersion": secret["metadata"]["resourceVersion"]}
            await api.patch(path("secrets", namespace, SECRET), {"metadata": version, "data": encoded})
    except ApiError as error:
        if error.status == 409 or error.unclear:
            return False
        raise
    if lost:
        log.warning("Secret %s/%s lacked %s: it was written back", namespace, SECRET, ", ".join(lost))
    else:
        log.info("Secret %s/%s was written", namespace, SECRET)
    return True


async def _publish(api: Api, namespace: str, material: Material) -> None:
    where, data = path("configmaps", namespace, CONFIG_MAP), {CA: material.ca.decode()}
    found = await _find(api, where)
    if found is not None and found.get("data") == data:
        return
    try:
        if found is None:
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(CONFIG_MAP), "data": data}
            await api.create(path("configmaps", namespace), body)
        else:
            await api.patch(where, {"data": data})
    except ApiError as error:
        if error.status != 409:  # it was made by another operator, of the same Secret
            raise


def _metadata(name: str) -> Object:
    return {"name": name, "labels": {labels.MANAGED_BY: labels.OPERATOR}}
