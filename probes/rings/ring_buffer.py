"""Reading a BPF ring buffer of equal records as numpy arrays.

The kernel maps a ring buffer as one writable page (the consumer's position), one read-only page (the producer's) and
the data twice in a row, so that a slice across the end is contiguous; a record is an 8-byte header and its payload
(kernel/bpf/ringbuf.c).  When every record has the same size, a batch is one strided view: no Python runs per event.
Whoever needs only parts of it, or keeps it elsewhere, looks at it where it lies (`batch`): the records come from other
processors' caches, and every copy of them takes more of this one's away from the job.

The pages of a mapped ring count as the reader's memory, all of them, and those of the data twice.  So the data are
mapped when there is something to read, and given back once nothing has come for a while: an agent beside an idle job
is 6 MB smaller.

Memory order: the producer's position and each header must be read before the payload.  x86 keeps that order by
itself; elsewhere taking a lock in between gives the acquire barrier that Python has no other word for.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from railscope.probes.loading.maps import Records

_BUSY: Final = 1 << 31
_DISCARDED: Final = 1 << 30
_LENGTH_MASK: Final = _DISCARDED - 1
_IDLE_READS: Final = 40
"""After so many in a row that found nothing the data are not kept mapped; mapping 2 MiB anew takes some 0.4 ms."""


class RingCorrupted(RuntimeError):
    """The ring holds a record of another size: reader and BPF object do not belong together."""


class Ring:
    """The reader's end of one ring buffer whose records all have dtype `record`; at most one reader a ring."""

    def __init__(self, fd: int, size_bytes: int, record: np.dtype[Any]) -> None:
        """Map the ring behind map descriptor `fd` (which stays the caller's) of `size_bytes` (a power of two).

        Raises:
            OSError: it cannot be mapped.
        """
        if size_bytes & (size_bytes - 1):
            raise ValueError(f"a ring's size is a power of two, not {size_bytes}")
        page = mmap.PAGESIZE
        self.fd = fd
        self._size = size_bytes
        self._record = record
        self._bytes = np.dtype((np.void, record.itemsize))
        self._slot = np.dtype([("header", "<u4"), ("page", "<u4"), ("record", self._bytes)])
        if self._slot.itemsize % 8:
            raise ValueError(f"records of {record.itemsize} bytes are padded by the kernel; make them a multiple of 8")
        self._consumer_page = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0)
        try:
            self._producer_page = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        except OSError:
            self._consumer_page.close()
            raise
        self._consumer = np.frombuffer(self._consumer_page, np.uint64, 1)
        self._producer = np.frombuffer(self._producer_page, np.uint64, 1)
        self._mapped: mmap.mmap | None = None
        """The data, while they are mapped."""
        self._idle_reads = 0
        self._fence = threading.Lock()
        self.records_read = 0
        """Records handed out since the ring was opened."""

    def backlog_bytes(self) -> int:
        """Bytes written and not yet read."""
        return int(self._producer[0]) - int(self._consumer[0])

    def fullness(self) -> float:
        """The part of the ring that waits, 0 to 1."""
        return self.backlog_bytes() / self._size

    def read(self) -> Records:
        """Take all finished records, oldest first, as a copy of shape (n,).

        Raises:
            OSError, RingCorrupted: see `batch`.
        """
        with self.batch() as batch:
            # As bytes: numpy copies what has fields field by field, at ten times the cost.
            return batch.view((np.void, batch.dtype.itemsize)).copy().view(batch.dtype)

    @contextmanager
    def batch(self) -> Iterator[Records]:
        """All finished records, oldest first, where they lie: shape (n,), read-only, with gaps between them.

        They are taken out of the ring when the block ends, however it ends; nothing of them is valid after that.

        Raises:
            OSError: the data cannot be mapped.
            RingCorrupted: a record has another size than `record`.
        """
        consumed = int(self._consumer[0])
        produced = int(self._producer[0])
        stride = self._slot.itemsize
        count = (produced - consumed) // stride
        if count <= 0:
            self._idle_reads += 1
            if self._idle_reads == _IDLE_READS:
                self._unmap()
            yield np.empty(0, self._record)
            return
        self._idle_reads = 0
        if self._mapped is None:
            self._mapped = mmap.mmap(self.fd, 2 * self._size, mmap.MAP_SHARED, mmap.PROT_READ, offset=2 * mmap.PAGESIZE)
        data = np.frombuffer(self._mapped, np.uint8)
        with self._fence:
            start = consumed & (self._size - 1)
        slots = data[start : start + count * stride].view(self._slot)
        headers = slots["header"]
        discarded = None
        if not (headers == self._record.itemsize).all():  # as a rule: finished, and none discarded
            headers = headers.copy()
            busy = (headers & _BUSY) != 0
            if busy.any():
                count = int(busy.argmax())
                slots, headers = slots[:count], headers[:count]
            lengths = headers & _LENGTH_MASK
            if count and not (lengths == self._record.itemsize).all():
                raise RingCorrupted(f"a record of {int(lengths.max())} bytes instead of {self._record.itemsize}")
            discarded = (headers & _DISCARDED) != 0
        with self._fence:
            batch = slots["record"]
        if discarded is not None and discarded.any():
            batch = batch[~discarded]
        try:
            yield batch.view(self._record)
        finally:
            self._consumer[0] = consumed + count * stride
            self.records_read += len(batch)

    def close(self) -> None:
        """Unmap; the descriptor stays open."""
        # numpy's views must go first: a mapping with views on it refuses to close.
        del self._consumer, self._producer
        self._consumer_page.close()
        self._producer_page.close()
        self._unmap()

    def _unmap(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.close()
