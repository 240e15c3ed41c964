"""The server on real sockets of the loopback."""

from __future__ import annotations

import gzip
import http.client
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from agent.snapshot import Snapshot
from exporters.http import MetricsServer, ServerError, ServerSettings
from exporters.listen import ListenAddress, parse_listen_address
from exporters.negotiation import accepts_gzip, metrics_format
from exporters.protobuf import Protobuf
from exporters.text import Format
from tests.unit.exporters_snapshots import full_snapshot
from tests.unit.metric_families import read_families

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily"
PROMETHEUS_NATIVE = (
    f"{PROTOBUF};encoding=delimited,application/openmetrics-text;version=1.0.0;q=0.8,"
    "application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""With --enable-feature=native-histograms."""
FREE_PORT = ServerSettings(listen_address="127.0.0.1:0", request_timeout_seconds=5.0)


@dataclass
class Agent:
    """What stands behind the server; a test changes its mood."""

    snapshot: Callable[[], Snapshot] = full_snapshot
    health: tuple[bool, str] = (True, "ok")
    readiness: tuple[bool, str] = (True, "ready")
    servers: ExitStack = field(default_factory=ExitStack)

    def server(self, settings: ServerSettings = FREE_PORT) -> MetricsServer:
        return self.servers.enter_context(
            MetricsServer(
                settings,
                snapshot=lambda: self.snapshot(),
                healthy=lambda: self.health,
                ready=lambda: self.readiness,
            )
        )


@pytest.fixture
def agent() -> Iterator[Agent]:
    one = Agent()
    with one.servers:
        yield one


@dataclass(frozen=True)
class Response:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(server: MetricsServer, path: str, method: str = "GET", **headers: str) -> Response:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as client:
        return ask_on(client, path, method, **headers)


def ask_on(client: http.client.HTTPConnection, path: str, method: str = "GET", **headers: str) -> Response:
    client.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = client.getresponse()
    return Response(answer.status, answer.headers, answer.read())


def until_idle(server: MetricsServer, count: int) -> None:
    deadline = time.monotonic() + 10
    while server.idle_connections != count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def raw(server: MetricsServer, data: bytes) -> bytes:
    """Everything that the server says to some bytes until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(data)
        said = b""
        while more := client.recv(65536):
            said += more
        return said


def test_metrics_are_plain_text_for_whoever_does_not_ask(agent: Agent) -> None:
    answer = ask(agent.server(), "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert int(answer.headers["Content-Length"]) == len(answer.body)
    assert "Content-Encoding" not in answer.headers
    assert "railscope_rail_up{" in answer.text


def test_prometheus_gets_openmetrics_compressed(agent: Agent) -> None:
    answer = ask(agent.server(), "/metrics", Accept=PROMETHEUS_2, Accept_Encoding="gzip")
    assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.headers["Content-Encoding"] == "gzip"
    text = gzip.decompress(answer.body).decode()
    families = {family.name for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
    assert "railscope_comm_enqueued" in families


def test_prometheus_gets_protobuf_where_it_takes_native_histograms(agent: Agent) -> None:
    answer = ask(agent.server(), "/metrics", Accept=PROMETHEUS_NATIVE, Accept_Encoding="gzip")
    assert answer.headers["Content-Type"] == (
        "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
    )
    read = {family.name: family for family in read_families(gzip.decompress(answer.body))}
    assert "railscope_comm_enqueued_total" in read
    # The text that others get is not touched by it.
    assert "railscope_comm_enqueued_total{" in ask(agent.server(), "/metrics").text


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        ("", Format.PROMETHEUS),
        ("*/*", Format.PROMETHEUS),
        ("text/html,application/xhtml+xml,*/*;q=0.8", Format.PROMETHEUS),
        ("application/*", Format.PROMETHEUS),
        ("application/openmetrics-text", Format.OPENMETRICS),
        ("Application/OpenMetrics-Text; Version=1.0.0", Format.OPENMETRICS),
        ("text/plain,application/openmetrics-text", Format.OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1", Format.PROMETHEUS),
        (PROMETHEUS_2, Format.OPENMETRICS),
        ("application/openmetrics-text;q=0.3,text/plain;q=0.7", Format.PROMETHEUS),
        ("application/openmetrics-text;q=0.3,text/plain;version=1.0.0;q=0.7", Format.OPENMETRICS),
        ("application/openmetrics-text;q=0.3,*/*;q=0.7", Format.PROMETHEUS),
        ("application/openmetrics-text;q=0.3,text/plain;q=0.1,*/*;q=0.7", Format.OPENMETRICS),
        ("application/openmetrics-text;q=0", Format.PROMETHEUS),
        ("application/openmetrics-text;q=high", Format.PROMETHEUS),
        ("image/png", Format.PROMETHEUS),
        (",;=,q=;", Format.PROMETHEUS),
        (PROMETHEUS_NATIVE, Protobuf.DELIMITED),
        ("application/vnd.google.protobuf", Format.PROMETHEUS),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily", Format.PROMETHEUS),
        (f"{PROTOBUF};encoding=text", Format.PROMETHEUS),
        (f"{PROTOBUF};encoding=delimited;q=0.3,text/plain;q=0.7", Format.PROMETHEUS),
        (f"{PROTOBUF};encoding=delimited;q=0.3,application/openmetrics-text;q=0.7", Format.OPENMETRICS),
        (f"{PROTOBUF};encoding=delimited;q=0", Format.PROMETHEUS),
    ],
)
def test_the_format_follows_accept_and_its_qualities(accept: str, format: Format | Protobuf) -> None:
    assert metrics_format(accept) is format


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("", False),
        ("gzip", True),
        ("deflate, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("*", True),
        ("*;q=0, gzip", True),
        ("gzip;q=0, *", False),
        ("identity", False),
        ("br", False),
    ],
)
def test_compression_follows_accept_encoding_and_its_qualities(header: str, allowed: bool) -> None:
    assert accepts_gzip(header) is allowed


def test_a_small_answer_is_not_compressed(agent: Agent) -> None:
    agent.snapshot = lambda: Snapshot(realtime_ns=0, version="0.1.0", kernel="6.8.0")
    answer = ask(agent.server(), "/metrics", Accept_Encoding="gzip")
    assert len(answer.body) < 1024
    assert "Content-Encoding" not in answer.headers


def test_head_has_the_headers_of_get_and_no_body(agent: Agent) -> None:
    server = agent.server()
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as client:
        head = ask_on(client, "/metrics", "HEAD")
        full = ask_on(client, "/metrics", "GET")
    assert head.status == 200
    assert (head.body, head.headers["Content-Length"]) == (b"", full.headers["Content-Length"])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods_are_refused_with_those_that_work(agent: Agent, method: str) -> None:
    answer = ask(agent.server(), "/metrics", method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_what_is_not_there_is_one_line_that_says_where_metrics_are(agent: Agent) -> None:
    answer = ask(agent.server(), "/metricss?x=<script>")
    assert (answer.status, answer.text) == (404, "nothing here; metrics are at /metrics\n")


def test_a_query_does_not_change_the_page(agent: Agent) -> None:
    assert ask(agent.server(), "/metrics?collect[]=x").status == 200


def test_the_landing_page_links_to_the_metrics_wherever_they_are(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, telemetry_path="/rails"))
    answer = ask(server, "/")
    assert answer.headers["Content-Type"].startswith("text/html")
    for link in re.findall(r'href="([^"]+)"', answer.text):
        assert ask(server, link).status == 200
    assert 'href="/rails"' in answer.text
    assert ask(server, "/metrics").status == 404


@pytest.mark.parametrize("path", ["metrics", "/healthz", "/readyz", "/a b", "/é", ""])
def test_a_telemetry_path_that_cannot_be_one_is_refused(agent: Agent, path: str) -> None:
    with pytest.raises(ServerError, match=r"--web\.telemetry-path"):
        agent.server(replace(FREE_PORT, telemetry_path=path))


def test_health_and_readiness_say_what_is_wrong(agent: Agent) -> None:
    server = agent.server()
    assert (ask(server, "/healthz").status, ask(server, "/readyz").status) == (200, 200)
    agent.health = (False, "the ring reader stopped 12 s ago")
    agent.readiness = (False, "no readings yet")
    assert (ask(server, "/healthz").status, ask(server, "/healthz").text) == (503, "the ring reader stopped 12 s ago\n")
    assert (ask(server, "/readyz").status, ask(server, "/readyz").text) == (503, "no readings yet\n")


def test_a_snapshot_that_fails_is_one_line_to_the_client_and_the_reason_in_the_log(
    agent: Agent, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Snapshot:
        raise OSError("map is gone")

    agent.snapshot = fail
    server = agent.server()
    with caplog.at_level(logging.ERROR, "railscope.http"):
        answer = ask(server, "/metrics")
        server.close()
    assert (answer.status, answer.text) == (500, "railscope failed; see its log\n")
    assert [record.getMessage() for record in caplog.records] == ["127.0.0.1: OSError: map is gone"]
    assert capfd.readouterr() == ("", "")


def test_after_a_failed_snapshot_the_next_scrape_works(agent: Agent) -> None:
    answers = iter([ValueError("once")])

    def fail_once() -> Snapshot:
        for error in answers:
            raise error
        return full_snapshot()

    agent.snapshot = fail_once
    server = agent.server()
    assert [ask(server, "/metrics").status for _ in range(2)] == [500, 200]


def test_one_connection_serves_scrape_after_scrape(agent: Agent) -> None:
    server = agent.server()
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as client:
        client.connect()
        ours = client.sock.getsockname()
        for path in ("/metrics", "/nothing", "/healthz"):
            ask_on(client, path)
            assert client.sock is not None
            assert client.sock.getsockname() == ours


def test_requests_that_arrive_together_are_answered_in_order(agent: Agent) -> None:
    said = raw(
        agent.server(),
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    )
    assert re.findall(rb"\r\n\r\n(\w+)\n", said) == [b"ok", b"ready"]


def test_an_old_client_is_answered_and_the_connection_closed(agent: Agent) -> None:
    assert raw(agent.server(), b"GET /healthz HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\nok\n")


def test_a_request_with_a_body_ends_the_connection_so_that_the_body_is_not_taken_for_a_request(agent: Agent) -> None:
    inner = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"
    said = raw(agent.server(), b"GET /healthz HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(inner), inner))
    assert said.count(b"HTTP/1.1 ") == 1
    assert b"\r\nConnection: close\r\n" in said


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/9.1\r\n\r\n", b"505"),
        (b"GET / WHAT/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000, b"431"),
    ],
)
def test_what_is_no_request_gets_one_line_and_is_closed(agent: Agent, data: bytes, status: bytes) -> None:
    said = raw(agent.server(), data)
    assert said.startswith(b"HTTP/1.1 " + status + b" ")
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"Connection: close" in head
    assert body.count(b"\n") == 1


def test_a_client_that_trickles_its_request_is_cut_off_at_the_deadline(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, request_timeout_seconds=0.3))
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        stop = threading.Event()
        # A byte now and then must not buy more time.
        trickle = threading.Thread(target=send_slowly, args=(client, stop))
        trickle.start()
        try:
            assert received_until_closed(client) == b""
        finally:
            stop.set()
            trickle.join()


def send_slowly(client: socket.socket, stop: threading.Event) -> None:
    for byte in b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 10_000:
        if stop.wait(0.05):
            return
        try:
            client.send(bytes([byte]))
        except OSError:
            return


def received_until_closed(client: socket.socket) -> bytes:
    said = b""
    try:
        while more := client.recv(65536):
            said += more
    except ConnectionResetError:
        pass
    return said


def test_an_idle_connection_is_closed(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, idle_timeout_seconds=0.2))
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        assert client.recv(1) == b""


def begun_request(server: MetricsServer) -> socket.socket:
    """A connection whose request is on its way, and the server knows it."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /he")
    assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    return client


