"""Calls that no probe met, as NCCL itself numbers them: what is known of ranks at the level *watch*.

From 2.26 on a communicator counts its collectives by function (probes/nccl/memory/sequence_numbers.py).  While the
calls of a library meet no probe, these numbers are read from its processes a few times a second, by their tenant's
inspection process.  They tell how far each rank is, and since when it stands.  What they are beyond the calls that
probes counted are calls that no probe met: estimated, as they are read a moment after the calls, and as NCCL has no
number for point to point, for collectives without an element and for replays of captured graphs.

Of a communicator that makes such calls too nothing tells whether it stands: it is not judged, as one that cannot be
read, or of which no call was counted yet.  Each process is read by itself, as often as its tenant's communicators
allow: whoever cannot be read keeps nobody else waiting, and seems to stand only as long as was read.

The payload of calls is in no memory.  So calls are counted for a moment now and then (agent/node/daemon/watching.py):
their mean payload by operation stands for those between, and how much the means of the last moments differ gives the
error.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from railscope.agent.facts.snapshot import EstimatedCalls
from railscope.agent.node.collectives.call_counts import CallCounts, CallKind, Table
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.targets.memory import LaunchedNumbers, ProcessMemory
from railscope.probes.clock import Clock
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.memory.sequence_numbers import FUNCTIONS, SequenceLayout

_log = logging.getLogger("railscope.watched")

_LEAST_PERIOD_NS: Final = 250_000_000
_PERIOD_NS: Final = 500_000
"""Between two readings of a process, for each communicator of its tenant: thousands of them are read once a second."""
_FRESH_NS: Final = 1_000_000_000
"""So long after a reading a rank is taken to be where it was."""
_SAMPLES: Final = 16
"""Moments of which the mean payload is kept."""
_NOTHING: Final = (0,) * FUNCTIONS

_Numbers = tuple[int, ...]
"""Collectives by function."""
_Counted = Mapping[CallKind, tuple[int, int]]
"""Calls and payload, bytes, by row of the kernel's table."""


@dataclass(slots=True)
class _Rank:
    """One rank's end of a communicator whose library is watched, or was."""

    tgid: int
    address: int
    comm_hash: int
    library: int
    layout: SequenceLayout
    counted: _Numbers = _NOTHING
    """Calls that probes counted."""
    unnumbered: bool = False
    """Probes counted calls besides that NCCL has no number for."""
    offset: _Numbers | None = None
    """NCCL's numbers less the calls that were counted, when no call had gone uncounted; None: not known yet."""
    numbers: _Numbers | None = None
    """NCCL's, when they were read last; None: they cannot be read (any more)."""
    captured: bool = False
    """A captured graph lives."""
    advanced_ns: int = 0
    """When they were first seen to be what they are."""
    read_ns: int = 0
    """When they were seen last."""
    uncounted: list[int] = field(default_factory=lambda: [0] * FUNCTIONS)
    """Calls that met no probe."""

    @property
    def judged(self) -> bool:
        """Whether it stands when its numbers do."""
        return self.numbers is not None and any(self.counted) and not (self.unnumbered or self.captured)


@dataclass(slots=True)
class _Process:
    """A process with such ranks."""

    instances: tuple[int, ...] = ()
    period_ns: int = _LEAST_PERIOD_NS
    """Between two readings."""
    next_ns: int = 0
    """When it is read again."""
    asked: tuple[tuple[int, _Rank], ...] = ()
    """Ranks, with their instances, whose numbers were asked for and have not come."""
    moment: int = 0
    """What tells that question from others."""


