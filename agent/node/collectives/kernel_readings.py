"""Reads what the BPF programs count: calls, host times, losses, limits; if a read fails, the last value stays.

A total that fell because one reading was refused would look like a restart, and a scrape without an answer like a dead
agent.  So a refusal is remembered, for the collector's success, and the last reading stands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final, Protocol, TypeVar

from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.snapshot import OpHistogram
from railscope.agent.node.collectives.agreement import Shapes
from railscope.agent.node.collectives.call_counts import Accounting, CallCounts, Table
from railscope.agent.node.collectives.communicators import Communicators
from railscope.agent.node.collectives.sequences import CommunicatorRows
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import op_name
from railscope.probes.nccl.records.calls import Stat

_log = logging.getLogger("railscope.observer")

ENQUEUE_BOUNDS: Final = tuple((1 << (7 + i)) / 1e9 for i in range(31))
"""Seconds; the last bucket of the kernel's 32 has no bound."""

_CALLS: Final = "calls"
_COMMUNICATORS: Final = "communicators"
_LOST: Final = {
    "ring_full": Stat.RING_FULL,
    "lifecycle_ring_full": Stat.LIFECYCLE_RING_FULL,
    "communicators_full": Stat.COMMUNICATORS_FULL,
    "aggregates_full": Stat.AGGREGATES_FULL,
    "arguments_unreadable": Stat.ARGUMENTS_UNREADABLE,
    "foreign_pid_namespace": Stat.FOREIGN_PID_NAMESPACE,
}

Reading = TypeVar("Reading")


class Events(Protocol):
    """A ring of events (probes/rings/ring_buffer.py)."""

    def read(self) -> Records: ...


class SharedTables(Protocol):
    """Who holds how much of the tables (probes/nccl/programs/shares.py)."""

    def refused(self) -> Mapping[tuple[str, int | None], int]: ...


class CountingPrograms(Protocol):
    """What is read of the loaded programs (probes/nccl/programs/calls.py)."""

    @property
    def aggregates(self) -> Table: ...

    @property
    def communicators(self) -> CommunicatorRows: ...

    @property
    def lifecycle_events(self) -> Events: ...

    @property
    def shapes(self) -> Shapes: ...

    @property
    def shares(self) -> SharedTables: ...

    def overflow_totals(self) -> Records: ...

    def unreadable_calls(self) -> Mapping[int, int]: ...

    def processes_gone(self, pids: Collection[int]) -> None: ...

    def enqueue_times(self) -> Records: ...

    def stats(self) -> Mapping[Stat, int]: ...


class KernelReadings:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, programs: CountingPrograms) -> None:
        self._programs = programs
        self.accounting = Accounting(programs.aggregates)
        self._overflow: Records | None = None
        self._enqueue_times: tuple[OpHistogram, ...] = ()
        self._lost = dict.fromkeys(_LOST, 0)
        self._unreadable: Mapping[int, int] = {}
        self._limits_reached: Mapping[tuple[str, int | None], int] = {}
        self._refused_before = 0
        """How often a user's share was used up, when the shares were read last."""
        self._stats: Mapping[Stat, int] | None = None
        """What the programs counted about themselves, as of `is_unchanged`; None: that could not be read."""
        self._refused: set[str] = set()
        self._runs: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)
        """Runs of the programs at the last two readings."""

    @property
    def complete(self) -> bool:
        """Whether the last reading of everything worked."""
        return not self._refused

    @property
    def can_archive(self) -> bool:
        """Whether the tables of calls and of communicators were read, so that what ended can leave them."""
        return self._refused.isdisjoint({_CALLS, _COMMUNICATORS})

    def is_unchanged(self) -> bool:
        """Whether no program ran since the reading before the last, so that the tables are unchanged.

        One reading more than seems needed: a program counts its run first, and what it saw a moment later.
        """
        stats = self._stats = self._attempt("losses", self._programs.stats)
        runs = None if stats is None else (stats[Stat.CALLS], stats[Stat.LIFECYCLE])
        quiet = self.can_archive and runs is not None and self._runs == (runs, runs)
        self._runs = (runs, self._runs[0])
        return quiet

    def counts(self) -> CallCounts:
        """Every row of the table of calls."""
        self._attempt(_CALLS, self.accounting.read)
        return self.accounting.last

    def refresh(self, communicators: Communicators) -> set[int]:
        """Bring communicators up to date; returns the processes in their table."""
        return self._attempt(_COMMUNICATORS, communicators.refresh) or set()

    def overflow(self) -> Records | None:
        """Calls that found the table full, by op and data type; None while they could never be read."""
        reading = self._attempt("calls beyond the table", self._programs.overflow_totals)
        self._overflow = self._overflow if reading is None else reading
        return self._overflow

    def enqueue_times(self) -> tuple[OpHistogram, ...]:
        """Sampled host time inside calls, of the ops that have any."""
        reading = self._attempt("enqueue times", self._read_enqueue_times)
        self._enqueue_times = self._enqueue_times if reading is None else reading
        return self._enqueue_times

    def events_lost(self) -> dict[str, int]:
        """What the programs could not tell, by reason; every reason is there."""
        reading = self._attempt("losses", self._read_lost)
        self._lost = self._lost if reading is None else reading
        return dict(self._lost)

    def unreadable_calls(self) -> Mapping[int, int]:
        """Calls whose arguments could not be read, by pid: of the processes that made any of late."""
        reading = self._attempt("unreadable calls", self._programs.unreadable_calls)
        self._unreadable = self._unreadable if reading is None else reading
        return self._unreadable

    def processes_gone(self, pids: Collection[int]) -> None:
        """What ended processes left in calls under way leaves the kernel's table."""
        self._attempt("calls under way", lambda: self._programs.processes_gone(pids))

    def limits_reached(self) -> Mapping[tuple[str, int | None], int]:
        """Calls that got no entry because a user's share was used up, by table and uid, as of the last reading."""
        stats = self._stats
        refused = self._refused_before if stats is None else stats.get(Stat.SHARE_USED_UP, 0)
        if refused != self._refused_before:
            reading = self._attempt("shares", self._programs.shares.refused)
            if reading is not None:
                self._limits_reached, self._refused_before = reading, refused
        return self._limits_reached

    def _read_enqueue_times(self) -> tuple[OpHistogram, ...]:
        return tuple(
            OpHistogram(
                op_name(op), Histogram(ENQUEUE_BOUNDS, tuple(row["buckets"].tolist()), int(row["sum_ns"]) / 1e9)
            )
            for op, row in enumerate(self._programs.enqueue_times())
            if row["calls"]
        )

    def _read_lost(self) -> dict[str, int]:
        stats = self._programs.stats()
        return {reason: stats[stat] for reason, stat in _LOST.items()}

    def _attempt(self, what: str, read: Callable[[], Reading]) -> Reading | None:
        """What `read` returns, None where the kernel refuses it; `what` names it in the log."""
        try:
            reading = read()
        except KernelRefusal as refusal:
            if what not in self._refused:
                _log.error("the kernel's %s cannot be read, the last reading is kept: %s", what, refusal.strerror)
            self._refused.add(what)
            return None
        self._refused.discard(what)
        return reading
