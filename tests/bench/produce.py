"""Lets the producer's BPF program write call events at a chosen rate; a process of its own beside the readers.

    python -m tests.bench.produce PROGRAM_FD

The descriptor is inherited.  Each line "EVENTS EVENTS_PER_SECOND" of standard input is answered by a line "LOST
NANOSECONDS".  Events come in bursts, a burst each half millisecond: what is due by then.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from typing import Final

from railscope.probes.loading.bpf_syscall import bpf

_BPF_PROG_TEST_RUN: Final = 10
_ORDER: Final = struct.Struct("<QII")
_PAUSE_SECONDS: Final = 0.0005
_MOST_AT_ONCE: Final = 1 << 20  # bpf_loop() goes no further than 8 Mi


class Producer:
    """A loaded program of producer.bpf.c."""

    def __init__(self, program_fd: int) -> None:
        self._order = ctypes.create_string_buffer(_ORDER.size)
        self._attributes = struct.pack(
            "<IIIIQQIIIIQQIII",
            *(program_fd, 0, 0, 0, 0, 0, 0, 0),
            *(_ORDER.size, 0, ctypes.addressof(self._order), 0, 0, 0, 0),
        )
        self._sequence = 0

    def write(self, events: int) -> int:
        """Write so many events at once; returns how many found the ring full."""
        _ORDER.pack_into(self._order, 0, self._sequence, events, 0)
        bpf(_BPF_PROG_TEST_RUN, self._attributes, "run the producer")
        self._sequence, _, lost = _ORDER.unpack(self._order)
        return int(lost)

    def pace(self, events: int, per_second: int) -> tuple[int, int]:
        """Write so many events at this rate; returns how many were lost, and how long it took, ns."""
        written = lost = 0
        start = time.monotonic_ns()
        while written < events:
            due = min(events, (time.monotonic_ns() - start) * per_second // 1_000_000_000)
            if due > written:
                burst = min(due - written, _MOST_AT_ONCE)
                lost += self.write(burst)
                written += burst
            else:
                time.sleep(_PAUSE_SECONDS)
        return lost, time.monotonic_ns() - start


def main() -> None:
    producer = Producer(int(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        events, per_second = map(int, line.split())
        print(*producer.pace(events, per_second), flush=True)


if __name__ == "__main__":
    main()
