"""The reader of rings of slots hands out every finished record once, in the order of time, and nothing else.

The writers are simulated: memory files laid out as the maps of probes/bpf/call_slots.h.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.daemon import ring_drain
from railscope.agent.node.daemon.ring_pace import AIM
from railscope.probes.rings.ring_buffer import Ring
from railscope.probes.rings.slots import MOST_BYTES, MOST_RINGS, RING_ENTRY_BYTES, SlotRings, rings_for

RECORD = np.dtype([("time_ns", "<u8"), ("number", "<u8"), ("more", "<u8", (5,))])
SLOT_BYTES = 64
PAGE = mmap.PAGESIZE
SLOTS = PAGE // SLOT_BYTES


class Writers:
    """The programs' end of some rings of one page."""

    def __init__(self, rings: int) -> None:
        self.rings_fd, self.slots_fd, self.wakeups_fd = (os.memfd_create(name) for name in ("rings", "slots", "wake"))
        os.ftruncate(self.rings_fd, PAGE)
        os.ftruncate(self.slots_fd, rings * PAGE)
        os.ftruncate(self.wakeups_fd, 4 * PAGE)

    def position(self, ring: int) -> tuple[int, int]:
        """How many slots of a ring were reserved, and how many are taken."""
        reserved, taken = struct.unpack("<QQ", os.pread(self.rings_fd, 16, ring * RING_ENTRY_BYTES))
        return reserved, taken

    def start_at(self, position: int) -> None:
        """Let the first ring look as if so many records had been written and read before."""
        os.pwrite(self.rings_fd, struct.pack("<QQ", position, position), 0)

    def reserve(self, ring: int) -> int | None:
        """The stamp of a slot; None: the ring is full."""
        reserved, taken = self.position(ring)
        if reserved - taken >= SLOTS:
            return None
        os.pwrite(self.rings_fd, struct.pack("<Q", reserved + 1), ring * RING_ENTRY_BYTES)
        return reserved + 1

    def finish(self, ring: int, stamp: int, time_ns: int, number: int) -> None:
        slot = struct.pack("<QQ", time_ns, number).ljust(SLOT_BYTES - 8, b"\0") + struct.pack("<Q", stamp)
        os.pwrite(self.slots_fd, slot, ring * PAGE + (stamp - 1) % SLOTS * SLOT_BYTES)

    def write(self, ring: int, time_ns: int, number: int = 0) -> bool:
        stamp = self.reserve(ring)
        if stamp is not None:
            self.finish(ring, stamp, time_ns, number)
        return stamp is not None

    def close(self) -> None:
        for fd in (self.rings_fd, self.slots_fd, self.wakeups_fd):
            os.close(fd)


@contextmanager
def opened(rings: int = 2, *, position: int = 0) -> Iterator[tuple[Writers, SlotRings]]:
    writers = Writers(rings)
    try:
        writers.start_at(position)
        wakeups = Ring(writers.wakeups_fd, PAGE, np.dtype("<u8"))
        reader = SlotRings(*(writers.rings_fd, writers.slots_fd, wakeups), rings=rings, ring_bytes=PAGE, record=RECORD)
        try:
            yield writers, reader
        finally:
            reader.close()
        os.fstat(writers.slots_fd)  # the descriptors stay the caller's
    finally:
        writers.close()


def numbers(reader: SlotRings) -> list[int]:
    records = reader.read()
    assert records.dtype == RECORD
    return [int(number) for number in records["number"]]


