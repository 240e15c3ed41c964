"""The reader of a ring buffer hands out every finished record once, in order, and nothing else.

The ring is simulated: a memory file laid out as the kernel maps a ring, with the data written twice because one file
cannot show one page at two places.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.nccl.records.calls import CALL_EVENT, LIFECYCLE_EVENT
from railscope.probes.rings.ring_buffer import Ring, RingCorrupted

RECORD = np.dtype([("number", "<u8"), ("more", "<u4", (6,))])
BUSY, DISCARDED = 1 << 31, 1 << 30
PAGE = mmap.PAGESIZE


class Kernel:
    """The producer's end, as kernel/bpf/ringbuf.c writes it."""

    def __init__(self, size_bytes: int, record: np.dtype[Any] = RECORD) -> None:
        self.fd = os.memfd_create("ring")
        self.size_bytes = size_bytes
        self._record = record
        self._stride = 8 + record.itemsize
        os.ftruncate(self.fd, 2 * PAGE + 2 * size_bytes)
        self._produced = 0

    def consumed(self) -> int:
        return int(struct.unpack("<Q", os.pread(self.fd, 8, 0))[0])

    def fits(self) -> bool:
        return self._produced + self._stride - self.consumed() <= self.size_bytes - 1

    def start_at(self, position: int) -> None:
        """Let the ring look as if so many bytes had been written and read before."""
        self._produced = position
        os.pwrite(self.fd, struct.pack("<Q", position), 0)
        os.pwrite(self.fd, struct.pack("<Q", position), PAGE)

    def write(self, number: int, flags: int = 0, length: int | None = None) -> int:
        """Reserve and fill one record; returns where its header is."""
        record = np.zeros(1, self._record)
        record[record.dtype.names[0]] = number
        return self.write_record(record.tobytes(), flags, length)

    def write_record(self, record: bytes, flags: int = 0, length: int | None = None) -> int:
        """Reserve one record and fill it with these bytes."""
        at = self._produced
        self._put(at, struct.pack("<II", (length or self._record.itemsize) | flags, 0xABCD) + record)
        self._produced += self._stride
        os.pwrite(self.fd, struct.pack("<Q", self._produced), PAGE)
        return at

    def finish(self, at: int, flags: int = 0) -> None:
        """Clear the busy bit of the record at a position."""
        self._put(at, struct.pack("<I", self._record.itemsize | flags))

    def _put(self, position: int, data: bytes) -> None:
        for index, byte in enumerate(data):
            at = (position + index) % self.size_bytes
            for copy in (0, self.size_bytes):
                os.pwrite(self.fd, bytes([byte]), 2 * PAGE + copy + at)


@contextmanager
def rings(size_bytes: int = 4096, record: np.dtype[Any] = RECORD) -> Iterator[tuple[Kernel, Ring]]:
    kernel = Kernel(size_bytes, record)
    try:
        ring = Ring(kernel.fd, size_bytes, record)
        try:
            yield kernel, ring
        finally:
            ring.close()
        os.fstat(kernel.fd)  # the descriptor stays the caller's
    finally:
        os.close(kernel.fd)


def numbers(ring: Ring) -> list[int]:
    return [int(number) for number in ring.read()["number"]]


def test_records_come_once_and_in_order() -> None:
    with rings() as (kernel, ring):
        assert numbers(ring) == []
        for number in (5, 6, 7):
            kernel.write(number)
        assert ring.backlog_bytes() == 3 * 40
        assert numbers(ring) == [5, 6, 7]
        assert numbers(ring) == []
        assert ring.backlog_bytes() == 0
        assert kernel.consumed() == 3 * 40
        assert ring.records_read == 3


def test_a_record_under_way_stops_the_batch_until_it_is_finished() -> None:
    with rings() as (kernel, ring):
        kernel.write(1)
        under_way = kernel.write(2, BUSY)
        kernel.write(3)
        assert numbers(ring) == [1]
        assert numbers(ring) == []
        assert kernel.consumed() == 40
        kernel.finish(under_way)
        assert numbers(ring) == [2, 3]


def test_discarded_records_are_passed_over() -> None:
    with rings() as (kernel, ring):
        for number, flags in enumerate((DISCARDED, 0, DISCARDED, DISCARDED, 0, DISCARDED)):
            kernel.write(number, flags)
        assert numbers(ring) == [1, 4]
        assert ring.records_read == 2
        assert ring.backlog_bytes() == 0
        kernel.write(6, DISCARDED)
        assert numbers(ring) == []
        assert kernel.consumed() == 7 * 40


def test_a_record_under_way_may_end_up_discarded() -> None:
    with rings() as (kernel, ring):
        under_way = kernel.write(1, BUSY)
        kernel.write(2)
        assert numbers(ring) == []
        kernel.finish(under_way, DISCARDED)
        assert numbers(ring) == [2]


def test_a_batch_is_a_copy_that_later_records_do_not_change() -> None:
    with rings() as (kernel, ring):
        kernel.write(1)
        kernel.write(2, DISCARDED)
        kernel.write(3)
        batch = ring.read()
        for number in range(100, 195):
            kernel.write(number)
        assert batch["number"].tolist() == [1, 3]


