"""The loaded CUDA programs of probes/bpf/cuda.h: attaches them and reads completion.

A job learns from CUDA that a collective is complete when it asks: PyTorch's watchdog does so every 100 ms.  What is
read here is therefore an upper bound, and a late one, of when a collective was complete; that it was is certain, on
whatever transport it ran.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import BPF_TRACE_UPROBE_SESSION, KernelRefusal, possible_cpus
from railscope.probes.loading.links import AttachKind, Links, ProbePoint, plain_attach_type
from railscope.probes.loading.maps import Map, Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.cuda import LIBRARY_PROGRAMS, CudaPoints
from railscope.probes.nccl.programs.calls import EnqueueTime
from railscope.probes.nccl.programs.readings import delete_where, distributions_by_op, have_ended
from railscope.probes.nccl.programs.shared import OwnedMap, SharedMap
from railscope.probes.nccl.programs.shares import Shares
from railscope.probes.nccl.records import cuda as cuda_records
from railscope.probes.nccl.records.calls import COMMUNICATOR_KEY, OWNER, SLOT, STAT
from railscope.probes.nccl.records.cuda import CudaStat
from railscope.probes.nccl.records.internals import DISTRIBUTION

_SESSION: Final = "cuda_session"
_PAIR: Final = ("cuda_entry", "cuda_return")


@dataclass(frozen=True, slots=True)
class CudaProgress:
    """How far one communicator has come, as far as the job has asked CUDA."""

    instance: int
    completed_sequence: int
    """Calls known to be complete: the number, in the communicator's sequence, of the last one."""
    proved_ns: int
    """When that was known (CLOCK_MONOTONIC)."""


def attach_types(attach: AttachKind, enqueue_time: EnqueueTime) -> dict[str, int]:
    """The BPF programs on CUDA to load, with the attach type of each: sessions where the entry probes have them too."""
    plain = plain_attach_type(attach)
    types = dict.fromkeys(LIBRARY_PROGRAMS, plain)
    if enqueue_time is EnqueueTime.SESSION:
        types[_SESSION] = BPF_TRACE_UPROBE_SESSION
    else:
        types.update(dict.fromkeys(_PAIR, plain))
    return types


class CudaCommunicatorTable(OwnedMap):
    """What was proved of each communicator: keys of dtype COMMUNICATOR_KEY, values of dtype COMMUNICATOR."""

    def __init__(self, fd: int, shares: Shares, ranges: Map) -> None:
        """`ranges`: the map `cuda_ranges`."""
        super().__init__(fd, "cuda_communicators", COMMUNICATOR_KEY, cuda_records.COMMUNICATOR, shares)
        self._ranges = ranges

    def delete(self, key: bytes) -> bool:
        """See `Map.delete`."""
        entry = Map.lookup(self, key)
        if entry is None or not super().delete(key):
            return False
        if number := int(entry["value"]["range"][0]):
            self._ranges.update((number - 1).to_bytes(4, "little"), bytes(4))
            self._shares.free("cuda_ranges", *self._owner(key, entry))
        return True


