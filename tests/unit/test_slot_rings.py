"""The reader of rings of slots hands out every finished record once, in the order of time, and nothing else.

The writers are simulated: memory files laid out as the maps of probes/bpf/call_slots.h.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.clock import SystemClock
from probes.ring import Ring
from probes.slot_rings import MOST_BYTES, MOST_RINGS, RING_ENTRY_BYTES, SlotRings, rings_for

RECORD = np.dtype([("time_ns", "<u8"), ("number", "<u8"), ("more", "<u8", (5,))])
SLOT_BYTES = 64
PAGE = mmap.PAGESIZE
SLOTS = PAGE // SLOT_BYTES


class StoppedClock(SystemClock):
    """Stands where it is put."""

    now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns


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
def opened(rings: int = 2, *, position: int = 0) -> Iterator[tuple[Writers, SlotRings, StoppedClock]]:
    writers, clock = Writers(rings), StoppedClock()
    try:
        writers.start_at(position)
        wakeups = Ring(writers.wakeups_fd, PAGE, np.dtype("<u8"))
        reader = SlotRings(
            *(writers.rings_fd, writers.slots_fd, wakeups), rings=rings, ring_bytes=PAGE, record=RECORD, clock=clock
        )
        try:
            yield writers, reader, clock
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
    with opened() as (writers, reader, clock):
        clock.now_ns = 100
        assert numbers(reader) == []
        for time_ns in (10, 20, 30, 40):
            assert writers.write(time_ns // 10 % 2, time_ns, time_ns)
        assert reader.fullness() == 2 / SLOTS
        assert numbers(reader) == [10, 20, 30, 40]
        assert numbers(reader) == []
        assert reader.fullness() == 0
        assert writers.position(0) == writers.position(1) == (2, 2)
        assert reader.records_read == 4


def test_a_record_under_way_holds_up_those_behind_it_in_its_ring_alone() -> None:
    with opened() as (writers, reader, clock):
        clock.now_ns = 100
        writers.write(0, 10, 1)
        under_way = writers.reserve(0)
        assert under_way is not None
        writers.write(0, 12, 3)
        writers.write(1, 13, 4)
        assert numbers(reader) == [1, 4]
        assert numbers(reader) == []
        writers.finish(0, under_way, 11, 2)
        assert numbers(reader) == [2, 3]


def test_what_was_done_after_the_reading_began_is_left_for_the_next() -> None:
    with opened() as (writers, reader, clock):
        clock.now_ns = 15
        writers.write(0, 10, 1)
        writers.write(1, 20, 2)  # of the thread that wrote 1, and then came to another processor
        writers.write(1, 14, 3)  # taken before 2, by another thread that was preempted
        assert numbers(reader) == [1]
        clock.now_ns = 20
        assert numbers(reader) == [3, 2]


def test_a_full_ring_takes_no_more_until_it_is_read() -> None:
    with opened() as (writers, reader, clock):
        clock.now_ns = 10**9
        assert all(writers.write(0, each, each) for each in range(SLOTS))
        assert not writers.write(0, SLOTS, SLOTS)
        assert reader.fullness() == 1
        assert numbers(reader) == list(range(SLOTS))
        assert writers.write(0, SLOTS, SLOTS)
        assert numbers(reader) == [SLOTS]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40), max_size=12),
    st.sampled_from([0, 1, SLOTS - 1, 2**40 + 5]),
)
def test_whatever_comes_between_the_readings_nothing_is_lost_or_doubled(
    between: list[list[tuple[int, bool]]], position: int
) -> None:
    with opened(4, position=position) as (writers, reader, clock):
        written: list[int] = []
        unfinished: list[tuple[int, int, int]] = []
        taken: list[int] = []
        for writes in between:
            for ring, finished in writes:
                clock.now_ns += 10
                stamp = writers.reserve(ring)
                if stamp is None:
                    continue
                written.append(clock.now_ns)
                if finished:
                    writers.finish(ring, stamp, clock.now_ns, clock.now_ns)
                else:
                    unfinished.append((ring, stamp, clock.now_ns))
            batch = numbers(reader)
            assert batch == sorted(batch)
            taken += batch
            for ring, stamp, time_ns in unfinished:
                writers.finish(ring, stamp, time_ns, time_ns)
            unfinished.clear()
        clock.now_ns += 10
        taken += numbers(reader)
        assert sorted(taken) == written
        assert reader.records_read == len(written)


def test_a_ring_is_mapped_while_it_is_used() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0].split("-") for line in maps if "memfd:slots" in line]
        return sum(int(end, 16) - int(begin, 16) for begin, end in ranges) // PAGE

    with opened() as (writers, reader, clock):
        clock.now_ns = 100
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
                clock=SystemClock(),
            )
    finally:
        wakeups.close()
        writers.close()
