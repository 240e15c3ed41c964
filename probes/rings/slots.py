"""Reading records out of rings of slots that BPF programs and this process share (probes/bpf/call_slots.h).

A ring is a processor's own as far as there are enough.  Each slot is a record and a stamp, the number that its writer
got in the ring; a record is there when its stamp is.

**What one thread did stays in order**, from one reading to the next, even if it changed processors in between.  A
writer looks at the clock before it takes a slot, and a thread's next record is begun when this one is finished.  So
what a thread does after a record is later than the times of all slots before that in its ring, and records may be put
in the order of the highest time that their ring had so far.  A reading looks twice where the rings end, and takes what
it saw the first time: where it finds a thread's next record, it finds the one before it at the second look at least.
What a ring holds back, behind a slot that is not finished or beyond what is read at a time, holds back whatever may
follow it: all that is later than the highest time of its ring up to the first record held back.

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

from railscope.probes.loading.maps import Records
from railscope.probes.rings.ring_buffer import Ring

RING_ENTRY_BYTES: Final = 64
"""How far one ring has got, in the map of rings: `reserved` and `taken`, 8 bytes each, and what fills a cache line."""
MOST_RINGS: Final = 32
MOST_BYTES: Final = 64 << 20
"""Of all rings, unless a single one is larger."""
_RESERVED, _TAKEN = 0, 1
_NEVER_NS: Final = (1 << 64) - 1
MOST_AT_ONCE: Final = 1 << 16
"""Records of one batch, of all rings together: copies of more would take more memory than their ring."""
_FEWEST_OF_A_RING: Final = 1 << 10
_IDLE_READS: Final = 40
"""After so many in a row that found nothing a ring is not kept mapped."""


def rings_for(processors: int, ring_bytes: int) -> int:
    """How many BPF rings of `ring_bytes` so many processors get: a power of two."""
    most = max(1, min(MOST_RINGS, MOST_BYTES // ring_bytes))
    return int(min(most, 1 << (processors - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class _Found:
    """What can be taken of one ring, where it lies."""

    ring: int
    runs: tuple[Records, ...]
    """Slots: one run, or two around the ring's end."""
    highest_ns: npt.NDArray[np.uint64]
    """Of each slot the highest time of all slots up to it."""
    bound_ns: int
    """What follows anything that the ring holds back is later than this."""

    def until(self, time_ns: int) -> _Found:
        """The slots whose highest time is no later than this."""
        left = count = int(np.searchsorted(self.highest_ns, np.uint64(time_ns), side="right"))
        runs = []
        for run in self.runs:
            runs.append(run[:left])
            left = max(0, left - len(run))
        return _Found(self.ring, tuple(runs), self.highest_ns[:count], self.bound_ns)


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
    ) -> None:
        """Map what tells how far the rings have got.

        Args:
            rings_fd, slots_fd: descriptors of the two maps; they stay the caller's.
            wakeups: the ring through which programs wake this reader; closed with it.
            rings, ring_bytes: powers of two, as the maps were made; a ring of at least one page.
            record: has the field `time_ns`, taken before its slot was; a slot is this and eight bytes.

        Raises:
            OSError: they cannot be mapped.
        """
        if rings & (rings - 1) or ring_bytes & (ring_bytes - 1) or ring_bytes < mmap.PAGESIZE:
            raise ValueError(f"{rings} rings of {ring_bytes} bytes: powers of two are needed, and a page at least")
        self._slots_fd = slots_fd
        self._wakeups = wakeups
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
        parts = []
        while True:
            with self.batch() as batch:
                if not len(batch):
                    break
                # As bytes: numpy copies what has fields field by field, at ten times the cost.
                parts.append(batch.view(self._bytes).copy())
        return np.concatenate([np.empty(0, self._bytes), *parts]).view(self._record)

    @contextmanager
    def batch(self) -> Iterator[Records]:
        """The next records that were finished before now, oldest first: shape (n,), with gaps between them.

        At most `MOST_AT_ONCE`, or a thousand of each ring where that is more: none at all when nothing is left.  They
        are taken out of the rings when the block ends, however it ends; nothing of them is valid after that.

        Raises:
            OSError: a ring cannot be mapped.
        """
        # First: a wakeup from here on is seen at the next turn.
        if self._wakeups.backlog_bytes():
            self._wakeups.read()
        waiting = self._positions[:, _RESERVED] - self._taken
        with self._fence:
            waiting_now = self._positions[:, _RESERVED] - self._taken
        self._unmap_idle(waiting_now)
        used = np.flatnonzero(waiting_now).tolist()
        most = max(_FEWEST_OF_A_RING, MOST_AT_ONCE // max(1, len(used)))
        found = [self._finished(ring, min(int(waiting[ring]), most), int(waiting_now[ring])) for ring in used]
        bound_ns = min((each.bound_ns for each in found), default=_NEVER_NS)
        found = [each.until(bound_ns) for each in found]
        if not any(len(each.highest_ns) for each in found):
            yield np.empty(0, self._record)
            return
        try:
            yield self._in_order(found)
        finally:
            for each in found:
                self._taken[each.ring] += len(each.highest_ns)
                self.records_read += len(each.highest_ns)
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

    def _finished(self, ring: int, most: int, waiting: int) -> _Found:
        """Of the first `most` slots that wait, those before the first that is not finished."""
        slots = np.frombuffer(self._mapped(ring), self._slot)
        taken = int(self._taken[ring])
        runs: list[Records] = []
        times: list[npt.NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        count = 0
        while count < most:
            begin = (taken + count) & (self._slots - 1)
            end = min(begin + most - count, self._slots)
            stamped = _stamped(slots[begin:end], taken + count)
            finished = end - begin if stamped.all() else int(stamped.argmin())
            with self._fence:
                runs.append(slots[begin : begin + finished])
                times.append(self._records(runs[-1])["time_ns"])
            count += finished
            if finished < end - begin:
                break
        highest_ns = np.maximum.accumulate(np.concatenate(times))
        held_ns = self._first_time(slots, taken + count, waiting - count)
        if held_ns is not None and count:
            held_ns = max(held_ns, int(highest_ns[-1]))
        return _Found(ring, tuple(runs), highest_ns, _NEVER_NS if held_ns is None else held_ns)

    def _first_time(self, slots: Records, taken: int, waiting: int) -> int | None:
        """The time of the first finished record among those that wait behind the first `taken`; None: none is."""
        last = taken + waiting
        while taken < last:  # as a rule there is none, or the first one is finished
            begin = taken & (self._slots - 1)
            end = min(begin + min(last - taken, _FEWEST_OF_A_RING), self._slots)
            stamped = _stamped(slots[begin:end], taken)
            if stamped.any():
                at = begin + int(stamped.argmax())
                with self._fence:
                    return int(self._records(slots[at : at + 1])["time_ns"][0])
            taken += end - begin
        return None

    def _in_order(self, found: list[_Found]) -> Records:
        """The records of all runs in one order.

        They are copied into memory that is used again and again: fresh pages cost more than the copy.
        """
        order = np.argsort(np.concatenate([each.highest_ns for each in found]), kind="stable")
        count = len(order)
        if len(self._copies) < count:
            self._copies = np.empty(1 << (count - 1).bit_length(), (np.void, self._slot.itemsize))
        place = np.empty(count, np.intp)
        place[order] = np.arange(count)
        begin = 0
        for run in (run for each in found for run in each.runs):
            end = begin + len(run)
            self._copies[place[begin:end]] = run.view(self._copies.dtype)
            begin = end
        return self._records(self._copies[:count].view(self._slot))

    def _records(self, slots: Records) -> Records:
        return slots["record"].view(self._record)

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


def _stamped(slots: Records, taken: int) -> npt.NDArray[np.bool_]:
    """Which of the slots are finished, the first one being that of the record after the first `taken`."""
    stamped: npt.NDArray[np.bool_] = slots["stamp"] == np.arange(taken + 1, taken + 1 + len(slots), dtype="<u8")
    return stamped