class CudaEvents:
    """The programs and their maps, within an object whose owner loads and closes it."""

    def __init__(
        self, loaded: libbpf.LoadedObject, attach: AttachKind, shares: Shares, pids: Sequence[int] = ()
    ) -> None:
        """`pids`: see `Links`."""
        self._attach_kind = attach
        self._pids = pids
        self._programs = loaded.program_fds
        cpus = possible_cpus()

        def map_of(name: str, key: np.dtype[Any], value: np.dtype[Any], *, per_cpu: bool = False) -> Map:
            return Map(loaded.map_fds[name], name, key, value, cpus=cpus, per_cpu=per_cpu)

        def shared(name: str, key: np.dtype[Any], value: np.dtype[Any]) -> Map:
            return OwnedMap(loaded.map_fds[name], name, key, value, shares)

        self._communicators = CudaCommunicatorTable(
            loaded.map_fds["cuda_communicators"], shares, map_of("cuda_ranges", SLOT, SLOT)
        )
        self._streams = shared("cuda_streams", cuda_records.STREAM_KEY, cuda_records.STREAM)
        self._marks = shared("cuda_marks", cuda_records.HANDLE_KEY, cuda_records.STREAM)
        self._calls = shared("cuda_calls_under_way", SLOT, cuda_records.UNDER_WAY)
        self._processes = SharedMap(loaded.map_fds["cuda_processes"], "cuda_processes", SLOT, OWNER, shares)
        self._durations = map_of("cuda_durations", SLOT, DISTRIBUTION, per_cpu=True)
        self._stats = map_of("cuda_stats", SLOT, STAT, per_cpu=True)

    def attach_library(self, path: str, points: Mapping[str, ProbePoint]) -> Links:
        """Attach to the NCCL library at `path`; it must have been described (`Internals.describe`).

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        links = Links(self._pids)
        try:
            for program, point in points.items():
                links.attach(self._attach_kind, self._programs[program], path, (point,))
        except KernelRefusal:
            links.close()
            raise
        return links

    def attach_cuda(self, path: str, points: CudaPoints) -> Links:
        """Attach to a file of CUDA's at `path`; processes that launched nothing through NCCL pass by at once.

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        links = Links(self._pids)
        kind, programs = self._attach_kind, self._programs
        try:
            # First what takes marks away: a mark whose event is destroyed unseen would prove what it must not.
            if _SESSION in programs:
                links.attach(kind, programs[_SESSION], path, points.drops, session=True)
                links.attach(kind, programs[_SESSION], path, points.calls, session=True)
            else:
                links.attach(kind, programs["cuda_entry"], path, points.drops)
                links.attach(kind, programs["cuda_return"], path, points.calls, on_return=True)
                links.attach(kind, programs["cuda_entry"], path, points.calls)
        except KernelRefusal:
            links.close()
            raise
        return links

    def progress(self) -> dict[int, CudaProgress]:
        """By instance: every communicator of which something was proved complete.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        _, values = self._communicators.read()
        proved = values[(values["completed_sequence"] > 0) & (values["instance"] > 0)]
        return {
            instance: CudaProgress(instance, sequence, time_ns)
            for instance, sequence, time_ns in zip(
                proved["instance"].tolist(),
                proved["completed_sequence"].tolist(),
                proved["completed_ns"].tolist(),
                strict=True,
            )
        }

    def durations(self) -> dict[Op, Records]:
        """From each call to the proof that it is complete, by op: dtype DISTRIBUTION, ns."""
        return distributions_by_op(self._durations)

    def stats(self) -> Mapping[CudaStat, int]:
        """What the programs counted about themselves, since load."""
        keys, values = self._stats.read()
        totals = values.sum(axis=1)
        return {CudaStat(int(key)): int(total) for key, total in zip(keys, totals, strict=True)}

    def forget_processes(self, tgids: Collection[int]) -> None:
        """Drop everything of processes that have ended."""
        ended = np.array(sorted(tgids), np.uint32)
        for table in (self._communicators, self._streams, self._marks):
            delete_where(table, lambda keys, _: np.isin(keys["tgid"], ended))
        delete_where(self._calls, lambda _, calls: have_ended(calls["tgid"], tgids))
        for tgid in tgids:
            self._processes.delete(tgid.to_bytes(4, "little"))

    def forget_communicators(self, instances: set[int]) -> None:
        """Drop communicators that have ended; the others of their streams are known again from their next launch on."""
        _, values = self._communicators.read()
        ended = np.isin(values["instance"], np.array(sorted(instances), np.uint32))
        numbers = values["number"][ended]
        delete_where(self._communicators, lambda _, these: np.isin(these["number"], numbers))
        delete_where(self._streams, lambda _, these: np.isin(these["behind"]["number"], numbers).any(axis=1))

    def forget_handles(self) -> None:
        """Drop what is known of streams and events: handles may have been reused while nothing was observed."""
        for table in (self._marks, self._streams):
            delete_where(table, lambda keys, _: np.ones(len(keys), bool))
