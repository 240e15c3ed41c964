"""Who holds a socket: real processes of this host, and simulated ones where there have to be many."""

from __future__ import annotations

import ctypes
import os
import platform
import selectors
import socket
import struct
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.facts.traffic_owners import NAMED_LIBRARIES, TrafficOwner
from railscope.agent.node.attribution.parties import Parties, Unlooked, owner_of, owner_of_party, party
from railscope.probes.libraries.communication import NO_LIBRARY, CommunicationLibrary
from railscope.probes.netdev.connection_accounts import Party
from railscope.probes.netdev.tcp_counters import TcpCounters
from railscope.probes.processes import socket_owners
from railscope.probes.processes.processes import PROCFS
from railscope.probes.processes.socket_owners import NO_PROCESS, Holder, HostSockets, Polled, sockets_of
from tests.unit.netdev_messages import SteppedClock
from tests.unit.test_tcp_info import diag, process  # noqa: F401 - a fixture

NCCL, UCX, NIXL, MPI, GLOO = (
    *(CommunicationLibrary.NCCL, CommunicationLibrary.UCX, CommunicationLibrary.NIXL),
    *(CommunicationLibrary.MPI, CommunicationLibrary.GLOO),
)


class AtOnce(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class Later(AtOnce):
    """Runs what it was given when it is told to."""

    def __init__(self) -> None:
        self.given: list[Callable[[], object]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self.given.append(lambda: done.set_result(fn(*args, **kwargs)))
        return done


def host(procfs: Path, clock: SteppedClock, *, every_process: bool = True) -> HostSockets:
    """On a simulated clock all time is spent."""
    return HostSockets(procfs, clock, AtOnce(), every_process=every_process, spent_ns=clock.monotonic_ns)


def test_how_a_process_waits_for_its_sockets_is_told_by_its_epoll_sets() -> None:
    with ExitStack() as stack:
        plain, numbered, pointed = (stack.enter_context(socket.socket()) for _ in range(3))
        waiting = stack.enter_context(selectors.EpollSelector())
        waiting.register(numbered, selectors.EVENT_READ)
        # Python gives the number of the descriptor along, and a library of C a pointer.
        event = ctypes.create_string_buffer(
            struct.pack("=IQ" if platform.machine() == "x86_64" else "@IQ", 1, 0x7F001122)
        )
        assert ctypes.CDLL(None).epoll_ctl(waiting.fileno(), 1, pointed.fileno(), event) == 0
        held = sockets_of(PROCFS, os.getpid())
        inodes = [os.fstat(one.fileno()).st_ino for one in (plain, numbered, pointed)]
        assert [held[inode].polled for inode in inodes] == [Polled.NOT, Polled.BY_NUMBER, Polled.BY_POINTER]
        assert held[inodes[0]].pid == os.getpid()


@pytest.mark.parametrize(
    ("mapped", "polled", "owner"),
    [
        (set(), Polled.BY_POINTER, TrafficOwner.TCP_OTHER),
        ({NCCL}, Polled.NOT, TrafficOwner.NCCL),
        ({NCCL}, Polled.BY_POINTER, TrafficOwner.TCP_OTHER),
        ({NCCL, GLOO}, Polled.NOT, TrafficOwner.NCCL),
        ({NCCL, GLOO}, Polled.BY_POINTER, TrafficOwner.UNKNOWN),
        ({NCCL, GLOO}, Polled.BY_NUMBER, TrafficOwner.TCP_OTHER),
        ({NCCL, GLOO, UCX}, Polled.BY_POINTER, TrafficOwner.UCX),
        ({NCCL, UCX}, Polled.NOT, TrafficOwner.NCCL),
        ({NCCL, UCX, NIXL}, Polled.BY_POINTER, TrafficOwner.NIXL),
        ({UCX}, Polled.NOT, TrafficOwner.UCX),
        ({UCX}, Polled.BY_NUMBER, TrafficOwner.TCP_OTHER),
        ({UCX, MPI}, Polled.BY_POINTER, TrafficOwner.MPI),
        ({MPI}, Polled.BY_NUMBER, TrafficOwner.MPI),
        ({NCCL, MPI}, Polled.BY_NUMBER, TrafficOwner.UNKNOWN),
        ({GLOO}, Polled.BY_POINTER, TrafficOwner.GLOO),
        ({NIXL, MPI}, Polled.BY_POINTER, TrafficOwner.UNKNOWN),
    ],
)
def test_a_socket_belongs_to_the_one_library_that_can_have_opened_it(
    mapped: set[CommunicationLibrary], polled: Polled, owner: TrafficOwner
) -> None:
    assert owner_of(frozenset(mapped), polled) is owner
    looked_at: dict[int, frozenset[CommunicationLibrary] | Unlooked] = {7: frozenset(mapped), 8: Unlooked.YET}
    parties = Parties(lambda pid: looked_at.get(pid, Unlooked.NEVER))
    assert parties.party_of(Holder(7, polled), False, (1, 2)) == party(owner)
    assert parties.party_of(Holder(8, polled), False, (1, 2)) is None, "it was not looked at yet"
    assert parties.party_of(Holder(9, polled), False, (1, 2)) == party(TrafficOwner.UNKNOWN)


def test_every_library_is_an_owner_and_every_party_tells_its_own() -> None:
    assert {one.value for one in NAMED_LIBRARIES} == {one.value for one in CommunicationLibrary} - {"nccl"}
    for owner in TrafficOwner:
        for observed in (False, True):
            assert owner_of_party(party(owner, observed=observed).name)[0] is owner
    assert owner_of_party(party(TrafficOwner.NCCL, observed=True).name)[1]
    assert not owner_of_party(party(TrafficOwner.UCX, observed=True).name)[1]


def test_what_no_process_holds_is_storage_by_its_port() -> None:
    parties = Parties(lambda _pid: NO_LIBRARY)
    assert parties.party_of(NO_PROCESS, False, (814, 2049)) == party(TrafficOwner.STORAGE)
    assert parties.party_of(NO_PROCESS, False, (814, 80)) == party(TrafficOwner.TCP_OTHER)
    assert parties.party_of(Holder(7), False, (814, 2049)) == party(TrafficOwner.TCP_OTHER), "a program's own"


def test_a_socket_is_found_with_whoever_holds_it_and_a_kernel_s_with_nobody(tmp_path: Path) -> None:
    process(tmp_path, 10, "socket:[5]")
    process(tmp_path, 11, "socket:[6]")
    clock, user = SteppedClock(), os.getuid()
    sockets = host(tmp_path, clock)
    assert sockets.holders("a", {5: user, 6: user + 1, 7: user}) == {5: Holder(10), 6: Holder(11), 7: NO_PROCESS}
    assert sockets.holders("b", {6: user}) == {6: Holder(11)}
    assert sockets.looks == 1, "what is known is not looked for again"
    partial = host(tmp_path, clock, every_process=False)
    assert partial.holders("a", {5: user, 7: user}) == {5: Holder(10)}, "a container does not see all processes"


def test_a_socket_that_comes_later_is_looked_for_at_its_user_s_processes_and_the_rest_now_and_then(
    tmp_path: Path,
) -> None:
    process(tmp_path, 10, "socket:[5]")
    clock, user = SteppedClock(), os.getuid()
    sockets = host(tmp_path, clock)
    assert sockets.holders("a", {5: user}) == {5: Holder(10)}
    process(tmp_path, 10, "socket:[8]")
    assert sockets.holders("a", {5: user, 8: user, 9: user + 1}) == {5: Holder(10), 8: Holder(10)}
    process(tmp_path, 10, "socket:[9]")
    assert 9 not in sockets.holders("a", {9: user + 1})
    clock.sleep(31)
    assert sockets.holders("a", {9: user + 1}) == {9: Holder(10)}


def test_who_has_very_many_processes_hides_his_own_sockets_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated users: the folders are all this test's."""
    for pid in range(100, 400):
        process(tmp_path, pid, f"socket:[{pid}]")
    process(tmp_path, 10, "socket:[5]")
    monkeypatch.setattr(socket_owners, "MOST_IN_ALL", 200)
    monkeypatch.setattr(socket_owners, "_descriptors", lambda _procfs, _pid: 1)
    monkeypatch.setattr(socket_owners, "_user_of", lambda _procfs, pid: 1000 if pid >= 100 else 2000)
    found = host(tmp_path, SteppedClock()).holders("a", {5: 2000, 399: 1000, 77: 1000})
    assert found == {5: Holder(10)}, "and what was not found may be anybody's"


def test_after_a_look_that_took_long_the_next_is_put_off(tmp_path: Path) -> None:
    process(tmp_path, 10, "socket:[5]")
    clock, user = SteppedClock(cost_ns=1_000_000_000), os.getuid()
    sockets = host(tmp_path, clock)
    assert sockets.holders("a", {5: user}) == {5: Holder(10)}
    process(tmp_path, 10, "socket:[6]")
    assert sockets.holders("a", {6: user}) == {}
    clock.sleep(20)
    assert sockets.holders("a", {6: user}) == {6: Holder(10)}


@pytest.mark.usefixtures("diag")
def test_a_connection_is_not_nobodys_before_anybody_looked_for_it() -> None:
    """On a busy host a look takes seconds, and the next one is put off."""
    clock, later = SteppedClock(), Later()
    others = HostSockets(PROCFS, clock, later, every_process=True)

    def party_of(holder: Holder, _observed: bool, _ports: tuple[int, int]) -> Party:
        return Party("mine" if holder.pid == os.getpid() else "others", False)

    def sent() -> int:
        reading = source.read()
        columns: dict[str, int] = dict(zip(reading.fields, reading.values[0].tolist(), strict=True))
        return columns.get("mine/tx_bytes", 0)

    with (
        closing(TcpCounters(clock, PROCFS, others=others, party_of=party_of)) as source,
        closing(socket.create_server(("127.0.0.1", 0))) as server,
    ):
        source.watch(("lo",), ())
        source.read()
        with closing(socket.create_connection(server.getsockname())) as client, closing(server.accept()[0]) as accepted:
            client.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(accepted.recv(left))
            for _ in range(3):
                assert sent() == 0
                assert source.undecided["lo"][0] >= 100_000
                clock.sleep(5)
            later.given.pop()()
            assert sent() == 100_000
