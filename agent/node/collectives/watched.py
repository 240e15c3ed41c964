"""Calls that no probe met, as NCCL itself numbers them: what is known of ranks at the level *watch*.

From 2.26 on a communicator counts its collectives by function (probes/nccl/memory/sequence_numbers.py).  While the
calls of a library meet no probe, these numbers are read from its processes a few times a second, by their tenant's
inspection process.  They tell how far each rank is, and since when it stands.  What they are beyond the calls that
probes counted are calls that no probe met: estimated, as they are read a moment after the calls, and as NCCL has no
number for point to point, for collectives without an element and for replays of captured graphs.

Of a communicator that makes such calls too nothing tells whether it stands: it is not judged, as one that cannot be
read, or of which no call was counted yet.

The payload of calls is in no memory.  So calls are counted for a moment now and then (agent/node/daemon/watching.py):
their mean payload by operation stands for those between, and how much the means of the last moments differ gives the
error.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from railscope.agent.facts.snapshot import EstimatedCalls
from railscope.agent.node.collectives.call_counts import CallCounts, CallKind, Table
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.targets.memory import LaunchedNumbers, ProcessMemory
from railscope.probes.clock import Clock
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.memory.sequence_numbers import FUNCTIONS, SequenceLayout

_log = logging.getLogger("railscope.watched")

_LEAST_PERIOD_NS: Final = 250_000_000
_PERIOD_NS: Final = 500_000
"""Between two readings, for each communicator: thousands of them are read once a second."""
_SAMPLES: Final = 16
"""Moments of which the mean payload is kept."""
_NOTHING: Final = (0,) * FUNCTIONS

_Numbers = tuple[int, ...]
"""Collectives by function."""


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
    uncounted: list[int] = field(default_factory=lambda: [0] * FUNCTIONS)
    """Calls that met no probe."""

    @property
    def judged(self) -> bool:
        """Whether it stands when its numbers do."""
        return self.numbers is not None and any(self.counted) and not (self.unnumbered or self.captured)


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
        self._asked: dict[int, tuple[int, ...]] = {}
        """By pid, instances whose numbers were asked for and have not come."""
        self._moment = 0
        self._next_ns = 0
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
            self._payloads.begin(self._by_op(self._counts))
        elif uncounted - self._uncounted:
            # What was counted meanwhile must be read before anything is subtracted.
            self._rows = None
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
                self._payloads.end(self._by_op(counts))
        self.poll(now_ns)

    def poll(self, now_ns: int) -> None:
        """Read the numbers of all watched communicators if that is due; what has not come is learnt next time."""
        if not self._asked:
            if now_ns < self._next_ns or self._rows is None:
                return
            of_process: defaultdict[int, list[int]] = defaultdict(list)
            for instance, rank in self._ranks.items():
                if rank.library in self._watching:
                    of_process[rank.tgid].append(instance)
            self._asked = {tgid: tuple(instances) for tgid, instances in of_process.items()}
            self._moment += 1
            self._next_ns = now_ns + max(_LEAST_PERIOD_NS, _PERIOD_NS * sum(map(len, self._asked.values())))
        for tgid in list(self._asked):
            self._read(tgid, now_ns)

    def _read(self, tgid: int, now_ns: int) -> None:
        instances = self._asked[tgid]
        ranks = [rank for one in instances if (rank := self._ranks.get(one)) is not None]
        if len(ranks) != len(instances):  # some have ended since
            del self._asked[tgid]
            return
        of_layout: defaultdict[SequenceLayout, list[int]] = defaultdict(list)
        for at, rank in enumerate(ranks):
            of_layout[rank.layout].append(at)
        readings = [
            LaunchedNumbers(tuple((ranks[at].address, ranks[at].comm_hash) for at in places), layout)
            for layout, places in of_layout.items()
        ]
        try:
            answers = self._memory.read(tgid, readings, moment=self._moment)
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
            answers = tuple((None,) * len(places) for places in of_layout.values())
        del self._asked[tgid]
        for places, found in zip(of_layout.values(), answers, strict=True):
            for at, launched in zip(places, found, strict=True):
                self._learn(instances[at], ranks[at], launched, now_ns)

    def _learn(self, instance: int, rank: _Rank, launched: tuple[bool, _Numbers] | None, now_ns: int) -> None:
        if launched is None:
            rank.numbers = None
            return
        captured, numbers = launched
        if numbers != rank.numbers:
            rank.advanced_ns = now_ns
        rank.captured, rank.numbers = captured, numbers
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
        """When ranks made their last calls: now, of those that are not judged; probes saw one at `last_ns`."""
        found = []
        for instance, seen_ns in zip(instances, last_ns, strict=True):
            rank = self._ranks.get(instance)
            if rank is None or rank.library not in self._watching:
                found.append(seen_ns)
            else:
                found.append(max(seen_ns, rank.advanced_ns) if rank.judged else now_ns)
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

    def _by_op(self, counts: CallCounts) -> tuple[list[int], list[int]]:
        """Calls and payload that probes counted, by function."""
        ops = self._ops_of(counts)
        chosen = [ops == function for function in range(FUNCTIONS)]
        calls, payload_bytes = (
            [int(numbers[one].sum()) for one in chosen] for numbers in (counts.calls, counts.payload_bytes)
        )
        return calls, payload_bytes

    def _ops_of(self, counts: CallCounts) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        if self._ops[0] is not counts.kinds:
            self._ops = counts.kinds, np.array([kind.op for kind in counts.kinds], np.intp)
        return self._ops[1]


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
        self._began: tuple[list[int], list[int]] = [0] * FUNCTIONS, [0] * FUNCTIONS
        self._samples: tuple[deque[tuple[int, int]], ...] = tuple(deque(maxlen=_SAMPLES) for _ in range(FUNCTIONS))
        """Calls and payload of the last moments in which there were any."""
        self._bytes = [0.0] * FUNCTIONS
        self._unpriced = [0] * FUNCTIONS
        """Calls that no mean is known for yet."""

    @property
    def awaited(self) -> bool:
        """Whether there were calls whose payload cannot be estimated yet."""
        return any(self._unpriced)

    def begin(self, counted: tuple[list[int], list[int]]) -> None:
        """Calls are counted from now on: what was counted before."""
        self._began = counted

    def end(self, counted: tuple[list[int], list[int]]) -> None:
        """And no longer."""
        for function, samples in enumerate(self._samples):
            calls, size = (now[function] - then[function] for now, then in zip(counted, self._began, strict=True))
            if calls > 0 and size >= 0:
                samples.append((calls, size))
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
