"""The loaded program that sees processes being stopped: which to watch, and when each was stopped last.

It is no part of the programs that count calls: where the kernel does not take it, or bcc loaded those, stopped
processes are found by looking at them alone (probes/bpf/stops.bpf.c).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Final, Self

import numpy as np

from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import KernelRefusal, open_raw_tracepoint
from railscope.probes.loading.libbpf import LoadedObject
from railscope.probes.loading.maps import Map
from railscope.probes.nccl.programs.calls import pid_namespace
from railscope.probes.nccl.records.calls import SLOT
from railscope.probes.rings.ring_buffer import Ring

_PROGRAM: Final = "stop_delivered"
_TRACEPOINT: Final = "signal_deliver"
_WAKEUPS_BYTES: Final = 4096  # as in stops.bpf.c
_NEVER: Final = struct.pack("<Q", 0)


class Stops:
    """The program and its maps.  Not thread-safe."""

    def __init__(self, loaded: LoadedObject) -> None:
        """
        Raises:
            KernelRefusal: the kernel attaches nothing there, and nothing is left behind but `loaded`.
        """
        self._loaded = loaded
        self._stopped = Map(loaded.map_fds["stopped_processes"], "stopped_processes", SLOT, np.dtype("<u8"))
        self._wakeups = Ring(loaded.map_fds["stop_wakeups"], _WAKEUPS_BYTES, np.dtype("<u8"))
        try:
            self._link = open_raw_tracepoint(loaded.program_fds[_PROGRAM], _TRACEPOINT)
        except KernelRefusal:
            self._wakeups.close()
            raise

    @classmethod
    def load(cls) -> Self:
        """Load the program and attach it.

        Raises:
            LoadError: this kernel does not take it.
        """
        path = libbpf.object_path("stops")
        constants = struct.pack("<QQ", *pid_namespace())
        loaded = libbpf.load(path, attach_types={_PROGRAM: 0}, map_entries={}, constants=constants)
        try:
            return cls(loaded)
        except OSError as error:
            loaded.close()
            raise libbpf.LoadError(f"{path.name}: {error.strerror or error}") from None

    def fileno(self) -> int:
        """Readable when a process was stopped that is watched; `read` makes it unreadable."""
        return self._wakeups.fd

    def watch(self, pid: int) -> None:
        """Hear of this process from now on.

        Raises:
            KernelRefusal: too many are watched.
        """
        self._stopped.update(struct.pack("<I", pid), _NEVER)

    def forget(self, pid: int) -> None:
        self._stopped.delete(struct.pack("<I", pid))

    def read(self) -> Mapping[int, int]:
        """When watched processes received a stop signal last, CLOCK_MONOTONIC, ns; those that never did are left out.

        Whether one stopped, and goes on by now, is another question.

        Raises:
            KernelRefusal: the map cannot be read.
        """
        self._wakeups.read()
        pids, times = self._stopped.read()
        return {pid: time_ns for pid, time_ns in zip(pids.tolist(), times.tolist(), strict=True) if time_ns}

    def close(self) -> None:
        os.close(self._link)
        self._wakeups.close()
        self._loaded.close()
