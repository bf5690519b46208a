"""What the broker serves TLS with, its key for claims, and what callers verify its certificate by.

1. Both are kept in the Secret `tapforge-broker`, and the authority is published in the ConfigMap `tapforge-broker-ca`.
   They are made when they are missing; several operators that begin at once end with the same ones.
2. The key for claims is made once and never changed: with another one nobody could prove a claim any more.
3. Certificates are renewed long before they end (`certificates.py`); whoever reads the ConfigMap again trusts the new
   ones before the old ones end.
4. A certificate that is mounted (cert-manager's, or a person's) is served instead, and its `ca.crt` published. It is
   taken over only when a caller that trusts that bundle would accept it for every name, and while a replacement is not,
   the earlier one is served on. Connections that are open stay open.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import secrets
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tapforge_operator import labels
from tapforge_operator.broker.certificates import (
    bundle,
    can_sign,
    expires,
    fits_authority,
    fits_server,
    new_authority,
    new_server,
)
from tapforge_operator.broker.writer import Api
from tapforge_operator.kube.client import ApiError, path
from tapforge_operator.observability.metrics import Telemetry

log = logging.getLogger(__name__)

Object = dict[str, Any]

SECRET: Final = "tapforge-broker"
CONFIG_MAP: Final = "tapforge-broker-ca"
CA, CA_KEY, CERTIFICATE, PRIVATE_KEY, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key", "hmac.key"

_KEY_BYTES: Final = 32
_TRIES: Final = 8
#: of a handshake; more than there are
_FLIGHTS: Final = 6


@dataclass(frozen=True, slots=True)
class Material:
    """What the Secret holds. PEM, but for `key`: the key for claims."""

    key: bytes
    ca: bytes
    ca_key: bytes
    certificate: bytes
    private_key: bytes


class Unusable(Exception):
    """A mounted certificate can't be served: which file, why, and what to do."""


