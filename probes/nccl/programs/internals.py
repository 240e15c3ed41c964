"""The loaded programs below NCCL's entry points: attaches them level by level and reads them.

An object of its own beside the one that counts calls (calls.py), because everything here is optional:
it needs a library whose struct offsets are known, a kernel with bpf_loop (5.17), and a budget for its cost.  The
tables of communicators and observed processes are shared, so that both speak of the same instances.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import KernelRefusal, possible_cpus
from railscope.probes.loading.links import Links, ProbePoint, plain_attach_type
from railscope.probes.loading.maps import Map, Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.internals import FUNCTIONS, InternalPoints, Level
from railscope.probes.nccl.programs.calls import NcclPrograms, constants
from railscope.probes.nccl.programs.cuda import CudaEvents
from railscope.probes.nccl.programs.cuda import attach_types as cuda_attach_types
from railscope.probes.nccl.programs.errors import PROGRAMS as ERROR_PROGRAMS
from railscope.probes.nccl.programs.errors import Errors
from railscope.probes.nccl.programs.failover import PROGRAMS as FAILOVER_PROGRAMS
from railscope.probes.nccl.programs.failover import Failover
from railscope.probes.nccl.programs.readings import delete_where, distributions_by_op
from railscope.probes.nccl.programs.shared import OwnedMap, SharedRing
from railscope.probes.nccl.records import internals as layouts
from railscope.probes.nccl.records.calls import SLOT, STAT
from railscope.probes.nccl.records.errors import ErrorLayout
from railscope.probes.nccl.records.internals import InternalStat, NetworkKind

_RING_BYTES: Final = 1 << 21  # as in proxy_tables.h


@dataclass(frozen=True, slots=True)
class Launch:
    """How often collectives were launched in one way; numbers as NCCL's (`ALGORITHMS`, `PROTOCOLS`)."""

    op: int
    algorithm: int
    protocol: int
    channels: int
    count: int


@dataclass(frozen=True, slots=True)
class Sent:
    """What one process handed to one network device, as NCCL numbers devices; -1: it could not be told."""

    tgid: int
    library: int
    network: NetworkKind
    device: int
    messages: int
    bytes: int
    last_ns: int = 0
    """When the latest message was handed over."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one communicator has come, as far as its network part tells."""

    instance: int
    completed_sequence: int
    """Calls known to be complete: the number, in the communicator's sequence, of the last one."""
    posted_sequence: int
    """Calls made when something was last handed to the network."""
    oldest_posted_ns: int | None
    """When the oldest operation that is not complete was handed to the network; None: all are."""
    oldest_op: int | None
    posted: int
    completed: int
    """Operations (collectives, and all Send and Recv of one launch as one) posted and completed."""
    captured: int
    """Collectives captured into CUDA graphs so far; their replays are no calls."""
    replayed: int
    elsewhere: bool
    """Parts go to another rank's proxy (PXN): their end is not seen, and `completed_sequence` proves nothing."""


@dataclass(frozen=True, slots=True)
class EmptyRun:
    """Calls in a row, by number, that had no element: NCCL discards such collectives, nothing more is seen of them."""

    first: int
    last: int

    def after(self, completed: int) -> int:
        """Calls known to be complete once the first `completed` are."""
        return self.last if self.first <= completed + 1 <= self.last else completed


