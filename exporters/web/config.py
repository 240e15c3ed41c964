"""The web configuration file: TLS, passwords and headers, in the format that other exporters read.

Operators have one such file for node_exporter and its peers; `--web.config.file` takes the same.  Source:
docs/web-configuration.md of prometheus/exporter-toolkit.  Every key is checked, and what is not known or cannot be done
here is an error, because a security setting that is silently ignored is worse than none.  Like the toolkit, changes to
the file and its certificates hold from the next connection on; unlike it, a change that cannot be used is logged and
the settings before it stay.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from railscope.exporters.web.auth import BasicAuth, is_bcrypt_hash
from railscope.exporters.web.config_yaml import Section, WebConfigError, read_yaml
from railscope.exporters.web.tls import (
    CIPHERS,
    CLIENT_AUTH,
    CURVES,
    TLS13_CIPHERS,
    VERSIONS,
    Pem,
    TlsSettings,
    TlsSettingsError,
    certificate_names,
    server_context,
)
from railscope.exporters.web.tls_transport import TlsTransport
from railscope.exporters.web.transport import PlainTransport, Transport

__all__ = ["WebConfig", "WebConfigError", "WebConfigFile", "load_web_config"]

_logger: Final = logging.getLogger("railscope.web_config")

_UNUSABLE_SECONDS: Final = 1.0
"""A certificate may become usable without a change of the file that names it."""

HEADERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "Content-Security-Policy": (),
        "Strict-Transport-Security": (),
        "X-Content-Type-Options": ("nosniff",),
        "X-Frame-Options": ("deny", "sameorigin"),
        "X-XSS-Protection": (),
    }
)
"""Headers that may be set, and the values that they may have; none means any."""


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The content of the file."""

    tls: TlsSettings | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """bcrypt hashes by user; empty where everyone may read."""
    headers: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    """What is accepted but has no effect here, one line each."""


def load_web_config(path: Path) -> WebConfig:
    """Read and check the web configuration file, except for what its certificates hold.

    Raises:
        WebConfigError: it cannot be read, or does not say something that can be done.
    """
    root = read_yaml(path)
    tls = root.section("tls_server_config")
    http = root.section("http_server_config")
    users = root.section("basic_auth_users")
    if root.pop("rate_limit", dict, None) is not None:
        raise root.error("rate_limit", "railscope does not limit requests; remove it")
    root.reject_unknown_keys()
    config = WebConfig(
        tls=_tls_settings(path.parent, tls) if tls.given else None,
        users=_users(users),
        headers=_headers(http.section("headers")),
        notes=_http2_note(path, http),
    )
    http.reject_unknown_keys()
    return config