def test_a_batch_is_taken_out_when_its_block_ends_however_it_ends() -> None:
    with rings() as (kernel, ring):
        kernel.write(1)
        kernel.write(2, BUSY)
        with ring.batch() as batch:
            assert batch["number"].tolist() == [1]
            assert (kernel.consumed(), ring.records_read) == (0, 0)
        assert (kernel.consumed(), ring.records_read) == (40, 1)
        kernel.finish(40)
        with pytest.raises(InterruptedError), ring.batch():
            raise InterruptedError
        assert (kernel.consumed(), ring.records_read) == (80, 2)
        with ring.batch() as batch:
            assert len(batch) == 0


def test_a_batch_lies_in_the_ring_and_cannot_be_written_to() -> None:
    with rings() as (kernel, ring):
        for number in range(3):
            kernel.write(number)
        with ring.batch() as batch:
            assert not batch.flags.owndata
            assert batch.strides == (40,)
            with pytest.raises(ValueError, match="read-only"):
                batch["number"] = 7
            del batch


@pytest.mark.parametrize("flags", [0, DISCARDED], ids=["all", "some discarded"])
def test_every_field_of_a_record_arrives(flags: int) -> None:
    written = np.frombuffer(np.random.default_rng(1).bytes(3 * CALL_EVENT.itemsize), CALL_EVENT)
    with rings(record=CALL_EVENT) as (kernel, ring):
        for record in written:
            kernel.write_record(record.tobytes())
        kernel.write(0, flags)
        assert ring.read()[:3].tolist() == written.tolist()


def test_a_record_across_the_end_is_whole() -> None:
    assert 4096 % 40 != 0
    with rings() as (kernel, ring):
        for number in range(0, 1000, 50):
            for each in range(number, number + 50):
                kernel.write(each)
            assert numbers(ring) == list(range(number, number + 50))
        assert kernel.consumed() > 9 * 4096


def test_positions_beyond_32_bits_are_positions() -> None:
    with rings() as (kernel, ring):
        kernel.start_at((1 << 33) + 4096 - 8)
        kernel.write(1)
        kernel.write(2)
        assert numbers(ring) == [1, 2]


@pytest.mark.parametrize("record", [CALL_EVENT, LIFECYCLE_EVENT])
def test_the_records_of_the_programs_fit_into_a_ring(record: np.dtype[Any]) -> None:
    with rings(8192, record) as (kernel, ring):
        for number in range(1, 100):
            kernel.write(number)
            assert ring.read()["time_ns"].tolist() == [number]


@given(
    start=st.integers(0, 1 << 20).map(lambda words: 8 * words),
    steps=st.lists(st.lists(st.sampled_from((0, DISCARDED, BUSY)), max_size=40), max_size=8),
)
def test_whatever_is_written_comes_out_once_in_order(start: int, steps: Sequence[Sequence[int]]) -> None:
    written: list[int] = []
    discarded: set[int] = set()
    under_way: list[int] = []
    found: list[int] = []
    with rings() as (kernel, ring):
        kernel.start_at(start)
        for step in steps:
            for flags in step:
                if not kernel.fits():
                    break
                written.append(len(written))
                at = kernel.write(written[-1], flags)
                if flags == BUSY:
                    under_way.append(at)
                if flags == DISCARDED:
                    discarded.add(written[-1])
            found += numbers(ring)
            if under_way:
                kernel.finish(under_way.pop(0))
        while under_way:
            kernel.finish(under_way.pop(0))
        found += numbers(ring)
        assert found == [number for number in written if number not in discarded]
        assert ring.records_read == len(found)
        assert ring.backlog_bytes() == 0


def test_a_record_of_another_size_is_an_error_and_is_not_taken() -> None:
    with rings() as (kernel, ring):
        kernel.write(1)
        kernel.write(2, length=24)
        with pytest.raises(RingCorrupted, match="instead of 32"):
            ring.read()
        assert kernel.consumed() == 0


def mapped_bytes() -> int:
    """How much of rings this process has mapped."""
    ranges = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if ":ring" in line
    ]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def test_the_data_are_mapped_while_there_is_something_to_read_and_not_for_long_after() -> None:
    with rings() as (kernel, ring):
        positions = mapped_bytes()
        assert positions == 2 * PAGE
        assert numbers(ring) == []
        assert mapped_bytes() == positions
        for number in range(3):
            kernel.write(number)
            assert numbers(ring) == [number]
            assert mapped_bytes() == positions + 2 * 4096
            # A short pause is none; a long one gives the memory back.
            for _ in range(10):
                assert numbers(ring) == []
            assert mapped_bytes() == positions + 2 * 4096
            for _ in range(100):
                assert numbers(ring) == []
            assert mapped_bytes() == positions


def test_sizes_that_no_ring_has_are_refused() -> None:
    fd = os.memfd_create("ring")
    try:
        with pytest.raises(ValueError, match="power of two, not 5000"):
            Ring(fd, 5000, RECORD)
        with pytest.raises(ValueError, match="multiple of 8"):
            Ring(fd, 4096, np.dtype([("number", "<u4")]))
        with pytest.raises((OSError, ValueError)):
            Ring(fd, 4096, RECORD)  # the file is empty: nothing to map
    finally:
        os.close(fd)
