"""Whose connections were that ended early: real ones of this process, over the loopback, on a simulated clock."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from railscope.probes.netdev.connection_accounts import Party
from railscope.probes.netdev.ended_connections import MOST_HELD, MOST_SERVICES, PATIENCE_NS, EndedConnections
from railscope.probes.netdev.netlink import NetlinkSocket
from railscope.probes.netdev.tcp_counters import TcpCounters
from railscope.probes.netdev.tcp_info import DESTROYED_TCP_GROUPS, NETLINK_SOCK_DIAG, NO_SOCKETS, TcpTable
from railscope.probes.processes.processes import PROCFS
from railscope.probes.processes.socket_owners import Holder, HostSockets
from tests.unit.netdev_messages import SteppedClock
from tests.unit.test_socket_owners import AtOnce
from tests.waiting import eventually

SENT = 100_000


class Counted:
    """Connections on the loopback, whose processes are looked at when the test says so."""

    def __init__(self) -> None:
        self.clock = SteppedClock()
        self.looked_at = True
        others = HostSockets(PROCFS, self.clock, AtOnce(), every_process=True)
        self._source = TcpCounters(self.clock, PROCFS, others=others, party_of=self._party_of)
        self._source.watch(("lo",), ())
        self.close = self._source.close
        self._source.read()

    def _party_of(self, holder: Holder, _observed: bool, _ports: tuple[int, int]) -> Party | None:
        if holder.pid != os.getpid():
            return Party("others", False)
        return Party("mine", False) if self.looked_at else None

    def read(self, seconds: float = 1) -> dict[str, int]:
        """Bytes sent and received by party; a connection's two ends are both here."""
        self.clock.sleep(seconds)
        reading = self._source.read()
        values: dict[str, int] = dict(zip(reading.fields, reading.values[0].tolist(), strict=True))
        return {
            party: values.get(f"{party}/tx_bytes", 0) + values.get(f"{party}/rx_bytes", 0)
            for party in ("mine", "unknown")
        }

    @property
    def undecided(self) -> dict[str, tuple[int, int]]:
        return dict(self._source.undecided)


@pytest.fixture
def counted() -> Iterator[Counted]:
    try:
        NetlinkSocket(DESTROYED_TCP_GROUPS, NETLINK_SOCK_DIAG).close()
    except OSError as error:
        pytest.skip(f"the kernel does not tell of connections that end: {error}")
    with closing(Counted()) as one:
        yield one


@contextmanager
def transfer(server: socket.socket) -> Iterator[None]:
    """A connection that has carried SENT; ended on exit."""
    with closing(socket.create_connection(server.getsockname())) as client, closing(server.accept()[0]) as accepted:
        _carry(client, accepted)
        yield


def _carry(client: socket.socket, accepted: socket.socket) -> None:
    client.sendall(bytes(SENT))
    left = SENT
    while left:
        left -= len(accepted.recv(left))


def test_one_that_ended_before_its_process_was_looked_at_is_that_process_s_still(counted: Counted) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        counted.looked_at = False
        with transfer(server):
            assert counted.read()["mine"] == 0
        assert counted.read() == {"mine": 0, "unknown": 0}, "it is held back"
        counted.looked_at = True
        eventually(lambda: counted.read(0.1)["mine"] >= 2 * SENT)
        assert counted.read()["unknown"] < SENT


def test_one_whose_process_is_never_looked_at_is_nobody_s_in_the_end(counted: Counted) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        counted.looked_at = False
        with transfer(server):
            counted.read()
        eventually(lambda: counted.read()["unknown"] >= 2 * SENT)
        assert counted.read()["mine"] == 0


def test_one_that_nobody_saw_is_whose_others_of_its_service_are(counted: Counted) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        with transfer(server):
            pass
        eventually(lambda: counted.read()["unknown"] >= 2 * SENT)
        unknown = counted.read()["unknown"]
        with ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(transfer(server))
            seen = counted.read()["mine"]
        assert seen >= 4 * SENT
        with transfer(server):
            pass
        eventually(lambda: counted.read()["mine"] >= seen + 2 * SENT)
        assert counted.read()["unknown"] - unknown < SENT


def test_one_whose_process_is_looked_at_again_goes_on_as_that_process_s_meanwhile(counted: Counted) -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.create_connection(server.getsockname())) as client,
        closing(server.accept()[0]) as accepted,
    ):
        _carry(client, accepted)
        eventually(lambda: counted.read()["mine"] >= 2 * SENT)
        counted.looked_at = False
        _carry(client, accepted)
        eventually(lambda: counted.read(0.1)["mine"] >= 4 * SENT)
        assert not counted.undecided
        for _ in range(40):  # longer than any patience
            assert counted.read()["unknown"] < SENT


MANY, MODEST, GREEDY = 3 * MOST_HELD, 1000, 5000


def sockets_of_many() -> TcpTable:
    """Connections of one user by the thousand, and the last one of another's; each of a service of its own."""
    rows = np.zeros(MANY, NO_SOCKETS.rows.dtype)
    rows["cookie"] = rows["inode"] = np.arange(1, MANY + 1)
    rows["user"] = GREEDY
    rows["user"][-1] = MODEST
    rows["ports"][:, 1] = np.arange(MANY) % 60_000 + 1
    rows["ports"][:, 0] = np.arange(MANY) // 60_000 + 1
    return TcpTable(rows, {})


def test_a_user_with_thousands_of_connections_takes_from_no_other_what_is_remembered_of_his() -> None:
    table, ended = sockets_of_many(), EndedConnections(Party("unknown", False))
    ended.note(table, {}, range(MANY), 0)
    assert len(ended._listed) == MOST_HELD
    assert ended._listed[MANY].user == MODEST
    ended._find(table, np.zeros(MANY, np.bool_), {}, 0)
    assert {one.user for one in ended._held.values()} == {GREEDY, MODEST}
    assert len(ended._held) == MOST_HELD // 2 + 1
    mine = Party("mine", False)
    told = ended.take(TcpTable(table.rows[:0], {}), np.zeros(0, np.bool_), {MANY: mine}, 1)
    assert (told.table.rows["cookie"].tolist(), told.parties) == ([MANY], (mine,))
    ended.take(TcpTable(table.rows[:0], {}), np.zeros(0, np.bool_), {}, 2 * PATIENCE_NS)
    assert not ended._held
    assert ended._places.room(GREEDY) == MOST_HELD // 2


def test_a_user_who_meets_thousands_of_services_makes_no_other_users_forgotten() -> None:
    table, ended = sockets_of_many(), EndedConnections(Party("unknown", False))
    mine = table.rows[-1:]
    for _ in range(2):
        ended._learn(mine, [Party("mine", False)])
    ended._learn(table.rows[:-1], [Party("his", False)] * (MANY - 1))
    assert ended._like(mine) == [Party("mine", False)]
    assert len(ended._services) == MOST_SERVICES