def mounted(folder: Path, key: bytes = b"") -> Material:
    """What the volume of a Secret of type kubernetes.io/tls holds now. Raises Unusable."""
    # The kubelet exchanges all files at once by this link: read through it, they are of one Secret.
    link = folder / "..data"
    where = link.resolve() if link.exists() else folder
    if (where / KEY).exists():
        raise Unusable(
            f"{folder} has {KEY}: it is the operator's own Secret {SECRET}, which holds the key for claims and "
            "which nobody else renews; mount a Secret with a certificate of yours"
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
    return Material(key, found[CA], b"", found[CERTIFICATE], found[PRIVATE_KEY])


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
                f"{folder / CERTIFICATE} is not accepted by who trusts {folder / CA} and calls {name}: "
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


def renewed(data: Mapping[str, bytes], dns_names: Sequence[str], now: datetime) -> Material:
    """What the Secret should hold, keeping what is still good of `data`. Pure but for new random keys."""
    if not dns_names:
        raise ValueError("a certificate needs at least one name or address that the broker is reached by")
    ca, ca_key = _still_good(data.get(CA, b""), now), data.get(CA_KEY, b"")
    if not can_sign(ca, ca_key, now):
        ca, ca_key = new_authority(now)
    certificate, private_key = data.get(CERTIFICATE, b""), data.get(PRIVATE_KEY, b"")
    if not fits_server(certificate, private_key, ca, dns_names, now):
        certificate, private_key = new_server(ca, ca_key, dns_names, now)
    if not fits_authority(ca, ca_key, now):
        new, ca_key = new_authority(now)
        ca = new + ca
    return Material(_claims_key(data), ca, ca_key, certificate, private_key)


def _claims_key(data: Mapping[str, bytes]) -> bytes:
    key = data.get(KEY, b"")
    return key if len(key) >= _KEY_BYTES else secrets.token_bytes(_KEY_BYTES)


def _still_good(ca: bytes, now: datetime) -> bytes:
    try:
        return bundle(ca, now)
    except ValueError:
        return b""


async def ensure(
    api: Api,
    namespace: str,
    dns_names: Sequence[str],
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    folder: Path | None = None,
) -> Material:
    """Reads the Secret, makes or renews what is missing or ends soon, and publishes the authority. With `folder` the
    certificate is the one that is mounted there. Raises ApiError, Unusable."""
    given = mounted(folder) if folder is not None else None
    if given is not None and folder is not None:
        check(given, dns_names, folder)
    for _ in range(_TRIES):
        secret = await _find(api, path("secrets", namespace, SECRET))
        data = _decoded(secret)
        if given is not None:
            material = replace(given, key=_claims_key(data))
            wanted = {**data, KEY: material.key}
        else:
            material = renewed(data, dns_names, now())
            wanted = _data(material)
        if wanted != data and not await _store(api, namespace, secret, wanted):
            continue  # somebody else was faster: what they wrote counts
        await _publish(api, namespace, material)
        return material
    raise RuntimeError(f"Secret {namespace}/{SECRET} changed at each of {_TRIES} attempts to write it; who else does?")


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


async def keep(
    api: Api,
    namespace: str,
    dns_names: Sequence[str],
    into: ssl.SSLContext,
    material: Material,
    every: float = 3600.0,
    trust: ssl.SSLContext | None = None,
    telemetry: Telemetry | None = None,
) -> None:
    """Looks after the certificate `every` so many seconds, until cancelled; `trust` is a caller's."""
    if telemetry is not None:
        telemetry.certificate(expires(material.certificate), refused=False)
    while True:
        await asyncio.sleep(every)
        try:
            fresh = await ensure(api, namespace, dns_names)
        except (ApiError, RuntimeError) as error:  # it is good for months: the next check is in time
            log.warning("the broker's certificate could not be looked after, the old one stays: %s", error)
            continue
        if trust is not None:
            trust.load_verify_locations(cadata=fresh.ca.decode())
        if fresh.certificate != material.certificate:
            load(into, fresh)
            material = fresh
            if telemetry is not None:
                telemetry.certificate(expires(fresh.certificate), refused=False)
            log.info("the broker serves a new certificate")


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
    ):
        """`now`: what `into` serves and `trust`, a caller's, trusts."""
        self._telemetry = telemetry
        self._folder = folder
        self._names = names
        self._into = into
        self._trust = trust
        self._serves = now
        self._published = True
        #: what is wrong with the mounted files; "" when nothing is
        self.problem = ""
        #: callers accept what is served
        self.usable = True
        telemetry.certificate(expires(now.certificate), refused=False)

    def reload(self) -> None:
        """Takes over what is new and good."""
        problem = ""
        try:
            fresh = mounted(self._folder, self._serves.key)
            check(fresh, self._names, self._folder)
        except Unusable as error:
            problem = str(error)
            self.usable = self._still_good()
        else:
            self.usable = True
            if fresh != self._serves:
                self._trust.load_verify_locations(cadata=fresh.ca.decode())
                load(self._into, fresh)
                self._published = self._published and fresh.ca == self._serves.ca
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

    async def keep(self, api: Api, namespace: str, every: float = 10.0, publish_every: float = 3600.0) -> None:
        """Looks at the files `every` so many seconds, and publishes their authority when it is new, and from time to
        time should somebody have deleted it. Until cancelled."""
        published = time.monotonic()
        while True:
            await asyncio.sleep(every)
            self.reload()
            if self._published and time.monotonic() - published < publish_every:
                continue
            try:
                await _publish(api, namespace, self._serves)
            except ApiError as error:  # tried again at the next reload
                log.warning("ConfigMap %s/%s could not be written: %s", namespace, CONFIG_MAP, error)
                self._published = False
            else:
                self._published, published = True, time.monotonic()


# --- the two objects --------------------------------------------------------------------------------------------------


async def _find(api: Api, where: str) -> Object | None:
    try:
        return await api.get(where)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


async def _store(api: Api, namespace: str, secret: Object | None, data: Mapping[str, bytes]) -> bool:
    """False when somebody else wrote it meanwhile, or may have."""
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


def _decoded(secret: Object | None) -> dict[str, bytes]:
    try:
        return {name: base64.b64decode(text) for name, text in ((secret or {}).get("data") or {}).items()}
    except binascii.Error:
        return {}


def _data(material: Material) -> dict[str, bytes]:
    return {
        CA: material.ca,
        CA_KEY: material.ca_key,
        CERTIFICATE: material.certificate,
        PRIVATE_KEY: material.private_key,
        KEY: material.key,
    }