def test_more_connections_than_allowed_are_answered_503_and_a_free_place_is_used_again(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, max_connections=2))
    with ExitStack() as clients:
        first, second = (clients.enter_context(closing(begun_request(server))) for _ in range(2))
        assert raw(server, b"").startswith(b"HTTP/1.1 503 ")
        for client in (first, second):
            client.sendall(b"althz HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        # Their places are free once their threads have ended, an instant after the clients saw the end.
        freed = threading.Event()
        for _ in range(200):
            if raw(server, b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 "):
                freed.set()
                break
            freed.wait(0.02)
        assert freed.is_set()


def test_the_connection_that_was_idle_for_longest_makes_room_for_a_new_one(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, max_connections=3))
    with ExitStack() as clients:
        busy = clients.enter_context(closing(begun_request(server)))
        older, newer = (
            clients.enter_context(closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)))
            for _ in range(2)
        )
        for number, client in enumerate((older, newer), 1):
            assert ask_on(client, "/healthz").status == 200
            # The answer may be here before the server has gone back to waiting.
            until_idle(server, number)
        assert ask(server, "/healthz").status == 200
        assert older.sock is not None
        assert older.sock.recv(1) == b""
        assert ask_on(newer, "/healthz").status == 200
        busy.sendall(b"althz HTTP/1.1\r\n\r\n")
        assert busy.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_connections_that_never_ask_anything_do_not_hold_off_a_scrape(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, max_connections=2))
    with ExitStack() as clients:
        for _ in range(5):
            clients.enter_context(closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)))
        assert ask(server, "/metrics").status == 200


