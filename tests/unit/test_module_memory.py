"""Memories of network modules and answers on error correction, as bytes: made after SFF-8636 and CMIS (simulated)."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.condition.modules import Modules
from railscope.probes.netdev.ethtool_netlink import EthtoolNetlink, FecStatistics, parse_fec
from railscope.probes.netdev.module_memory import parse_cmis, parse_sff8636, read_module
from railscope.probes.netdev.netlink import MalformedNetlink
from tests.unit.netdev_messages import SteppedClock


def qsfp28(*, receive: tuple[int, ...] = (7000, 7000, 7000, 300), flags: dict[int, int] | None = None) -> bytes:
    memory = bytearray(128)
    memory[0] = 0x11
    struct.pack_into(">h", memory, 22, round(45.5 * 256))
    struct.pack_into(">H", memory, 26, 33_000)
    struct.pack_into(">4H", memory, 34, *receive)
    struct.pack_into(">4H", memory, 50, 9000, 9000, 9000, 9000)
    for at, value in (flags or {}).items():
        memory[at] = value
    return bytes(memory)


def osfp(*, flat: bool = False, flags: int = 0) -> bytes:
    memory = bytearray(128)
    memory[0], memory[2], memory[9] = 0x19, 0x80 if flat else 0, flags
    struct.pack_into(">h", memory, 14, 68 * 256)
    struct.pack_into(">H", memory, 16, 33_100)
    return bytes(memory)


def lanes(*, receive: int = 8000, flags: dict[int, int] | None = None) -> bytes:
    page = bytearray(128)
    struct.pack_into(">8H", page, 154 - 128, *[10_000] * 8)
    struct.pack_into(">8H", page, 186 - 128, *[receive] * 8)
    for at, value in (flags or {}).items():
        page[at - 128] = value
    return bytes(page)


def test_a_qsfp28_tells_temperature_light_and_which_lane_is_dark() -> None:
    # Lane 4: low alarm and low warning of received light; lane 1: no signal; the module: temperature high warning.
    found = parse_sff8636(qsfp28(flags={10: 0b0000_0101, 3: 0b0000_0001, 6: 0b0010_0000}))
    assert found is not None
    assert (found.form, found.temperature_celsius) == ("qsfp28", 45.5)
    assert found.volts == pytest.approx(3.3)
    assert found.receive_watts == pytest.approx((0.0007, 0.0007, 0.0007, 0.00003))
    assert found.alarms == (
        ("", "temperature_high_warning"),
        ("1", "receive_lost"),
        ("4", "receive_power_low"),
        ("4", "receive_power_low_warning"),
    )


def test_an_osfp_has_eight_lanes_and_flags_the_other_way_round() -> None:
    page = lanes(flags={150: 0b0000_0100, 147: 0b1000_0000, 135: 1})
    pages = {0: osfp(flags=0b0000_0101), 0x11: page}
    found = read_module(lambda number, _offset, _length: pages[number])
    assert found is not None
    assert (found.form, found.temperature_celsius, len(found.receive_watts)) == ("osfp", 68.0, 8)
    assert min(found.receive_watts) == pytest.approx(0.0008)
    assert found.alarms == (
        ("", "temperature_high"),
        ("", "temperature_high_warning"),
        ("1", "transmit_fault"),
        ("3", "receive_power_low"),
        ("8", "receive_lost"),
    )


def test_copper_has_no_light_and_no_alarms_of_lanes() -> None:
    dark = qsfp28(receive=(0, 0, 0, 0), flags={3: 0xFF, **dict.fromkeys(range(50, 58), 0)})
    found = parse_sff8636(dark)
    assert found is not None
    assert (found.receive_watts, found.transmit_watts, found.alarms) == ((), (), ())
    asked = []

    def read(page: int, _offset: int, _length: int) -> bytes:
        asked.append(page)
        return osfp(flat=True)

    found = read_module(read)
    assert found is not None
    assert (found.receive_watts, asked) == ((), [0])


def test_a_module_of_another_form_tells_nothing() -> None:
    assert read_module(lambda *_: bytes([0x03]) + bytes(127)) is None
    assert read_module(lambda *_: b"") is None


@given(st.binary(max_size=140), st.binary(max_size=140))
def test_any_bytes_are_a_module_or_none(lower: bytes, page: bytes) -> None:
    for found in (
        parse_sff8636(lower),
        parse_cmis(lower, page),
        parse_sff8636(b"\x11" + lower),
        parse_cmis(b"\x19" + lower, page),
    ):
        assert found is None or all(0 <= watts <= 0.0066 for watts in (*found.receive_watts, *found.transmit_watts))


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def test_statistics_of_error_correction_are_totals_and_a_histogram() -> None:
    bins = b"".join(
        attribute(
            5,
            attribute(2, struct.pack("=I", low))
            + attribute(3, struct.pack("=I", high))
            + attribute(4, struct.pack("=Q", blocks)),
        )
        for low, high, blocks in ((0, 0, 10**13), (1, 7, 42))
    )
    statistics = attribute(2, struct.pack("=3Q", 50, 20, 30)) + attribute(3, struct.pack("=Q", 1)) + bins
    assert parse_fec(attribute(5, statistics)) == FecStatistics(50, 1, None, ((0, 0, 10**13), (1, 7, 42)))
    assert parse_fec(b"") == FecStatistics(None, None, None, ())


@given(st.binary(max_size=200))
def test_any_answer_is_statistics_or_malformed(data: bytes) -> None:
    for answer in (data, attribute(5, data)):
        try:
            parse_fec(answer)
        except MalformedNetlink:
            continue


def test_the_running_kernel_knows_ethtool_over_netlink_and_a_loopback_has_no_module() -> None:
    asked = EthtoolNetlink()
    with pytest.raises(OSError, match=r"not supported|not permitted"):
        asked.module_page("lo", 0, 0, 128)
    with pytest.raises(OSError, match="No such device"):
        asked.fec_statistics("nowhere0")
    asked.close()


class Ports:
    """Answers of simulated ports."""

    def __init__(self, clock: SteppedClock, memory: Callable[[], bytes]) -> None:
        self.clock, self.memory, self.asked = clock, memory, 0

    def fec_statistics(self, device: str) -> FecStatistics:
        self.asked += 1
        if device == "bare":
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return FecStatistics(9, 1, None, ())

    def module_page(self, device: str, *_: int) -> bytes:
        self.clock.sleep(2)  # a slow bus
        if device == "bare":
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return self.memory()

    def close(self) -> None:
        """Nothing is open."""


def test_a_port_is_read_as_seldom_as_it_is_slow_and_one_that_tells_nothing_more_seldom_still() -> None:
    clock = SteppedClock()
    ports = Ports(clock, qsfp28)
    modules = Modules(clock, 60_000_000_000, lambda: ports)
    modules.update([("0", "ens1"), ("1", "bare")])
    (facts,) = modules.facts
    assert (facts.rail, facts.device, facts.form, facts.corrected_blocks) == ("0", "ens1", "qsfp28", 9)
    assert facts.receive_watts == pytest.approx(0.00003)
    assert modules.result is not None
    assert modules.result.success
    asked = ports.asked
    for _ in range(90):
        clock.sleep(1)
        modules.update([("0", "ens1"), ("1", "bare")])
    assert ports.asked == asked, "two seconds each: not within a hundred"
    clock.sleep(60)
    modules.update([("0", "ens1"), ("1", "bare")])
    assert ports.asked == asked + 1
    modules.update([])
    assert modules.facts == ()