class WebConfigFile:
    """The file as it is now: what a server asks at every connection.  Safe to use from several threads.

    Raises:
        WebConfigError: on construction, where the file or a certificate cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._state = _State(path)
        self._complaint = ""
        """Why the file as it is now cannot be used; said once."""
        self._unusable: tuple[tuple[int, int, int] | None, float] | None = None
        """Signature of a file that cannot be used, and until when it is not read again: requests do not wait for it."""
        for note in self._state.config.notes:
            _logger.info("%s", note)

    def tls_context(self) -> ssl.SSLContext | None:
        """The context for a new connection, None where the file asks for no TLS."""
        return self._current().context

    def transport(self, accepted: socket.socket) -> Transport:
        """What speaks for a new connection, TLS where the file asks for it.

        Raises:
            OSError: the peer has gone.
        """
        context = self.tls_context()
        return PlainTransport(accepted) if context is None else TlsTransport(accepted, context, self._allows_peer)

    def _allows_peer(self, connection: ssl.SSLSocket) -> bool:
        """Whether the client's certificate has one of the names asked for, if any is asked for."""
        tls = self._current().config.tls
        if tls is None or not tls.client_allowed_sans:
            return True
        return not certificate_names(connection.getpeercert()).isdisjoint(tls.client_allowed_sans)

    def auth(self) -> BasicAuth:
        """Who may read now."""
        return self._current().auth

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers for every answer."""
        return self._current().config.headers

    def _current(self) -> _State:
        with self._lock:
            if self._state.current():
                return self._state
            signature, now = _file_signature(self._path), time.monotonic()
            if self._unusable is not None and self._unusable[0] == signature and now < self._unusable[1]:
                return self._state
            try:
                self._state = _State(self._path)
                self._unusable = None
            except WebConfigError as error:
                self._unusable = signature, now + _UNUSABLE_SECONDS
                if str(error) != self._complaint:
                    _logger.error("%s; the settings before this change stay in use", error)
                self._complaint = str(error)
            else:
                _logger.info("%s: read again", self._path)
                self._complaint = ""
            return self._state


class _State:
    """One reading of the file and of what it names."""

    def __init__(self, path: Path) -> None:
        # Each signature is taken before the reading it stands for, so a change in between is seen next time.
        signatures = {path: _file_signature(path)}
        self.config = load_web_config(path)
        for file in self.config.tls.files() if self.config.tls else ():
            signatures[file] = _file_signature(file)
        self._signatures = signatures
        try:
            self.context = server_context(self.config.tls) if self.config.tls else None
        except TlsSettingsError as error:
            raise WebConfigError(f"{path}: tls_server_config.{error}") from None
        self.auth = BasicAuth(self.config.users)

    def current(self) -> bool:
        """Whether the file and its certificates are still those that were read."""
        return all(_file_signature(file) == signature for file, signature in self._signatures.items())


def _file_signature(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _tls_settings(folder: Path, section: Section) -> TlsSettings:
    def pem(inline_key: str, file_key: str) -> Pem | None:
        inline, file = section.text(inline_key), section.text(file_key)
        if inline and file:
            raise section.error(inline_key, f"give this or {file_key}, not both")
        if file:
            return Pem(file_key, file=folder / file)
        return Pem(inline_key, text=inline) if inline else None

    certificate, private_key, client_ca = (
        pem("cert", "cert_file"),
        pem("key", "key_file"),
        pem("client_ca", "client_ca_file"),
    )
    if certificate is None:
        raise section.error("cert_file", "missing; TLS needs a certificate")
    if private_key is None:
        raise section.error("key_file", "missing; TLS needs the certificate's key")
    client_auth, sans = _client_auth(section, client_ca)
    ciphers = section.texts("cipher_suites")
    for cipher in ciphers:
        if cipher not in CIPHERS and cipher not in TLS13_CIPHERS:
            raise section.error("cipher_suites", f"unknown cipher {cipher!r}; see Go's crypto/tls.CipherSuites")
    curves = section.texts("curve_preferences")
    if len(curves) > 1:
        raise section.error(
            "curve_preferences", "this host's TLS library accepts a single curve; give one, or none for all"
        )
    if curves and curves[0] not in CURVES:
        raise section.error("curve_preferences", f"unknown curve {curves[0]!r}; use one of {', '.join(CURVES)}")
    settings = TlsSettings(
        certificate=certificate,
        private_key=private_key,
        client_ca=client_ca,
        client_auth=client_auth,
        client_allowed_sans=sans,
        min_version=section.choice("min_version", VERSIONS, "TLS12"),
        max_version=section.choice("max_version", VERSIONS, "TLS13"),
        cipher_suites=ciphers,
        prefer_server_cipher_suites=section.pop("prefer_server_cipher_suites", bool, True) is not False,
        curve=curves[0] if curves else "",
    )
    section.reject_unknown_keys()
    return settings


def _client_auth(section: Section, client_ca: Pem | None) -> tuple[ssl.VerifyMode, tuple[str, ...]]:
    name = section.text("client_auth_type", "NoClientCert")
    if name in ("RequireAnyClientCert", "RequireClientCert"):
        raise section.error(
            "client_auth_type", f"{name} would accept any certificate unverified; use RequireAndVerifyClientCert"
        )
    if name not in CLIENT_AUTH:
        raise section.error("client_auth_type", f"unknown value {name!r}; use one of {', '.join(CLIENT_AUTH)}")
    mode = CLIENT_AUTH[name]
    if client_ca is not None and name == "NoClientCert":
        raise section.error(client_ca.key, "has no effect without client_auth_type: RequireAndVerifyClientCert")
    sans = section.texts("client_allowed_sans")
    if sans and mode is not ssl.CERT_REQUIRED:
        raise section.error("client_allowed_sans", "needs client_auth_type: RequireAndVerifyClientCert")
    return mode, sans


def _users(section: Section) -> dict[str, str]:
    users = section.all_texts()
    for user, hashed in users.items():
        if ":" in user:
            raise section.error(user, "a user's name cannot hold a colon")
        if not is_bcrypt_hash(hashed):
            raise section.error(user, "not a bcrypt hash; make one with: htpasswd -nBC 10 '' | tr -d ':\\n'")
    return users


def _headers(section: Section) -> tuple[tuple[str, str], ...]:
    headers = {name: value for name, value in section.all_texts().items() if value}
    for name, value in headers.items():
        if name not in HEADERS:
            raise section.error(name, f"this header cannot be set; use one of {', '.join(HEADERS)}")
        if HEADERS[name] and value not in HEADERS[name]:
            raise section.error(name, f"unknown value {value!r}; use one of {', '.join(HEADERS[name])}")
        if not value.isprintable() or not value.isascii():
            raise section.error(name, "contains a character that is not allowed in a header")
    return tuple(headers.items())


def _http2_note(path: Path, section: Section) -> tuple[str, ...]:
    if section.pop("http2", bool, None):
        return (f"{path}: http_server_config.http2 has no effect: HTTP/1.1 is served",)
    return ()
