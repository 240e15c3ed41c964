"""Netlink framing, links, statistics and link events, from simulated messages."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.netdev.events import LinkChange, LinkEvent, LinkTable
from railscope.probes.netdev.links import Link, parse_links, read_links
from railscope.probes.netdev.netlink import MalformedNetlink, NetlinkSocket, attributes, messages
from railscope.probes.netdev.rtnetlink_counters import LINK_STATS_FIELDS, parse_statistics
from tests.unit.netdev_messages import RTM_DELLINK, attribute, done, link, message, statistics

RX_BYTES = LINK_STATS_FIELDS.index("rx_bytes")
TX_BYTES = LINK_STATS_FIELDS.index("tx_bytes")

devices = st.dictionaries(
    st.integers(1, 2**31 - 1),
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    max_size=20,
)


def dump_of(counters: dict[int, tuple[int, int]], words: int = 25) -> list[bytes]:
    return [statistics(index, {RX_BYTES: rx, TX_BYTES: tx}, words=words) for index, (rx, tx) in counters.items()]


def counted(datagrams: list[bytes]) -> dict[int, tuple[int, int]]:
    indexes, values = parse_statistics(datagrams)
    assert values.shape == (len(indexes), len(LINK_STATS_FIELDS))
    return {index: (int(row[RX_BYTES]), int(row[TX_BYTES])) for index, row in zip(indexes, values, strict=True)}


@settings(deadline=None)
@given(devices, st.sampled_from([23, 24, 25, 27]), st.integers(1, 5))
def test_every_device_gets_its_own_counters_however_the_kernel_packs_them(
    counters: dict[int, tuple[int, int]], words: int, per_datagram: int
) -> None:
    parts = [*dump_of(counters, words), done()]
    datagrams = [b"".join(parts[at : at + per_datagram]) for at in range(0, len(parts), per_datagram)]
    assert counted(datagrams) == counters


@settings(deadline=None)
@given(devices, st.randoms(use_true_random=False))
def test_the_order_of_messages_does_not_matter_and_other_messages_are_passed_over(
    counters: dict[int, tuple[int, int]], random: Random
) -> None:
    parts = [*dump_of(counters), link(5, "eth0"), message(1, b"")]
    random.shuffle(parts)
    assert counted([b"".join(parts)]) == counters


def test_an_alignment_attribute_before_the_counters_is_passed_over() -> None:
    data = statistics(7, {RX_BYTES: 11, TX_BYTES: 12}, before=attribute(0, b"")) + statistics(8, {RX_BYTES: 13})
    assert counted([data]) == {7: (11, 12), 8: (13, 0)}


@settings(deadline=None)
@given(devices.filter(bool), st.data())
def test_a_cut_answer_raises_or_yields_only_whole_devices(
    counters: dict[int, tuple[int, int]], data: st.DataObject
) -> None:
    whole = b"".join(dump_of(counters))
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        found = counted([cut])
    except MalformedNetlink:
        assert len(cut) % (len(whole) // len(counters))
    else:
        assert found == dict(list(counters.items())[: len(found)])


def test_counters_too_short_for_their_structure_are_refused() -> None:
    with pytest.raises(MalformedNetlink, match="counters of 80 bytes"):
        parse_statistics([statistics(3, {}, words=10)])


def test_one_device_listed_twice_is_refused() -> None:
    with pytest.raises(MalformedNetlink, match="two statistics of one device"):
        parse_statistics([statistics(3, {}) + statistics(3, {})])


@pytest.mark.parametrize("parse", [parse_statistics, parse_links])
@settings(deadline=None)
@given(garbage=st.lists(st.binary(max_size=400), max_size=3))
def test_garbage_ends_in_a_clean_error_or_nothing(parse: Callable[[list[bytes]], object], garbage: list[bytes]) -> None:
    with suppress(MalformedNetlink):
        parse(garbage)


@settings(deadline=None)
@given(devices.filter(bool), st.data())
def test_a_flipped_byte_never_hangs_and_never_changes_the_shape(
    counters: dict[int, tuple[int, int]], data: st.DataObject
) -> None:
    whole = bytearray(b"".join(dump_of(counters)))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        indexes, values = parse_statistics([bytes(whole)])
    except MalformedNetlink:
        return
    assert values.shape == (len(indexes), len(LINK_STATS_FIELDS))
    assert values.dtype == np.uint64


@pytest.mark.parametrize("length", [0, 15, 17 + 1000])
def test_a_message_length_that_is_too_small_or_too_large_is_refused(length: int) -> None:
    with pytest.raises(MalformedNetlink, match=f"a message of {length} bytes"):
        list(messages(struct.pack("=IHHII", length, 16, 0, 0, 0)))


def test_an_attribute_of_length_zero_is_refused_and_does_not_loop() -> None:
    with pytest.raises(MalformedNetlink, match="an attribute of 0 bytes"):
        list(attributes(memoryview(bytes(8))))


def only(datagram: bytes) -> Link:
    (found,) = parse_links([datagram])
    return found


def test_a_link_message_says_what_a_device_is() -> None:
    found = only(link(9, "rail1", declared="veth", master=4, changes=3, carrier=False))
    assert (found.index, found.name, found.kind, found.master) == (9, "rail1", "veth", 4)
    assert (found.up, found.carrier, found.carrier_changes, found.mtu) == (True, False, 3, 1500)
    assert found.link_layer == "Ethernet"


@pytest.mark.parametrize(
    ("hardware_type", "port_name", "kind"),
    [
        (1, "", "physical"),
        (1, "p0", "physical"),
        (1, "pf0vf3", "representor"),
        (772, "", "loopback"),
        (32, "", "physical"),
    ],
)
def test_an_undeclared_device_is_told_by_its_hardware_type_and_port(
    hardware_type: int, port_name: str, kind: str
) -> None:
    assert only(link(2, "x", hardware_type=hardware_type, port_name=port_name)).kind == kind


@pytest.mark.parametrize(("status", "up"), [(0, True), (1, False), (2, False), (3, False)])
def test_a_member_of_a_bond_tells_what_the_bond_takes_its_link_for(status: int, up: bool) -> None:
    assert only(link(2, "eth0", master=9, bond_status=status)).bond_link is up
    assert only(link(3, "veth0", master=9, declared="veth", bond_status=status)).kind == "veth"
    assert only(link(9, "bond0", declared="bond")).bond_link is None


def test_a_message_about_a_port_of_a_bridge_is_no_link() -> None:
    assert parse_links([link(9, "rail1", family=7)]) == []


@settings(deadline=None)
@given(st.data())
def test_a_cut_link_message_is_refused(data: st.DataObject) -> None:
    whole = link(9, "rail1", declared="veth")
    with pytest.raises(MalformedNetlink):
        parse_links([whole[: data.draw(st.integers(1, len(whole) - 1))]])


def table(*datagrams: bytes) -> dict[int, Link]:
    return {found.index: found for found in parse_links(list(datagrams))}


def told(events: list[LinkEvent]) -> list[tuple[LinkChange, str, int]]:
    return [(event.change, event.name, event.flaps) for event in events]


RAIL = link(9, "rail1", changes=1)


def test_a_flap_between_two_reads_is_two_events_when_both_were_announced() -> None:
    down, again = link(9, "rail1", carrier=False, changes=2), link(9, "rail1", changes=3)
    events = LinkTable(1, table(RAIL)).changes([down, again], table(again))
    assert told(events) == [(LinkChange.CARRIER, "rail1", 1), (LinkChange.CARRIER, "rail1", 1)]
    assert [event.carrier for event in events] == [False, True]


def test_a_flap_that_the_kernel_merged_away_is_found_by_carrier_changes() -> None:
    events = LinkTable(1, table(RAIL)).changes([RAIL], table(link(9, "rail1", changes=5)))
    assert told(events) == [(LinkChange.CARRIER, "rail1", 4)]
    assert events[0].carrier is True


def test_a_device_that_came_and_went_between_two_reads_is_still_told() -> None:
    new = link(12, "rail2")
    events = LinkTable(1, table(RAIL)).changes([new, link(12, "rail2", kind=RTM_DELLINK)], table(RAIL))
    assert told(events) == [(LinkChange.ADDED, "rail2", 0), (LinkChange.REMOVED, "rail2", 0)]


def test_leaving_a_bridge_is_not_being_removed() -> None:
    leaving = link(9, "rail1", kind=RTM_DELLINK, family=7)
    assert LinkTable(1, table(RAIL)).changes([leaving], table(RAIL)) == []


def test_messages_older_than_the_last_table_tell_nothing_twice() -> None:
    seen = LinkTable(1, table(RAIL, link(12, "rail2")))
    down = link(9, "rail1", carrier=False, changes=2)
    assert told(seen.changes([RAIL], table(down))) == [
        (LinkChange.REMOVED, "rail2", 0),
        (LinkChange.CARRIER, "rail1", 1),
    ]
    late = [down, link(12, "rail2", carrier=False, changes=2), link(12, "rail2", kind=RTM_DELLINK)]
    assert seen.changes(late, table(down)) == []


def test_a_new_device_with_a_used_number_is_told_after_the_old_one_went() -> None:
    seen = LinkTable(1, table(RAIL))
    assert told(seen.changes([RAIL], {})) == [(LinkChange.REMOVED, "rail1", 0)]
    back = [link(9, "rail1", kind=RTM_DELLINK), RAIL]
    assert told(seen.changes(back, table(RAIL))) == [(LinkChange.ADDED, "rail1", 0)]


def test_a_rename_and_a_switch_off_are_told() -> None:
    events = LinkTable(1, table(RAIL)).changes([RAIL], table(link(9, "ib0", up=False)))
    assert told(events) == [(LinkChange.RENAMED, "ib0", 0), (LinkChange.ADMIN, "ib0", 0)]


def test_a_bond_that_gives_a_member_up_is_told_though_its_carrier_stays() -> None:
    """As with ARP monitoring: the cable is fine, and nobody answers."""
    table = LinkTable(1, {2: only(link(2, "eth0", bond_status=0))})
    (event,) = table.changes([], {2: only(link(2, "eth0", bond_status=2))})
    assert (event.change, event.name, event.carrier, event.flaps) == (LinkChange.CARRIER, "eth0", True, 0)


def test_dropped_messages_are_told_and_what_they_said_is_found_in_the_table() -> None:
    events = LinkTable(1, table(RAIL)).changes([], table(link(12, "rail2")), overflow=True)
    assert told(events) == [
        (LinkChange.REMOVED, "rail1", 0),
        (LinkChange.ADDED, "rail2", 0),
        (LinkChange.OVERFLOW, "", 0),
    ]


def test_a_broken_message_counts_as_lost_ones() -> None:
    events = LinkTable(1, table(RAIL)).changes([RAIL[:20]], table(RAIL))
    assert told(events) == [(LinkChange.OVERFLOW, "", 0)]


@pytest.fixture
def kernel() -> Iterator[NetlinkSocket]:
    """The running kernel's own devices."""
    netlink = NetlinkSocket()
    yield netlink
    netlink.close()


def test_an_answer_that_was_given_up_on_is_not_taken_for_the_next_one(kernel: NetlinkSocket) -> None:
    expected = read_links(kernel)
    whole, kernel._buffer = kernel._buffer, bytearray(40)
    with pytest.raises(MalformedNetlink):
        read_links(kernel)
    kernel._buffer = whole
    assert read_links(kernel) == expected


def test_an_answer_to_an_earlier_question_is_passed_over(kernel: NetlinkSocket) -> None:
    whole = kernel.dump(18, bytes(16))
    assert kernel._scan(whole[0])[0]
    kernel._sequence += 1
    assert kernel._scan(whole[0]) == (False, False, False)


def test_a_question_that_the_kernel_refuses_is_an_error_and_the_next_one_works(kernel: NetlinkSocket) -> None:
    with pytest.raises(OSError, match="netlink: Operation not supported"):
        kernel.dump(4000, bytes(16))
    assert 1 in read_links(kernel)
