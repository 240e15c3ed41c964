"""The loaded NCCL programs: attaches them to libraries and reads their counters.

`NcclPrograms.load` picks the best object the kernel takes: with a session program (6.13), with uprobe_multi (6.6), or
with perf events (5.15); each choice can be forced, so that all of them are tested on one machine.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import (
    BPF_TRACE_UPROBE_SESSION,
    KernelRefusal,
    possible_cpus,
)
from railscope.probes.loading.kernel_structs import kernel_offsets
from railscope.probes.loading.libbpf import ARCHITECTURES, OBJECTS, LoadedObject
from railscope.probes.loading.links import (
    AttachKind,
    Links,
    plain_attach_type,
    supports_multi,
    tells_processes_apart,
)
from railscope.probes.loading.maps import Map, MappedArray, Records
from railscope.probes.nccl.functions.probe_points import ProbePoints
from railscope.probes.nccl.layouts.layout import CommLayout
from railscope.probes.nccl.programs.host_calls import HostCallTable
from railscope.probes.nccl.programs.readings import delete_where, have_ended
from railscope.probes.nccl.programs.shapes import ShapeTable
from railscope.probes.nccl.programs.shared import SharedMap, SharedRing
from railscope.probes.nccl.programs.shares import Shares
from railscope.probes.nccl.programs.tables import AggregateTable, CommunicatorTable
from railscope.probes.nccl.records import calls as records
from railscope.probes.nccl.records.calls import CALL_EVENT, CALL_SLOT, Stat
from railscope.probes.rings.ring_buffer import Ring
from railscope.probes.rings.slots import SlotRings, rings_for

_log = logging.getLogger("railscope.probes")

_LIFECYCLE_RING_BYTES: Final = 1 << 20  # as in communicators.h
_WAKEUPS_BYTES: Final = 4096  # as in call_slots.h
_SAMPLING_OFF: Final = 32
_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
MOST_LIBRARIES: Final = 256
"""Slots of the programs' `layouts` map."""
_MOST_NAMESPACES: Final = 256  # as in observed.h; processes of more are found by their reader
_MOST_PIDS: Final = 2
"""A hit looks at every link of its function, also at those that are for other processes.

With sessions one is the most.  A link that is for another process does not say that it can do without the return
(uprobe_multi_link_handler() in the kernel's bpf_trace.c), so that with two of them every return of both processes
traps, where a link to all processes traps at sampled ones alone.
"""


_PROGRAMS: Final = ("collective_entry", "init_entry", "init_return", "end_entry", "call_entry", "call_return")
_NAMESPACE_OF_TASK: Final = (
    ("task_struct", "nsproxy"),
    ("nsproxy", "net_ns"),
    ("net", "ns"),
    ("ns_common", "inum"),
)
_ANSWERABLE: Final = (
    ("task_struct", "cred"),
    ("cred", "user_ns"),
    ("user_namespace", "level"),
    ("user_namespace", "parent"),
    ("user_namespace", "owner"),
    ("task_struct", "thread_pid"),
    ("pid", "level"),
    ("pid", "numbers"),
    ("pid_namespace", "user_ns"),
    ("pid_namespace", "ns"),
)


class Loader(Enum):
    """What loads the programs, best first: the second one compiles their source on the host."""

    LIBBPF = "libbpf"
    BCC = "bcc"