class Watched:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        memory: ProcessMemory,
        layout_of: Callable[[int], SequenceLayout | None],
        is_whole: Callable[[int], bool],
        missed: Callable[[int, int], object],
    ) -> None:
        """`layout_of` knows the layout of a library by its number.

        `is_whole` knows of an instance whether it was seen from its first call on; `missed` is told of calls of an
        instance that met no probe.
        """
        self._memory = memory
        self._layout_of = layout_of
        self._is_whole = is_whole
        self._missed = missed
        self._watching: frozenset[int] = frozenset()
        """Libraries whose numbers are read."""
        self._uncounted: frozenset[int] = frozenset()
        """Those of them whose calls meet no probe now."""
        self._ranks: dict[int, _Rank] = {}
        """By instance, of living communicators."""
        self._processes: dict[int, _Process] = {}
        """By pid, those of these ranks."""
        self._moment = 0
        self._rows: tuple[Records, Records] | None = None
        self._counts: CallCounts | None = None
        """As of the last update."""
        self._unreadable: set[int] = set()
        """Pids of which the log has it."""
        self._payloads = _Payloads()
        self._calls = [0] * FUNCTIONS
        """That met no probe so far."""
        self._told = 0
        self._ops: tuple[tuple[CallKind, ...], np.ndarray[tuple[int], np.dtype[np.intp]]] = ((), np.zeros(0, np.intp))

    # What the level is

    def set_libraries(self, watching: Collection[int], uncounted: Collection[int]) -> None:
        """Libraries, by number, whose numbers are to be read, and those of them whose calls meet no probe now.

        Call it before probes go back on the calls of a library, and once they are off.
        """
        uncounted = frozenset(uncounted).intersection(watching)
        if self._uncounted and not uncounted and self._counts is not None:
            self._payloads.begin(_by_row(self._counts))
        elif uncounted - self._uncounted:
            # What was counted meanwhile must be read before anything is subtracted, and NCCL's numbers after that.
            self._rows = None
            for process in self._processes.values():
                process.asked, process.next_ns = (), 0
        self._watching, self._uncounted = frozenset(watching), uncounted

    def watches(self, library: int) -> bool:
        """Whether the numbers of a library's communicators are read."""
        return library in self._watching

    @property
    def awaits_counts(self) -> bool:
        """Whether calls should be counted for a moment: some cannot be judged, or have no payload yet."""
        fresh = any(
            rank.numbers is not None and any(rank.numbers) and not any(rank.counted) and self.watches(rank.library)
            for rank in self._ranks.values()
        )
        return fresh or self._payloads.awaited

    def share_numbered(self, counts: CallCounts) -> float:
        """The share of counted calls that NCCL numbers; 1 where there are none."""
        ops = self._ops_of(counts)
        total = float(counts.calls.sum())
        return float(counts.calls[ops < FUNCTIONS].sum()) / total if total else 1.0

    # What is read

    def update(self, rows: tuple[Records, Records], counts: CallCounts, now_ns: int) -> None:
        """Take what is in the kernel's tables, read after the last `set_libraries`, and read what is due."""
        if not self._watching:
            self._counts = counts
            return
        if rows is not self._rows or counts is not self._counts:
            entering = self._rows is None and bool(self._uncounted)
            self._find_ranks(*rows)
            self._take_counts(counts)
            self._rows, self._counts = rows, counts
            if entering:
                self._payloads.end(_by_row(counts), self._ranks)
        self.poll(now_ns)

    def poll(self, now_ns: int) -> None:
        """Read the numbers of watched communicators where that is due; what has not come is learnt next time."""
        for tgid, process in self._processes.items():
            if not process.asked:
                if now_ns < process.next_ns or self._rows is None:
                    continue
                self._moment += 1
                ranks = ((instance, self._ranks[instance]) for instance in process.instances)
                process.asked = tuple(one for one in ranks if one[1].library in self._watching)
                process.moment, process.next_ns = self._moment, now_ns + process.period_ns
            if process.asked:
                self._read(tgid, process, now_ns)

    def _read(self, tgid: int, process: _Process, now_ns: int) -> None:
        of_layout: defaultdict[SequenceLayout, list[tuple[int, _Rank]]] = defaultdict(list)
        for instance, rank in process.asked:
            of_layout[rank.layout].append((instance, rank))
        readings = [
            LaunchedNumbers(tuple((rank.address, rank.comm_hash) for _, rank in ranks), layout)
            for layout, ranks in of_layout.items()
        ]
        try:
            answers = self._memory.read(tgid, readings, moment=process.moment)
        except NotYet:
            return
        except Refused as refused:
            if not refused.gone and tgid not in self._unreadable:
                self._unreadable.add(tgid)
                _log.warning(
                    "process %d: its memory cannot be read (%s): at level watch nothing is known of its calls; grant "
                    "railscope CAP_SYS_PTRACE, or choose --level counts",
                    tgid,
                    refused,
                )
            answers = tuple((None,) * len(ranks) for ranks in of_layout.values())
        process.asked = ()
        for ranks, found in zip(of_layout.values(), answers, strict=True):
            for (instance, rank), launched in zip(ranks, found, strict=True):
                if self._ranks.get(instance) is rank:
                    self._learn(instance, rank, launched, now_ns)

    def _learn(self, instance: int, rank: _Rank, launched: tuple[bool, _Numbers] | None, now_ns: int) -> None:
        if launched is None:
            rank.numbers = None
            return
        captured, numbers = launched
        if numbers != rank.numbers:
            rank.advanced_ns = now_ns
        rank.captured, rank.numbers, rank.read_ns = captured, numbers, now_ns
        if rank.library not in self._uncounted or self._rows is None:
            return
        beyond = [number - counted for number, counted in zip(numbers, rank.counted, strict=True)]
        if rank.offset is None:
            # Seen from its first call on, a rank has made no other calls than those that were counted and those that
            # were not; captured ones were counted and have no number.
            rank.offset = tuple(min(0, one) for one in beyond) if self._is_whole(instance) else tuple(beyond)
        for function, (one, offset) in enumerate(zip(beyond, rank.offset, strict=True)):
            more = one - offset - rank.uncounted[function]
            if more <= 0:
                continue
            self._missed(instance, more)
            rank.uncounted[function] += more
            self._calls[function] += more
            self._payloads.add(function, more)

    def _find_ranks(self, keys: Records, values: Records) -> None:
        identities = values["identity"]
        living = (values["confirmed"] != 0) & (values["destroyed_ns"] == 0)
        keys, values, identities = keys[living], values[living], identities[living]
        before, self._ranks = self._ranks, {}
        for instance, library, tgid, address, comm_hash in zip(
            *(values[name].tolist() for name in ("instance", "library")),
            *(keys[name].tolist() for name in ("tgid", "comm")),
            identities["comm_hash"].tolist(),
            strict=True,
        ):
            known = before.get(instance)
            if known is None and library in self._watching:
                layout = self._layout_of(library)
                known = None if layout is None else _Rank(tgid, address, comm_hash, library, layout)
            if known is not None:
                self._ranks[instance] = known
        self._find_processes()

    def _find_processes(self) -> None:
        instances: defaultdict[int, list[int]] = defaultdict(list)
        for instance, rank in self._ranks.items():
            instances[rank.tgid].append(instance)
        tenants = {tgid: self._memory.tenant_of(tgid) for tgid in instances}
        of_tenant: Counter[Tenant] = Counter()
        for tgid, tenant in tenants.items():
            of_tenant[tenant] += len(instances[tgid])
        before, self._processes = self._processes, {}
        for tgid, tenant in tenants.items():
            process = self._processes[tgid] = before.get(tgid) or _Process()
            process.instances = tuple(instances[tgid])
            process.period_ns = max(_LEAST_PERIOD_NS, _PERIOD_NS * of_tenant[tenant])
        self._unreadable &= self._processes.keys()

    def _take_counts(self, counts: CallCounts) -> None:
        counted: dict[int, list[int]] = {instance: [0] * FUNCTIONS for instance in self._ranks}
        for kind, calls in zip(counts.kinds, counts.calls.tolist(), strict=True):
            of_rank = counted.get(kind.instance)
            if of_rank is None or not calls:
                continue
            if kind.op < FUNCTIONS:
                of_rank[kind.op] += calls
            else:
                self._ranks[kind.instance].unnumbered = True
        for instance, calls_of in counted.items():
            self._ranks[instance].counted = tuple(calls_of)

    # What is known

    def position(self, instance: int) -> int | None:
        """NCCL's number of a watched rank's last collective; None: it is not watched, or that is unknown."""
        rank = self._ranks.get(instance)
        if rank is None or rank.library not in self._watching or rank.numbers is None or rank.captured:
            return None
        return sum(rank.numbers)

    def last_calls_ns(self, instances: Iterable[int], last_ns: Iterable[int], now_ns: int) -> list[int]:
        """When ranks made their last calls: now, of those that are not judged; probes saw one at `last_ns`.

        Of one that was not read for a while nobody knows whether it still stands: it seems to for as long as it did.
        """
        found = []
        for instance, seen_ns in zip(instances, last_ns, strict=True):
            rank = self._ranks.get(instance)
            if rank is None or rank.library not in self._watching:
                found.append(seen_ns)
            else:
                unread_ns = max(0, now_ns - rank.read_ns - _FRESH_NS)
                found.append(max(seen_ns, rank.advanced_ns + unread_ns) if rank.judged else now_ns)
        return found

    @property
    def is_watching(self) -> bool:
        """Whether the numbers of any library are read."""
        return bool(self._watching)

    def take_unprobed(self) -> int:
        """Calls that met no probe since this was asked last."""
        before, self._told = self._told, sum(self._calls)
        return self._told - before

    def facts(self) -> tuple[EstimatedCalls, ...]:
        """Calls that met no probe so far, of the operations that have any."""
        return tuple(
            EstimatedCalls(Op(function).name, calls, *self._payloads.estimate(function))
            for function, calls in enumerate(self._calls)
            if calls
        )

    def _ops_of(self, counts: CallCounts) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        if self._ops[0] is not counts.kinds:
            self._ops = counts.kinds, np.array([kind.op for kind in counts.kinds], np.intp)
        return self._ops[1]


