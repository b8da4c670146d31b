"""TLS for gRPC: what the server is started with, and how the unary twins, its own clients, get through."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from diffusion_backend.serve.errors import ArgumentError


@dataclass(frozen=True)
class GrpcTls:
    """The server's certificate and key, and who may call.

    Attributes:
        cert: PEM file of the server's certificate, followed by those between it and its root.
        key: PEM file of its private key, not encrypted.
        ca: PEM file of the authorities whose certificates clients must show (mutual TLS); None where they need none.
    """

    cert: Path
    key: Path
    ca: Path | None = None

    @classmethod
    def from_options(cls, cert: Path | None, key: Path | None, ca: Path | None) -> GrpcTls | None:
        """Return what the three options ask for; None if none is given.

        Raises:
            ArgumentError: one is missing; or, from `check`, what is wrong with the files.
        """
        if cert is None and key is None and ca is None:
            return None
        if cert is None or key is None:
            raise ArgumentError("TLS for gRPC needs both --grpc-tls-cert and --grpc-tls-key.")
        tls = cls(cert, key, ca)
        tls.check()
        return tls

    def check(self) -> None:
        """Find out now what the server would find out only when the first client comes.

        Raises:
            ArgumentError: a file cannot be read or is no PEM, the key is another certificate's, a certificate has
                expired, or the server's names no host.
        """
        certificates = _certificates("--grpc-tls-cert", self.cert)
        try:
            key = load_pem_private_key(_read("--grpc-tls-key", self.key), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise ArgumentError(f"--grpc-tls-key {self.key} is no unencrypted private key in PEM format.") from None
        form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if key.public_key().public_bytes(*form) != certificates[0].public_key().public_bytes(*form):
            raise ArgumentError(f"The key in {self.key} does not belong to the first certificate in {self.cert}.")
        _name(certificates[0])
        if self.ca is not None:
            certificates += _certificates("--grpc-tls-ca", self.ca)
        now = datetime.datetime.now(datetime.UTC)
        for certificate in certificates:
            if certificate.not_valid_after_utc <= now:
                raise ArgumentError(
                    f"The certificate of {certificate.subject.rfc4514_string()} expired on "
                    f"{certificate.not_valid_after_utc:%Y-%m-%d}. Renew it."
                )

    def arguments(self) -> list[str]:
        """Return the server's arguments."""
        mutual = [] if self.ca is None else ["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={self.ca}"]
        return [
            "--grpc-use-ssl=true",
            f"--grpc-server-cert={self.cert}",
            f"--grpc-server-key={self.key}",
            *mutual,
        ]

    def environment(self) -> dict[str, str]:
        """Return what the unary twins need to call the server that they run in.

        They trust the server's own certificate and nothing else, under a name that it has, as the address that they
        call, 127.0.0.1, is seldom in it. Where clients must show a certificate they show the server's.

        Raises:
            ArgumentError: the certificate cannot be read any more.
        """
        name = _name(_certificates("--grpc-tls-cert", self.cert)[0])
        environment = {"DIFFUSION_GRPC_TLS_CERT": str(self.cert.absolute()), "DIFFUSION_GRPC_TLS_NAME": name}
        if self.ca is not None:
            environment["DIFFUSION_GRPC_TLS_KEY"] = str(self.key.absolute())
        return environment


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{option} {path} cannot be read: {error.strerror}.") from None


def _certificates(option: str, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(option, path))
    except ValueError:
        raise ArgumentError(f"{option} {path} holds no certificate in PEM format.") from None


def _name(certificate: x509.Certificate) -> str:
    """Return a name that the certificate is for: its first alternative name, else its common name."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = None
    if names is not None:
        addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
        for name in names.get_values_for_type(x509.DNSName) + addresses:
            return name.replace("*", "twin", 1)  # a wildcard stands for any one label
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not common:
        raise ArgumentError("The certificate of --grpc-tls-cert names no host: it needs a subjectAltName.")
    return str(common[0].value)