def test_a_scrape_whose_client_has_gone_does_not_hold_a_place(agent: Agent) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Snapshot:
        begun.set()
        assert go_on.wait(10)
        return full_snapshot()

    agent.snapshot = slow
    server = agent.server(replace(FREE_PORT, max_connections=1))
    try:
        with closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert begun.wait(10)
            assert raw(server, b"").startswith(b"HTTP/1.1 503 ")
        assert ask(server, "/healthz").status == 200
    finally:
        go_on.set()


def test_health_answers_while_a_snapshot_takes_long(agent: Agent) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Snapshot:
        begun.set()
        assert go_on.wait(10)
        return full_snapshot()

    agent.snapshot = slow
    server = agent.server()
    answers: list[Response] = []
    scrape = threading.Thread(target=lambda: answers.append(ask(server, "/metrics")))
    scrape.start()
    try:
        assert begun.wait(10)
        assert ask(server, "/healthz").status == 200
    finally:
        go_on.set()
        scrape.join()
    assert answers[0].status == 200


def test_two_scrapes_at_once_take_one_snapshot_after_the_other(agent: Agent) -> None:
    taking = threading.Lock()
    alone: list[bool] = []

    def snapshot() -> Snapshot:
        alone.append(taking.acquire(blocking=False))
        threading.Event().wait(0.05)
        taking.release()
        return full_snapshot()

    agent.snapshot = snapshot
    server = agent.server()
    scrapes = [threading.Thread(target=ask, args=(server, "/metrics")) for _ in range(3)]
    for scrape in scrapes:
        scrape.start()
    for scrape in scrapes:
        scrape.join()
    assert alone == [True, True, True]


