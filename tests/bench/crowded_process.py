"""A process with thousands of communicators of two ranks, both its own, as threads; and what an agent takes beside it.

The testbed's library makes them: a communicator of the real NCCL brings 65 MiB of shared memory.  Each is called once,
and then again whenever the pace says so, or never.

    with CrowdedProcess(2048, pace_seconds=1.0) as crowd, AgentProcess("--pid", str(crowd.pid)) as agent:
        crowd.begin()

`python -m tests.bench.crowded_process LIBRARY COMMUNICATORS PACE` is the process: it makes them when a line comes on
its standard input, and says `made`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from types import TracebackType
from typing import Final, Self

from railscope.testbed.job import LIBRARY
from tests.bench.cpu_time import process_time
from tests.bench.target import BenchError
from tests.nccl.library import REPOSITORY

_ID_BYTES: Final = 128
_FLOAT, _SUM = 7, 0  # ncclFloat32, ncclSum
_ELEMENTS: Final = 8
_NEVER: Final = 0.0


class CrowdedProcess:
    """The process, for as long as the `with` block lasts."""

    def __init__(self, communicators: int, pace_seconds: float) -> None:
        """`pace_seconds`: each communicator is called once in so long; 0: once and no more."""
        self._command = [sys.executable, "-m", "tests.bench.crowded_process"]
        self._command += [str(LIBRARY), str(communicators), str(pace_seconds)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self) -> None:
        """Make the communicators; returns when each was called.

        Raises:
            BenchError: it ended before.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        if not self._process.stdout.readline():
            raise BenchError("the process with many communicators ended; its error is above")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """As a debugger, or a job's scheduler, stops it."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


def core_percent(pid: int, seconds: float) -> float:
    """What a process takes of a core for so long."""
    before = process_time(pid)
    time.sleep(seconds)
    return process_time(pid).core_percent(before)


def scrape(connection: HTTPConnection, headers: dict[str, str], pid: int) -> tuple[float, bytes]:
    """CPU milliseconds that the process at the other end took for a scrape, and its body."""
    before = process_time(pid).cpu_ns
    connection.request("GET", "/metrics", headers=headers)
    body = connection.getresponse().read()
    return (process_time(pid).cpu_ns - before) / 1e6, body


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


def _require(call: str, result: int) -> None:
    """End the process, whatever its other thread waits for, where a call failed: as where no network device is up."""
    if result:
        print(f"{call} failed with {result}", file=sys.stderr, flush=True)
        os._exit(1)


def _run(library: ctypes.CDLL, ids: list[_UniqueId], rank: int, pace_seconds: float, made: threading.Barrier) -> None:
    send, receive = (ctypes.c_float * _ELEMENTS)(), (ctypes.c_float * _ELEMENTS)()

    def reduce(communicator: ctypes.c_void_p) -> None:
        _require("ncclAllReduce", library.ncclAllReduce(send, receive, _ELEMENTS, _FLOAT, _SUM, communicator, None))

    communicators = []
    for identity in ids:
        communicator = ctypes.c_void_p()
        _require("ncclCommInitRank", library.ncclCommInitRank(ctypes.byref(communicator), 2, identity, rank))
        reduce(communicator)
        communicators.append(communicator)
    made.wait()
    while pace_seconds != _NEVER:
        time.sleep(pace_seconds)
        for communicator in communicators:
            reduce(communicator)
    threading.Event().wait()


def main(arguments: list[str]) -> None:
    """Be the process, until killed."""
    library, number, pace_seconds = ctypes.CDLL(arguments[0]), int(arguments[1]), float(arguments[2])
    pointer = ctypes.c_void_p
    library.ncclCommInitRank.argtypes = (pointer, ctypes.c_int, _UniqueId, ctypes.c_int)
    library.ncclAllReduce.argtypes = (
        *(pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(pointer, pointer),
    )
    sys.stdin.readline()
    ids = []
    for _ in range(number):
        identity = _UniqueId()
        library.ncclGetUniqueId(ctypes.byref(identity))
        ids.append(identity)
    made = threading.Barrier(3)
    for rank in range(2):
        threading.Thread(target=_run, args=(library, ids, rank, pace_seconds, made), daemon=True).start()
    made.wait()
    print("made", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
