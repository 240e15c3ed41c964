"""What real connections of this process look like when the network, the peer, or nobody keeps them waiting."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from railscope.probes.clock import SystemClock
from railscope.probes.netdev.connection_state import ConnectionState, ProcessConnections
from railscope.testbed.faults import Fault, FilteredRail, LinkDown
from railscope.testbed.hosts import Fabric
from railscope.testbed.namespaces import entered, tcp_socket
from tests.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.fabric]

SERVICE_PORT = 2049


class Pair:
    """A connection on rail 1 from host 0 to host 1; both ends are this process's."""

    def __init__(self, fabric: Fabric, stack: ExitStack, *, port: int = 0) -> None:
        near, far = fabric.hosts
        listener = stack.enter_context(tcp_socket(far.namespace))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((far.addresses[1], port))
        listener.listen(1)
        self.near = stack.enter_context(tcp_socket(near.namespace))
        self.near.bind((near.addresses[1], 0))
        self.near.connect(listener.getsockname())
        self.far = stack.enter_context(listener.accept()[0])
        self.near.setblocking(False)
        with entered(near.namespace):
            self.connections = ProcessConnections(SystemClock(), Path("/proc"))
        stack.callback(self.connections.close)

    def fill(self) -> None:
        """Send until the kernel takes no more."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.near.send(bytes(1 << 16))

    def all(self) -> tuple[ConnectionState, ...]:
        return self.connections.read([os.getpid()], {})

    def state(self) -> ConnectionState:
        (state,) = self.all()
        return state

    def until(self, true: Callable[[ConnectionState], bool], seconds: float = 20.0) -> ConnectionState:
        deadline = time.monotonic() + seconds
        while not true(self.state()) and time.monotonic() < deadline:
            time.sleep(0.05)
        state = self.state()
        assert true(state), state
        return state


@pytest.fixture
def pair(two_hosts: Fabric) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(two_hosts, stack)


def test_a_connection_is_told_with_its_rail_and_what_it_moved(pair: Pair) -> None:
    pair.near.send(bytes(1000))
    assert len(pair.far.recv(1000, socket.MSG_WAITALL)) == 1000
    state = pair.until(lambda state: state.bytes_acked >= 1000)
    assert (state.pid, state.device, state.peer_closed) == (os.getpid(), "rail1", False)
    assert state.moved_bytes >= 1000
    assert not state.unanswered
    assert pair.connections.read([1], {}) == ()


@pytest.mark.parametrize(
    "fault",
    [
        lambda fabric: FilteredRail(fabric, 0, 1),
        lambda fabric: FilteredRail(fabric, 0, 1, in_switch=True),
        lambda fabric: LinkDown(fabric, 0, 1),
        lambda fabric: FilteredRail(fabric, 1, 1),
    ],
    ids=["own filter", "filter in the switch", "own link down", "the peer's answers are dropped"],
)
def test_what_the_network_swallows_is_unanswered_within_two_seconds(
    fault: Callable[[Fabric], Fault], two_hosts: Fabric, pair: Pair
) -> None:
    pair.near.send(bytes(1000))
    pair.until(lambda state: state.bytes_acked >= 1000)
    with fault(two_hosts):
        pair.fill()
        began = time.monotonic()
        pair.until(lambda state: state.unanswered)
        took_seconds = time.monotonic() - began
    assert took_seconds < 5.0
    pair.until(lambda state: not state.unanswered, seconds=40)


def test_a_peer_that_does_not_read_is_not_the_network_s_fault(pair: Pair) -> None:
    def full(state: ConnectionState) -> bool:
        pair.fill()
        return state.probing and state.unacknowledged_segments == 0

    state = pair.until(full)
    time.sleep(1.0)
    assert not pair.state().unanswered
    assert state.not_sent_bytes > 0


def test_an_acknowledgement_that_the_peer_put_off_shows_in_the_deviation(pair: Pair) -> None:
    """It lengthens the round trip fifty times, though the network is as it was."""

    def is_usual() -> bool:
        for _ in range(
            50
        ):  # after which the peer's kernel takes it that an answer is going to carry its acknowledgement
            pair.near.send(b"?")
            pair.far.recv(1)
            pair.far.send(b"!")
            select.select([pair.near], [], [])
            pair.near.recv(1)
        state = pair.state()
        return state.round_trip_deviation_us < state.round_trip_us < 3000

    eventually(is_usual)  # on a busy machine one of them may have waited for a processor
    usual = pair.state()
    pair.near.send(b"?")
    state = pair.until(lambda state: state.bytes_acked > usual.bytes_acked)
    assert state.round_trip_us > 3000
    assert state.round_trip_deviation_us > state.round_trip_us


def test_what_the_peer_sent_and_nobody_reads_is_counted(pair: Pair) -> None:
    pair.far.send(bytes(5000))
    assert pair.until(lambda state: state.unread_bytes == 5000).bytes_received >= 5000


def test_a_connection_that_the_peer_closed_is_told(pair: Pair) -> None:
    pair.far.close()
    assert pair.until(lambda state: state.peer_closed)


def test_a_connection_to_a_service_is_left_out(two_hosts: Fabric) -> None:
    with ExitStack() as stack:
        pair = Pair(two_hosts, stack, port=SERVICE_PORT)
        pair.far.send(bytes(100))
        pair.far.close()
        time.sleep(0.2)
        assert pair.all() == ()


def test_what_goes_to_a_service_is_summed_up_and_is_no_connection_of_a_collective(two_hosts: Fabric) -> None:
    own = os.getpid()
    with ExitStack() as stack:
        pair = Pair(two_hosts, stack, port=SERVICE_PORT)
        connections = pair.connections

        def sent(size: int, by: int, parents: dict[int, int]) -> Callable[[], bool]:
            before = connections.sent_to_services[by]
            pair.near.send(bytes(size))
            assert len(pair.far.recv(size, socket.MSG_WAITALL)) == size
            return lambda: connections.read([by], parents) == () and connections.sent_to_services[by] == before + size

        pair.near.send(bytes(1000))
        assert len(pair.far.recv(1000, socket.MSG_WAITALL)) == 1000
        assert connections.read([own], {}) == ()
        assert connections.sent_to_services[own] == 0, "nobody asked about it before"
        eventually(sent(5000, own, {}))
        # A child holds what its parent had when it was forked: for whom it is asked is who sends.
        connections.read([1], {own: 1})
        eventually(sent(7000, 1, {own: 1}))
