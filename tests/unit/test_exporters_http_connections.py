"""How the server keeps its connections, however many and however slow its clients are."""

from __future__ import annotations

import http.client
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import psutil
import pytest

from railscope.agent.facts.snapshot import Snapshot
from railscope.dashboards.typical_node import typical_node
from railscope.exporters.web.http import MetricsServer
from tests.unit.exporters_snapshots import full_snapshot
from tests.unit.http_agent import (
    FREE_PORT,
    PROMETHEUS_2,
    Agent,
    Response,
    ask,
    ask_on,
    raw,
    received_until_closed,
    serving,
)


@pytest.fixture
def agent() -> Iterator[Agent]:
    with serving() as one:
        yield one


def until_idle(server: MetricsServer, count: int) -> None:
    deadline = time.monotonic() + 60
    while server.idle_connections != count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


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


def test_empty_lines_before_a_request_are_passed_over_and_are_no_request(agent: Agent) -> None:
    ask_twice = b"\r\n\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 2
    said = raw(agent.server(), ask_twice + b"\n\nGET /readyz HTTP/1.0\r\n\r\n")
    assert re.findall(rb"\r\n\r\n(\w+)\n", said) == [b"ok", b"ok", b"ready"]


def test_line_ends_too_many_leave_a_connection_waiting_for_its_next_request(agent: Agent) -> None:
    server = agent.server()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        until_idle(server, 1)


def test_empty_lines_without_end_are_no_request(agent: Agent) -> None:
    assert raw(agent.server(), b"\r\n" * 10_000).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 4_000_000, b"431"),
        (b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n" + b"y" * 4_000_000, b"405"),
    ],
)
def test_one_who_sends_far_too_much_gets_to_know_it(agent: Agent, data: bytes, status: bytes) -> None:
    assert raw(agent.server(), data).startswith(b"HTTP/1.1 " + status + b" ")


def test_one_who_sends_without_end_is_cut_off(agent: Agent) -> None:
    server = agent.server()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client, pytest.raises(ConnectionError):
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 64_000_000)


def test_an_old_client_is_answered_and_the_connection_closed(agent: Agent) -> None:
    assert raw(agent.server(), b"GET /healthz HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\nok\n")


def test_a_request_with_a_body_ends_the_connection_so_that_the_body_is_not_taken_for_a_request(agent: Agent) -> None:
    inner = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"
    said = raw(
        agent.server(), b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(inner), inner)
    )
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


def test_an_idle_connection_is_closed(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, idle_timeout_seconds=0.2))
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        assert client.recv(1) == b""


class Hanging:
    """A snapshot that does not come until it is let go."""

    def __init__(self) -> None:
        self.begun, self._go_on = threading.Event(), threading.Event()

    def __enter__(self) -> Hanging:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        self._go_on.set()

    def __call__(self) -> Snapshot:
        self.begun.set()
        assert self._go_on.wait(20)
        return full_snapshot()

    def scrape(self, server: MetricsServer) -> socket.socket:
        """A client whose scrape is under way, and the server knows it."""
        client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        until_idle(server, 1)
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        until_idle(server, 0)
        assert self.begun.wait(10)
        return client


SCRAPE = b"GET /metrics HTTP/1.0\r\n\r\n"


def test_beside_requests_that_wait_in_every_place_a_further_one_is_answered_503_and_health_200(agent: Agent) -> None:
    with Hanging() as agent.snapshot, ExitStack() as clients:
        server = agent.server(replace(FREE_PORT, max_connections=2))
        held = [clients.enter_context(closing(agent.snapshot.scrape(server))) for _ in range(2)]
        assert raw(server, SCRAPE).startswith(b"HTTP/1.1 503 ")
        assert raw(server, b"").startswith(b"HTTP/1.1 503 ")
        assert ask(server, "/healthz").status == 200
        agent.snapshot.let_go()
        for client in held:
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert raw(server, SCRAPE).startswith(b"HTTP/1.1 200 ")


def test_a_request_that_comes_in_part_makes_room_for_a_newcomer(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, max_connections=1))
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as client:
        client.sendall(b"GET /he")
        assert ask(server, "/healthz").status == 200
        assert received_until_closed(client) == b""


def test_the_connection_that_was_idle_for_longest_makes_room_for_a_new_one(agent: Agent) -> None:
    with Hanging() as agent.snapshot, ExitStack() as clients:
        server = agent.server(replace(FREE_PORT, max_connections=3))
        busy = clients.enter_context(closing(agent.snapshot.scrape(server)))
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
        agent.snapshot.let_go()
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
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
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