def _by_row(counts: CallCounts) -> _Counted:
    """What probes counted of calls that NCCL numbers."""
    return {
        kind: (calls, payload_bytes)
        for kind, calls, payload_bytes in zip(
            counts.kinds, counts.calls.tolist(), counts.payload_bytes.tolist(), strict=True
        )
        if kind.op < FUNCTIONS
    }


class WatchedTable:
    """The table of communicators with the last calls of watched ranks, as their numbers tell them."""

    def __init__(self, table: Table, watched: Watched, clock: Clock) -> None:
        self._table = table
        self._watched = watched
        self._clock = clock

    def read(self) -> tuple[Records, Records]:
        """See `Table`; reads the numbers of watched ranks if that is due.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        keys, values = self._table.read()
        if self._watched.is_watching:
            now_ns = self._clock.monotonic_ns()
            self._watched.poll(now_ns)
            values = values.copy()
            values["last_ns"] = self._watched.last_calls_ns(
                values["instance"].tolist(), values["last_ns"].tolist(), now_ns
            )
        return keys, values

    def lookup(self, key: bytes) -> Records | None:
        """See `Table`."""
        return self._table.lookup(key)

    def delete(self, key: bytes) -> object:
        """See `Table`."""
        return self._table.delete(key)


class _Payloads:
    """Payload of calls that met no probe, from the mean of those that did for a moment, by function."""

    def __init__(self) -> None:
        self._began: _Counted = {}
        self._samples: tuple[deque[tuple[int, int]], ...] = tuple(deque(maxlen=_SAMPLES) for _ in range(FUNCTIONS))
        """Calls and payload of the last moments in which there were any."""
        self._bytes = [0.0] * FUNCTIONS
        self._unpriced = [0] * FUNCTIONS
        """Calls that no mean is known for yet."""

    @property
    def awaited(self) -> bool:
        """Whether there were calls whose payload cannot be estimated yet."""
        return any(self._unpriced)

    def begin(self, counted: _Counted) -> None:
        """Calls are counted from now on: what was counted before."""
        self._began = counted

    def end(self, counted: _Counted, watched: Collection[int]) -> None:
        """And no longer; `watched`: instances whose calls are, as others' payload stands for nothing here."""
        calls_of, bytes_of = [0] * FUNCTIONS, [0] * FUNCTIONS
        # Row by row: rows of what has ended meanwhile have left the table.
        for kind, (calls, payload_bytes) in counted.items():
            if kind.instance in watched:
                calls_before, bytes_before = self._began.get(kind, (0, 0))
                calls_of[kind.op] += calls - calls_before
                bytes_of[kind.op] += payload_bytes - bytes_before
        for function, (calls, size) in enumerate(zip(calls_of, bytes_of, strict=True)):
            if calls > 0:
                self._samples[function].append((calls, size))
                self.add(function, 0)
        self._began = counted

    def add(self, function: int, calls: int) -> None:
        """Calls met no probe."""
        self._unpriced[function] += calls
        samples = self._samples[function]
        if samples:
            mean = sum(size for _, size in samples) / sum(counted for counted, _ in samples)
            self._bytes[function] += self._unpriced[function] * mean
            self._unpriced[function] = 0

    def estimate(self, function: int) -> tuple[int | None, float | None]:
        """Payload bytes so far, None: no such call was counted yet; their standard error as a share of them.

        None: calls were counted in one moment alone.
        """
        samples = self._samples[function]
        if not samples:
            return None, None
        size = round(self._bytes[function])
        means = [size / calls for calls, size in samples]
        middle = statistics.fmean(means)
        if len(means) < 2 or not middle:
            return size, None
        return size, statistics.stdev(means) / math.sqrt(len(means)) / middle
