"""RDMA netlink, from synthesised messages: no machine of ours has an RDMA device to ask."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroute2.netlink import nla, nlmsg

from railscope.probes.netdev.netlink import NETLINK_RDMA, MalformedNetlink, NetlinkSocket, messages
from railscope.probes.rdma.netlink import NLDEV_GET, NLDEV_STAT_GET, RdmaNetlink, parse_devices, parse_port_counters
from tests.unit.netdev_messages import attribute, message

NESTED = 0x8000


def number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def device(index: int, name: str) -> bytes:
    return message(NLDEV_GET, number(1, index) + text(2, name) + attribute(4, bytes(8)))


def statistics(counters: dict[str, int], *, index: int = 3, port: int = 1, nested: int = 0) -> bytes:
    entries = b"".join(
        attribute(81 | nested, text(82, name) + attribute(83, struct.pack("=Q", value)))
        for name, value in counters.items()
    )
    body = number(1, index) + text(2, "mlx5_0") + number(3, port) + attribute(80 | nested, entries)
    return message(NLDEV_STAT_GET, body)


names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
counters = st.dictionaries(names, st.integers(0, 2**64 - 1), max_size=60)


@settings(deadline=None)
@given(counters, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.sampled_from([0, NESTED]))
def test_every_counter_comes_back_with_its_value(values: dict[str, int], index: int, port: int, nested: int) -> None:
    answer = [statistics(values, index=index, port=port, nested=nested), message(2, bytes(20))]
    assert parse_port_counters(answer, index, port) == values
    assert parse_port_counters([b"".join(answer)], index, port) == values


@settings(deadline=None)
@given(st.dictionaries(names, st.integers(0, 2**31 - 1), max_size=20))
def test_every_device_comes_back_with_its_number(devices: dict[str, int]) -> None:
    datagram = b"".join(device(index, name) for name, index in devices.items())
    assert parse_devices([datagram, message(3, bytes(4))]) == devices


class RdmaStatistics(nlmsg):  # type: ignore[misc]
    """What pyroute2 would make of the same answer; it knows no RDMA of its own."""

    nla_map = (
        (1, "DEV_INDEX", "uint32"),
        (2, "DEV_NAME", "asciiz"),
        (3, "PORT_INDEX", "uint32"),
        (80, "HWCOUNTERS", "table"),
    )

    class table(nla):  # type: ignore[misc]
        nla_map = ((81, "ENTRY", "entry"),)

        class entry(nla):  # type: ignore[misc]
            nla_map = ((82, "NAME", "asciiz"), (83, "VALUE", "uint64"))


def test_what_pyroute2_encodes_is_decoded_alike() -> None:
    values = {"out_of_sequence": 7, "rx_write_requests": 2**32 - 1, "np_cnp_sent": 2**64 - 1}
    answer = RdmaStatistics()
    answer["header"]["type"] = NLDEV_STAT_GET
    entries = [["ENTRY", {"attrs": [["NAME", name], ["VALUE", value]]}] for name, value in values.items()]
    answer["attrs"] = [["DEV_INDEX", 3], ["DEV_NAME", "mlx5_0"], ["PORT_INDEX", 1], ["HWCOUNTERS", {"attrs": entries}]]
    answer.encode()
    assert parse_port_counters([bytes(answer.data)], 3, 1) == values


@settings(deadline=None)
@given(counters.filter(bool), st.data())
def test_a_cut_answer_is_refused(values: dict[str, int], data: st.DataObject) -> None:
    whole = statistics(values)
    with pytest.raises(MalformedNetlink):
        parse_port_counters([whole[: data.draw(st.integers(0, len(whole) - 1))]], 3, 1)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused_as_such(garbage: bytes) -> None:
    with pytest.raises(MalformedNetlink):
        parse_port_counters([message(NLDEV_STAT_GET, garbage)], 3, 1)
    with pytest.raises(MalformedNetlink):
        parse_devices([message(NLDEV_GET, garbage)])


def test_an_answer_about_another_port_is_refused() -> None:
    with pytest.raises(MalformedNetlink, match="another port"):
        parse_port_counters([statistics({"a": 1}, port=2)], 3, 1)
    with pytest.raises(MalformedNetlink, match="no RDMA statistics"):
        parse_port_counters([message(2, bytes(20))], 3, 1)


@pytest.mark.parametrize(
    "entry", [text(82, "a"), attribute(83, bytes(8)), text(82, "a") + attribute(83, bytes(4)), b""]
)
def test_a_counter_without_name_or_whole_value_is_refused(entry: bytes) -> None:
    body = number(1, 3) + number(3, 1) + attribute(80, attribute(81, entry))
    with pytest.raises(MalformedNetlink):
        parse_port_counters([message(NLDEV_STAT_GET, body)], 3, 1)


def test_one_question_gets_one_answer_and_its_acknowledgement_from_the_kernel() -> None:
    rtm_getlink, rtm_newlink = 18, 16
    route = NetlinkSocket()
    try:
        body = struct.pack("=BxHiII", 0, 0, 1, 0, 0)
        for _ in range(2):
            kinds = [kind for data in route.ask(rtm_getlink, body) for kind, *_ in messages(data)]
            assert kinds == [rtm_newlink, 2]
        with pytest.raises(OSError, match="No such device") as refusal:
            route.ask(rtm_getlink, struct.pack("=BxHiII", 0, 0, 2**31 - 1, 0, 0))
        assert refusal.value.errno == errno.ENODEV
        assert len(route.ask(rtm_getlink, body)) >= 1
    finally:
        route.close()


def test_a_kernel_without_rdma_says_so_and_one_with_it_lists_its_devices() -> None:
    try:
        rdma = RdmaNetlink()
    except OSError as error:
        if error.errno != errno.EPROTONOSUPPORT:
            raise
        pytest.skip(f"this kernel has no RDMA netlink (protocol {NETLINK_RDMA}): run 'make test-vm'")
    try:
        assert all(index >= 0 for index in rdma.device_indexes().values())
    finally:
        rdma.close()
