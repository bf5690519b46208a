"""What the broker keeps in the cluster for itself: the Secret `tapforge-broker` with its certificate and its key for
claims, and the ConfigMap `tapforge-broker-ca` with what callers verify the certificate by.

1. Both are made when they are missing; several operators that begin at once end with the same ones.
2. The key for claims is made once and never changed: with another one nobody could prove a claim any more.
3. Certificates are renewed long before they end (`certificates.py`); whoever reads the ConfigMap again trusts the new
   ones before the old ones end.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import secrets
import ssl
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from .. import names
from ..kube.client import ApiError, path
from .certificates import bundle, can_sign, fits_authority, fits_server, new_authority, new_server
from .writes import Api

log = logging.getLogger(__name__)

Object = dict[str, Any]

SECRET: Final = "tapforge-broker"
CONFIG_MAP: Final = "tapforge-broker-ca"
CA, CA_KEY, CERTIFICATE, PRIVATE_KEY, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key", "hmac.key"

_KEY_BYTES: Final = 32
_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class Material:
    """What the Secret holds. PEM, but for `key`: the key for claims."""

    key: bytes
    ca: bytes
    ca_key: bytes
    certificate: bytes
    private_key: bytes


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
    key = data.get(KEY, b"")
    if len(key) < _KEY_BYTES:
        key = secrets.token_bytes(_KEY_BYTES)
    return Material(key, ca, ca_key, certificate, private_key)


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
) -> Material:
    """Reads the Secret, makes or renews what is missing or ends soon, and publishes the authority. Raises ApiError."""
    for _ in range(_TRIES):
        secret = await _find(api, path("secrets", namespace, SECRET))
        data = _decoded(secret)
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
        into.load_cert_chain(*files)


async def keep(
    api: Api,
    namespace: str,
    dns_names: Sequence[str],
    into: ssl.SSLContext,
    material: Material,
    every: float = 3600.0,
    trust: ssl.SSLContext | None = None,
) -> None:
    """Looks after the certificate `every` so many seconds, until cancelled; `trust` is a caller's."""
    while True:
        await asyncio.sleep(every)
        try:
            fresh = await ensure(api, namespace, dns_names)
        except (ApiError, RuntimeError) as error:  # it is good for months: the next look is in time
            log.warning("the broker's certificate could not be looked after, the old one stays: %s", error)
            continue
        if trust is not None:
            trust.load_verify_locations(cadata=fresh.ca.decode())
        if fresh.certificate != material.certificate:
            load(into, fresh)
            material = fresh
            log.info("the broker serves a new certificate")


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
    return {"name": name, "labels": {names.MANAGED_BY: names.OPERATOR}}


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
