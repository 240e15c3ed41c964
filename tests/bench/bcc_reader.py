"""Reads a ring buffer the way bcc's Python tools do; run by the system's Python, which bcc is installed for.

    python3 bcc_reader.py MAP_FD

The descriptor is inherited.  bcc's own `RingBuf` calls a Python function for each record, but it is given a map that
exists already instead of compiling a program, which would need the running kernel's headers.  On standard input,
"read" begins reading and the next line ends it; the answer is a line "EVENTS CPU_SECONDS".
"""

from __future__ import annotations

import ctypes
import select
import sys
import time
from typing import Any

from bcc import BPF  # type: ignore[import-not-found]
from bcc.table import RingBuf  # type: ignore[import-not-found]

_POLL_SECONDS = 0.01


class CallEvent(ctypes.Structure):
    """`struct call_event` of probes/bpf/nccl.h, as far as it is used."""

    _fields_ = [
        ("time_ns", ctypes.c_uint64),
        ("comm", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("payload_bytes", ctypes.c_uint64),
        ("identity", ctypes.c_uint32 * 5),
        ("op", ctypes.c_uint8),
    ]


def main() -> None:
    program = BPF.__new__(BPF)
    program._ringbuf_manager = None
    ring = RingBuf.__new__(RingBuf)
    ring.bpf, ring.map_fd, ring._cbs, ring._event_class = program, int(sys.argv[1]), {}, CallEvent
    calls = [0] * 16
    payload_bytes = [0] * 16
    events = 0

    def take(_context: Any, data: Any, _size: int) -> int:
        nonlocal events
        event = ring.event(data)
        calls[event.op] += 1
        payload_bytes[event.op] += event.payload_bytes
        events += 1
        return 0

    ring.open_ring_buffer(take)
    print("ready", flush=True)
    while sys.stdin.readline():
        events = 0
        start = time.thread_time()
        while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            program.ring_buffer_consume()
        sys.stdin.readline()
        program.ring_buffer_consume()
        print(events, time.thread_time() - start, flush=True)


main()