def test_records_come_once_and_in_the_order_of_their_time() -> None:
    with opened() as (writers, reader):
        assert numbers(reader) == []
        for time_ns in (10, 20, 30, 40):
            assert writers.write(time_ns // 10 % 2, time_ns, time_ns)
        assert reader.fullness() == 2 / SLOTS
        assert numbers(reader) == [10, 20, 30, 40]
        assert numbers(reader) == []
        assert reader.fullness() == 0
        assert writers.position(0) == writers.position(1) == (2, 2)
        assert reader.records_read == 4


def test_nanoseconds_count_however_long_the_host_has_been_up() -> None:
    with opened() as (writers, reader):
        late_ns = 1 << 62
        writers.write(0, late_ns + 2, 2)
        under_way = writers.reserve(0)
        assert under_way is not None
        writers.write(0, late_ns + 3, 4)
        writers.write(1, late_ns + 1, 1)
        writers.write(1, late_ns + 4, 5)
        assert numbers(reader) == [1, 2]
        writers.finish(0, under_way, late_ns + 2, 3)
        assert numbers(reader) == [3, 4, 5]


def test_a_record_under_way_holds_up_what_may_follow_those_behind_it() -> None:
    with opened() as (writers, reader):
        writers.write(0, 10, 1)
        under_way = writers.reserve(0)  # by a thread that is preempted
        assert under_way is not None
        writers.write(0, 12, 3)
        writers.write(1, 11, 2)
        writers.write(1, 13, 4)  # perhaps of the thread that wrote 3, and then came to another processor
        assert numbers(reader) == [1, 2]
        assert numbers(reader) == []
        writers.finish(0, under_way, 11, 99)
        assert numbers(reader) == [99, 3, 4]


def test_what_comes_between_the_two_looks_holds_up_what_may_follow_it() -> None:
    with opened() as (writers, reader):

        class Meanwhile:
            """In the fence's place: the first time that the reader passes it a thread writes."""

            def __enter__(self) -> None:
                if not writers.position(0)[0]:
                    writers.write(0, 10, 1)

            def __exit__(self, *_: object) -> None:
                writers.write(1, 12, 3)

        writers.write(1, 11, 2)  # seen at the first look; may be the next record of who writes 1, now seen too late
        reader._fence = Meanwhile()  # type: ignore[assignment]
        assert 2 not in [int(number) for number in _batch(reader)]
        assert _batch(reader)[:2] == [1, 2]


def test_writers_that_were_preempted_before_they_took_a_slot_hold_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railscope.probes.rings.slots.MOST_AT_ONCE", 2)
    monkeypatch.setattr("railscope.probes.rings.slots._FEWEST_OF_A_RING", 1)
    with opened() as (writers, reader):
        for time_ns in (13, 12, 11, 10):
            writers.write(0, time_ns, time_ns)
        assert numbers(reader) == [13, 12, 11, 10]


def _batch(reader: SlotRings) -> list[int]:
    with reader.batch() as records:
        return [int(number) for number in records["number"]]


def test_a_full_ring_takes_no_more_until_it_is_read() -> None:
    with opened() as (writers, reader):
        assert all(writers.write(0, each, each) for each in range(SLOTS))
        assert not writers.write(0, SLOTS, SLOTS)
        assert reader.fullness() == 1
        assert numbers(reader) == list(range(SLOTS))
        assert writers.write(0, SLOTS, SLOTS)
        assert numbers(reader) == [SLOTS]


class Thread:
    """Calls again and again, on whatever processor it is."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.called = 0
        self.ring = 0
        self.time_ns: int | None = None
        self.stamp: int | None = None

    def step(self, writers: Writers, now_ns: int, ring: int) -> bool:
        """Look at the clock, then reserve a slot, then finish it; returns whether a record was lost."""
        if self.time_ns is None:
            self.ring, self.time_ns = ring, now_ns
            return False
        if self.stamp is None:
            self.stamp = writers.reserve(self.ring)
            if self.stamp is not None:
                return False
        else:
            self.called += 1
            writers.finish(self.ring, self.stamp, self.time_ns, self.number << 32 | self.called)
        lost = self.stamp is None
        self.time_ns = self.stamp = None
        return lost


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=600),
    st.sampled_from([0, SLOTS - 1, 2**40 + 5]),
    st.sampled_from([2, 1 << 16]),
)
def test_whenever_threads_stop_and_wherever_they_go_on_what_each_did_is_read_once_and_in_order(
    steps: list[tuple[int, int]], position: int, most: int
) -> None:
    threads = [Thread(number) for number in range(6)]
    taken: list[int] = []
    with (
        opened(4, position=position) as (writers, reader),
        patch("railscope.probes.rings.slots.MOST_AT_ONCE", most),
        patch("railscope.probes.rings.slots._FEWEST_OF_A_RING", 1),
    ):
        for now_ns, (thread, ring) in enumerate(steps, start=1):
            if thread == len(threads):
                taken += _batch(reader)
            else:
                threads[thread].step(writers, now_ns, ring)
        for thread_ in threads:
            while thread_.time_ns is not None:
                thread_.step(writers, len(steps) + 1, 0)
        taken += numbers(reader)
        assert reader.records_read == len(taken)
    for thread_ in threads:
        of_thread = [number & 0xFFFFFFFF for number in taken if number >> 32 == thread_.number]
        assert of_thread == list(range(1, thread_.called + 1))


def test_the_agent_goes_on_reading_while_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railscope.probes.rings.slots.MOST_AT_ONCE", 8)
    monkeypatch.setattr("railscope.probes.rings.slots._FEWEST_OF_A_RING", 1)
    taken: list[int] = []
    recorded: list[int] = []
    with opened() as (writers, reader):
        for number in range(SLOTS):
            writers.write(0, number, number)
        found = ring_drain.drain_ring(
            reader,
            lambda records: taken.extend(records["number"].tolist()),
            lambda records: recorded.extend(records["number"].tolist()),
        )
        assert found == 1
        assert reader.fullness() < AIM
    assert taken == recorded == list(range(len(taken)))
    assert len(taken) > SLOTS // 2


def test_a_ring_is_mapped_while_it_is_used() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0].split("-") for line in maps if "memfd:slots" in line]
        return sum(int(end, 16) - int(begin, 16) for begin, end in ranges) // PAGE

    with opened() as (writers, reader):
        assert mapped() == 0
        writers.write(1, 10)
        assert len(reader.read()) == mapped() == 1
        writers.write(0, 10)
        assert len(reader.read()) == 1
        assert mapped() == 2
        for _ in range(60):
            reader.read()
        assert mapped() == 0
        writers.write(1, 20, 5)
        assert numbers(reader) == [5]


def test_each_processor_has_a_ring_while_they_fit() -> None:
    assert [rings_for(processors, 1 << 20) for processors in (1, 2, 3, 8, 9, 32, 33, 448)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        32,
        32,
    ]
    for ring_bytes in (1 << 16, 1 << 20, 1 << 24):
        assert 1 <= rings_for(448, ring_bytes) <= MOST_RINGS
        assert rings_for(448, ring_bytes) * ring_bytes <= MOST_BYTES
    assert rings_for(448, 1 << 30) == 1


@pytest.mark.parametrize(("rings", "ring_bytes"), [(3, PAGE), (2, 3 * PAGE), (2, PAGE // 2)])
def test_sizes_that_cannot_be_are_refused(rings: int, ring_bytes: int) -> None:
    writers = Writers(4)
    wakeups = Ring(writers.wakeups_fd, PAGE, np.dtype("<u8"))
    try:
        with pytest.raises(ValueError, match="powers of two"):
            SlotRings(
                *(writers.rings_fd, writers.slots_fd, wakeups),
                rings=rings,
                ring_bytes=ring_bytes,
                record=RECORD,
            )
    finally:
        wakeups.close()
        writers.close()