def test_close_ends_open_connections_and_frees_the_port(agent: Agent) -> None:
    server = agent.server()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536)
        server.close()
        assert received_until_closed(client) == b""
        again = agent.server(replace(FREE_PORT, listen_address=f"127.0.0.1:{server.port}"))
        assert ask(again, "/healthz").status == 200


def test_a_port_in_use_says_what_to_do(agent: Agent) -> None:
    port = agent.server().port
    with pytest.raises(ServerError) as caught:
        agent.server(replace(FREE_PORT, listen_address=f"127.0.0.1:{port}"))
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: address already in use; "
        "stop the other process or choose another --web.listen-address"
    )


def test_an_address_that_is_not_ours_says_so(agent: Agent) -> None:
    with pytest.raises(ServerError, match=r"^cannot listen on 192\.0\.2\.1:9: cannot assign requested address; "):
        agent.server(replace(FREE_PORT, listen_address="192.0.2.1:9"))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9779", ListenAddress("127.0.0.1", 9779)),
        (":9779", ListenAddress("", 9779)),
        ("[::1]:0", ListenAddress("::1", 0)),
        ("node-1.example:65535", ListenAddress("node-1.example", 65535)),
    ],
)
def test_listen_addresses_are_read_as_other_exporters_read_them(text: str, address: ListenAddress) -> None:
    assert parse_listen_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "9779", "localhost", "::1:9779", "[::1]", "x:", "x:65536", "x:-1", "x:９", "[x:1"]
)
def test_what_is_no_listen_address_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ServerError, match=r"expected HOST:PORT, :PORT or \[v6\]:PORT"):
        parse_listen_address(text)


def test_every_address_means_ipv4_and_ipv6(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, listen_address=":0"))
    assert ask(server, "/healthz").status == 200
    if socket.has_dualstack_ipv6():
        with socket.create_connection(("::1", server.port), timeout=10) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert received_until_closed(client).endswith(b"ok\n")
