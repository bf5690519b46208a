"""What the Secret `tapforge-broker` holds: the keys for claims, authorities, the certificate. Pure.

1. Nothing that was used is lost: what the Secret lacks and a running operator has (`held`) is kept, and what the Secret
   has besides counts too (`merged`). To take something away, all operators have to stop first.
2. Keys for claims are a list: `hmac.key` signs, it and every `hmac.key.NAME` verify. A release that knows one key reads
   `hmac.key`, and leaves the others where they are.
3. Authorities are a bundle. The first one signs; the others stay until they end, so that a client that trusts any of
   them trusts the certificate. A certificate of an authority that callers may not have yet is not taken over from the
   Secret while the one that is served is good.
4. An authority signs nothing on the day it is made while there is an older one that can (`completed`).
"""

from __future__ import annotations

import base64
import binascii
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from tapforge_operator.broker.certificates import (
    bundle,
    fits_authority,
    fits_server,
    joined,
    new_authority,
    new_server,
    settled,
    signers,
)
from tapforge_operator.broker.claim_record import MIN_KEY_BYTES, key_name

log = logging.getLogger(__name__)

CA, CA_KEY, CERTIFICATE, PRIVATE_KEY, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key", "hmac.key"
#: that of the authority before the first one
OLD_CA_KEY: Final = "ca.old.key"
#: begins the names of the fields of keys that only verify
MORE_KEYS: Final = f"{KEY}."


@dataclass(frozen=True, slots=True)
class Material:
    """PEM, but for `keys`: those for claims, of which the first signs."""

    keys: tuple[bytes, ...]
    #: authorities, of which the first signs
    ca: bytes = b""
    #: those of authorities: of the first one, and of an older one where it is known
    ca_keys: tuple[bytes, ...] = ()
    certificate: bytes = b""
    private_key: bytes = b""

    @property
    def key(self) -> bytes:
        """That signs claims."""
        return self.keys[0]


NOTHING: Final = Material(())


def decoded(secret: Mapping[str, Any] | None) -> dict[str, bytes]:
    found = {}
    for name, value in ((secret or {}).get("data") or {}).items():
        try:
            found[name] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            found[name] = b""
    return found


def claims_keys(data: Mapping[str, bytes]) -> tuple[bytes, ...]:
    """The keys for claims, that which signs first. One that is too short is none."""
    given = [(name, value) for name, value in sorted(data.items()) if name == KEY or name.startswith(MORE_KEYS)]
    for name in [name for name, value in given if len(value) < MIN_KEY_BYTES]:
        log.error("the key %s of the Secret has less than %d bytes: it is ignored", name, MIN_KEY_BYTES)
    return tuple(dict.fromkeys(value for _, value in given if len(value) >= MIN_KEY_BYTES))


def has_keys(data: Mapping[str, bytes]) -> bool:
    """Claims that were granted before can be proved by it, as far as one can see."""
    return len(data.get(KEY, b"")) >= MIN_KEY_BYTES


def merged(data: Mapping[str, bytes], held: Material, names: Sequence[str], now: datetime) -> Material:
    """What the Secret holds and what this process has, together. Possibly without a key, an authority or a
    certificate that could be served."""
    ca_keys = [data.get(CA_KEY, b""), data.get(OLD_CA_KEY, b""), *held.ca_keys]
    ca = joined(_still_good(data.get(CA, b""), now), _still_good(held.ca, now))
    able = signers(ca, ca_keys, now)
    if able:  # the signing one comes first
        ca = joined(able[0][0], ca)
    known = _still_good(held.ca, now) or ca
    pairs = [(data.get(CERTIFICATE, b""), data.get(PRIVATE_KEY, b"")), (held.certificate, held.private_key)]
    pair = next((p for p in pairs if fits_server(*p, known, names, now)), None)
    pair = pair or next((p for p in pairs if fits_server(*p, ca, names, now)), (b"", b""))
    keys = tuple(dict.fromkeys((*claims_keys(data), *held.keys)))
    if not has_keys(data) and held.keys:  # whatever else verifies
        keys = tuple(dict.fromkeys((held.key, *keys)))
    return Material(keys, ca, tuple(key for _, key in able[:2]), *pair)


def completed(material: Material, names: Sequence[str], now: datetime) -> Material:
    """With what is missing or ends soon made anew. Pure but for new random keys."""
    if not names:
        raise ValueError("a certificate needs at least one name or address that the broker is reached by")
    ca, ca_keys = material.ca, material.ca_keys
    able = signers(ca, ca_keys, now)
    if not able:
        first, key = new_authority(now)
        ca, ca_keys, able = joined(first, ca), (key,), [(first, key)]
    certificate, private_key = material.certificate, material.private_key
    if not fits_server(certificate, private_key, ca, names, now):
        authority, key = next((a for a in able if settled(a[0], now)), able[-1])
        certificate, private_key = new_server(authority, key, names, now)
    if not fits_authority(ca, ca_keys[0], now):
        first, key = new_authority(now)
        ca, ca_keys = joined(first, ca), (key, ca_keys[0])
    return Material(material.keys or (made_key(),), ca, ca_keys, certificate, private_key)


def fields(material: Material, there: Mapping[str, bytes]) -> dict[str, bytes]:
    """What has to be in the Secret; fields that are there besides may stay."""
    found = {KEY: material.key}
    for key in material.keys[1:]:
        names = [name for name, value in there.items() if name.startswith(MORE_KEYS) and value == key]
        found[names[0] if names else f"{MORE_KEYS}{key_name(key)}"] = key
    if material.ca_keys:
        found |= {CA: material.ca, CA_KEY: material.ca_keys[0]}
        found |= {CERTIFICATE: material.certificate, PRIVATE_KEY: material.private_key}
    if len(material.ca_keys) > 1:
        found[OLD_CA_KEY] = material.ca_keys[1]
    return found


def made_key() -> bytes:
    return secrets.token_bytes(MIN_KEY_BYTES)


def _still_good(ca: bytes, now: datetime) -> bytes:
    try:
        return bundle(ca, now)
    except ValueError:
        return b""
