"""Applies the governor: adds up the probes' cost and sets the level that the budget allows.

Calls are counted at every level but *watch*, at which the observer takes the probes off them
(agent/node/daemon/watching.py).  Probes on CUDA's driver were asked for, and stay while they alone keep the budget:
levels give way to them.  A second governor decides on them, which has two levels, *counts* for detached and
*completion* for attached, and sees what they alone cost.  A third one decides likewise on the probes on transfers of
other libraries, in the processes that map one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.overhead.cost import Hits, Interval, Overhead, busy_factor
from railscope.agent.node.overhead.governor import LEVELS, Governor, Measured, level_name
from railscope.probes.clock import Clock
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.calibration import Calibration
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.programs.internals import Sent
from railscope.probes.nccl.records.calls import Stat
from railscope.probes.nccl.records.internals import InternalStat

_log = logging.getLogger("railscope.levels")


class CountedHits(Protocol):
    """What is needed of the programs that count calls (probes/nccl/programs/calls.py)."""

    def stats(self) -> Mapping[Stat, int]: ...


class DriverProbes(Protocol):
    """What is needed of the probes on CUDA's driver (agent/node/completion/driver_calls.py)."""

    def hits(self) -> int: ...
    def set_attached(self, attached: bool) -> list[str]: ...


class TransferProbes(DriverProbes, Protocol):
    """What is needed of the probes on other libraries' transfers (agent/node/transfers/watch.py)."""

    @property
    def mappers(self) -> Collection[object]: ...


class LevelControl:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        programs: CountedHits,
        completion: Completion | None,
        calibration: Calibration,
        clock: Clock,
        *,
        budget_ratio: float,
        level: str,
        procfs: Path,
        driver: DriverProbes | None = None,
        transfers: TransferProbes | None = None,
        late: bool = False,
    ) -> None:
        """`level` is a key of `LEVELS`; `completion` None: calls are counted, and nothing else can be.

        `driver` None: there are no probes on CUDA's driver; `transfers` alike.  `late`: jobs may run already, which are
        to notice nothing.
        """
        self._programs = programs
        self._completion = completion
        self._procfs = procfs
        self._overhead = Overhead(calibration, clock)
        self._governor = Governor(calibration, budget_ratio, LEVELS[level], late=late)
        self._reason = self._governor.reason
        self._driver = driver
        self._driver_governor = Governor(calibration, budget_ratio)
        self._transfers = transfers
        self._transfer_governor = Governor(calibration, budget_ratio)
        self._calls: Mapping[Stat, int] = {}
        self._below: tuple[Mapping[InternalStat, int], list[Sent], int] = ({}, [], 0)
        """Of the last tick that read them."""
        if completion is not None:
            completion.set_level(self._governor.level)

    def reconfigure(self, *, budget_ratio: float, level: str) -> None:
        """Keep to another budget, or another key of `LEVELS`, from the next tick on."""
        self._governor.reconfigure(budget_ratio, LEVELS[level])
        self._driver_governor.reconfigure(budget_ratio, None)
        self._transfer_governor.reconfigure(budget_ratio, None)

    @property
    def seconds(self) -> Mapping[str, float]:
        """By program: what its hits have cost the observed processes so far; never falls."""
        return self._overhead.seconds

    @property
    def is_stable(self) -> bool:
        """See `Governor.is_stable`."""
        return self._governor.is_stable

    def judge_arrival(self) -> list[str]:
        """Choose the level to begin with by whether a job has called since the programs came; returns errors."""
        try:
            running = self._programs.stats()[Stat.CALLS] > 0
        except KernelRefusal as refusal:
            return [f"the probes' cost cannot be read: {refusal.strerror}"]
        self._governor.judge_arrival(running=running)
        return self._completion.set_level(self._governor.level) if self._completion is not None else []

    def update(
        self, processes: int, *, lowest: Level = Level.COUNTS, unprobed_calls: Callable[[], int] = lambda: 0
    ) -> list[str]:
        """Add up the cost and change the level if necessary; returns errors, one line each.

        Args:
            processes: observed processes that have a communicator.
            lowest: *watch* where calls can do without a probe.
            unprobed_calls: calls that met none since it was asked last.
        """
        try:
            calls = self._programs.stats()
            # Without communicators nothing happens below the calls, and reading that takes longer than all the rest.
            if self._completion is not None and (processes or calls != self._calls):
                self._below = self._completion.hits()
            driver_hits = self._driver.hits() if self._driver is not None else 0
            transfer_hits = self._transfers.hits() if self._transfers is not None else 0
        except KernelRefusal as refusal:
            return [f"the probes' cost cannot be read: {refusal.strerror}"]
        self._calls = calls
        interval = self._overhead.add_hits(calls, *self._below, driver_hits, transfer_hits)
        busy = busy_factor(self._procfs)
        errors: list[str] = []
        if self._driver is not None:
            alone = Hits(driver_calls=interval.hits.driver_calls)
            measured = Measured(Interval(interval.elapsed_ns, alone), processes, Level.COMPLETION, busy)
            errors += _decide("CUDA's driver", self._driver, self._driver_governor, measured)
        if self._transfers is not None:
            alone = Hits(transfers=interval.hits.transfers)
            mappers = len(self._transfers.mappers)
            measured = Measured(Interval(interval.elapsed_ns, alone), mappers, Level.COMPLETION, busy)
            errors += _decide("other libraries' transfers", self._transfers, self._transfer_governor, measured)
            interval = replace(interval, hits=replace(interval.hits, transfers=0))
        if self._completion is None:
            return errors
        available = self._completion.levels.highest
        level = self._governor.decide(Measured(interval, processes, available, busy, lowest, unprobed_calls()))
        if self._governor.reason != self._reason:
            self._reason = self._governor.reason
            _log.info("probe level: %s", self._reason)
        if level == self._completion.levels.target_level:
            return [*errors, *self._completion.levels.finish_detaching()]
        return [*errors, *self._completion.set_level(level)]

    def describe(self) -> str:
        """What is observed beyond calls, for the log."""
        return level_name(self._completion.levels.target_level if self._completion is not None else Level.COUNTS)


def _decide(what: str, probes: DriverProbes, governor: Governor, measured: Measured) -> list[str]:
    """Attach or detach by what these probes alone cost; returns errors, one line each."""
    before = governor.level > Level.COUNTS
    attached = governor.decide(measured) > Level.COUNTS
    # Where no process maps a library none is probed, and there is nothing to tell.
    if attached is not before and measured.processes > 0:
        _, _, why = governor.reason.partition(": ")
        _log.info("probes on %s are %s: %s", what, "attached" if attached else "detached", why)
    return probes.set_attached(attached)
