"""Authorities and certificates as files, made for a test."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from restow.broker.client import Credentials

DAY = datetime.timedelta(days=1)
DOMAIN = "spiffe://test/restow"
P_AND_D = (f"{DOMAIN}/tenant/a/engine/*", f"{DOMAIN}/tenant/a/agent/*")
"""What an engine of tenant a has that embeds its agents."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path, name: str = "ca", lasts: datetime.timedelta = DAY) -> None:
        self._folder, self._serial = folder, 1
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._builder(self._name, self._key.public_key(), lasts)
        own = own.add_extension(x509.BasicConstraints(True, None), True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(_pem(own.sign(self._key, hashes.SHA256())))

    def issue(
        self,
        *uris: str,
        dns: tuple[str, ...] = (),
        server: bool = False,
        lasts: datetime.timedelta = DAY,
        password: bytes | None = None,
        begins: datetime.timedelta = -2 * DAY,
        use: x509.ObjectIdentifier | None = None,
    ) -> Pair:
        """Issue a certificate with these URIs; with a negative ``lasts`` it has already expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name([]), key.public_key(), lasts, begins)
        if use is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([use]), False)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [x509.DNSName(name) for name in dns]
        if server:
            names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        certificate = self._folder / f"{self.path.stem}-{self._serial}.pem"
        certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        path = certificate.with_suffix(".key")
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(password)
                if password
                else serialization.NoEncryption(),
            )
        )
        path.chmod(0o600)
        return Pair(certificate, path)

    def server(self, own: Pair | None = None) -> dict[str, Any]:
        """Return the settings of a broker with this certificate, or a new one of this authority."""
        own = own or self.issue(server=True)
        return {"tls_cert": own.certificate, "tls_key": own.key, "client_ca": self.path}

    def client(self, *uris: str, authority: Path | None = None) -> Credentials:
        """Return credentials of a client with these URIs, who trusts ``authority`` or this one."""
        pair = self.issue(*uris)
        return Credentials(authority or self.path, pair.certificate, pair.key)

    def _builder(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePublicKey,
        lasts: datetime.timedelta,
        begins: datetime.timedelta = -2 * DAY,
    ) -> x509.CertificateBuilder:
        self._serial += 1
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(self._serial)
            .not_valid_before(now + begins)
            .not_valid_after(now + lasts)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
