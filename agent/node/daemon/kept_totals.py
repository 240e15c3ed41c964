"""Keeps the totals that were shown in a file, so that they do not fall when the agent is replaced or killed.

A total is saved before it is shown, and every second besides; the next agent of the same boot adds what it finds to
what it counts (exporters/series/earlier.py).  Between the last save and the moment when the next agent has attached
nobody counts: that time is added up and shown as dark.  docs/restarts.md says why probes do not stay in the kernel
meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from railscope.agent.facts.rank_identity import RankKey
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.node.daemon.totals_file import Saved, TotalsFolder, UnreadableTotalsError, encode
from railscope.exporters.series.earlier import EarlierTotals, RankPids, rank_pids
from railscope.exporters.series.family import Family
from railscope.probes.clock import Clock, boot_id, boottime_ns

_log = logging.getLogger("railscope.totals")

PERIOD_SECONDS: Final = 1.0
_SHARE: Final = 100
"""Saving waits so many times what it took, so that it stays below 1 % of a core however many series there are."""
_STOP_PATIENCE_SECONDS: Final = 2.0


class KeptTotals:
    """The totals of this boot, on disk.  `keep` is for one thread at a time."""

    def __init__(
        self, path: Path, procfs: Path, version: str, clock: Clock, now_ns: Callable[[], int] = boottime_ns
    ) -> None:
        """Read what an earlier agent saved in a folder, which is made where it is missing.

        `now_ns` is the clock of the boot.

        Raises:
            StateError: totals cannot be kept there.
        """
        self._folder = TotalsFolder(path)
        self._boot = boot_id(procfs)
        self._version = version
        self._clock = clock
        self._now_ns = now_ns
        self._counting = False
        self._refused = ""
        self._save: Callable[[], None] = lambda: None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        saved = None
        try:
            saved = self._folder.read(self._boot, now_ns(), procfs)
        except FileNotFoundError:
            _log.info("totals are kept in %s", path)
        except (OSError, UnreadableTotalsError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            _log.warning("totals start at 0: what an agent saved in %s cannot be used: %s", path, why)
        self.earlier = EarlierTotals(saved.totals if saved is not None else None)
        self._stamp_ns = saved.stamp_ns if saved is not None else None
        """When totals were saved last; None: never."""
        self._dark_ns = saved.dark_ns if saved is not None else 0
        self._ahead: dict[RankKey, int] = {}
        """By how much NCCL's own number of a rank's collectives was above what this agent counted of it, when it was
        known last."""

    @property
    def dark_seconds(self) -> float:
        """In which no agent counted, so far."""
        return self._dark_ns / 1e9

    def start(self, save: Callable[[], None]) -> None:
        """Calls are counted from now on: the dark time ends, and `save`, which calls `keep`, is called every second."""
        if self._stamp_ns is not None:
            dark_ns = max(0, self._now_ns() - self._stamp_ns)
            self._dark_ns += dark_ns
            _log.info("totals go on after %.2f s without an agent, %.2f s in all", dark_ns / 1e9, self.dark_seconds)
        self._counting = True
        self._save = save
        self._thread = threading.Thread(target=self._run, name="totals", daemon=True)
        self._thread.start()

    def keep(self, snapshot: Snapshot, shown: Iterable[Family]) -> None:
        """Save the totals of a snapshot; call it before they are shown to anybody.

        Before `start` nothing is saved: what is dark would be taken for counted.
        """
        if not self._counting:
            return
        pids = rank_pids(snapshot)
        self.earlier.record_shown(shown, pids, self._positions(snapshot, pids))
        taken_ns = self._now_ns() - (self._clock.monotonic_ns() - snapshot.monotonic_ns)
        self._stamp_ns = max(self._stamp_ns or 0, taken_ns)
        saved = Saved(self._boot, self._version, self._stamp_ns, self._dark_ns, self.earlier.totals)
        try:
            self._folder.write(encode(saved))
            self._refused = ""
        except OSError as error:
            if str(error) != self._refused:
                _log.error("totals are not saved, and would fall if the agent were restarted now: %s", error.strerror)
            self._refused = str(error)

    def _positions(self, snapshot: Snapshot, pids: RankPids) -> dict[RankKey, int]:
        """Collectives that each rank has entered, by NCCL's own number, or as far as agents have counted."""
        positions: dict[RankKey, int] = {}
        for one in snapshot.collectives.communicators:
            rank = one.identity.key
            if rank not in pids:
                continue
            if one.position is not None:
                self._ahead[rank] = one.position - one.enqueued
            ahead = self._ahead.get(rank)
            before = ahead if ahead is not None else self.earlier.entered(rank, one.identity.pid)
            positions[rank] = max(0, before + one.enqueued)
        self._ahead = {rank: ahead for rank, ahead in self._ahead.items() if rank in positions}
        return positions

    def finish(self) -> None:
        """Save a last time, while calls are still counted; from now on only what is shown is saved."""
        self._stopping.set()
        if self._thread is None:
            return
        self._thread.join(_STOP_PATIENCE_SECONDS)
        if not self._thread.is_alive():
            self._save()

    def close(self) -> None:
        """Let another agent have the folder; call it when nothing is shown any more."""
        self._folder.close()

    def _run(self) -> None:
        pause_seconds = PERIOD_SECONDS
        while not self._stopping.wait(pause_seconds):
            began_ns = self._clock.monotonic_ns()
            try:
                self._save()
            except OSError as error:  # what the kernel refused for a moment
                _log.error("totals are not saved: %s", error.strerror or error)
            pause_seconds = max(PERIOD_SECONDS, _SHARE * (self._clock.monotonic_ns() - began_ns) / 1e9)
