"""Streams executable mappings of all processes, so that a library is found when it is loaded.

A software event that never counts anything, opened on every online CPU for all processes, makes the kernel write one
PERF_RECORD_MMAP2 for each executable mapping.  A record is a hint: it names process, file and time, and its reader
looks at the process again (probes/processes/processes.py), because on overlayfs older kernels name another device and
inode here than /proc/PID/maps does.  What the kernel could not write is counted; after a loss only a fresh scan is
complete.  CPUs that come online later are not watched: their mappings show at the next scan.

Sources: perf_event_open(2) and include/uapi/linux/perf_event.h of Linux 6.13.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from railscope.probes.loading.bpf_syscall import perf_event_open

DATA_PAGES: Final = 8
"""Pages a CPU for records, a power of two; one record takes 80 bytes and its path."""

_TYPE_SOFTWARE: Final = 1
_COUNT_SW_DUMMY: Final = 9
_SAMPLE_TIME: Final = 1 << 2
_CLOCK_MONOTONIC: Final = 1
_FLAG_EXCLUDE_KERNEL: Final = 1 << 5
_FLAG_MMAP: Final = 1 << 8
_FLAG_WATERMARK: Final = 1 << 14
_FLAG_SAMPLE_ID_ALL: Final = 1 << 18
_FLAG_MMAP2: Final = 1 << 23
_FLAG_USE_CLOCKID: Final = 1 << 25
_ATTRIBUTE_BYTES: Final = 112

_RECORD_LOST: Final = 2
_RECORD_MMAP2: Final = 10
_MISC_MMAP_DATA: Final = 1 << 13
_MISC_MMAP_BUILD_ID: Final = 1 << 14
_HEADER: Final = struct.Struct("<IHH")
_LOST: Final = struct.Struct("<QQ")
_MMAP2: Final = struct.Struct("<IIQQQIIQQII")
_TIME: Final = struct.Struct("<Q")
_CONTROL_AT: Final = 1024
"""Where data_head, data_tail, data_offset and data_size stand in the first page of the mapping."""


class MmapEventsError(Exception):
    """The stream cannot be opened; the message is one line that says what would help."""


@dataclass(frozen=True, slots=True)
class MmapEvent:
    """A process mapped a part of a file executable."""

    pid: int
    """In our own pid namespace; 0 for a process outside it."""
    tid: int
    address: int
    length: int
    """Bytes mapped."""
    device: tuple[int, int]
    """Major and minor number."""
    inode: int
    path: str
    time_ns: int
    """CLOCK_MONOTONIC."""


@dataclass(frozen=True, slots=True)
class Records:
    """The events in a stretch of the kernel's record buffer."""

    events: list[MmapEvent]
    lost: int
    """Records that the kernel dropped for want of room, and one for a stretch that cannot be read."""


def parse_records(data: bytes) -> Records:
    """Read whole perf records of new mappings as this module's events produce them; never raises, whatever the bytes.

    Mappings of no file are left out.  Where a record cannot be whole the rest is given up and counted as one loss.
    """
    events: list[MmapEvent] = []
    lost = 0
    at = 0
    while at < len(data):
        if at + _HEADER.size > len(data):
            return Records(events, lost + 1)
        kind, flags, size = _HEADER.unpack_from(data, at)
        if size < _HEADER.size or at + size > len(data):
            return Records(events, lost + 1)
        body, end = at + _HEADER.size, at + size
        at = end
        if kind == _RECORD_LOST and body + _LOST.size <= end:
            lost += _LOST.unpack_from(data, body)[1]
        elif kind == _RECORD_MMAP2 and not flags & (_MISC_MMAP_DATA | _MISC_MMAP_BUILD_ID):
            name_at, name_end = body + _MMAP2.size, end - _TIME.size
            if name_at > name_end:
                lost += 1
                continue
            pid, tid, address, length, _, major, minor, inode, _, protection, _ = _MMAP2.unpack_from(data, body)
            if inode == 0 or not protection & mmap.PROT_EXEC:
                continue
            path = os.fsdecode(data[name_at:name_end].partition(b"\0")[0])
            (time_ns,) = _TIME.unpack_from(data, name_end)
            events.append(MmapEvent(pid, tid, address, length, (major, minor), inode, path, time_ns))
    return Records(events, lost)


def online_cpus(sysfs: Path = Path("/sys")) -> list[int]:
    """Numbers of the CPUs that are online.

    Raises:
        ValueError: the kernel's list cannot be understood.
    """
    cpus: list[int] = []
    for part in (sysfs / "devices/system/cpu/online").read_text().strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


