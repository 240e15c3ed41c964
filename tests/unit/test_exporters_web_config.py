"""The web configuration file, and TLS and passwords on real sockets with certificates made by openssl."""

from __future__ import annotations

import base64
import http.client
import logging
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import bcrypt
import pytest

from railscope.exporters.web import config
from railscope.exporters.web.auth import BasicAuth, is_bcrypt_hash
from railscope.exporters.web.clients import _guesser
from railscope.exporters.web.config import WebConfig, WebConfigError, WebConfigFile, load_web_config
from railscope.exporters.web.connection import Connection
from railscope.exporters.web.connection_table import Origin
from railscope.exporters.web.http import MetricsServer, ServerSettings
from railscope.exporters.web.password_checks import PasswordChecks
from railscope.exporters.web.tls import CIPHERS, CURVES, certificate_names
from railscope.exporters.web.transport import PlainTransport
from tests.unit.exporters_snapshots import full_snapshot

PASSWORD = "correct horse"
HASH = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def make_certificate(folder: Path, name: str, sans: str, issuer: str | None) -> None:
    """`name.crt` and `name.key` in the folder, signed by `issuer` or by itself as an authority."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")
    subject = ("-subj", f"/CN={name}")
    if issuer is None:
        openssl(folder, "req", "-x509", *key, *subject, "-days", "2", "-out", f"{name}.crt")
        return
    openssl(folder, "req", "-new", *key, *subject, "-out", f"{name}.csr")
    (folder / f"{name}.ext").write_text(f"subjectAltName={sans}\n")
    signed_by = ("-CA", f"{issuer}.crt", "-CAkey", f"{issuer}.key", "-CAcreateserial")
    openssl(
        folder,
        *("x509", "-req", "-in", f"{name}.csr", *signed_by, "-days", "2"),
        *("-extfile", f"{name}.ext", "-out", f"{name}.crt"),
    )


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server, two clients of it, and a stranger with an authority of its own."""
    folder = tmp_path_factory.mktemp("pki")
    make_certificate(folder, "ca", "", None)
    make_certificate(folder, "other-ca", "", None)
    make_certificate(folder, "server", "DNS:localhost,IP:127.0.0.1", "ca")
    make_certificate(folder, "renewed", "DNS:localhost,IP:127.0.0.1", "ca")
    make_certificate(folder, "prometheus", "DNS:prometheus.example,IP:0:0:0:0:0:0:0:1,URI:spiffe://x/prom", "ca")
    make_certificate(folder, "laptop", "DNS:laptop.example", "ca")
    make_certificate(folder, "stranger", "DNS:prometheus.example", "other-ca")
    return folder


class Site:
    """A configuration file and the server that uses it."""

    def __init__(self, folder: Path, pki: Path) -> None:
        self.folder = folder
        self.pki = pki
        self.file = folder / "web.yml"
        self._servers: list[MetricsServer] = []

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def tls(self, more: str = "") -> None:
        self.write(f"tls_server_config:\n  cert_file: {self.pki}/server.crt\n  key_file: {self.pki}/server.key\n{more}")

    def serve(self, max_connections: int = 64, wrong_password_seconds: float = 0.1) -> MetricsServer:
        server = MetricsServer(
            ServerSettings(
                listen_address="127.0.0.1:0",
                request_timeout_seconds=5.0,
                max_connections=max_connections,
                wrong_password_seconds=wrong_password_seconds,
            ),
            snapshot=full_snapshot,
            healthy=lambda: (True, "ok"),
            ready=lambda: (True, "ready"),
            web=WebConfigFile(self.file),
        )
        server.start()
        self._servers.append(server)
        return server

    def close(self) -> None:
        for server in self._servers:
            server.close()


@pytest.fixture
def site(tmp_path: Path, pki: Path) -> Iterator[Site]:
    with closing(Site(tmp_path, pki)) as one:
        yield one


def client_context(pki: Path, certificate: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=pki / "ca.crt")
    if certificate:
        context.load_cert_chain(pki / f"{certificate}.crt", pki / f"{certificate}.key")
    return context


def get(
    server: MetricsServer, context: ssl.SSLContext | None = None, authorization: str = "", path: str = "/healthz"
) -> tuple[int, http.client.HTTPMessage]:
    kind = http.client.HTTPConnection
    client = (
        http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=context)
        if context
        else kind("127.0.0.1", server.port, timeout=10)
    )
    with closing(client):
        client.request("GET", path, headers={"Authorization": authorization} if authorization else {})
        answer = client.getresponse()
        answer.read()
        return answer.status, answer.headers


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