def test_scrapes_of_different_formats_take_one_snapshot_after_the_other(agent: Agent) -> None:
    taking = threading.Lock()
    alone: list[bool] = []

    def snapshot() -> Snapshot:
        alone.append(taking.acquire(blocking=False))
        threading.Event().wait(0.05)
        taking.release()
        return full_snapshot()

    agent.snapshot = snapshot
    server = agent.server()
    # In other words, for those who ask for the same share one snapshot.
    others = [("/metrics", PROMETHEUS_2), ("/metrics", ""), ("/stalls", "")]
    scrapes = [threading.Thread(target=ask, args=(server, path), kwargs={"Accept": accept}) for path, accept in others]
    for scrape in scrapes:
        scrape.start()
    for scrape in scrapes:
        scrape.join()
    assert alone == [True, True, True]


def test_clients_that_take_nothing_lose_their_answers_where_those_become_too_much(agent: Agent) -> None:
    agent.snapshot = lambda: typical_node(64)
    with ExitStack() as clients:
        server = agent.server(replace(FREE_PORT, unsent_bytes=1))
        unread = []
        for _ in range(3):
            client = clients.enter_context(closing(socket.socket()))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.settimeout(10)
            client.connect(("127.0.0.1", server.port))
            client.sendall(SCRAPE)
            client.recv(1)  # an answer each
            unread.append(client)
        assert ask(server, "/metrics").status == 200
        for client in unread:
            assert len(received_until_closed(client)) < len(ask(server, "/metrics").body)
        assert server.refusals()["unread"] == 3


def test_clients_that_ask_ahead_and_read_nothing_have_one_answer_made(agent: Agent) -> None:
    taken: list[None] = []

    def snapshot() -> Snapshot:
        taken.append(None)
        return typical_node(64)

    agent.snapshot = snapshot
    server = agent.server()
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
        client.recv(1)
        assert [ask(server, "/healthz").status for _ in range(20)] == [200] * 20
    assert len(taken) == 1


def test_a_client_that_takes_its_answer_slowly_gets_all_of_it(agent: Agent) -> None:
    agent.snapshot = lambda: typical_node(64)
    server = agent.server()
    whole = ask(server, "/metrics").body
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(SCRAPE)
        assert received_until_closed(client).endswith(whole[-1000:])


def test_a_client_that_does_not_take_its_answer_is_closed_at_the_deadline(agent: Agent) -> None:
    agent.snapshot = lambda: typical_node(64)
    server = agent.server(replace(FREE_PORT, request_timeout_seconds=0.3))
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", server.port))
        client.sendall(SCRAPE)
        deadline = time.monotonic() + 60
        while not server.refusals()["timeout"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_check_that_fails_is_one_line_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def ready() -> tuple[bool, str]:
        raise RuntimeError("no")

    with MetricsServer(FREE_PORT, snapshot=full_snapshot, healthy=lambda: (True, "ok"), ready=ready) as server:
        assert ask(server, "/readyz").status == 500
        assert ask(server, "/healthz").status == 200
    assert "127.0.0.1: RuntimeError: no" in [record.getMessage() for record in caplog.records]


def test_an_accept_header_of_thousands_of_ranges_is_answered(agent: Agent) -> None:
    ranges = ",".join(["application/openmetrics-text;version=1.0.0;q=0.1"] * 300)
    assert ask(agent.server(), "/metrics", Accept=ranges).status == 200


@pytest.mark.parametrize("seed", range(3))
def test_clients_of_every_kind_leave_nothing_behind(agent: Agent, seed: int) -> None:
    chance = random.Random(seed)
    agent.snapshot = lambda: typical_node(64)
    server = agent.server(replace(FREE_PORT, max_connections=16, unsent_bytes=1_000_000))
    assert ask(server, "/metrics").status == 200
    process = psutil.Process()
    before = process.num_fds()
    sent = (
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n",
        b"GET /stalls HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"y" * 50_000,
        b"GET /met",
        b"\r\n" * 1000,
        b"\0" * 20_000,
        b"",
    )
    clients: list[socket.socket] = []
    for _ in range(400):
        client = socket.socket()
        client.settimeout(10)
        if chance.random() < 0.3:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", server.port))
        with suppress(OSError):
            client.sendall(chance.choice(sent))
            if chance.random() < 0.2:
                client.shutdown(socket.SHUT_WR)
            if chance.random() < 0.3:
                client.settimeout(0.01)
                client.recv(chance.choice((1, 65536)))
        clients.append(client)
        while len(clients) > chance.choice((0, 8, 40)):
            clients.pop(chance.randrange(len(clients))).close()
    for client in clients:
        client.close()
    deadline = time.monotonic() + 20
    while process.num_fds() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ask(server, "/metrics").status == 200
    assert server.refusals()["failed"] == 0