class _CpuBuffer:
    """The kernel's record buffer of one event on one CPU: a control page and data pages."""

    def __init__(self, fd: int, pages: int) -> None:
        self.fd: Final = fd
        self._size = pages * mmap.PAGESIZE
        self._memory = mmap.mmap(fd, mmap.PAGESIZE + self._size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._control = np.frombuffer(self._memory, np.uint64, 2, _CONTROL_AT)
        self._fence = threading.Lock()

    def read(self) -> bytes:
        """Everything written and not taken yet."""
        head = int(self._control[0])
        with self._fence:
            # The position is read before the records: the lock is the barrier on machines that reorder loads.
            tail = int(self._control[1])
        data = unwrap(self._memory, mmap.PAGESIZE, self._size, tail, head)
        with self._fence:
            self._control[1] = head
        return data

    def close(self) -> None:
        # The view pins the mapping.
        del self._control
        self._memory.close()
        os.close(self.fd)


def unwrap(memory: mmap.mmap | bytes, start: int, size: int, tail: int, head: int) -> bytes:
    """The bytes from position `tail` to `head` of a perf ring of `size` bytes that begins at `start` of some memory."""
    first, last = tail % size, head % size
    if head - tail <= 0 or head - tail > size:
        return b""
    if first < last:
        return memory[start + first : start + last]
    return memory[start + first : start + size] + memory[start : start + last]


class MmapEvents:
    """The open stream.

    Wait until it becomes readable, wait no more until some time has passed, then `read`: a process that starts maps
    dozens of files one after the other, and each would wake the reader.
    """

    def __init__(self, buffers: Sequence[_CpuBuffer]) -> None:
        """
        Raises:
            OSError: there are no descriptors left to wait for all CPUs at once.
        """
        self._any_cpu = select.epoll()
        self._buffers = list(buffers)
        for buffer in self._buffers:
            self._any_cpu.register(buffer.fd, select.EPOLLIN)
        self.lost = 0
        """Records lost since the stream was opened."""

    @classmethod
    def open(cls, pages: int = DATA_PAGES, sysfs: Path = Path("/sys")) -> Self:
        """Start watching every process on every online CPU.

        Raises:
            MmapEventsError: the kernel refuses; says which capability or setting is missing.
        """
        if pages < 1 or pages & (pages - 1):
            raise ValueError(f"the number of pages is a power of two, not {pages}")
        buffers: list[_CpuBuffer] = []
        try:
            for cpu in online_cpus(sysfs):
                fd = perf_event_open(_attributes(), pid=-1, cpu=cpu, what=f"watch mappings on CPU {cpu}")
                try:
                    buffers.append(_CpuBuffer(fd, pages))
                except OSError:
                    os.close(fd)
                    raise
            return cls(buffers)
        except OSError as error:
            for buffer in buffers:
                buffer.close()
            raise MmapEventsError(_remedy(error)) from None

    def fileno(self) -> int:
        """Becomes readable when a record is written on any CPU."""
        return self._any_cpu.fileno()

    def read(self) -> list[MmapEvent]:
        """All new events in the order of time; adds to `lost`.  Does not wait."""
        # Takes back that there is something: what is written from here on becomes readable anew.
        self._any_cpu.poll(0)
        events: list[MmapEvent] = []
        for buffer in self._buffers:
            records = parse_records(buffer.read())
            events += records.events
            self.lost += records.lost
        events.sort(key=lambda event: event.time_ns)
        return events

    def close(self) -> None:
        self._any_cpu.close()
        while self._buffers:
            self._buffers.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _attributes() -> bytes:
    flags = _FLAG_EXCLUDE_KERNEL | _FLAG_MMAP | _FLAG_MMAP2 | _FLAG_WATERMARK | _FLAG_SAMPLE_ID_ALL | _FLAG_USE_CLOCKID
    out = bytearray(_ATTRIBUTE_BYTES)
    struct.pack_into(
        "<IIQQQQQI", out, 0, _TYPE_SOFTWARE, _ATTRIBUTE_BYTES, _COUNT_SW_DUMMY, 0, _SAMPLE_TIME, 0, flags, 1
    )
    struct.pack_into("<i", out, 92, _CLOCK_MONOTONIC)
    return bytes(out)


def _remedy(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            "new libraries are only found by scanning: watching mappings needs CAP_PERFMON "
            f"(or kernel.perf_event_paranoid at 0 or lower): {reason}"
        )
    return f"new libraries are only found by scanning: {reason}"
