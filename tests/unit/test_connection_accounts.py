"""Connections as columns against one at a time: simulated answers of sock_diag, read after read."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, fields
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.netdev import connection_accounts
from railscope.probes.netdev.connection_accounts import ACCOUNT_FIELDS, OBSERVED, ConnectionAccounts
from railscope.probes.netdev.netlink import MalformedNetlink
from railscope.probes.netdev.tcp_info import TcpTable, local_addresses, parse_table
from tests.unit import tcp_reference
from tests.unit.netdev_messages import attribute, done, message
from tests.unit.tcp_reference import LEAST_INFO_BYTES, OFFSETS, TcpInfo

DEVICES = ("rail0", "rail1")
NAMES = {3: "rail0", 4: "rail1"}
IPV4 = [bytes([10, 0, 0, host]) for host in (1, 2)]
IPV6 = [bytes(15) + bytes([host]) for host in (1, 2)]
PLACES = {IPV4[0]: "rail0", IPV4[1]: "rail1", IPV6[0]: "rail0", IPV6[1]: "rail1"}
MAPPED = [bytes(10) + b"\xff\xff" + address for address in IPV4]
ELSEWHERE = [bytes([192, 0, 2, 1]), bytes([10, 0, 0, 1]) + bytes(12)]

wide = st.integers(0, 3) | st.integers(0, 2**64 - 1) | st.integers(2**64 - 4, 2**64 - 1)
narrow = st.integers(0, 3) | st.integers(0, 2**32 - 1) | st.integers(2**32 - 4, 2**32 - 1)
FORMS = {"Q": wide, "I": narrow | st.integers(998, 1002), "B": st.integers(0, 255)}
infos = st.builds(
    TcpInfo,
    **{
        field.name: st.booleans() if field.name == "application_limited" else FORMS[OFFSETS[field.name][1]]
        for field in fields(TcpInfo)
    },
)
ahead = st.lists(
    st.sampled_from([attribute(8, b"\0"), attribute(21, bytes(8)), attribute(15, b"12345678"), b"\3\0\x08\0"]),
    max_size=3,
).map(b"".join)
"""Attributes before the one with tcp_info, one of them malformed."""


@dataclass(frozen=True)
class Shape:
    """How sockets are told; as a rule all in the same way."""

    ahead: bytes = attribute(8, b"\0")
    info_bytes: int | None = 248
    behind: bytes = b""


shapes = st.just(Shape()) | st.builds(
    Shape,
    ahead,
    st.none() | st.integers(0, 300) | st.sampled_from([215, 216, 231, 232]),
    st.binary(max_size=9),
)
sockets = st.tuples(
    st.integers(1, 5) | st.just(2**64 - 1),
    st.integers(0, 4),
    st.sampled_from([*IPV4, *IPV4, *IPV6, *MAPPED, *ELSEWHERE]),
    st.sampled_from([0, 0, 0, 3, 4, 9]),
    infos,
)
Drawn = tuple[int, int, bytes, int, TcpInfo]
noise = st.sampled_from([done(), message(20, bytes(24))])


def listed(drawn: Drawn, shape: Shape) -> bytes:
    cookie, inode, local, interface, info = drawn
    family = socket.AF_INET if len(local) == 4 else socket.AF_INET6
    head = struct.pack("=4B", family, 1, 0, 0) + struct.pack(">HH", 40_000, 5001) + local.ljust(16, b"\0") + bytes(16)
    head += struct.pack("=IIIIIIII", interface, cookie & 0xFFFFFFFF, cookie >> 32, 0, 0, 0, 0, inode)
    told = b"" if shape.info_bytes is None else attribute(2, info.packed(shape.info_bytes))
    return message(18, head + shape.ahead + told + shape.behind)


answers = st.lists(
    st.lists(st.builds(listed, sockets, shapes) | noise, max_size=7).map(b"".join), min_size=1, max_size=2
)
alike = st.tuples(shapes, st.lists(sockets, max_size=9)).map(
    lambda drawn: [b"".join(listed(one, drawn[0]) for one in drawn[1]) + done()]
)
reads = st.lists(
    st.tuples(
        answers | alike,
        st.frozensets(st.integers(1, 4)),
        st.sampled_from([DEVICES, DEVICES, DEVICES, ("rail1", "rail0"), ("rail0", "rail1", "rail0")]),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(reads, st.sampled_from([2_048, 3]))
def test_columns_add_up_to_what_connections_one_by_one_do(
    reads: list[tuple[list[bytes], frozenset[int], tuple[str, ...]]], maximum: int
) -> None:
    accounts, expected = ConnectionAccounts(), tcp_reference.Accounts()
    with (
        patch.object(connection_accounts, "MAXIMUM_CONNECTIONS", maximum),
        patch.object(tcp_reference, "MAXIMUM_CONNECTIONS", maximum),
    ):
        for number, (datagrams, owners, devices) in enumerate(reads):
            table = parse_table(datagrams)
            if number == 0:
                accounts.begin(table)
            found = accounts.find(table, dict.fromkeys(owners, OBSERVED), NAMES, PLACES)
            failed = accounts.add(devices, found)
            told = tcp_reference.sockets_of(datagrams)
            assert failed == expected.take(devices, told, owners, NAMES, PLACES)
            assert accounts.last == expected.last
            for device in DEVICES:
                totals = accounts.totals(device)
                assert dict(zip(ACCOUNT_FIELDS, totals, strict=True)) == expected.of(device)
                assert all(type(total) is int for total in totals)


@settings(deadline=None)
@given(answers)
def test_every_field_of_a_table_is_what_one_socket_alone_says(datagrams: list[bytes]) -> None:
    table = parse_table(datagrams)
    expected = tcp_reference.sockets_of(datagrams)
    assert [
        (int(row["inode"]), int(row["cookie"]), address, int(row["interface"]))
        for row, address in zip(table.rows, local_addresses(table.rows), strict=True)
    ] == [(one.inode, one.cookie, one.local, one.interface) for one in expected]
    for number, one in enumerate(expected):
        row = table.rows[number]
        error = _untold(one)
        assert repr(table.untold.get(number)) == repr(error)
        info = TcpInfo() if error else one.info()
        assert {name: int(row[name]) for name in OFFSETS} == {name: getattr(info, name) for name in OFFSETS}


def _untold(one: tcp_reference.Socket) -> ValueError | None:
    try:
        one.info()
    except ValueError as error:
        return error
    return None


@settings(deadline=None)
@given(answers, st.data())
def test_cut_and_flipped_answers_end_as_they_do_one_by_one(datagrams: list[bytes], data: st.DataObject) -> None:
    cut = bytearray(datagrams[0])
    if cut:
        del cut[data.draw(st.integers(0, len(cut))) :]
    for _ in range(data.draw(st.integers(0, 2)) if cut else 0):
        cut[data.draw(st.integers(0, len(cut) - 1))] ^= data.draw(st.integers(0, 255))
    expected: list[tcp_reference.Socket] | str
    got: TcpTable | str
    try:
        expected = tcp_reference.sockets_of([bytes(cut)])
    except MalformedNetlink as error:
        expected = str(error)
    try:
        got = parse_table([bytes(cut)])
    except MalformedNetlink as error:
        got = str(error)
    if isinstance(got, str) or isinstance(expected, str):
        assert got == expected
        return
    assert got.rows["inode"].tolist() == [one.inode for one in expected]
    errors = {number: repr(_untold(one)) for number, one in enumerate(expected) if _untold(one)}
    assert {number: repr(error) for number, error in got.untold.items()} == errors


@pytest.mark.parametrize("info_bytes", [LEAST_INFO_BYTES, 231])
def test_the_peers_window_is_0_where_the_kernel_does_not_tell_it(info_bytes: int) -> None:
    shape = Shape(info_bytes=info_bytes, behind=attribute(4, b"\xff" * 12))
    table = parse_table([listed((1, 1, IPV4[0], 0, TcpInfo(bytes_sent=7)), shape) + done()])
    assert (table.rows["bytes_sent"].tolist(), table.rows["peer_window_bytes"].tolist()) == ([7], [0])
