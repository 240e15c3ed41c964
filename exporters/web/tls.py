"""TLS as exporter-toolkit's `tls_server_config` describes it, on Python's `ssl`.

The settings are Go's, the engine here is OpenSSL: names are translated, and what OpenSSL through Python cannot do is
refused instead of being ignored.  Source: docs/web-configuration.md of prometheus/exporter-toolkit.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
"""Versions offered.  TLS 1.0 and 1.1 are not (RFC 8996)."""

CLIENT_AUTH: Final = {
    "NoClientCert": ssl.CERT_NONE,
    # Asks without looking at the answer: for the client the same as not asking.
    "RequestClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

CURVES: Final = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}

CIPHERS: Final = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
}
"""Go's name (crypto/tls.CipherSuites) to OpenSSL's, for TLS 1.2."""

TLS13_CIPHERS: Final = frozenset({"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"})
"""All three are always offered with TLS 1.3, in Go as here."""


class TlsSettingsError(ValueError):
    """A setting cannot be used.  `key` is its name within `tls_server_config`."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Pem:
    """A certificate or key: a file, or the text itself."""

    key: str
    """Name of the setting it came from."""
    file: Path | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    certificate: Pem
    private_key: Pem
    client_ca: Pem | None = None
    client_auth: ssl.VerifyMode = ssl.CERT_NONE
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    """Go's names; empty for OpenSSL's default."""
    prefer_server_cipher_suites: bool = True
    curve: str = ""
    """Go's name; empty for OpenSSL's default."""

    def files(self) -> tuple[Path, ...]:
        """Files whose change means a new context."""
        return tuple(
            pem.file for pem in (self.certificate, self.private_key, self.client_ca) if pem is not None and pem.file
        )


def server_context(settings: TlsSettings) -> ssl.SSLContext:
    """A TLS context that serves with these settings; certificates are read now.

    Raises:
        TlsSettingsError: a file cannot be read or does not hold what it should, or OpenSSL refuses a setting.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    if not settings.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    _set_versions_and_ciphers(context, settings)
    if settings.curve:
        try:
            context.set_ecdh_curve(CURVES[settings.curve])
        except (ssl.SSLError, ValueError):
            raise TlsSettingsError(
                "curve_preferences", f"this host's OpenSSL cannot offer {settings.curve} alone; choose another curve"
            ) from None
    _load_certificate(context, settings)
    context.verify_mode = settings.client_auth
    if settings.client_auth is not ssl.CERT_NONE:
        _load_client_ca(context, settings.client_ca)
    return context


def certificate_names(certificate: Any) -> frozenset[str]:
    """The alternative names (DNS, IP, e-mail, URI) of a certificate as `SSLSocket.getpeercert` returns it."""
    names = set()
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        # OpenSSL writes 0:0:0:0:0:0:0:1 where everyone else writes ::1.
        names.add(_plain_address(value) if kind == "IP Address" else value)
    return frozenset(names)


def _plain_address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text.strip()))
    except ValueError:
        return text


def _set_versions_and_ciphers(context: ssl.SSLContext, settings: TlsSettings) -> None:
    lowest, highest = VERSIONS[settings.min_version], VERSIONS[settings.max_version]
    if lowest > highest:
        raise TlsSettingsError("min_version", f"{settings.min_version} is above max_version {settings.max_version}")
    older = [CIPHERS[name] for name in settings.cipher_suites if name in CIPHERS]
    if settings.cipher_suites and not older:
        # Only TLS 1.3 suites: nothing is left that TLS 1.2 could agree on.
        lowest = ssl.TLSVersion.TLSv1_3
        if highest < lowest:
            raise TlsSettingsError("cipher_suites", "holds only TLS 1.3 suites, but max_version is TLS12")
    context.minimum_version, context.maximum_version = lowest, highest
    if older:
        try:
            context.set_ciphers(":".join(older))
        except ssl.SSLError:
            raise TlsSettingsError("cipher_suites", "OpenSSL on this host offers none of them") from None


def _load_certificate(context: ssl.SSLContext, settings: TlsSettings) -> None:
    with ExitStack() as opened:
        certificate = opened.enter_context(_as_file(settings.certificate))
        private_key = opened.enter_context(_as_file(settings.private_key))
        try:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certificate, private_key, password=lambda: b"")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise TlsSettingsError(settings.private_key.key, "is not the key of the certificate") from None
            raise TlsSettingsError(
                settings.certificate.key,
                f"with {settings.private_key.key} does not hold a PEM certificate and its key without password",
            ) from None


def _load_client_ca(context: ssl.SSLContext, client_ca: Pem | None) -> None:
    if client_ca is None:
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
        return
    with _as_file(client_ca) as path:
        try:
            context.load_verify_locations(cafile=str(path))
        except ssl.SSLError:
            raise TlsSettingsError(client_ca.key, "does not hold a PEM certificate") from None


@contextmanager
def _as_file(pem: Pem) -> Iterator[Path]:
    """A path at which OpenSSL can read it; text is put in memory, never on a disk."""
    if pem.file is not None:
        try:
            pem.file.open("rb").close()
        except OSError as error:
            raise TlsSettingsError(pem.key, f"cannot read {pem.file}: {error.strerror}") from None
        yield pem.file
        return
    descriptor = os.memfd_create(pem.key)
    try:
        os.write(descriptor, pem.text.encode())
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
