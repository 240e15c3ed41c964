"""A job of the real NCCL with hundreds of communicators that uses each of them in turn; a rank is one Python process.

A communicator of its own right brings 65 MiB of shared memory for the proxy's operations, so that 200 of them would
not fit into a usual machine.  These are split off one parent and share its proxy, as frameworks have it for the many
groups of a job (NCCL_COMM_SPLIT_SHARE_RESOURCES).  Each is a communicator with an identity like any other.

Between two calls a rank sleeps for a millisecond, so that the host has time for something else.

    with ManyCommunicators(fabric, folder, double, 200) as job:
        pids = job.ready()

`python -m tests.bench.many_communicators RANK RANKS COMMUNICATORS FOLDER LIBRARY` is one rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import ENVIRONMENT, Double
from tests.bench.target import BenchError
from tests.nccl.library import REPOSITORY

_ID_BYTES: Final = 128
_FLOAT, _SUM = 7, 0  # ncclFloat32, ncclSum
_ELEMENTS: Final = 256
_POLL_SECONDS: Final = 0.01
_READY_SECONDS: Final = 240.0
_PACE_SECONDS: Final = 0.001


class ManyCommunicators:
    """One rank on each host of a fabric for as long as the `with` block lasts."""

    def __init__(self, fabric: Fabric, folder: Path, double: Double, communicators: int) -> None:
        """Describe the job; `folder` is empty and the caller's."""
        self._fabric = fabric
        self._folder = folder
        self._double = double
        self._communicators = communicators
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            for host in self._fabric.hosts:
                rank, ranks = host.index, len(self._fabric.hosts)
                command = [sys.executable, "-m", "tests.bench.many_communicators", str(rank), str(ranks)]
                command += [str(self._communicators), str(self._folder), str(self._double.nccl)]
                environment = {
                    **os.environ,
                    **ENVIRONMENT,
                    "NCCL_SOCKET_IFNAME": ",".join(host.rails),
                    "NCCL_HOSTID": f"host{host.index}",
                    "NCCL_COMM_SPLIT_SHARE_RESOURCES": "1",
                    "LD_PRELOAD": str(self._double.shared_object),
                }
                with (self._folder / f"output.{rank}").open("wb") as output:
                    self._processes.append(
                        subprocess.Popen(
                            host.command(*command),
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env=environment,
                            cwd=REPOSITORY,
                        )
                    )
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ready(self) -> tuple[int, ...]:
        """Wait until each rank has used every communicator once; returns their pids.

        Raises:
            BenchError: a rank ended, or took too long; with what it said.
        """
        files = [_ready_file(self._folder, rank) for rank in range(len(self._processes))]
        deadline = time.monotonic() + _READY_SECONDS
        while not all(file.exists() for file in files):
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    said = (self._folder / f"output.{rank}").read_text(errors="replace").strip()
                    raise BenchError(f"rank {rank} of the job with many communicators ended: {said[-500:]}")
            if time.monotonic() > deadline:
                raise BenchError(f"{self._communicators} communicators were not made within {_READY_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        return tuple(process.pid for process in self._processes)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def pause(pids: Iterable[int]) -> None:
    """Stop processes where they are, such as the ranks of a job: NCCL does not mind."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def resume(pids: Iterable[int]) -> None:
    """Let paused processes go on."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


class _Rank:
    """One rank's calls of NCCL, and of CUDA's streams as the double plays them."""

    def __init__(self, library: str) -> None:
        self._nccl = ctypes.CDLL(library)
        self._nccl.ncclCommInitRank.argtypes = (ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int)
        self._nccl.ncclCommSplit.argtypes = (
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_void_p),
        )
        self._nccl.ncclAllReduce.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_void_p),
        )
        double = ctypes.CDLL(None)
        double.cuda_double_function.restype = ctypes.c_void_p
        integer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        create = integer(double.cuda_double_function(b"cudaStreamCreate"))
        self._synchronize = integer(double.cuda_double_function(b"cudaStreamSynchronize"))
        self._stream = ctypes.c_void_p()
        _check(create(ctypes.addressof(self._stream)), "cudaStreamCreate")
        self._send = (ctypes.c_float * _ELEMENTS)()
        self._receive = (ctypes.c_float * _ELEMENTS)()

    def unique_id(self, file: Path, rank: int) -> _UniqueId:
        """The same id for every rank: rank 0 makes it."""
        if rank == 0:
            made = _UniqueId()
            _check(self._nccl.ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
            partial = file.with_suffix(".partial")
            partial.write_bytes(bytes(made))
            partial.rename(file)
        while not file.exists():
            time.sleep(_POLL_SECONDS)
        return _UniqueId.from_buffer_copy(file.read_bytes())

    def communicators(self, identity: _UniqueId, rank: int, ranks: int, number: int) -> list[ctypes.c_void_p]:
        """A parent and `number` - 1 communicators split off it."""
        parent = ctypes.c_void_p()
        _check(self._nccl.ncclCommInitRank(ctypes.byref(parent), ranks, identity, rank), "ncclCommInitRank")
        all_of_them = [parent]
        for _ in range(number - 1):
            child = ctypes.c_void_p()
            _check(self._nccl.ncclCommSplit(parent, 0, rank, ctypes.byref(child), None), "ncclCommSplit")
            all_of_them.append(child)
        return all_of_them

    def reduce(self, communicator: ctypes.c_void_p) -> None:
        """One small AllReduce, to its end."""
        result = self._nccl.ncclAllReduce(
            self._send, self._receive, _ELEMENTS, _FLOAT, _SUM, communicator, self._stream
        )
        _check(result, "ncclAllReduce")
        _check(self._synchronize(self._stream), "cudaStreamSynchronize")


def _ready_file(folder: Path, rank: int) -> Path:
    return folder / f"ready.{rank}"


def _check(result: int, what: str) -> None:
    if result != 0:
        sys.exit(f"{what} returns {result}")


def main(arguments: list[str]) -> None:
    """Be one rank, until killed."""
    rank, ranks, number = map(int, arguments[:3])
    folder, library = Path(arguments[3]), arguments[4]
    calls = _Rank(library)
    communicators = calls.communicators(calls.unique_id(folder / "id", rank), rank, ranks, number)
    for communicator in communicators:
        calls.reduce(communicator)
    _ready_file(folder, rank).touch()
    while True:
        for communicator in communicators:
            calls.reduce(communicator)
            time.sleep(_PACE_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
