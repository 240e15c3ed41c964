"""One turn of a server's loop: handshakes and large answers take turns, for a bounded time."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.selection import Selection
from railscope.exporters.web.clients import Clients
from railscope.exporters.web.connection import Connection
from railscope.exporters.web.pages import Pages
from railscope.exporters.web.password_checks import PasswordChecks
from railscope.exporters.web.refusals import Refusals
from railscope.exporters.web.rendering import Rendered, Renderings
from railscope.exporters.web.replies import Replies
from railscope.exporters.web.settings import ServerSettings
from railscope.exporters.web.transport import PlainTransport
from tests.unit.exporters_snapshots import full_snapshot

COUNT = 50
_WORK_SECONDS = 0.003


class SlowTransport(PlainTransport):
    """Hands are shaken, and bytes are sent, by a millisecond of work; the peer sends nothing before."""

    shaken = 0
    sends = 0
    whole = True
    """The peer's first message is all of its handshake."""

    @property
    def costly_handshake(self) -> bool:
        return True

    def shake_hands(self) -> bool:
        type(self).shaken += 1
        _work()
        return self.whole

    def send(self, data: memoryview) -> int:
        type(self).sends += 1
        _work()
        return super().send(data)


def _work() -> None:
    end = time.thread_time() + _WORK_SECONDS
    while time.thread_time() < end:
        pass


class Server:
    """The clients of a server, and no loop but the test's."""

    def __init__(self, ending: ExitStack) -> None:
        pages = Pages(
            telemetry_path="/metrics",
            snapshot=full_snapshot,
            processes=lambda _wanted: (),
            healthy=lambda: (True, "ok"),
            ready=lambda: (True, "ready"),
            budget=SeriesBudget(),
            selection=Selection(),
        )
        self.results: list[Rendered[Connection]] = []
        self.epoll = select.epoll()
        ending.callback(self.epoll.close)
        renderings: Renderings[Connection] = Renderings("test-scrape", pages.render, self.results.append, share=1.0)
        checks: PasswordChecks[Connection] = PasswordChecks("test-auth", lambda _checked: None)
        self.clients = Clients(
            ServerSettings(),
            2 * COUNT,
            Replies(pages, None),
            SlowTransport,
            self.epoll,
            Refusals(),
            scrapes=renderings,
            documents=renderings,
            checks=checks,
        )
        ending.callback(renderings.close, 20)
        ending.callback(self.clients.close)

    def turn(self) -> None:
        """As the loop's, without newcomers."""
        for fd, events in self.epoll.poll(0):
            self.clients.on_event(fd, events, time.monotonic())
        for result in self.results:
            self.clients.rendered(result, time.monotonic())
        self.results.clear()
        self.clients.go_on(time.monotonic())


@pytest.fixture
def server() -> Iterator[tuple[Server, list[socket.socket]]]:
    """With so many clients, each of which has sent a request behind its handshake."""
    with ExitStack() as ending:
        SlowTransport.shaken = SlowTransport.sends = 0
        SlowTransport.whole = True
        one = Server(ending)
        peers = []
        for _ in range(COUNT):
            ours, theirs = socket.socketpair()
            peers.append(ending.enter_context(closing(theirs)))
            theirs.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            one.clients.welcome(ours, "10.0.0.1", time.monotonic())
        yield one, peers


def test_handshakes_take_turns_and_hold_newcomers_off(server: tuple[Server, list[socket.socket]]) -> None:
    one, _peers = server
    assert SlowTransport.shaken == 0
    one.turn()
    assert 0 < SlowTransport.shaken < COUNT
    assert not one.clients.may_accept(time.monotonic())
    assert one.clients.more_due <= time.monotonic()
    deadline = time.monotonic() + 20
    while SlowTransport.shaken < COUNT:
        assert time.monotonic() < deadline
        one.turn()
    assert one.clients.may_accept(time.monotonic())


def test_clients_that_send_their_handshake_byte_by_byte_hold_off_no_newcomer(
    server: tuple[Server, list[socket.socket]],
) -> None:
    one, _peers = server
    SlowTransport.whole = False
    deadline = time.monotonic() + 20
    one.turn()
    while not one.clients.may_accept(time.monotonic()):
        assert time.monotonic() < deadline
        one.turn()
    # They go on sending, and have a turn each time, but so has the newcomer.
    assert COUNT <= SlowTransport.shaken <= 3 * COUNT
    ours, theirs = socket.socketpair()
    with closing(theirs):
        theirs.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        SlowTransport.whole = True
        one.clients.welcome(ours, "10.0.0.2", time.monotonic())
        before = SlowTransport.shaken
        theirs.setblocking(False)
        answer = b""
        while not answer:
            assert time.monotonic() < deadline
            one.turn()
            with suppress(BlockingIOError):
                answer = theirs.recv(100)
        assert answer.startswith(b"HTTP/1.1 200")
        assert SlowTransport.shaken - before < COUNT


def test_handshakes_rest_when_they_have_had_their_share_of_a_core(server: tuple[Server, list[socket.socket]]) -> None:
    one, _peers = server
    one.clients._handshakes_share.record(60.0, time.monotonic())
    one.turn()
    assert SlowTransport.shaken == 0
    assert one.clients.more_due > time.monotonic() + 60.0


def test_a_client_that_breaks_off_before_its_handshake_costs_none(server: tuple[Server, list[socket.socket]]) -> None:
    one, peers = server
    one.clients._handshakes_share.record(60.0, time.monotonic())
    one.turn()
    for peer in peers:
        peer.close()
    one.turn()
    assert len(one.clients) == 0


def test_large_answers_take_turns_and_all_arrive(server: tuple[Server, list[socket.socket]]) -> None:
    one, peers = server
    for peer in peers:
        peer.setblocking(False)
    lengths: dict[socket.socket, int] = dict.fromkeys(peers, 0)
    deadline = time.monotonic() + 20
    most = 0
    while len(one.clients) and min(lengths.values()) < 10_000:
        assert time.monotonic() < deadline
        before = SlowTransport.sends
        one.turn()
        most = max(most, SlowTransport.sends - before)
        for peer in peers:
            with suppress(BlockingIOError):
                lengths[peer] += len(peer.recv(1 << 20))
    assert len(set(lengths.values())) == 1
    assert 0 < most < COUNT / 2