class EnqueueTime(Enum):
    """How host time inside calls is sampled."""

    SESSION = "session"
    PAIR = "pair"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What is chosen before load; None: the best that the kernel has."""

    loader: Loader | None = None
    """None: bcc serves only where libbpf can load nothing."""
    attach: AttachKind | None = None
    enqueue_time: EnqueueTime | None = None
    sample_every: int = 16
    """Host time is measured for one call in this many; a power of two."""
    only_observed_processes: bool = False
    namespaces: frozenset[int] = frozenset()
    """Network namespaces, by inode, whose processes are counted besides, from their first call on."""
    pids: tuple[int, ...] = ()
    """Attach to these processes alone where the kernel can: others meet no probe then.  Empty: to all."""
    write_events: bool = True
    ring_bytes: int = 2 << 20
    """Of a ring of call events, of which each processor has one while they fit (probes/rings/slots.py)."""
    aggregate_entries: int = 65536
    communicator_entries: int = 16384


@dataclass(frozen=True, slots=True)
class CallRings:
    """The rings that calls come through (probes/bpf/call_slots.h): what the loader and their reader must agree on."""

    rings: int
    ring_bytes: int

    @classmethod
    def for_this_host(cls, ring_bytes: int) -> Self:
        """As many rings of `ring_bytes`, a power of two, as its processors get."""
        return cls(rings_for(os.cpu_count() or 1, ring_bytes), ring_bytes)

    @property
    def map_entries(self) -> Mapping[str, int]:
        """`max_entries` by map."""
        return {"call_rings": self.rings, "call_slots": self.rings * self.ring_bytes // CALL_SLOT.itemsize}

    @property
    def constants(self) -> bytes:
        """The variables `call_ring_mask` and `call_slot_bits`, one behind the other."""
        return struct.pack("<II", self.rings - 1, (self.ring_bytes // CALL_SLOT.itemsize).bit_length() - 1)

    def open(self, loaded: LoadedObject) -> SlotRings:
        """The reader of records of dtype CALL_EVENT.

        Raises:
            OSError: a map cannot be mapped.
        """
        maps = loaded.map_fds
        return SlotRings(
            maps["call_rings"],
            maps["call_slots"],
            Ring(maps["call_wakeups"], _WAKEUPS_BYTES, np.dtype("<u8")),
            rings=self.rings,
            ring_bytes=self.ring_bytes,
            record=CALL_EVENT,
        )


class NcclPrograms:
    """The loaded programs, their maps and rings.  Closing it frees everything but the links made through it."""

    def __init__(
        self,
        loaded: libbpf.LoadedObject,
        attach: AttachKind,
        enqueue_time: EnqueueTime,
        settings: ProgramSettings,
        call_rings: CallRings,
    ) -> None:
        self.attach_kind = attach
        self.enqueue_time = enqueue_time
        self.settings = settings
        living = sum(map(_lives, settings.pids))  # those that have ended get no link
        apart = attach is AttachKind.MULTI and living <= (1 if enqueue_time is EnqueueTime.SESSION else _MOST_PIDS)
        self.pids = settings.pids if apart and tells_processes_apart(loaded.program_fds["init_entry"]) else ()
        """Processes that the probes are attached to; empty: to all that map a library."""
        self._loaded = loaded
        self._mapped_arrays: list[MappedArray] = []
        cpus = possible_cpus()

        def map_of(name: str, key: np.dtype[Any], value: np.dtype[Any], *, per_cpu: bool = False) -> Map:
            return Map(loaded.map_fds[name], name, key, value, cpus=cpus, per_cpu=per_cpu)

        self.shares = Shares(
            map_of("shares", records.SHARE_KEY, records.SHARE),
            map_of("shares_freed", records.SHARE_KEY, records.SHARE_FREED),
        )
        self.aggregates = AggregateTable(
            loaded.map_fds["aggregates"],
            cpus=cpus,
            slots=self._mapped("aggregate_slots", records.AGGREGATE_SLOT, records.AGGREGATE_SLOTS),
            shares=self.shares,
        )
        self.shapes = ShapeTable(
            self._mapped("call_shapes", records.CALL_SHAPES, records.SHAPES),
            map_of("shapes_places", records.SLOT, records.SHAPES_PLACE),
            self.shares,
        )
        self.communicators = CommunicatorTable(
            loaded.map_fds["communicators"],
            slots=self._mapped("communicator_slots", records.COMMUNICATOR_SLOT, records.COMMUNICATOR_SLOTS),
            shapes=self.shapes,
            shares=self.shares,
        )
        self.host_calls = HostCallTable(
            SharedMap(loaded.map_fds["host_calls"], "host_calls", records.SLOT, records.HOST_CALL, self.shares)
        )
        self._overflow = map_of("overflow_totals", records.SLOT, records.AGGREGATE, per_cpu=True)
        self._enqueue_times = map_of("enqueue_times", records.SLOT, records.ENQUEUE_TIME, per_cpu=True)
        self._stats = map_of("stats", records.SLOT, records.STAT, per_cpu=True)
        self._calls_under_way = SharedMap(
            loaded.map_fds["calls_under_way"], "calls_under_way", records.SLOT, records.CALL_UNDER_WAY, self.shares
        )
        self._unreadable = SharedMap(
            loaded.map_fds["unreadable_calls"], "unreadable_calls", records.SLOT, records.UNREADABLE, self.shares
        )
        self._layouts = map_of("layouts", records.SLOT, records.COMM_LAYOUT)
        self._observed = map_of("observed_processes", records.SLOT, np.dtype("u1"))
        namespaces = map_of("observed_namespaces", records.SLOT, np.dtype("u1"))
        for inode in sorted(settings.namespaces)[:_MOST_NAMESPACES]:
            namespaces.update(struct.pack("<I", inode), b"\1")
        self.call_events = call_rings.open(loaded)
        self.lifecycle_events = SharedRing(
            loaded.map_fds["lifecycle_events"],
            _LIFECYCLE_RING_BYTES,
            records.LIFECYCLE_EVENT,
            "lifecycle_events",
            self.shares,
        )

    @classmethod
    def load(cls, settings: ProgramSettings) -> NcclPrograms:
        """Load the best programs this kernel takes, within `settings`.

        Raises:
            LoadError: none can be loaded, or what was forced is not there.
        """
        if settings.sample_every & (settings.sample_every - 1) or settings.sample_every < 1:
            raise ValueError(f"one call in {settings.sample_every} cannot be sampled: choose a power of two")
        refusals: list[libbpf.LoadError] = []
        for loader in [settings.loader] if settings.loader else Loader:
            try:
                programs = cls._load_with(loader, settings)
            except libbpf.LoadError as error:
                refusals.append(error)
                _log.debug("%s loads no programs: %s", loader.value, error)
                if isinstance(error, libbpf.HostRefusal):
                    break
                continue
            _log.info("the programs were loaded by %s", loader.value)
            return programs
        raise refusals[0]

    @classmethod
    def _load_with(cls, loader: Loader, settings: ProgramSettings) -> NcclPrograms:
        refusals: list[libbpf.LoadError] = []
        call_rings = CallRings.for_this_host(settings.ring_bytes)
        for attach, enqueue_time in _candidates(loader, settings):
            try:
                loaded = _load(loader, attach, enqueue_time, settings, call_rings)
            except libbpf.LoadError as error:
                refusals.append(error)
                _log.debug("programs for %s/%s do not load: %s", attach.value, enqueue_time.value, error)
                continue
            if attach is AttachKind.PERF or _kernel_links(loaded, enqueue_time):
                return cls(loaded, attach, enqueue_time, settings, call_rings)
            loaded.close()
            refusals.append(libbpf.LoadError("this kernel has no such links"))
        if refusals:
            raise refusals[-1]
        raise libbpf.LoadError(
            "bcc loads no session probes: sample enqueue time as 'pair' or 'off', or load with libbpf"
            if loader is Loader.BCC
            else "perf events carry no session probes: sample enqueue time as 'pair' or 'off', or attach as 'multi'"
        )

    def attach(self, path: str, points: ProbePoints, library: int, layout: CommLayout | None, *, pid: int = 0) -> Links:
        """Attach to the file at `path` (`/proc/self/fd/N` serves); `pid` 0: `self.pids`.

        Raises:
            KernelRefusal: nothing stays attached.
        """
        if not 0 <= library < MOST_LIBRARIES:
            raise ValueError(f"library number {library} is out of range")
        self._layouts.update(struct.pack("<I", library), _layout_record(layout))
        programs = self._loaded.program_fds
        kind = self.attach_kind
        links = Links(self.pids)
        try:
            # Return probes first: an entry without its return would leave a stale start time behind.
            links.attach(kind, programs["init_return"], path, points.inits, pid=pid, on_return=True)
            links.attach(kind, programs["init_entry"], path, points.inits, pid=pid)
            waiting = points.ends + points.followed
            links.attach(kind, programs["call_return"], path, waiting, pid=pid, on_return=True)
            links.attach(kind, programs["end_entry"], path, points.ends, pid=pid)
            links.attach(kind, programs["call_entry"], path, points.followed, pid=pid)
            if self.enqueue_time is EnqueueTime.SESSION:
                links.attach(kind, programs["collective_session"], path, points.calls, pid=pid, session=True)
            else:
                if self.enqueue_time is EnqueueTime.PAIR and points.calls:
                    # A call that was under way as probes came off left its start: no time of the next one's.
                    delete_where(self._calls_under_way, lambda keys, _: np.ones(len(keys), bool))
                    links.attach(kind, programs["collective_return"], path, points.calls, pid=pid, on_return=True)
                links.attach(kind, programs["collective_entry"], path, points.calls, pid=pid)
            links.attach(kind, programs["collective_entry"], path, points.calls_entry_only, pid=pid)
        except KernelRefusal:
            links.close()
            raise
        return links

    def observe(self, pid: int) -> None:
        """Let a process be counted, where `only_observed_processes` is set."""
        self._observed.update(struct.pack("<I", pid), b"\1")

    def processes_gone(self, pids: Collection[int]) -> None:
        """Take out what ended processes left, these or others: sampled calls under way, calls that are not readable.

        Raises:
            KernelRefusal: a map cannot be read or changed.
        """
        delete_where(self._unreadable, lambda keys, _: have_ended(keys, pids))
        if self.enqueue_time is EnqueueTime.PAIR:
            ended = np.array(sorted(pids), np.uint32)
            delete_where(self._calls_under_way, lambda _, calls: np.isin(calls["tgid"], ended))

    def forget(self, pid: int) -> None:
        self._observed.delete(struct.pack("<I", pid))

    def stats(self) -> Mapping[Stat, int]:
        """What the programs counted about themselves, since load."""
        keys, values = self._stats.read()
        totals = values.sum(axis=1)
        return {Stat(int(key)): int(total) for key, total in zip(keys, totals, strict=True)}

    def unreadable_calls(self) -> Mapping[int, int]:
        """Calls of operations whose arguments could not be read, by pid: of the processes that made any."""
        pids, entries = self._unreadable.read()
        return dict(zip(pids.tolist(), entries["calls"].tolist(), strict=True))

    def overflow_totals(self) -> Records:
        """Calls and payload that found the aggregates full: shape (ops, data types), dtype AGGREGATE."""
        _, values = self._overflow.read()
        totals = np.zeros(len(values), records.AGGREGATE)
        for name in ("calls", "payload_bytes"):
            totals[name] = values[name].sum(axis=1)
        return totals.reshape(-1, 16)

    def enqueue_times(self) -> Records:
        """Sampled host time inside calls, one row an op, dtype ENQUEUE_TIME."""
        _, values = self._enqueue_times.read()
        totals = np.zeros(len(values), records.ENQUEUE_TIME)
        for name in ("calls", "sum_ns", "buckets"):
            totals[name] = values[name].sum(axis=1)
        return totals

    def shared_maps(self) -> Mapping[str, int]:
        """Descriptors of the maps, by name: for another object that works on the same tables."""
        return {name: fd for name, fd in self._loaded.map_fds.items() if not name.startswith(".")}

    def close(self) -> None:
        self.call_events.close()
        self.lifecycle_events.close()
        for mapped in self._mapped_arrays:
            mapped.close()
        self._loaded.close()

    def _mapped(self, name: str, value: np.dtype[Any], entries: int) -> MappedArray:
        mapped = MappedArray(self._loaded.map_fds[name], name, value, entries)
        self._mapped_arrays.append(mapped)
        return mapped


def _lives(pid: int) -> bool:
    """Whether there is a process of this number, as the kernel asks when it makes a link for it."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def _candidates(loader: Loader, settings: ProgramSettings) -> list[tuple[AttachKind, EnqueueTime]]:
    """Combinations to try, best first."""
    attaches = [settings.attach] if settings.attach else [AttachKind.MULTI, AttachKind.PERF]
    candidates = []
    for attach in attaches:
        if settings.enqueue_time:
            times = [settings.enqueue_time]
        elif attach is AttachKind.MULTI:
            # A pair traps twice at every call, which is not worth a histogram: it is for those who ask for it.
            times = [EnqueueTime.SESSION, EnqueueTime.OFF]
        else:
            times = [EnqueueTime.OFF]
        candidates += [
            (attach, time)
            for time in times
            # A session program calls a kernel function, which bcc cannot compile.
            if time is not EnqueueTime.SESSION or (attach is AttachKind.MULTI and loader is Loader.LIBBPF)
        ]
    return candidates


