"""The loaded programs of probes/bpf/driver_calls.bpf.c: attaches them to CUDA's driver and reads who is inside a call.

An object of its own: it is loaded for who asks for it, on every kernel that the programs that count calls are for.  The
table of shares is common to both.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np

from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import BPF_TRACE_UPROBE_SESSION, KernelRefusal, possible_cpus
from railscope.probes.loading.links import Links, ProbePoint, plain_attach_type
from railscope.probes.loading.maps import Map, Records
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, constants
from railscope.probes.nccl.records.calls import SLOT, STAT
from railscope.probes.nccl.records.driver_calls import PROCESS, THREAD, DriverStat

_SESSION: Final = "driver_call_session"
_ENTRY: Final = "driver_call_entry"
_RETURN: Final = "driver_call_return"
_TABLE: Final = "driver_threads"
_MOST_THREADS: Final = 4096


class DriverCalls:
    """The programs and their maps; closing it frees everything but the links made through it."""

    def __init__(self, loaded: libbpf.LoadedObject, programs: NcclPrograms) -> None:
        self._loaded = loaded
        self._attach_kind = programs.attach_kind
        self._pids = programs.pids
        self._shares = programs.shares
        cpus = possible_cpus()

        def map_of(name: str, value: np.dtype[Any], *, per_cpu: bool = False) -> Map:
            return Map(loaded.map_fds[name], name, SLOT, value, cpus=cpus, per_cpu=per_cpu)

        self._threads = map_of(_TABLE, THREAD)
        self._processes = map_of("driver_processes", PROCESS)
        self._stats = map_of("driver_stats", STAT, per_cpu=True)

    @classmethod
    def load(cls, programs: NcclPrograms, *, most_threads: int = _MOST_THREADS) -> Self:
        """Load the programs beside those that count calls.

        Args:
            programs: those.
            most_threads: that are known at once, of all users.

        Raises:
            LoadError: this kernel does not take them.
        """
        path = libbpf.object_path("driver_calls")
        if programs.enqueue_time is EnqueueTime.SESSION:
            types = {_SESSION: BPF_TRACE_UPROBE_SESSION}
        else:
            types = dict.fromkeys((_ENTRY, _RETURN), plain_attach_type(programs.attach_kind))
        loaded = libbpf.load(
            path,
            attach_types=types,
            map_entries={_TABLE: most_threads},
            constants=constants(programs.settings, programs.enqueue_time) + struct.pack("<I", most_threads),
            shared_maps=programs.shared_maps(),
        )
        return cls(loaded, programs)

    def attach(self, path: str, points: Sequence[ProbePoint]) -> Links:
        """Attach to the driver at `path`; processes that are not followed pass by at once.

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        links = Links(self._pids)
        kind, programs = self._attach_kind, self._loaded.program_fds
        try:
            if _SESSION in programs:
                links.attach(kind, programs[_SESSION], path, points, session=True)
            else:
                # First the return: an entry without its return would be a call that never ends.
                links.attach(kind, programs[_RETURN], path, points, on_return=True)
                links.attach(kind, programs[_ENTRY], path, points)
        except KernelRefusal:
            links.close()
            raise
        return links

    def follow(self, tgid: int) -> None:
        """Count the calls of a process from now on, from 0.

        Raises:
            KernelRefusal: too many are followed.
        """
        self._processes.update(tgid.to_bytes(4, "little"), np.zeros(1, PROCESS).tobytes())

    def forget(self, tgids: Collection[int]) -> None:
        """Follow these processes no longer, and drop what is known of their threads.

        Raises:
            KernelRefusal: a map cannot be read or changed.
        """
        for tgid in tgids:
            self._processes.delete(tgid.to_bytes(4, "little"))
        tids, threads = self._threads.read()
        theirs = np.isin(threads["tgid"], sorted(tgids))
        self._take_out(tids[theirs].tolist())

    def drop(self, threads: Iterable[tuple[int, int]]) -> None:
        """Take out threads that are not needed: their numbers, and `last_ns` as it was read.

        One that has made a call since stays.  One that begins a call at this very moment is taken out with it.

        Raises:
            KernelRefusal: the map cannot be changed.
        """
        for tid, last_ns in threads:
            found = self._threads.lookup(tid.to_bytes(4, "little"))
            if found is not None and found["last_ns"][0] == last_ns:
                self._take_out((tid,))
        self._shares.flush()

    def _take_out(self, tids: Iterable[int]) -> None:
        for tid in tids:
            key = tid.to_bytes(4, "little")
            found = self._threads.lookup(key)
            if found is not None:
                self._threads.delete(key)
                self._shares.free(_TABLE, int(found["uid"][0]), int(found["tgid"][0]))

    def threads(self) -> tuple[Records, Records]:
        """Numbers of threads that made such calls, and what each is in (dtype THREAD).

        Raises:
            KernelRefusal: the map cannot be read.
        """
        return self._threads.read()

    def processes(self) -> tuple[Records, Records]:
        """Numbers of the processes that are followed, and what they did (dtype PROCESS).

        Raises:
            KernelRefusal: the map cannot be read.
        """
        return self._processes.read()

    def stats(self) -> Mapping[DriverStat, int]:
        """What the programs counted about themselves, since load.

        Raises:
            KernelRefusal: the map cannot be read.
        """
        keys, values = self._stats.read()
        totals = values.sum(axis=1)
        return {DriverStat(int(key)): int(total) for key, total in zip(keys, totals, strict=True)}

    def close(self) -> None:
        self._loaded.close()
