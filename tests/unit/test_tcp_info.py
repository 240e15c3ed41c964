"""TCP connections: simulated answers of sock_diag, and this process's own connections in the running kernel."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.clock import SystemClock
from railscope.probes.netdev.addresses import LocalAddress, parse_addresses, plain_address
from railscope.probes.netdev.connection_accounts import (
    ACCOUNT_FIELDS,
    MAXIMUM_CONNECTIONS,
    OBSERVED,
    ConnectionAccounts,
    FoundConnections,
)
from railscope.probes.netdev.netlink import MalformedNetlink, NetlinkSocket
from railscope.probes.netdev.tcp_counters import TCP_FIELDS, TcpCounters
from railscope.probes.netdev.tcp_info import (
    APPLICATION_LIMITED,
    NETLINK_SOCK_DIAG,
    TcpTable,
    local_addresses,
    make_request,
    parse_table,
    read_table,
)
from railscope.probes.processes import socket_owners
from railscope.probes.processes.socket_owners import MOST_IN_ALL, SocketOwners, socket_inodes
from tests.unit.netdev_messages import SteppedClock, attribute, done, message
from tests.unit.tcp_reference import OFFSETS, TcpInfo
from tests.waiting import eventually

PROCFS = Path("/proc")
ESTABLISHED = 1
NOTHING = TcpInfo()

wide, narrow, byte = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 255)
infos = st.builds(
    TcpInfo,
    **{
        field.name: st.booleans()
        if field.name == "application_limited"
        else {"Q": wide, "I": narrow, "B": byte}[OFFSETS[field.name][1]]
        for field in fields(TcpInfo)
    },
)


def listed(
    inode: int,
    local: bytes,
    info: bytes | None,
    *,
    cookie: int = 1,
    interface: int = 0,
) -> bytes:
    family = socket.AF_INET if len(local) == 4 else socket.AF_INET6
    peers = local.ljust(16, b"\0") + bytes(16)
    head = struct.pack("=4B", family, ESTABLISHED, 4, 0) + struct.pack(">HH", 40_000, 5001) + peers
    head += struct.pack("=IIIIIIII", interface, cookie & 0xFFFFFFFF, cookie >> 32, 0, 77, 0, 0, inode)
    return message(18, head + attribute(8, b"\0") + (b"" if info is None else attribute(2, info)))


def told(row: np.void) -> TcpInfo:
    """What a row of a table says of its connection."""
    limited = bool(row["flags"] & APPLICATION_LIMITED)
    return TcpInfo(**{name: int(row[name]) for name in OFFSETS}, application_limited=limited)


@settings(deadline=None)
@given(infos, st.integers(216, 300))
def test_every_field_stands_where_the_kernel_puts_it_however_long_its_structure(info: TcpInfo, size: int) -> None:
    (row,) = parse_table([listed(7, bytes(4), info.packed(size))]).rows
    assert told(row) == info


@settings(deadline=None)
@given(st.binary(max_size=215))
def test_a_structure_of_an_old_kernel_is_refused(data: bytes) -> None:
    table = parse_table([listed(7, bytes(4), data)])
    assert str(table.untold[0]).startswith(f"tcp_info of {len(data)} bytes")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            narrow, st.sampled_from([4, 16]).flatmap(lambda size: st.binary(min_size=size, max_size=size)), wide, infos
        ),
        max_size=5,
    )
)
def test_sockets_are_read_as_they_were_listed(found: list[tuple[int, bytes, int, TcpInfo]]) -> None:
    data = b"".join(listed(inode, local, info.packed(), cookie=cookie) for inode, local, cookie, info in found)
    table = parse_table([data + done()])
    assert not table.untold
    assert [
        (int(row["inode"]), local, int(row["cookie"]), told(row))
        for row, local in zip(table.rows, local_addresses(table.rows), strict=True)
    ] == [(inode, plain_address(local), cookie, info) for inode, local, cookie, info in found]


def test_ports_states_and_what_is_unread_are_this_sides() -> None:
    (row,) = parse_table([listed(7, bytes(4), NOTHING.packed())]).rows
    assert (row["ports"].tolist(), int(row["state"]), int(row["timer"]), int(row["unread_bytes"])) == (
        [40_000, 5001],
        ESTABLISHED,
        4,
        77,
    )


@pytest.mark.parametrize("parse", [parse_table, parse_addresses])
@settings(deadline=None)
@given(st.data())
def test_cut_and_flipped_answers_end_in_a_clean_error_or_nothing_strange(parse: object, data: st.DataObject) -> None:
    assert callable(parse)
    whole = listed(7, bytes(4), NOTHING.packed()) + message(20, struct.pack("=4BI", 2, 24, 0, 0, 3) + bytes(8))
    cut = bytearray(whole[: data.draw(st.integers(1, len(whole)))])
    cut[data.draw(st.integers(0, len(cut) - 1))] ^= data.draw(st.integers(0, 255))
    with suppress(MalformedNetlink):
        parse([bytes(cut)])


def test_a_socket_that_the_kernel_says_nothing_about_is_not_counted_and_said() -> None:
    table = parse_table([listed(7, bytes(4), None) + listed(8, bytes(4), NOTHING.packed(), cookie=2)])
    assert {row: str(error) for row, error in table.untold.items()} == {0: "tcp_info of 0 bytes, expected at least 216"}
    accounts = ConnectionAccounts()
    found = accounts.find(table, {7: OBSERVED, 8: OBSERVED}, {}, {bytes(4): "rail0"})
    (failure,) = accounts.add(("rail0",), found)
    assert (failure.device, failure.reason) == ("rail0", "tcp_info of 0 bytes, expected at least 216")
    assert accounts.last[0].connections == 1


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([4, 16]).flatmap(lambda n: st.binary(min_size=n, max_size=n)), narrow))
def test_addresses_are_read_with_their_devices(found: dict[bytes, int]) -> None:
    data = b"".join(
        message(20, struct.pack("=4BI", 2, 24, 0, 0, index) + attribute(1, bytes(len(address))) + attribute(2, address))
        for address, index in found.items()
    )
    assert parse_addresses([data]) == [LocalAddress(index, address) for address, index in found.items()]


def test_an_ipv4_address_in_an_ipv6_socket_is_the_same_address() -> None:
    assert plain_address(bytes(10) + b"\xff\xff\x0a\x4d\x00\x01") == bytes([10, 77, 0, 1])
    assert plain_address(bytes(15) + b"\x01") == bytes(15) + b"\x01"


Found = tuple[str, bytes]
"""Device, and what the kernel lists."""


def connection(cookie: int, info: TcpInfo) -> bytes:
    return listed(0, bytes(4), info.packed(), cookie=cookie)


def these(accounts: ConnectionAccounts, *found: Found) -> FoundConnections | None:
    """Simulated connections of observed processes: of which device they are is given."""
    if not found:
        return None
    table = parse_table([b"".join(data for _device, data in found)])
    rows = table.rows.copy()
    rows["inode"] = range(len(found))
    numbers = np.array([accounts.account_number(device) for device, _data in found])
    ipv4 = np.array([len(address) == 4 for address in local_addresses(rows)])
    return FoundConnections(rows, numbers, ipv4, table.untold)


def taken(accounts: ConnectionAccounts, *found: Found) -> None:
    assert accounts.add(("rail0", "rail1"), these(accounts, *found)) == []


def test_what_a_connection_did_before_connections_were_read_is_left_out() -> None:
    accounts = ConnectionAccounts()
    taken(accounts, ("rail0", connection(9, replace(NOTHING, bytes_sent=1000))))
    assert not any(accounts.totals("rail0")[: ACCOUNT_FIELDS.index("connection_changes")])
    taken(accounts, ("rail0", connection(9, replace(NOTHING, bytes_sent=1500))))
    assert accounts.totals("rail0")[TCP_FIELDS.index("tx_bytes")] == 500


def test_a_connection_opened_since_counts_whole_and_a_closed_one_takes_nothing_away() -> None:
    accounts = ConnectionAccounts()
    taken(accounts)
    taken(accounts, ("rail0", connection(9, replace(NOTHING, bytes_sent=70))))
    taken(accounts)
    taken(accounts, ("rail0", connection(10, replace(NOTHING, bytes_sent=30))))
    assert accounts.totals("rail0")[0] == 100


def test_retransmissions_add_up_through_the_end_of_32_bits() -> None:
    accounts = ConnectionAccounts()
    taken(accounts, ("rail0", connection(9, replace(NOTHING, retransmitted_segments=2**32 - 2))))
    taken(accounts, ("rail0", connection(9, replace(NOTHING, retransmitted_segments=3))))
    assert accounts.totals("rail0")[TCP_FIELDS.index("retransmitted_segments")] == 5


def test_headers_follow_from_segments_timestamps_and_the_family_of_the_address() -> None:
    """Ethernet 14, IPv4 20 or IPv6 40, TCP 20, and 12 for timestamps."""
    accounts = ConnectionAccounts()
    plain, stamped = (
        replace(NOTHING, segments_sent=10, segments_received=4),
        replace(NOTHING, segments_sent=10, segments_received=4, options=0x07),
    )
    ipv6 = listed(0, bytes(15) + b"\1", stamped.packed(), cookie=3)
    taken(accounts)
    taken(accounts, ("rail0", connection(1, plain)), ("rail0", connection(2, stamped)), ("rail1", ipv6))
    for device, header_bytes in (("rail0", 54 + 66), ("rail1", 86)):
        total = dict(zip(ACCOUNT_FIELDS, accounts.totals(device), strict=True))
        assert total["header_bytes_sent"] == 10 * header_bytes
        assert total["header_bytes_received"] == 4 * header_bytes


def test_connections_that_went_without_a_word_are_counted_on_their_rail() -> None:
    accounts = ConnectionAccounts()
    taken(accounts, ("rail0", connection(1, NOTHING)), ("rail1", connection(2, NOTHING)))
    taken(accounts, ("rail1", connection(2, NOTHING)), ("rail0", connection(3, NOTHING)))
    taken(accounts)
    accounts.count_lost_ends()
    changes = ACCOUNT_FIELDS.index("connection_changes")
    assert [accounts.totals(device)[changes] for device in ("rail0", "rail1")] == [2, 1]


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans(), infos), max_size=5), max_size=6))
def test_totals_never_fall_and_one_rail_never_counts_for_the_other(
    reads: list[list[tuple[int, bool, TcpInfo]]],
) -> None:
    accounts = ConnectionAccounts()
    before = {"rail0": accounts.totals("rail0"), "rail1": accounts.totals("rail1")}
    for read in reads:
        found = [(f"rail{int(second)}", connection(cookie, info)) for cookie, second, info in read]
        taken(accounts, *found)
        assert [device.device for device in accounts.last] == ["rail0", "rail1"]
        for device, totals in before.items():
            after = accounts.totals(device)
            assert all(new >= old for old, new in zip(totals, after, strict=True))
            if not any(name == device for name, _data in found):
                changes = ACCOUNT_FIELDS.index("connection_changes")
                assert after[:changes] == totals[:changes]
            before[device] = after


def test_round_trips_and_rates_are_those_of_connections_that_send() -> None:
    accounts = ConnectionAccounts()
    idle = replace(NOTHING, data_segments_sent=9, last_sent_ms=60_000, round_trip_us=900_000)
    busy = replace(
        NOTHING,
        data_segments_sent=9,
        last_sent_ms=3,
        round_trip_us=300,
        round_trip_deviation_us=60,
        delivery_rate_bytes_per_second=5000,
    )
    stuck = replace(idle, unacknowledged_segments=4, round_trip_us=700, not_sent_bytes=10)
    limited = replace(busy, application_limited=True, round_trip_us=500)
    found = [("rail0", connection(cookie, info)) for cookie, info in enumerate((idle, busy, stuck, limited))]
    taken(accounts, *found)
    rail, other = accounts.last
    assert (rail.connections, rail.sending, rail.application_limited) == (4, 3, 1)
    assert (rail.round_trip_mean_us, rail.round_trip_maximum_us) == (500, 700)
    assert rail.round_trip_deviation_us == (60 + 60 + 0) / 3
    assert (rail.delivery_rate_bytes_per_second, rail.unacknowledged_segments, rail.not_sent_bytes) == (10_000, 4, 10)
    assert (other.connections, other.round_trip_mean_us, other.delivery_rate_bytes_per_second) == (0, None, None)


def test_too_many_connections_are_left_out_and_said() -> None:
    accounts = ConnectionAccounts()
    found = [("rail0", connection(cookie, NOTHING)) for cookie in range(MAXIMUM_CONNECTIONS + 3)]
    (failure,) = accounts.add(("rail0",), these(accounts, *found))
    assert failure.reason == f"3 beyond {MAXIMUM_CONNECTIONS} are not counted"
    assert accounts.last[0].connections == MAXIMUM_CONNECTIONS


def process(procfs: Path, pid: int, *targets: str) -> None:
    """A simulated process with these descriptors."""
    folder = procfs / str(pid) / "fd"
    folder.mkdir(parents=True, exist_ok=True)
    for number, target in enumerate(targets, len(list(folder.iterdir()))):
        (folder / str(number)).symlink_to(target)


def test_descriptors_are_looked_through_only_for_sockets_that_are_not_known(tmp_path: Path) -> None:
    process(tmp_path, 10, "socket:[5]", "/dev/null", "pipe:[6]", "socket:[7]")
    clock = SteppedClock()
    owners = SocketOwners(tmp_path, clock)
    assert owners.owners({10}, [5, 6, 0, 99]) == {5: 10}
    assert owners.owners({10}, [5, 6, 99]) == {5: 10}
    assert owners.looks == 1
    assert owners.owners({10}, [5, 7, 99]) == {5: 10, 7: 10}
    assert owners.looks == 2
    process(tmp_path, 11, "socket:[99]")
    assert owners.owners({10, 11}, [5, 99]) == {5: 10, 99: 11}
    assert owners.owners({11}, [5, 99]) == {99: 11}
    looks = owners.looks
    process(tmp_path, 11, "socket:[5]")  # handed over by the other
    clock.sleep(31)
    assert owners.owners({11}, [5, 99]) == {5: 11, 99: 11}
    assert owners.looks == looks + 1


def test_whoever_has_very_many_descriptors_hides_its_own_sockets_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in (10, 11, 12):
        process(tmp_path, pid, f"socket:[{pid}]")
    sizes = {10: 32_768, 11: 200, 12: MOST_IN_ALL - 300}
    monkeypatch.setattr(socket_owners, "_descriptors", lambda _procfs, pid: sizes[pid])
    owners = SocketOwners(tmp_path, SteppedClock())
    assert owners.owners({10, 11, 12}, [10, 11, 12]) == {10: 10, 11: 11}
    assert [one.pid for one in owners.unreadable] == [12]


def test_after_a_look_that_took_long_the_next_is_put_off(tmp_path: Path) -> None:
    for pid in (10, 11):
        process(tmp_path, pid, f"socket:[{pid}]")
    clock = SteppedClock(cost_ns=1_000_000_000)
    owners = SocketOwners(tmp_path, clock, spent_ns=clock.monotonic_ns)
    assert owners.owners({10}, [10, 11]) == {10: 10}
    for _ in range(7):
        assert owners.owners({11}, [10, 11]) == {}
    assert owners.looks == 1
    clock.sleep(10)
    assert owners.owners({11}, [10, 11]) == {11: 11}


def test_a_process_that_has_ended_has_no_sockets(tmp_path: Path) -> None:
    assert socket_inodes(tmp_path, 12) == set()


def test_a_process_that_may_not_be_looked_at_is_said_and_others_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(tmp_path, 10, "socket:[5]")
    process(tmp_path, 11, "socket:[6]")
    scandir = os.scandir

    def refusing(path: str) -> object:
        if "/11/" in path:
            raise PermissionError(errno.EACCES, "simulated")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    owners = SocketOwners(tmp_path, SteppedClock())
    assert owners.owners({10, 11}, [5, 6]) == {5: 10}
    (unreadable,) = owners.unreadable
    assert unreadable.pid == 11
    assert "grant railscope CAP_SYS_PTRACE" in unreadable.reason


@settings(deadline=None)
@given(st.lists(st.text(alphabet="socket:[]0123456789", min_size=1, max_size=20), max_size=5))
def test_any_link_is_a_socket_or_not(tmp_path_factory: pytest.TempPathFactory, targets: list[str]) -> None:
    procfs = tmp_path_factory.mktemp("proc")
    process(procfs, 3, *targets)
    assert socket_inodes(procfs, 3) == {
        int(target[8:-1])
        for target in targets
        if target.startswith("socket:[") and target.endswith("]") and target[8:-1].isdigit() and len(target) < 20
    }


@pytest.fixture
def diag() -> Iterator[NetlinkSocket]:
    """The running kernel."""
    try:
        netlink = NetlinkSocket(protocol=NETLINK_SOCK_DIAG)
        read_table(netlink, [bytes([127, 0, 0, 1])])
    except OSError as error:
        pytest.skip(f"no sock_diag here: {error}")
    yield netlink
    netlink.close()


def addresses(table: TcpTable) -> dict[int, bytes]:
    """Local addresses by inode."""
    return dict(zip(table.rows["inode"].tolist(), local_addresses(table.rows), strict=True))


@pytest.mark.parametrize("place", range(5))
def test_the_kernel_lists_only_sockets_of_the_addresses_asked_for(diag: NetlinkSocket, place: int) -> None:
    with ExitStack() as opened:
        inodes = {}
        for address in ("127.0.0.1", "127.0.0.77"):
            server = opened.enter_context(closing(socket.create_server((address, 0))))
            client = opened.enter_context(
                closing(socket.create_connection(server.getsockname(), source_address=(address, 0)))
            )
            inodes[address] = os.fstat(client.fileno()).st_ino
        others = [bytes([192, 0, 2, last]) for last in range(4)] + [bytes(15) + b"\x09"]
        asked = [*others[:place], bytes([127, 0, 0, 77]), *others[place:]]
        found = set(read_table(diag, asked).rows["inode"].tolist())
    assert inodes["127.0.0.77"] in found
    assert inodes["127.0.0.1"] not in found


def test_an_ipv4_connection_of_an_ipv6_socket_is_listed_under_its_ipv4_address(diag: NetlinkSocket) -> None:
    with ExitStack() as opened:
        try:
            client = opened.enter_context(closing(socket.socket(socket.AF_INET6, socket.SOCK_STREAM)))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        server = opened.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        client.connect((f"::ffff:{server.getsockname()[0]}", server.getsockname()[1]))
        inode = os.fstat(client.fileno()).st_ino
        found = addresses(read_table(diag, [bytes([127, 0, 0, 1])]))
    assert found[inode] == bytes([127, 0, 0, 1])


def test_connections_of_both_families_are_listed_together(diag: NetlinkSocket) -> None:
    with ExitStack() as opened:
        expected = {}
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            try:
                server = opened.enter_context(closing(socket.create_server((address, 0), family=family)))
            except OSError as error:
                pytest.skip(f"no {address} here: {error}")
            client = opened.enter_context(closing(socket.create_connection(server.getsockname()[:2])))
            expected[os.fstat(client.fileno()).st_ino] = socket.inet_pton(family, address)
        found = addresses(read_table(diag, list(expected.values())))
    assert expected.items() <= found.items()


def test_too_many_addresses_are_no_condition() -> None:
    assert len(make_request([bytes(4)] * 257)) == len(make_request([]))


@pytest.mark.usefixtures("diag")
def test_bytes_of_this_processes_own_connection_are_counted_exactly() -> None:
    source = TcpCounters(SystemClock(), PROCFS)
    with closing(source), closing(socket.create_server(("127.0.0.1", 0))) as server:
        source.watch(("lo",), {os.getpid()})
        source.read()
        with closing(socket.create_connection(server.getsockname())) as client:
            accepted, _peer = server.accept()
            with closing(accepted):
                client.sendall(bytes(100_000))
                received = 0
                while received < 100_000:
                    received += len(accepted.recv(1 << 16))
                reading = source.read()
                row = dict(zip(reading.fields, reading.values[0].tolist(), strict=True))
                (lo,) = source.last
        assert (row["tx_bytes"], row["rx_bytes"], reading.failed) == (100_000, 100_000, ())
        # The loopback device has carried by now what was received.
        assert row["port_tx_bytes"] >= 100_000 + row["port_tx_packets"]
        assert row["header_bytes_sent"] == row["segments_sent"] * 66
        assert lo.connections >= 2
        assert lo.round_trip_maximum_us
        source.read()
        source.watch(("lo",), ())
        gone = source.read()
        assert gone.values[0, 0] == 100_000
        assert source.last[0].connections == 0


@pytest.mark.usefixtures("diag")
@pytest.mark.parametrize("seen", [True, False])
def test_what_a_connection_carried_to_its_end_is_counted_and_whose_it_was_if_it_was_seen(seen: bool) -> None:
    def columns() -> dict[str, int]:
        reading = source.read()
        return dict(zip(reading.fields, reading.values[0].tolist(), strict=True))

    with (
        closing(TcpCounters(SystemClock(), PROCFS)) as source,
        closing(socket.create_server(("127.0.0.1", 0))) as server,
    ):
        source.watch(("lo",), {os.getpid()})
        source.read()
        with closing(socket.create_connection(server.getsockname())) as client, closing(server.accept()[0]) as accepted:
            if seen:
                source.read()
            client.sendall(bytes(50_000))
            client.shutdown(socket.SHUT_WR)
            while accepted.recv(1 << 16):
                pass
        whose = "tx_bytes" if seen else "unknown/tx_bytes"
        # The kernel tells of it in a thread of its own.
        eventually(lambda: columns().get(whose, 0) >= 50_000)
        if seen:
            assert columns()[whose] == 50_000
            assert columns()["connection_changes"] == 0


@pytest.mark.usefixtures("diag")
def test_when_no_process_may_be_looked_at_the_source_fails_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(tmp_path, 10, "socket:[5]")

    def refused(path: str) -> object:
        raise PermissionError(errno.EPERM, f"simulated: {path}")

    monkeypatch.setattr(os, "scandir", refused)
    with closing(TcpCounters(SystemClock(), tmp_path)) as source, closing(socket.create_server(("127.0.0.1", 0))) as s:
        with closing(socket.create_connection(s.getsockname())):
            source.watch(("lo",), {10})
            with pytest.raises(PermissionError, match="CAP_SYS_PTRACE"):
                source.read()