# TLS


def test_metrics_over_tls(site: Site, pki: Path) -> None:
    site.tls()
    server = site.serve()
    assert server.url.startswith("https://")
    assert get(server, client_context(pki), path="/metrics")[0] == 200


def test_one_who_sends_far_too_much_over_tls_gets_to_know_it(site: Site, pki: Path) -> None:
    site.tls()
    with closing(
        http.client.HTTPSConnection("127.0.0.1", site.serve().port, timeout=10, context=client_context(pki))
    ) as client:
        client.request("GET", "/healthz", headers={"X": "y" * 4_000_000})
        assert client.getresponse().status == 431


def test_plain_http_to_a_tls_port_is_not_answered(site: Site) -> None:
    site.tls()
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        get(site.serve())


def test_certificates_may_stand_in_the_file_itself(site: Site, pki: Path) -> None:
    def indented(name: str) -> str:
        return "".join(f"    {line}\n" for line in (pki / name).read_text().splitlines())

    site.write(f"tls_server_config:\n  cert: |\n{indented('server.crt')}  key: |\n{indented('server.key')}")
    assert get(site.serve(), client_context(pki))[0] == 200


def test_a_client_certificate_is_required_and_checked(site: Site, pki: Path) -> None:
    site.tls(f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {pki}/ca.crt\n")
    server = site.serve()
    assert get(server, client_context(pki, "prometheus"))[0] == 200
    for refused in ("", "stranger"):
        # With TLS 1.3 a client learns it on its first read, maybe only by the closed connection.
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            get(server, client_context(pki, refused))


def test_a_client_certificate_may_be_optional_but_not_wrong(site: Site, pki: Path) -> None:
    site.tls(f"  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: {pki}/ca.crt\n")
    server = site.serve()
    assert get(server, client_context(pki))[0] == 200
    assert get(server, client_context(pki, "prometheus"))[0] == 200
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        get(server, client_context(pki, "stranger"))


@pytest.mark.parametrize("name", ["prometheus.example", "::1", "spiffe://x/prom"])
def test_only_a_client_with_an_allowed_name_is_answered(site: Site, pki: Path, name: str) -> None:
    site.tls(
        f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {pki}/ca.crt\n"
        f'  client_allowed_sans: [unrelated.example, "{name}"]\n'
    )
    server = site.serve()
    assert get(server, client_context(pki, "prometheus"))[0] == 200
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        get(server, client_context(pki, "laptop"))


def test_a_client_below_the_minimum_version_is_refused(site: Site, pki: Path) -> None:
    site.tls("  min_version: TLS13\n")
    server = site.serve()
    old = client_context(pki)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="alert protocol version"):
        get(server, old)
    assert get(server, client_context(pki))[0] == 200


@pytest.mark.parametrize(("name", "agreed"), [("maximum_version", "TLSv1.2"), ("cipher_suites", "TLSv1.3")])
def test_versions_follow_the_maximum_and_the_cipher_suites(site: Site, pki: Path, name: str, agreed: str) -> None:
    site.tls("  max_version: TLS12\n" if name == "maximum_version" else "  cipher_suites: [TLS_AES_128_GCM_SHA256]\n")
    server = site.serve()
    client = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=client_context(pki))
    with closing(client):
        client.connect()
        assert isinstance(client.sock, ssl.SSLSocket)
        assert client.sock.version() == agreed


def test_a_cipher_by_gos_name_is_the_one_used(site: Site, pki: Path) -> None:
    site.tls("  max_version: TLS12\n  cipher_suites: [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256]\n")
    server = site.serve()
    client = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=client_context(pki))
    with closing(client):
        client.connect()
        assert isinstance(client.sock, ssl.SSLSocket)
        cipher = client.sock.cipher()
        assert cipher is not None
        assert cipher[0] == "ECDHE-ECDSA-CHACHA20-POLY1305"


