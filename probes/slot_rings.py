"""Reading records out of rings of slots that BPF programs and this process share (probes/bpf/call_slots.h).

A ring is a processor's own as far as there are enough.  Each slot is a record and a stamp, the number that its writer
got in the ring; a record is there when its stamp is.  All records of a reading are brought into the order of their
time: what one thread did is in order even if it changed processors between two records, since a reading takes only what
was done before it began.

The pages of a mapped ring count as the reader's memory, so each ring is mapped when there is something in it, and given
back once nothing has come for a while.

Memory order: a stamp must be read before its record, and a record before its slot is given back.  x86 keeps that order
by itself; elsewhere taking a lock in between gives the barrier that Python has no other word for.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from probes.clock import Clock
from probes.maps import Records
from probes.ring import Ring

RING_ENTRY_BYTES: Final = 64
"""How far one ring has got, in the map of rings: `reserved` and `taken`, 8 bytes each, and what fills a cache line."""
MOST_RINGS: Final = 32
MOST_BYTES: Final = 64 << 20
"""Of all rings, unless a single one is larger."""
_RESERVED, _TAKEN = 0, 1
_IDLE_READS: Final = 40
"""After so many in a row that found nothing a ring is not kept mapped."""


def rings_for(processors: int, ring_bytes: int) -> int:
    """How many rings of `ring_bytes` so many processors get: a power of two."""
    most = max(1, min(MOST_RINGS, MOST_BYTES // ring_bytes))
    return int(min(most, 1 << (processors - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class _Run:
    """Slots of one ring that are finished, where they lie."""

    ring: int
    slots: Records
    times_ns: npt.NDArray[np.uint64]
    """A copy."""


class SlotRings:
    """The reader's end of `rings` rings of `ring_bytes` each; at most one reader at a time."""

    def __init__(
        self,
        rings_fd: int,
        slots_fd: int,
        wakeups: Ring,
        *,
        rings: int,
        ring_bytes: int,
        record: np.dtype[Any],
        clock: Clock,
    ) -> None:
        """Map what tells how far the rings have got.

        Args:
            rings_fd, slots_fd: descriptors of the two maps; they stay the caller's.
            wakeups: the ring through which programs wake this reader; closed with it.
            rings, ring_bytes: powers of two, as the maps were made; a ring of at least one page.
            record: has the field `time_ns`, of `clock`; a slot is this and eight bytes.
            clock: the programs'.

        Raises:
            OSError: they cannot be mapped.
        """
        if rings & (rings - 1) or ring_bytes & (ring_bytes - 1) or ring_bytes < mmap.PAGESIZE:
            raise ValueError(f"{rings} rings of {ring_bytes} bytes: powers of two are needed, and a page at least")
        self._slots_fd = slots_fd
        self._wakeups = wakeups
        self._clock = clock
        self._record = record
        self._bytes = np.dtype((np.void, record.itemsize))
        self._slot = np.dtype([("record", self._bytes), ("stamp", "<u8")])
        self._slots = ring_bytes // self._slot.itemsize
        self._ring_bytes = ring_bytes
        size = -(-rings * RING_ENTRY_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._positions_page = mmap.mmap(rings_fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        words = np.frombuffer(self._positions_page, "<u8", rings * RING_ENTRY_BYTES // 8)
        self._positions = words.reshape(rings, -1)
        self._taken: npt.NDArray[np.uint64] = self._positions[:, _TAKEN].copy()
        self._windows: dict[int, tuple[mmap.mmap, int]] = {}
        """By ring: its slots, while they are mapped, and how often in a row there was nothing in them."""
        self._copies = np.empty(0, (np.void, self._slot.itemsize))
        self._fence = threading.Lock()
        self.records_read = 0
        """Records handed out since the rings were opened."""

    @property
    def fd(self) -> int:
        """Becomes readable when a program wakes the reader."""
        return self._wakeups.fd

    def fullness(self) -> float:
        """Of the fullest ring: the part of it that waits, 0 to 1."""
        return float((self._positions[:, _RESERVED] - self._taken).max()) / self._slots

    def read(self) -> Records:
        """Take all records that were finished before now, oldest first: shape (n,), the caller's own.

        Raises:
            OSError: a ring cannot be mapped.
        """
        with self.batch() as batch:
            # As bytes: numpy copies what has fields field by field, at ten times the cost.
            return batch.view(self._bytes).copy().view(self._record)

    @contextmanager
    def batch(self) -> Iterator[Records]:
        """All records that were finished before now, oldest first: shape (n,), with gaps between them.

        They are taken out of the rings when the block ends, however it ends; nothing of them is valid after that.

        Raises:
            OSError: a ring cannot be mapped.
        """
        latest_ns = self._clock.monotonic_ns()
        if self._wakeups.backlog_bytes():
            self._wakeups.read()
        waiting = self._positions[:, _RESERVED] - self._taken
        self._unmap_idle(waiting)
        runs = [
            run
            for ring in np.flatnonzero(waiting).tolist()
            for run in self._finished(ring, int(waiting[ring]), latest_ns)
        ]
        if not runs:
            yield np.empty(0, self._record)
            return
        try:
            yield self._in_order(runs)
        finally:
            for run in runs:
                self._taken[run.ring] += len(run.slots)
                self.records_read += len(run.slots)
            with self._fence:
                self._positions[:, _TAKEN] = self._taken

    def close(self) -> None:
        """Unmap; the descriptors of the maps stay open."""
        del self._positions
        self._positions_page.close()
        for window, _ in self._windows.values():
            window.close()
        self._windows.clear()
        self._wakeups.close()

    def _finished(self, ring: int, waiting: int, latest_ns: int) -> Iterator[_Run]:
        """What can be taken of a ring: one run of slots, or two around the ring's end."""
        slots = np.frombuffer(self._mapped(ring), self._slot)
        taken = int(self._taken[ring])
        start = taken & (self._slots - 1)
        for begin, end in ((start, min(start + waiting, self._slots)), (0, start + waiting - self._slots)):
            if end <= begin:
                return
            unfinished = slots["stamp"][begin:end] != np.arange(taken + 1, taken + 1 + end - begin, dtype="<u8")
            count = int(unfinished.argmax()) if unfinished.any() else end - begin
            with self._fence:
                times = slots["record"][begin : begin + count].view(self._record)["time_ns"].copy()
            late = times > latest_ns
            if late.any():
                count = int(late.argmax())
            if count:
                yield _Run(ring, slots[begin : begin + count], times[:count])
            if count < end - begin:
                return
            taken += count

    def _in_order(self, runs: list[_Run]) -> Records:
        """The records of all runs by their time: each run is nearly in order, as a writer may be preempted in between.

        They are copied into memory that is used again and again: fresh pages cost more than the copy.
        """
        order = np.argsort(np.concatenate([run.times_ns for run in runs]), kind="stable")
        count = len(order)
        if len(self._copies) < count:
            self._copies = np.empty(1 << (count - 1).bit_length(), (np.void, self._slot.itemsize))
        place = np.empty(count, np.intp)
        place[order] = np.arange(count)
        begin = 0
        for run in runs:
            end = begin + len(run.slots)
            self._copies[place[begin:end]] = run.slots.view(self._copies.dtype)
            begin = end
        return self._copies[:count].view(self._slot)["record"].view(self._record)

    def _mapped(self, ring: int) -> mmap.mmap:
        kept = self._windows.get(ring)
        if kept is not None:
            return kept[0]
        window = mmap.mmap(
            self._slots_fd, self._ring_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=ring * self._ring_bytes
        )
        self._windows[ring] = window, 0
        return window

    def _unmap_idle(self, waiting: npt.NDArray[np.uint64]) -> None:
        for ring, (window, idle) in list(self._windows.items()):
            idle = 0 if waiting[ring] else idle + 1
            if idle < _IDLE_READS:
                self._windows[ring] = window, idle
            else:
                del self._windows[ring]
                window.close()
        if not self._windows:
            self._copies = self._copies[:0].copy()
