"""A cluster's own certificates: one authority, and what it signs. Elliptic curves, because a cluster is made anew for
every run; valid from a day before, so that a test may turn clocks back, for a year.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs with a key that never leaves the process."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def server(self, names: Sequence[str]) -> Pair:
        """For a server reached by these DNS names and addresses."""
        alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
        return self._issue(
            [x509.NameAttribute(NameOID.COMMON_NAME, names[0])], ExtendedKeyUsageOID.SERVER_AUTH, alternatives
        )

    def client(self, user: str, groups: Sequence[str] = ()) -> Pair:
        """For a user of the API server."""
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        subject += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        return self._issue(subject, ExtendedKeyUsageOID.CLIENT_AUTH, None)

    def _issue(
        self,
        subject: list[x509.NameAttribute],
        purpose: x509.ObjectIdentifier,
        alternatives: x509.SubjectAlternativeName | None,
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(x509.Name(subject), self._name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return Pair(signed.public_bytes(serialization.Encoding.PEM), _pem(key))


def self_signed(names: Sequence[str]) -> Pair:
    """A server's that is its own authority, with an RSA key: for programs that want both, and take no other key."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    signed = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return Pair(signed.public_bytes(serialization.Encoding.PEM), secret)


def signing_keys() -> Pair:
    """What service-account tokens are signed with, and the public half (as `certificate`) that checks them."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Pair(public, _pem(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey | rsa.RSAPublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365))
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