@pytest.mark.parametrize("name", sorted(CIPHERS))
def test_every_cipher_of_go_is_known_to_openssl(name: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers(CIPHERS[name])
    assert CIPHERS[name] in {cipher["name"] for cipher in context.get_ciphers()}


@pytest.mark.parametrize("curve", sorted(CURVES))
def test_one_curve_may_be_chosen(site: Site, pki: Path, curve: str) -> None:
    site.tls(f"  curve_preferences: [{curve}]\n")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ecdh_curve(CURVES[curve])
    except (ssl.SSLError, ValueError):
        # Python 3.11 on OpenSSL 3.0 (Debian 12) does not take X25519 here: that is said in one line.
        with pytest.raises(WebConfigError, match=f"curve_preferences: .*{curve}"):
            site.serve()
        return
    assert get(site.serve(), client_context(pki))[0] == 200


def test_a_renewed_certificate_is_used_for_the_next_connection(site: Site, pki: Path) -> None:
    def install(name: str) -> None:
        for kind in ("crt", "key"):
            new = site.folder / f"new.{kind}"
            new.write_bytes((pki / f"{name}.{kind}").read_bytes())
            new.replace(site.folder / f"server.{kind}")

    def served() -> str:
        client = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=client_context(pki))
        with closing(client):
            client.connect()
            assert isinstance(client.sock, ssl.SSLSocket)
            certificate = client.sock.getpeercert()
            assert certificate is not None
            return str(dict(pair[0] for pair in certificate["subject"])["commonName"])  # type: ignore[misc]

    install("server")
    # Relative to the configuration file, not to where the agent was started.
    site.write("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    server = site.serve()
    assert served() == "server"
    install("renewed")
    assert served() == "renewed"


def test_a_change_that_cannot_be_used_is_logged_once_and_the_settings_before_it_stay(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.write(f"basic_auth_users: {{ada: {HASH}}}\n")
    server = site.serve()
    site.write("basic_auth_users: {ada: secret}\n")
    with caplog.at_level(logging.ERROR, "railscope.web_config"):
        assert [get(server)[0], get(server, authorization=basic("ada", PASSWORD))[0]] == [401, 200]
    (message,) = (record.getMessage() for record in caplog.records)
    assert "basic_auth_users.ada: not a bcrypt hash" in message
    assert "secret" not in message
    site.write("")
    assert get(server)[0] == 200


def test_a_file_that_cannot_be_used_is_not_read_again_for_each_request(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write(f"basic_auth_users: {{ada: {HASH}}}\n")
    file = WebConfigFile(site.file)
    readings: list[Path] = []

    def read(path: Path) -> WebConfig:
        readings.append(path)
        return load_web_config(path)

    monkeypatch.setattr(config, "load_web_config", read)
    monkeypatch.setattr(config, "_UNUSABLE_SECONDS", 3600.0)
    site.write("basic_auth_users: {ada: secret}\n")
    for _ in range(10):
        assert file.auth().has_users
    assert len(readings) == 1
    # It is after a while: what it names may have become usable.
    monkeypatch.setattr(config, "_UNUSABLE_SECONDS", 0.0)
    site.write("basic_auth_users: {ada: another}\n")
    for _ in range(2):
        assert file.auth().has_users
    assert len(readings) == 3
    site.write("")
    assert not file.auth().has_users


def test_a_client_that_never_shakes_hands_does_not_hold_up_the_others(site: Site, pki: Path) -> None:
    site.tls()
    server = site.serve()
    silent = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with closing(silent):
        silent.connect()
        assert get(server, client_context(pki))[0] == 200


def test_handshakes_that_never_end_make_room_for_a_scrape(site: Site, pki: Path) -> None:
    site.tls()
    server = site.serve(max_connections=4)
    with ExitStack() as silent:
        for number in range(20):
            client = silent.enter_context(closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)))
            client.connect()
            if number % 2:
                client.sock.sendall(b"\x16\x03\x01\x02")  # the beginning of a handshake
        assert get(server, client_context(pki), path="/metrics")[0] == 200
    assert server.refusals()["half_open"] >= 17


def test_names_of_a_certificate_are_written_as_people_write_them() -> None:
    certificate = {"subjectAltName": (("IP Address", "FE80:0:0:0:0:0:0:1"), ("DNS", "a"), ("email", "b@c"))}
    assert certificate_names(certificate) == {"fe80::1", "a", "b@c"}
    assert certificate_names(None) == certificate_names({}) == frozenset()


# Passwords


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/", "/nothing"])
def test_every_page_wants_the_password(site: Site, path: str) -> None:
    site.write(f"basic_auth_users: {{ada: {HASH}}}\n")
    server = site.serve()
    status, headers = get(server, path=path)
    assert (status, headers["WWW-Authenticate"]) == (401, 'Basic realm="railscope", charset="UTF-8"')
    assert get(server, authorization=basic("ada", PASSWORD), path=path)[0] in (200, 404)


def test_a_wrong_password_is_answered_late_and_holds_up_nobody(site: Site) -> None:
    site.write(f"basic_auth_users: {{ada: {HASH}}}\n")
    server = site.serve(wrong_password_seconds=0.5)
    late: list[tuple[int, float]] = []

    def guess() -> None:
        before = time.monotonic()
        late.append((get(server, authorization=basic("ada", "wrong"))[0], time.monotonic() - before))

    guesses = [threading.Thread(target=guess) for _ in range(10)]
    for thread in guesses:
        thread.start()
    assert get(server, authorization=basic("ada", PASSWORD))[0] == 200
    for thread in guesses:
        thread.join()
    assert [status for status, _ in late] == [401] * 10
    assert min(seconds for _, seconds in late) >= 0.5
    assert server.refusals()["password"] == 10


def test_guesses_over_the_loopback_are_those_of_their_user(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = []
    ask = PasswordChecks.ask

    def note(self: PasswordChecks[object], auth: BasicAuth, given: str, client: str, waiter: object) -> object:
        clients.append(client)
        return ask(self, auth, given, client, waiter)

    monkeypatch.setattr(PasswordChecks, "ask", note)
    site.write(f"basic_auth_users: {{ada: {HASH}}}\n")
    assert get(site.serve(), authorization=basic("ada", "wrong"))[0] == 401
    assert clients == [f"uid {os.geteuid()}"]


@pytest.mark.parametrize(
    ("address", "guesser"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1::2", "20010db800000001"),
        ("2001:db8:0:1:ffff::3", "20010db800000001"),
        ("fe80::1%eth0", "fe80000000000000"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_guesses_from_elsewhere_are_those_of_the_address_and_of_ipv6_of_the_network(address: str, guesser: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert _guesser(Connection(PlainTransport(ours), address, Origin.REMOTE, 0.0)) == guesser


def test_the_more_a_client_guesses_the_later_it_is_refused_up_to_four_times(site: Site) -> None:
    site.write(f"basic_auth_users: {{ada: {HASH}}}\n")
    server = site.serve(wrong_password_seconds=0.02)
    seconds = []
    for _ in range(48):
        before = time.monotonic()
        assert get(server, authorization=basic("ada", "wrong"))[0] == 401
        seconds.append(time.monotonic() - before)
    assert min(seconds[:8]) >= 0.02
    assert min(seconds[-8:]) >= 0.08


def test_who_has_shown_the_password_keeps_its_connection_beside_strangers(site: Site) -> None:
    site.write(f"basic_auth_users: {{ada: {HASH}}}\n")
    server = site.serve(max_connections=8)
    with ExitStack() as clients:
        known = clients.enter_context(closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)))
        known.connect()
        ours = known.sock.getsockname()
        for _ in range(2):
            known.request("GET", "/healthz", headers={"Authorization": basic("ada", PASSWORD)})
            answer = known.getresponse()
            answer.read()
            assert answer.status == 200
            assert known.sock.getsockname() == ours
            for _ in range(20):
                stranger = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
                clients.enter_context(closing(stranger)).connect()
            assert get(server)[0] == 401


def test_wrong_credentials_are_refused() -> None:
    auth = BasicAuth({"ada": HASH})
    assert auth.accepts(basic("ada", PASSWORD))
    assert auth.accepts(basic("ada", PASSWORD)), "from memory"
    for wrong in (
        basic("ada", "wrong"),
        basic("ada", ""),
        basic("ada", PASSWORD + " "),
        basic("ada", PASSWORD + "\0"),
        basic("bob", PASSWORD),
        basic("", PASSWORD),
        "",
        "Basic",
        "Basic !!!",
        "Basic YWRh",
        "Bearer " + basic("ada", PASSWORD).removeprefix("Basic "),
    ):
        assert not auth.accepts(wrong), wrong


def test_without_users_everyone_is_allowed() -> None:
    assert BasicAuth({}).accepts("")


def test_a_right_password_is_hashed_once_and_a_wrong_one_or_an_unknown_user_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[bytes] = []
    check = bcrypt.checkpw

    def noted(password: bytes, of: bytes) -> bool:
        hashed.append(of)
        return check(password, of)

    monkeypatch.setattr(bcrypt, "checkpw", noted)
    auth = BasicAuth({"ada": HASH, "eve": HASH.replace("$04$", "$05$")})
    for credentials in (basic("ada", PASSWORD), basic("ada", "wrong"), basic("bob", "x")):
        for _ in range(2):
            auth.accepts(credentials)
    assert len(hashed) == 1 + 2 + 2
    assert hashed[0].startswith(b"$2b$04$")
    assert hashed[-1].startswith(b"$2b$05$"), "an unknown user costs as much as the dearest known one"


def test_a_long_password_counts_up_to_where_bcrypt_looks() -> None:
    long = "x" * 100
    auth = BasicAuth({"ada": bcrypt.hashpw(long[:72].encode(), bcrypt.gensalt(4)).decode()})
    assert auth.accepts(basic("ada", long))
    assert not auth.accepts(basic("ada", "x" * 71))


def test_hashes_of_htpasswd_are_taken() -> None:
    assert BasicAuth({"ada": HASH.replace("$2b$", "$2y$")}).accepts(basic("ada", PASSWORD))


@pytest.mark.parametrize(
    "text",
    ["", "secret", HASH[:-1], HASH + "x", HASH.replace("$04$", "$99$"), "{SHA}x", HASH + "\n"],
    ids=("empty", "plain", "short", "long", "dear", "another kind", "line feed"),
)
def test_what_is_no_bcrypt_hash_is_seen(text: str) -> None:
    assert not is_bcrypt_hash(text)


def test_headers_go_with_every_answer(site: Site) -> None:
    site.write(
        f"basic_auth_users: {{ada: {HASH}}}\n"
        "http_server_config: {http2: false, headers: {X-Frame-Options: deny, Content-Security-Policy: ''}}\n"
    )
    server = site.serve()
    for authorization in ("", basic("ada", PASSWORD)):
        headers = get(server, authorization=authorization)[1]
        assert headers["X-Frame-Options"] == "deny"
        assert "Content-Security-Policy" not in headers


# What cannot be used


def test_an_empty_file_asks_for_nothing(site: Site) -> None:
    site.write("# nothing yet\n")
    assert get(site.serve())[0] == 200


def test_http2_is_accepted_with_a_note(site: Site) -> None:
    site.write("http_server_config:\n  http2: true\n")
    assert load_web_config(site.file).notes == (
        f"{site.file}: http_server_config.http2 has no effect: HTTP/1.1 is served",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("basic_auth_user: {}", "basic_auth_user: unknown key"),
        ("tls_server_config: {CERT, cert_flie: x}", "tls_server_config.cert_flie: unknown key"),
        ("http_server_config: {headers: {}, x: 1}", "http_server_config.x: unknown key"),
        ("- a\n- b", "the file: expected keys and values"),
        ("tls_server_config: yes please", "tls_server_config: expected keys and values"),
        ("tls_server_config: {}", "tls_server_config.cert_file: missing; TLS needs a certificate"),
        ("tls_server_config: {cert_file: server.crt}", "tls_server_config.key_file: missing; TLS needs"),
        ("tls_server_config: {CERT, cert: x}", "tls_server_config.cert: give this or cert_file, not both"),
        ("tls_server_config: {cert_file: 7, key_file: x}", "tls_server_config.cert_file: expected text, found int"),
        ("tls_server_config: {cert_file: gone.crt, key_file: server.key}", "tls_server_config.cert_file: cannot read"),
        ("tls_server_config: {cert_file: server.crt, key_file: gone.key}", "tls_server_config.key_file: cannot read"),
        ("tls_server_config: {cert_file: server.crt, key_file: laptop.key}", "key_file: is not the key of the cert"),
        ("tls_server_config: {cert_file: server.csr, key_file: server.key}", "cert_file: with key_file does not hold"),
        ("tls_server_config: {CERT, min_version: TLS9}", "min_version: unknown value 'TLS9'; use one of TLS12, TLS13"),
        ("tls_server_config: {CERT, min_version: TLS10}", "min_version: unknown value 'TLS10'; use one of TLS12"),
        (
            "tls_server_config: {CERT, min_version: TLS13, max_version: TLS12}",
            "min_version: TLS13 is above max_version",
        ),
        ("tls_server_config: {CERT, cipher_suites: [TLS_MADE_UP]}", "cipher_suites: unknown cipher 'TLS_MADE_UP'"),
        ("tls_server_config: {CERT, cipher_suites: TLS_X}", "cipher_suites: expected a list, found str"),
        ("tls_server_config: {CERT, cipher_suites: [1]}", "cipher_suites: expected a list of texts"),
        ("tls_server_config: {CERT, curve_preferences: [CurveP256, X25519]}", "curve_preferences: this host's TLS"),
        ("tls_server_config: {CERT, curve_preferences: [P1]}", "curve_preferences: unknown curve 'P1'; use one of"),
        ("tls_server_config: {CERT, client_auth_type: Yes please}", "client_auth_type: unknown value 'Yes please'"),
        ("tls_server_config: {CERT, client_auth_type: RequireAnyClientCert}", "client_auth_type: RequireAnyClientCert"),
        ("tls_server_config: {CERT, client_ca_file: ca.crt}", "client_ca_file: has no effect without client_auth_type"),
        ("tls_server_config: {CERT, client_allowed_sans: [a]}", "client_allowed_sans: needs client_auth_type"),
        (
            "tls_server_config: {CERT, client_auth_type: RequireAndVerifyClientCert, client_ca_file: server.key}",
            "client_ca_file: does not hold a PEM certificate",
        ),
        ("tls_server_config: {CERT, prefer_server_cipher_suites: 1}", "expected true or false, found int"),
        ("basic_auth_users: {ada: secret}", "basic_auth_users.ada: not a bcrypt hash; make one with: htpasswd"),
        ("basic_auth_users: {1: x}", "basic_auth_users.1: expected a text as key; put it in quotes"),
        ("basic_auth_users: {'a:b': x}", "basic_auth_users.a:b: a user's name cannot hold a colon"),
        ("http_server_config: {headers: {Server: x}}", "headers.Server: this header cannot be set; use one of"),
        ("http_server_config: {headers: {X-Frame-Options: maybe}}", "X-Frame-Options: unknown value 'maybe'; use one"),
        ('http_server_config: {headers: {X-XSS-Protection: "a\\r\\nb: c"}}', "X-XSS-Protection: contains a character"),
        ("http_server_config: {http2: maybe}", "http2: expected true or false, found str"),
        ("rate_limit: {burst: 1}", "rate_limit: railscope does not limit requests; remove it"),
        ("basic_auth_users: {}\nbasic_auth_users: {}", "line 2: the key 'basic_auth_users' is given twice"),
        ("a: [", "line 1: expected the node content"),
        ("[a]: b", "line 1: found unhashable key"),
        ("a: 2000-99-99", "this is not a YAML text in UTF-8"),
        ("a: \x07", "this is not a YAML text in UTF-8"),
        ("a: !!python/object/apply:os.system [x]", "line 1: could not determine a constructor"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_file_and_key(tmp_path: Path, pki: Path, text: str, problem: str) -> None:
    for name in ("server.crt", "server.key", "server.csr", "laptop.key", "ca.crt"):
        (tmp_path / name).symlink_to(pki / name)
    file = tmp_path / "web.yml"
    file.write_text(text.replace("CERT", "cert_file: server.crt, key_file: server.key"))
    with pytest.raises(WebConfigError) as caught:
        WebConfigFile(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert problem in message
    assert "\n" not in message


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path, pki: Path) -> None:
    openssl(tmp_path, "pkey", "-in", f"{pki}/server.key", "-aes128", "-passout", "pass:secret", "-out", "locked.key")
    file = tmp_path / "web.yml"
    file.write_text(f"tls_server_config: {{cert_file: {pki}/server.crt, key_file: locked.key}}\n")
    with pytest.raises(WebConfigError, match="its key without password"):
        WebConfigFile(file)


def test_a_file_that_is_not_there_or_not_text_says_so(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match=r"gone\.yml: cannot read the web configuration: No such file"):
        load_web_config(tmp_path / "gone.yml")
    (tmp_path / "binary.yml").write_bytes(os.urandom(16) + b"\xff\xfe\x00")
    with pytest.raises(WebConfigError, match="not a YAML text"):
        load_web_config(tmp_path / "binary.yml")
