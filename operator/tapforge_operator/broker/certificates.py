"""Certificates of an authority of the broker's own. Pure: keys and certificates as PEM.

The authority lasts `CA_DAYS`, the certificate `SERVER_DAYS`; either is renewed when a third of its life is left. A new
authority precedes the old one in the bundle until that one ends, so that a client that trusts the bundle
trusts certificates of both. It signs nothing on the day it is made (`settled`) while the old one can: callers have time
to read the bundle again.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS: Final = 3650
SERVER_DAYS: Final = 365
#: clocks of the cluster's machines differ
_SKEW: Final = timedelta(minutes=10)
_CURVE: Final = ec.SECP256R1()


def new_authority(now: datetime) -> tuple[bytes, bytes]:
    """Certificate and private key."""
    key = ec.generate_private_key(_CURVE)
    # The name differs, so that a verifier finds the right one of two authorities.
    name = _name(f"tapforge broker authority {now:%Y-%m-%dT%H:%M:%SZ}")
    certificate = (
        _builder(name, name, key.public_key(), now, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate), _private(key)


def new_server(authority: bytes, authority_key: bytes, names: Sequence[str], now: datetime) -> tuple[bytes, bytes]:
    """Certificate and private key of a server that is reached by these DNS names and addresses."""
    issuer = x509.load_pem_x509_certificates(authority)[0]
    key = ec.generate_private_key(_CURVE)
    signer = _load_key(authority_key)
    certificate = (
        _builder(_name(names[0][:64]), issuer.subject, key.public_key(), now, SERVER_DAYS)
        .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return _pem(certificate), _private(key)


def bundle(authorities: bytes, now: datetime) -> bytes:
    """The authorities that have not ended."""
    return b"".join(_pem(c) for c in x509.load_pem_x509_certificates(authorities) if c.not_valid_after_utc > now)


def joined(*bundles: bytes) -> bytes:
    """The authorities of all these, each once."""
    found = [c for pem in bundles if pem for c in x509.load_pem_x509_certificates(pem)]
    return b"".join(dict.fromkeys(map(_pem, found)))


def signers(authorities: bytes, keys: Sequence[bytes], now: datetime) -> list[tuple[bytes, bytes]]:
    """Authorities whose key is among these and which outlive a certificate that they sign now, each with its key."""
    by_public: dict[bytes, bytes] = {}
    for key in keys:
        try:
            by_public[_public(_load_key(key).public_key())] = key
        except (ValueError, TypeError):
            continue
    lasting = [
        authority
        for authority in (x509.load_pem_x509_certificates(authorities) if authorities else ())
        if authority.not_valid_after_utc - now > timedelta(days=SERVER_DAYS)
    ]
    return [(_pem(a), by_public[public]) for a in lasting if (public := _public(a.public_key())) in by_public]


def settled(authority: bytes, now: datetime) -> bool:
    """Callers have had time to read of it."""
    return now - x509.load_pem_x509_certificate(authority).not_valid_before_utc > timedelta(days=1)


def fits_authority(authorities: bytes, key: bytes, now: datetime) -> bool:
    """The first authority need not be renewed yet, and this is its key."""
    first = x509.load_pem_x509_certificates(authorities)[0]
    return bool(signers(_pem(first), [key], now)) and _fresh(first, now)


def fits_server(certificate: bytes, key: bytes, authorities: bytes, names: Sequence[str], now: datetime) -> bool:
    """The certificate can go on serving: valid for long, for all these names, issued by one of the authorities, and
    this is its key."""
    try:
        server = x509.load_pem_x509_certificate(certificate)
        known = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        issued = any(_issued(server, authority) for authority in x509.load_pem_x509_certificates(authorities))
        same_key = _load_key(key).public_key() == server.public_key()
    except (ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return issued and same_key and _fresh(server, now) and {_general(name) for name in names} <= set(known)


def expires(certificates: bytes) -> float:
    """When the first of a chain ends, in seconds since 1970."""
    return min(c.not_valid_after_utc.timestamp() for c in x509.load_pem_x509_certificates(certificates))


def _issued(server: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        server.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _fresh(certificate: x509.Certificate, now: datetime) -> bool:
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc - life / 3


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign,
        crl_sign=sign,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public(key: CertificatePublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"a key of type {type(key).__name__} is none of ours")
    return key
