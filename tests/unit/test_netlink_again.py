"""The same question asked of netlink again and again, as a sampler does: of a simulated kernel."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from railscope.probes.netdev.netlink import NetlinkSocket
from tests.unit.netdev_messages import NLMSG_DONE, RTM_NEWSTATS, message

GET_STATISTICS, GET_LINKS = 94, 18
NLMSG_ERROR = 2
Datagram = list[tuple[int, bytes]]
"""Messages: type and content."""
END = (NLMSG_DONE, bytes(4))


def row(text: bytes) -> tuple[int, bytes]:
    return RTM_NEWSTATS, text


class SimulatedKernel:
    """Stands in for a socket, with the datagrams that answer each question."""

    def __init__(self, *answers: list[Datagram]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, int]] = []
        """Kind and number of each question."""
        self.waiting: list[bytes] = []
        self.mute = False

    def send(self, request: bytes) -> None:
        _length, kind, _flags, number, _port = struct.unpack_from("=IHHII", request)
        self.asked.append((kind, number))
        for datagram in self.answers.pop(0):
            self.waiting.append(b"".join(message(what, body, sequence=number) for what, body in datagram))

    def recv_into(self, buffer: Any, _count: int = 0, _flags: int = 0) -> int:
        if self.mute or not self.waiting:
            self.mute = False
            raise BlockingIOError(11, "Resource temporarily unavailable")
        data = self.waiting.pop(0)
        buffer[: len(data)] = data
        return len(data)


@pytest.fixture
def netlink() -> Iterator[NetlinkSocket]:
    opened = NetlinkSocket()
    real = opened._socket
    yield opened
    real.close()


def simulate(netlink: NetlinkSocket, *answers: list[Datagram]) -> SimulatedKernel:
    simulated = SimulatedKernel(*answers)
    netlink._socket = simulated  # type: ignore[assignment]
    return simulated


def texts(datagrams: list[bytes]) -> list[bytes]:
    """What the first message of each datagram holds."""
    return [data[16 : struct.unpack_from("=I", data)[0]] for data in datagrams]


def test_it_is_sent_as_it_was_while_its_answer_is_whole(netlink: NetlinkSocket) -> None:
    simulated = simulate(netlink, *([[row(text), END]] for text in (b"one", b"two", b"three")))
    assert [texts(netlink.dump(GET_STATISTICS, b"all")) for _ in range(3)] == [[b"one"], [b"two"], [b"three"]]
    assert simulated.asked == [(GET_STATISTICS, 1)] * 3


def test_another_question_in_between_has_another_number(netlink: NetlinkSocket) -> None:
    simulated = simulate(netlink, *([[row(text), END]] for text in (b"a", b"b", b"c", b"d")))
    for kind, body in ((GET_STATISTICS, b"x"), (GET_LINKS, b"x"), (GET_STATISTICS, b"x"), (GET_STATISTICS, b"y")):
        netlink.dump(kind, body)
    assert [number for _kind, number in simulated.asked] == [1, 2, 3, 4]


def test_a_table_that_does_not_fit_one_datagram_any_more_is_asked_for_anew(netlink: NetlinkSocket) -> None:
    longer: list[Datagram] = [[row(b"first half")], [row(b"second half"), END]]
    simulated = simulate(netlink, [[row(b"short"), END]], longer, longer)
    netlink.dump(GET_STATISTICS, b"")
    assert texts(netlink.dump(GET_STATISTICS, b"")) == [b"first half", b"second half"]
    assert [number for _kind, number in simulated.asked] == [1, 1, 2]
    assert not simulated.waiting


def test_a_refusal_is_an_error_and_the_next_question_works(netlink: NetlinkSocket) -> None:
    refusal: list[Datagram] = [[(NLMSG_ERROR, struct.pack("=i", -95))]]
    simulate(netlink, [[row(b"a"), END]], refusal, refusal, [[row(b"b"), END]])
    netlink.dump(GET_STATISTICS, b"")
    with pytest.raises(OSError, match="netlink: Operation not supported"):
        netlink.dump(GET_STATISTICS, b"")
    assert texts(netlink.dump(GET_STATISTICS, b"")) == [b"b"]


def test_an_answer_that_was_given_up_on_is_not_taken_for_the_next_one(netlink: NetlinkSocket) -> None:
    simulated = simulate(netlink, *([[row(text), END]] for text in (b"a", b"late", b"b")))
    netlink.dump(GET_STATISTICS, b"")
    simulated.mute = True
    with pytest.raises(BlockingIOError):
        netlink.dump(GET_STATISTICS, b"")
    assert texts(netlink.dump(GET_STATISTICS, b"")) == [b"b"]
