"""Three readers: railscope's of its rings, and of a ring buffer a ctypes callback from libbpf, and bcc's.

Each does the same with an event: calls and payload by operation.  Each polls every 10 ms and reports the CPU time of
its thread, sleeping and waking included.  Only one may read at a time.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np

from railscope.probes.nccl.records import calls as records
from railscope.probes.rings.slots import SlotRings
from tests.bench.target import BenchError

POLL_SECONDS: Final = 0.01
_SYSTEM_PYTHON: Final = "/usr/bin/python3"
_OPS: Final = 16
_CTYPES: Final = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


@dataclass(frozen=True, slots=True)
class Reading:
    """What one reader did."""

    events: int
    cpu_seconds: float


class Reader(Protocol):
    """Reads between `start` and `finish`, in the background."""

    def start(self) -> None: ...

    def finish(self) -> Reading: ...

    def close(self) -> None: ...


class _Polling:
    """A reader in a thread of this process."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread()
        self._reading = Reading(0, 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> Reading:
        self._stop.set()
        self._thread.join()
        return self._reading

    def close(self) -> None:
        """Nothing is held."""

    def consume(self) -> int:
        """Take what is there; returns the number of events."""
        raise NotImplementedError

    def _run(self) -> None:
        events = 0
        start = time.thread_time()
        while not self._stop.wait(POLL_SECONDS):
            events += self.consume()
        events += self.consume()
        self._reading = Reading(events, time.thread_time() - start)


class ArrayReader(_Polling):
    """railscope's: a whole batch as one array."""

    def __init__(self, rings: SlotRings) -> None:
        super().__init__()
        self._rings = rings
        self.calls = np.zeros(_OPS)
        self.payload_bytes = np.zeros(_OPS)

    def consume(self) -> int:
        with self._rings.batch() as batch:
            op = batch["op"]
            self.calls += np.bincount(op, minlength=_OPS)
            self.payload_bytes += np.bincount(op, weights=batch["payload_bytes"], minlength=_OPS)
            return len(batch)


class _CallEvent(ctypes.Structure):
    """`struct call_event`, for the callback."""

    _fields_ = tuple((name, _CTYPES[dtype.itemsize]) for name, (dtype, *_) in (records.CALL_EVENT.fields or {}).items())


_CALLBACK: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class CallbackReader(_Polling):
    """libbpf's ring_buffer with a Python function called for each event."""

    def __init__(self, map_fd: int) -> None:
        super().__init__()
        library = ctypes.CDLL("libbpf.so.1", use_errno=True)
        self._new: Callable[..., Any] = library.ring_buffer__new
        library.ring_buffer__new.restype = ctypes.c_void_p
        library.ring_buffer__new.argtypes = [ctypes.c_int, _CALLBACK, ctypes.c_void_p, ctypes.c_void_p]
        library.ring_buffer__consume.argtypes = [ctypes.c_void_p]
        library.ring_buffer__free.argtypes = [ctypes.c_void_p]
        self._consume: Callable[..., Any] = library.ring_buffer__consume
        self._free: Callable[..., Any] = library.ring_buffer__free
        self.calls = [0] * _OPS
        self.payload_bytes = [0] * _OPS
        self._events = 0
        self._callback = _CALLBACK(self._take)
        self._manager: int | None = self._new(map_fd, self._callback, None, None)
        if not self._manager:
            raise BenchError("libbpf cannot open the ring")

    def _take(self, _context: int, data: int, _size: int) -> int:
        event = _CallEvent.from_address(data)
        self.calls[event.op] += 1
        self.payload_bytes[event.op] += event.payload_bytes
        self._events += 1
        return 0

    def consume(self) -> int:
        self._events = 0
        self._consume(self._manager)
        return self._events

    def close(self) -> None:
        self._free(self._manager)
        self._manager = None


class BccReader:
    """bcc's, in a process of the system's Python."""

    def __init__(self, map_fd: int) -> None:
        """Raises BenchError when bcc does not work here."""
        script = Path(__file__).with_name("bcc_reader.py")
        self._process = subprocess.Popen(
            [_SYSTEM_PYTHON, str(script), str(map_fd)],
            pass_fds=[map_fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        if self._output.readline().strip() != "ready":
            assert self._process.stderr is not None
            complaint = self._process.stderr.read().strip().rsplit("\n", 1)[-1]
            self.close()
            raise BenchError(f"bcc does not run ({complaint}): 'make packages-bench' installs it")

    def start(self) -> None:
        self._say("read")

    def finish(self) -> Reading:
        self._say("stop")
        events, cpu_seconds = self._output.readline().split()
        return Reading(int(events), float(cpu_seconds))

    def close(self) -> None:
        self._input.close()
        self._process.wait()
        self._output.close()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _say(self, word: str) -> None:
        self._input.write(word + "\n")
        self._input.flush()