def _load(
    loader: Loader, attach: AttachKind, enqueue_time: EnqueueTime, settings: ProgramSettings, call_rings: CallRings
) -> libbpf.LoadedObject:
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise libbpf.LoadError(f"railscope has no BPF programs for {platform.machine()}: x86_64 and aarch64 only")
    session = enqueue_time is EnqueueTime.SESSION
    plain = plain_attach_type(attach)
    attach_types = dict.fromkeys(_PROGRAMS, plain)
    if session:
        attach_types["collective_session"] = BPF_TRACE_UPROBE_SESSION
    if enqueue_time is EnqueueTime.PAIR:
        attach_types["collective_return"] = plain
    map_entries = {
        "aggregates": settings.aggregate_entries,
        "communicators": settings.communicator_entries,
        **call_rings.map_entries,
    }
    values = constants(settings, enqueue_time) + call_rings.constants
    if loader is Loader.BCC:
        # What runs another program and takes its answer is for those who need it: libbpf loads nearly everywhere.
        from railscope.probes.loading import bcc_loader

        return bcc_loader.load(
            OBJECTS / "nccl.bpf.c",
            attach_types=attach_types,
            map_entries=map_entries,
            constants=values,
            architecture=architecture,
        )
    path = libbpf.object_path("nccl_session" if session else "nccl")
    return libbpf.load(path, attach_types=attach_types, map_entries=map_entries, constants=values)


