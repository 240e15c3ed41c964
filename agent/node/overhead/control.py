"""Applies the governor: adds up the probes' cost and sets the level that the budget allows.

Calls are counted at every level, so nothing here touches them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.overhead.cost import Overhead, busy_factor
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
    ) -> None:
        """`level` is a key of `LEVELS`; `completion` None: calls are counted, and nothing else can be."""
        self._programs = programs
        self._completion = completion
        self._procfs = procfs
        self._overhead = Overhead(calibration, clock)
        self._governor = Governor(calibration, budget_ratio, LEVELS[level])
        self._reason = self._governor.reason
        self._calls: Mapping[Stat, int] = {}
        self._below: tuple[Mapping[InternalStat, int], list[Sent], int] = ({}, [], 0)
        """Of the last tick that read them."""
        if completion is not None:
            completion.set_level(self._governor.level)

    def reconfigure(self, *, budget_ratio: float, level: str) -> None:
        """Keep to another budget, or another key of `LEVELS`, from the next tick on."""
        self._governor.reconfigure(budget_ratio, LEVELS[level])

    @property
    def seconds(self) -> Mapping[str, float]:
        """By program: what its hits have cost the observed processes so far; never falls."""
        return self._overhead.seconds

    @property
    def is_stable(self) -> bool:
        """See `Governor.is_stable`."""
        return self._governor.is_stable

    def update(self, processes: int) -> list[str]:
        """Add up the cost and change the level if necessary; returns errors, one line each.

        `processes`: observed processes that have a communicator.
        """
        try:
            calls = self._programs.stats()
            # Without communicators nothing happens below the calls, and reading that takes longer than all the rest.
            if self._completion is not None and (processes or calls != self._calls):
                self._below = self._completion.hits()
        except KernelRefusal as refusal:
            return [f"the probes' cost cannot be read: {refusal.strerror}"]
        self._calls = calls
        interval = self._overhead.add_hits(calls, *self._below)
        if self._completion is None:
            return []
        available = self._completion.levels.highest
        level = self._governor.decide(Measured(interval, processes, available, busy_factor(self._procfs)))
        if self._governor.reason != self._reason:
            self._reason = self._governor.reason
            _log.info("%s", self._reason)
        if level == self._completion.levels.target_level:
            return self._completion.levels.finish_detaching()
        return self._completion.set_level(level)

    def describe(self) -> str:
        """What is observed beyond calls, for the log."""
        return level_name(self._completion.levels.target_level if self._completion is not None else Level.COUNTS)
