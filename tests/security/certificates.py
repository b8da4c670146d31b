"""Certificates for tests, made on the spot."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)] if text else [])


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files too."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    cert_file: Path
    key_file: Path


class Authority:
    """Signs certificates; its own is in `cert_file`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._own = self._make(name, None, [], days=30)
        self.cert_file = self._own.cert_file

    def issue(self, name: str, alternatives: list[str], *, days: int = 30) -> Pair:
        """Return a certificate for names and addresses, valid from two days ago for so many days from now."""
        return self._make(name, self._own, alternatives, days=days)

    def _make(self, name: str, issuer: Pair | None, alternatives: list[str], *, days: int) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(name) if issuer is None else issuer.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - datetime.timedelta(days=2))
            .not_valid_after(NOW + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        )
        if alternatives:
            names = [_alternative(text) for text in alternatives]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(key if issuer is None else issuer.key, hashes.SHA256())
        cert_file, key_file = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return Pair(certificate, key, cert_file, key_file)


def _alternative(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
