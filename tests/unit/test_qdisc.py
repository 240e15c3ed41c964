"""Queueing disciplines from simulated netlink messages, and the running kernel's against pyroute2's reading."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroute2 import IPRoute

from railscope.agent.node.rails.ethernet_facts import rail_queue
from railscope.agent.node.sampling.sampler import Sampler
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.counters import CounterReading
from railscope.probes.netdev.netlink import MalformedNetlink
from railscope.probes.netdev.qdisc import DeviceQueue, QueueCounters, QueueDiscipline, parse_queues, queue_reading
from tests.unit.netdev_messages import SteppedClock, attribute, done, link, message

ROOT, INGRESS = 0xFFFFFFFF, 0xFFFFFFF1
NARROW = 2**32 - 1
QUEUE = QueueDiscipline(
    index=4,
    kind="tbf",
    handle=0x80010000,
    parent=ROOT,
    transmit_bytes=5_000_000_000,
    transmit_packets=900,
    queued_packets=3,
    backlog_bytes=4542,
    drops=7,
    requeues=1,
    overlimits=40,
)


def queue_message(queue: QueueDiscipline) -> bytes:
    """RTM_NEWQDISC as the kernel writes it: packets in 64 bits only once 32 are not enough."""
    basic = attribute(1, struct.pack("=QI4x", queue.transmit_bytes, queue.transmit_packets & NARROW))
    if queue.transmit_packets > NARROW:
        basic += attribute(8, struct.pack("=Q", queue.transmit_packets))
    counters = (queue.queued_packets, queue.backlog_bytes, queue.drops, queue.requeues, queue.overlimits)
    statistics = basic + attribute(3, struct.pack("=5I", *counters))
    body = struct.pack("=B3xiIII", 0, queue.index, queue.handle, queue.parent, 2)
    return message(36, body + attribute(1, queue.kind.encode() + b"\0") + attribute(7 | 0x8000, statistics))


narrow = st.integers(0, NARROW)
queues = st.builds(
    QueueDiscipline,
    index=st.integers(1, 2**31 - 1),
    kind=st.sampled_from(["tbf", "mq", "fq_codel", "noqueue", ""]),
    handle=narrow,
    parent=st.sampled_from([ROOT, INGRESS, 0x10001]),
    transmit_bytes=st.integers(0, 2**64 - 1),
    transmit_packets=st.one_of(narrow, st.integers(0, 2**64 - 1)),
    queued_packets=narrow,
    backlog_bytes=narrow,
    drops=narrow,
    requeues=narrow,
    overlimits=narrow,
)


@settings(deadline=None)
@given(st.lists(queues, max_size=8), st.integers(1, 4))
def test_every_discipline_is_read_however_the_kernel_packs_them(found: list[QueueDiscipline], together: int) -> None:
    parts = [*map(queue_message, found), link(3, "eth0"), done()]
    datagrams = [b"".join(parts[at : at + together]) for at in range(0, len(parts), together)]
    assert parse_queues(datagrams) == found


@settings(deadline=None)
@given(st.data())
def test_a_cut_message_is_refused(data: st.DataObject) -> None:
    whole = queue_message(QUEUE)
    with pytest.raises(MalformedNetlink):
        parse_queues([whole[: data.draw(st.integers(1, len(whole) - 1))]])


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=3))
def test_garbage_ends_in_a_clean_error_or_nothing(garbage: list[bytes]) -> None:
    with suppress(MalformedNetlink):
        parse_queues(garbage)


@settings(deadline=None)
@given(st.data())
def test_a_flipped_byte_ends_in_a_clean_error_or_a_discipline(data: st.DataObject) -> None:
    whole = bytearray(queue_message(QUEUE))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(MalformedNetlink):
        assert len(parse_queues([bytes(whole)])) <= 1


def test_statistics_that_are_too_short_are_refused_and_missing_ones_passed_over() -> None:
    body = struct.pack("=B3xiIII", 0, 4, 0, ROOT, 2)
    short = attribute(7, attribute(1, bytes(4)) + attribute(3, bytes(20)))
    with pytest.raises(MalformedNetlink, match="statistics of 4 and 20 bytes"):
        parse_queues([message(36, body + short)])
    assert parse_queues([message(36, body), message(36, body + attribute(7, attribute(1, bytes(16))))]) == []


class Simulated:
    """A source whose readings are given."""

    def __init__(self) -> None:
        self.queue = QUEUE

    def read(self) -> CounterReading:
        return queue_reading(1, 1, [("rail0", self.queue)], ())

    def refresh(self) -> None:
        """Nothing is remembered."""

    def close(self) -> None:
        """Nothing is open."""


def test_drops_add_up_through_the_end_of_32_bits_and_through_another_discipline() -> None:
    source, clock = Simulated(), SteppedClock()
    source.queue = replace(QUEUE, drops=NARROW - 1)
    sampler = Sampler(clock)
    sampler.add("qdisc", 1, source, 1.0)

    def drops() -> int:
        clock.sleep(1)
        sampler.read_due(clock.monotonic_ns())
        found = sampler.state().device_of_source("qdisc", "rail0")
        assert found is not None
        waiting = DeviceQueue("rail0", source.queue.kind, source.queue.backlog_bytes, source.queue.queued_packets)
        shown = rail_queue(waiting, found)
        assert (shown.discipline, shown.backlog_bytes) == (source.queue.kind, source.queue.backlog_bytes)
        return shown.drops

    assert drops() == NARROW - 1
    source.queue = replace(QUEUE, drops=4)
    assert drops() == NARROW + 5
    source.queue = replace(QUEUE, handle=0x80020000, transmit_bytes=0, drops=0, backlog_bytes=0)
    assert drops() == NARROW + 5
    source.queue = replace(source.queue, transmit_bytes=10, drops=2)
    assert drops() == NARROW + 7


@pytest.fixture
def kernel() -> Iterator[QueueCounters]:
    made = QueueCounters(SystemClock())
    yield made
    made.close()


def test_the_running_kernels_roots_are_those_that_pyroute2_reads(kernel: QueueCounters) -> None:
    with IPRoute() as route:
        names = {entry["index"]: entry.get("ifname") for entry in route.get_links()}
        reference = {
            names[entry["index"]]: entry.get("kind") for entry in route.get_qdiscs() if entry["parent"] == ROOT
        }
    assert reference
    kernel.watch(tuple(names.values()))
    reading = kernel.read()
    assert not reading.failed
    assert {queue.device: queue.kind for queue in kernel.last} == reference
    assert set(reading.names) == set(reference)


def test_a_device_that_does_not_exist_fails_and_the_others_are_read(kernel: QueueCounters) -> None:
    kernel.watch(["nowhere0", "lo"])
    reading = kernel.read()
    assert [(failure.device, failure.reason) for failure in reading.failed] == [("nowhere0", "no such device")]
    assert reading.names == ("lo",)


def test_nothing_is_asked_for_without_devices(kernel: QueueCounters) -> None:
    reading = kernel.read()
    assert (reading.names, reading.failed, kernel.last) == ((), (), ())