def constants(settings: ProgramSettings, enqueue_time: EnqueueTime) -> bytes:
    """The `const volatile` variables that all BPF objects on NCCL have, in their order."""
    off = enqueue_time is EnqueueTime.OFF
    return struct.pack(
        "<QQ18I",
        *pid_namespace(),
        int(settings.only_observed_processes),
        int(settings.write_events),
        _SAMPLING_OFF if off else settings.sample_every.bit_length() - 1,
        settings.communicator_entries,
        settings.aggregate_entries,
        *(_offsets() if settings.namespaces else (0, 0, 0, *_offsets()[3:])),
    )


def pid_namespace() -> tuple[int, int]:
    """Device and inode of this process's pid namespace; zeros in the initial one, which numbers as the kernel does."""
    namespace = Path("/proc/self/ns/pid").stat()
    if namespace.st_ino == _INITIAL_PID_NAMESPACE:
        return 0, 0
    return namespace.st_dev, namespace.st_ino


@lru_cache(maxsize=1)
def _offsets() -> tuple[int, ...]:
    """Where the kernel's structures have what the programs read of them (observed.h, answerable.h).

    The way from a thread to its network namespace's inode, then what tells who is answerable for it; zeros where the
    kernel does not tell.  Read once, as its BTF has some megabytes.
    """
    found = kernel_offsets((*_NAMESPACE_OF_TASK, *_ANSWERABLE))
    if found is None:
        _log.info(
            "the kernel has no BTF: processes that are forked are observed once a scan has found them, and whoever has "
            "several user numbers has as many shares"
        )
        return (0,) * (len(_NAMESPACE_OF_TASK) + len(_ANSWERABLE) - 1)
    nsproxy, net, namespace, inode, *answerable, pid_namespace = found
    return nsproxy, net, namespace + inode, *answerable, pid_namespace + inode


def _kernel_links(loaded: libbpf.LoadedObject, enqueue_time: EnqueueTime) -> bool:
    programs = loaded.program_fds
    if not supports_multi(programs["init_entry"]):
        return False
    return enqueue_time is not EnqueueTime.SESSION or supports_multi(programs["collective_session"], session=True)


def _layout_record(layout: CommLayout | None) -> bytes:
    record = np.full(1, 0, records.COMM_LAYOUT)
    if layout is None:
        return record.tobytes()

    def offset(value: int | None) -> int:
        return records.NO_OFFSET if value is None else value

    record["known"] = 1
    for name in ("start_magic", "end_magic", "comm_hash", "rank", "nranks", "cuda_dev", "nvml_dev", "bus_id"):
        record[name] = offset(getattr(layout, name))
    for name in ("node", "n_nodes", "local_rank", "local_ranks"):
        record[name] = offset(getattr(layout, name))
    return record.tobytes()
