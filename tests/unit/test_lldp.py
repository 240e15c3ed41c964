"""What switches say of themselves (LLDP): the frame, and what is made of several of them."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.hardware import NeighbourFacts
from railscope.agent.node.fabric.neighbours import Neighbours
from railscope.probes.netdev.lldp import MalformedLldp, Neighbour, parse_lldp
from tests.unit.netdev_messages import SteppedClock

SECOND = 1_000_000_000
MAC = bytes.fromhex("0c42a1b2c3d4")


def part(kind: int, value: bytes) -> bytes:
    return (kind << 9 | len(value)).to_bytes(2, "big") + value


def frame(
    chassis: bytes = b"\x04" + MAC,
    port: bytes = b"\x05Ethernet1/3",
    *,
    seconds: int = 120,
    name: bytes = b"leaf-a",
    description: bytes = b"",
    more: bytes = b"",
) -> bytes:
    parts = part(1, chassis) + part(2, port) + part(3, seconds.to_bytes(2, "big"))
    parts += part(4, description) if description else b""
    return parts + (part(5, name) if name else b"") + more + part(0, b"")


def test_a_switch_says_its_name_and_port() -> None:
    told = parse_lldp(frame(more=part(6, b"a long text") + part(127, b"\x00\x12\x0f\x01abc")) + bytes(30))
    assert told == Neighbour("leaf-a", "Ethernet1/3", 120, "0c:42:a1:b2:c3:d4")


@pytest.mark.parametrize(
    ("data", "switch", "port"),
    [
        (frame(name=b""), "0c:42:a1:b2:c3:d4", "Ethernet1/3"),
        (frame(port=b"\x03" + MAC, description=b"swp7"), "leaf-a", "swp7"),
        (frame(port=b"\x03" + MAC), "leaf-a", "0c:42:a1:b2:c3:d4"),
        (frame(port=b"\x0742", description=b"to node-3"), "leaf-a", "42"),
        (frame(chassis=b"\x05\x01\x0a\x00\x00\x07", name=b""), "10.0.0.7", "Ethernet1/3"),
        (frame(chassis=b"\x05\x02" + bytes(15) + b"\x01", name=b""), "::1", "Ethernet1/3"),
        (frame(chassis=b"\x07\xff\xfe", name=b""), "fffe", "Ethernet1/3"),
        (frame(name=b"leaf\nnode\x1b[2J"), "0c:42:a1:b2:c3:d4", "Ethernet1/3"),
        (frame(name=b"leaf-b\0"), "leaf-b", "Ethernet1/3"),
    ],
)
def test_who_has_no_name_is_called_by_what_else_it_says(data: bytes, switch: str, port: str) -> None:
    told = parse_lldp(data)
    assert (told.switch, told.port) == (switch, port)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02",
        frame()[:-2],
        part(1, b"\x04" + MAC) + part(2, b"\x05e1") + part(0, b""),
        frame(chassis=b"\x04"),
        frame(port=b"\x05"),
        part(1, b"\x04" + MAC) + part(2, b"\x05e1") + part(3, b"\x01") + part(0, b""),
        part(127, b"") * 400 + part(0, b""),
    ],
    ids=["empty", "one-byte", "no-end", "no-lifetime", "chassis", "port", "half-a-lifetime", "many-parts"],
)
def test_what_is_no_lldp_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedLldp):
        parse_lldp(data)


@given(st.binary(max_size=1600))
def test_any_bytes_are_a_neighbour_or_refused(data: bytes) -> None:
    try:
        told = parse_lldp(data)
    except MalformedLldp:
        return
    assert told.switch.isprintable()
    assert told.port.isprintable()
    assert 0 < len(told.switch) <= 512 >= len(told.port) > 0


names = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=["C", "Z"]), min_size=1, max_size=60
)


@given(names, names, st.integers(0, 65535))
def test_names_come_back_as_they_were_sent(name: str, port: str, seconds: int) -> None:
    told = parse_lldp(frame(port=b"\x05" + port.encode(), name=name.encode(), seconds=seconds))
    assert (told.switch, told.port, told.lifetime_seconds) == (name, port, seconds)


class SimulatedEar:
    """Hears what a test says."""

    def __init__(self) -> None:
        self.said: list[Neighbour] = []
        self.fails: OSError | None = None
        self.closed = False

    def read(self) -> list[Neighbour]:
        if self.fails is not None:
            raise self.fails
        said, self.said = self.said, []
        return said

    def close(self) -> None:
        self.closed = True


LEAF = Neighbour("leaf-a", "Ethernet1/3", 120, "0c:42:a1:b2:c3:d4")
PORTS = (("0", "eth0"), ("1", "eth1"))


class Heard:
    """Cables with ears that a test drives."""

    def __init__(self) -> None:
        self.clock = SteppedClock()
        self.ears: dict[str, SimulatedEar] = {}
        self.refuses: OSError | None = None
        self.neighbours = Neighbours(self.clock, self._listen)

    def _listen(self, interface: str) -> SimulatedEar:
        if self.refuses is not None:
            raise self.refuses
        return self.ears.setdefault(interface, SimulatedEar())

    def after(self, seconds: int, ports: tuple[tuple[str, str], ...] = PORTS) -> tuple[NeighbourFacts, ...]:
        self.clock.now_ns += seconds * SECOND
        self.neighbours.update(ports)
        return self.neighbours.facts


def test_a_switch_is_known_until_its_time_is_over_or_it_says_goodbye() -> None:
    heard = Heard()
    assert heard.after(0) == ()
    heard.ears["eth0"].said = [LEAF]
    heard.ears["eth1"].said = [replace(LEAF, switch="leaf-b")]
    both = (NeighbourFacts("0", "eth0", "leaf-a", "Ethernet1/3"), NeighbourFacts("1", "eth1", "leaf-b", "Ethernet1/3"))
    assert heard.after(5) == both
    heard.ears["eth1"].said = [replace(LEAF, switch="leaf-b", lifetime_seconds=0)]
    assert heard.after(100) == both[:1]
    assert heard.after(21) == ()


def test_of_several_on_one_cable_none_is_the_switch() -> None:
    heard = Heard()
    heard.after(0)
    other = replace(LEAF, chassis="the card itself", lifetime_seconds=30)
    heard.ears["eth0"].said = [LEAF, other]
    assert heard.after(5) == ()
    assert [one.device for one in heard.after(31)] == ["eth0"]


def test_a_flood_of_senders_takes_no_memory() -> None:
    heard = Heard()
    heard.after(0)
    for first in range(0, 10_000, 32):
        heard.ears["eth0"].said = [replace(LEAF, chassis=str(number)) for number in range(first, first + 32)]
        assert heard.after(0) == ()
    assert len(heard.neighbours._cables["eth0"].heard) == 8


@pytest.mark.parametrize("number", [errno.EPERM, errno.EAFNOSUPPORT])
def test_without_the_right_to_listen_nothing_is_heard_and_nothing_fails(number: int) -> None:
    heard = Heard()
    heard.refuses = OSError(number, "refused")
    assert heard.after(0) == ()
    assert heard.neighbours.result is None
    heard.refuses = None
    heard.after(30)
    assert heard.ears == {}
    heard.after(31)
    assert set(heard.ears) == {"eth0", "eth1"}


def test_an_interface_that_goes_away_is_closed_and_one_that_is_down_opened_again() -> None:
    heard = Heard()
    heard.after(0)
    heard.ears["eth0"].fails = OSError(errno.ENETDOWN, "Network is down")
    heard.after(5, PORTS[:1])
    assert (heard.ears["eth0"].closed, heard.ears["eth1"].closed) == (True, True)
    heard.ears.clear()
    heard.after(61, PORTS[:1])
    heard.ears["eth0"].said = [LEAF]
    assert [one.device for one in heard.after(1, PORTS[:1])] == ["eth0"]