class Internals:
    """The loaded programs and their maps.  Closing it frees everything but the links made through it."""

    def __init__(self, loaded: libbpf.LoadedObject, programs: NcclPrograms) -> None:
        self.attach_kind = programs.attach_kind
        self._pids = programs.pids
        self._loaded = loaded
        self._known = programs.communicators
        cpus, shares = possible_cpus(), programs.shares

        def map_of(name: str, key: np.dtype[Any], value: np.dtype[Any], *, per_cpu: bool = False) -> Map:
            return Map(loaded.map_fds[name], name, key, value, cpus=cpus, per_cpu=per_cpu)

        def shared(name: str, key: np.dtype[Any], value: np.dtype[Any], *, per_cpu: bool = False) -> Map:
            return OwnedMap(loaded.map_fds[name], name, key, value, shares, cpus=cpus, per_cpu=per_cpu)

        self._layouts = map_of("internals_layouts", SLOT, layouts.LAYOUT)
        self._communicators = map_of("proxy_communicators", _COMMUNICATOR_KEY, layouts.PROXY_COMMUNICATOR)
        self._connections = shared("connections", layouts.CONNECTION_KEY, layouts.CONNECTION)
        self._operations = shared("operations", layouts.OPERATION_KEY, layouts.OPERATION)
        self._parts = shared("parts", layouts.PART_KEY, layouts.PART)
        self._durations = map_of("durations", SLOT, layouts.DISTRIBUTION, per_cpu=True)
        self._bandwidths = map_of("bandwidths", SLOT, layouts.DISTRIBUTION, per_cpu=True)
        self._histories = shared("histories", layouts.HISTORY_KEY, layouts.HISTORY)
        self._launches = map_of("launches", layouts.LAUNCH_KEY, np.dtype("<u8"), per_cpu=True)
        self._sent = shared("sent_bytes", layouts.SENT_KEY, layouts.SENT, per_cpu=True)
        self._stats = map_of("internal_stats", SLOT, STAT, per_cpu=True)
        self.completion_events = SharedRing(
            loaded.map_fds["completion_events"], _RING_BYTES, layouts.COMPLETION_EVENT, "completion_events", shares
        )
        self.errors = Errors(loaded, self.attach_kind, shares, programs.pids)
        self.failover = Failover(loaded, self.attach_kind, shares, programs.pids)
        self.cuda = CudaEvents(loaded, self.attach_kind, shares, programs.pids)

    @classmethod
    def load(cls, programs: NcclPrograms, *, write_events: bool = False) -> Internals:
        """Load the programs beside those that count calls.

        `write_events`: one `completion_events` record for each completed operation, for who draws time lines.

        Raises:
            LoadError: this kernel does not take them.
        """
        path = libbpf.object_path("nccl_internals")
        attach_type = plain_attach_type(programs.attach_kind)
        loaded = libbpf.load(
            path,
            attach_types={
                **dict.fromkeys(
                    (*(function.program for function in FUNCTIONS), *ERROR_PROGRAMS, *FAILOVER_PROGRAMS), attach_type
                ),
                **cuda_attach_types(programs.attach_kind, programs.enqueue_time),
            },
            map_entries={"communicators": programs.settings.communicator_entries},
            constants=constants(replace(programs.settings, write_events=write_events), programs.enqueue_time),
            shared_maps=programs.shared_maps(),
        )
        return cls(loaded, programs)

    def describe(self, library: int, layout: Records | None) -> None:
        """Set the struct offsets of a library (dtype LAYOUT); None: its structures are not read."""
        record = np.zeros(1, layouts.LAYOUT) if layout is None else layout
        self._layouts.update(library.to_bytes(4, "little"), record.tobytes())

    def watch_errors(self, path: str, points: Sequence[ProbePoint], library: int, layout: ErrorLayout | None) -> Links:
        """Watch the calls that end communicators of a library for what they return, and for what NCCL had stored.

        `points` are the library's `error_points`.

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        self.errors.describe(library, layout)
        return self.errors.attach(path, points)

    def error_events(self) -> Records:
        """Errors met since the last call: dtype ERROR_EVENT."""
        return self.errors.events.read()

    def watch_failover(self, path: str, points: Sequence[ProbePoint]) -> Links:
        """Watch NCCL's own failover in a library, whose `failover_points` these are; `describe` tells its layout.

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        return self.failover.attach(path, points)

    def failover_events(self) -> Records:
        """Ports that failed since the last call, each told once a connection: dtype FAILOVER_EVENT."""
        return self.failover.events.read()

    def forget_failed_over(self, connections: Iterable[tuple[int, int]]) -> None:
        """See `Failover.forget`.

        Raises:
            KernelRefusal: the tables cannot be written.
        """
        self.failover.forget(connections)

    def attach(self, path: str, points: InternalPoints, level: Level, *, pid: int = 0) -> Links:
        """Attach what `level` adds to the one before it to the file at `path`.

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        links = Links(self._pids)
        try:
            for program, point in points.at(level).items():
                links.attach(self.attach_kind, self._loaded.program_fds[program], path, (point,), pid=pid)
        except KernelRefusal:
            links.close()
            raise
        return links

    def progress(self) -> dict[int, Progress]:
        """By instance: every communicator that handed something to the network.

        Raises:
            KernelRefusal: the tables cannot be read.
        """
        # Communicators first: what is posted after that reading cannot lower what was complete in it.
        _, values = self._communicators.read()
        _, operations = self._operations.read()
        # Thousands may be under way: the first launch of each communicator is found without looking at each of them.
        operations = operations[np.lexsort((operations["launch"], operations["instance"]))]
        instances, at = np.unique(operations["instance"], return_index=True)
        firsts = (operations[name][at].tolist() for name in ("before_sequence", "posted_ns", "op"))
        oldest = dict(zip(instances.tolist(), zip(*firsts, strict=True), strict=True))
        names = ("instance", "posted_sequence", "posted", "completed", "captured", "replayed", "elsewhere")
        progress = {}
        for instance, sequence, posted, completed, captured, replayed, elsewhere in zip(
            *(values[name].tolist() for name in names), strict=True
        ):
            before_sequence, posted_ns, op = oldest.get(instance, (sequence, None, None))
            progress[instance] = Progress(
                instance=instance,
                completed_sequence=min(sequence, before_sequence),
                posted_sequence=sequence,
                oldest_posted_ns=posted_ns,
                oldest_op=op,
                posted=posted,
                completed=completed,
                captured=captured,
                replayed=replayed,
                elsewhere=bool(elsewhere),
            )
        return progress

    def empty_runs(self) -> dict[int, EmptyRun]:
        """By instance: the latest calls in a row without an element, of each communicator that had any.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        _, values = self._known.entries()
        return {
            int(value["instance"]): EmptyRun(int(value["empty_first"]), int(value["empty_last"]))
            for value in values[values["empty_last"] != 0]
        }

    def operations(self) -> tuple[Records, Records]:
        """Operations that are not complete: keys of dtype OPERATION_KEY, values of dtype OPERATION."""
        return self._operations.read()

    def connections(self) -> tuple[Records, Records]:
        """Connections: keys of dtype CONNECTION_KEY, values of dtype CONNECTION."""
        return self._connections.read()

    def durations(self) -> dict[Op, Records]:
        """From hand-over to the last network completion, by op: dtype DISTRIBUTION, ns."""
        return distributions_by_op(self._durations)

    def bandwidths(self) -> dict[Op, Records]:
        """Bus bandwidth by op: dtype DISTRIBUTION, bytes per second, nccl-tests' factors."""
        return distributions_by_op(self._bandwidths)

    def histories(self) -> tuple[Records, Records]:
        """Operations completed so far by communicator, kind and size: keys of HISTORY_KEY, values of HISTORY.

        Raises:
            KernelRefusal: the map cannot be read.
        """
        return self._histories.read()

    def launches(self) -> list[Launch]:
        """How collectives were launched."""
        keys, values = self._launches.read()
        counts = values.sum(axis=1).tolist()
        return [
            Launch(op, algorithm, protocol, channels, counts[at])
            for at, (op, algorithm, protocol, channels) in enumerate(keys.tolist())
        ]

    def sent(self) -> list[Sent]:
        """What was handed to network devices, by process."""
        keys, values = self._sent.read()
        messages, sizes = values["messages"].sum(axis=1).tolist(), values["bytes"].sum(axis=1).tolist()
        last = values["last_ns"].max(axis=1, initial=0).tolist()
        return [
            Sent(tgid, library, NetworkKind(network), device, messages[at], sizes[at], last[at])
            for at, (tgid, device, network, library) in enumerate(keys.tolist())
        ]

    def stats(self) -> Mapping[InternalStat, int]:
        """What the programs counted about themselves, since load."""
        keys, values = self._stats.read()
        totals = values.sum(axis=1)
        return {InternalStat(int(key)): int(total) for key, total in zip(keys, totals, strict=True)}

    def forget_processes(self, tgids: Collection[int]) -> None:
        """Drop everything of processes that have ended, but what they sent: that is the reader's to keep first."""
        ended = np.array(sorted(tgids), np.uint32)
        for table in (self._communicators, self._connections, self._operations, self._parts):
            delete_where(table, lambda keys, _: np.isin(keys["tgid"], ended))
        self.errors.forget_processes(tgids)
        self.failover.forget_processes(tgids)

    def forget_sent(self, tgids: Collection[int]) -> None:
        """Drop what ended processes sent."""
        ended = np.array(sorted(tgids), np.uint32)
        delete_where(self._sent, lambda keys, _: np.isin(keys["tgid"], ended))

    def forget_communicators(self, instances: set[int]) -> None:
        """Drop everything of communicators that have ended; what they had not completed will never be."""
        wanted = np.array(sorted(instances), np.uint32)
        for table in (self._communicators, self._operations, self._parts):
            delete_where(table, lambda _, values: np.isin(values["instance"], wanted))
        delete_where(self._histories, lambda keys, _: np.isin(keys["instance"], wanted))
        # Connections belong to all that share resources, not only the first user.  They are read before those who may
        # use them: a connection is never learned before its communicator.
        delete_where(self._connections, lambda keys, values: ~np.isin(_groups(keys, values), self._living_groups()))

    def _living_groups(self) -> Records:
        """Groups of communicators that share resources, of those that are not forgotten."""
        return _groups(*self._communicators.read())

    def forget_library(self, library: int) -> None:
        """Drop everything of a library's communicators: it is no longer updated."""
        _, values = self._known.read()
        self.forget_communicators(set(values["instance"][values["library"] == library].tolist()))

    def close(self) -> None:
        self.completion_events.close()
        self.errors.close()
        self.failover.close()
        self._loaded.close()


def _groups(keys: Records, values: Records) -> Records:
    """Which group of which process each row is of."""
    groups = np.empty(len(keys), np.dtype([("tgid", "<u4"), ("group", "<u8")]))
    groups["tgid"], groups["group"] = keys["tgid"], values["group"]
    return groups


_COMMUNICATOR_KEY: Final = np.dtype([("comm", "<u8"), ("tgid", "<u4"), ("reserved", "<u4")])
