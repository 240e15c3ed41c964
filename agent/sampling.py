"""Reads counters at a steady beat and keeps what a scrape every few seconds would lose.

One `Sampler` reads every registered `CounterSource` at that source's own period, turns readings into totals that
never fall, and sorts the rate over each interval into a histogram: a burst of 20 ms shows in it, while the totals
between two scrapes only show the average.

The rules:

* Totals never fall, and rates use the measured time between two reads, never the period: see agent/totals.py.
* A beat that was missed is counted, not made up for; the schedule does not drift.
* A source that fails shows in its own result, is tried again after a growing pause, and comes back by itself.  A
  source whose reads take long is read less often: it never gets more than a third of the time.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agent.shaped_totals import totals_for
from agent.snapshot import CollectorResult, Histogram
from agent.totals import RATE_BOUNDS, Counts, Floats, Totals
from probes.clock import Clock
from probes.netdev.counters import CounterReading, CounterSource, DeviceFailure, Flags, Values

MINIMUM_PERIOD_SECONDS: Final = 0.001
MAXIMUM_PERIOD_SECONDS: Final = 10.0
DEFAULT_PERIOD_SECONDS: Final = 0.1

_LONGEST_PAUSE_NS: Final = 30_000_000_000
_THREAD_SHARE: Final = 3
"""A source is read at most once in this many times its usual duration."""
_PR_SET_TIMERSLACK: Final = 29
_TIMER_SLACK_NS: Final = 1_000


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """What one device carried since it was first seen."""

    netns: int
    device: str
    transmit_bytes: int
    receive_bytes: int
    counters: tuple[tuple[str, int], ...]
    """(counter, increase since first seen) of everything else the source counts; never falls."""
    transmit_rate: Histogram
    """Bytes per second over the source's period."""
    receive_rate: Histogram
    present: bool
    """Whether the last reading still had it."""
    bytes_counted: bool = True
    """False: the device does not count bytes; `transmit_bytes`, `receive_bytes` and the rates say nothing then."""
    pinned: tuple[str, ...] = ()
    """Those of `counters` that stand at the most they can show: their increase is unknown."""


@dataclass(frozen=True, slots=True)
class SourceResult:
    """How one source is doing."""

    key: str
    success: bool
    """Whether the last read worked; also True while `failed_devices` names some that did not."""
    duration_seconds: float
    """Of the last read."""
    error: str
    """One line; empty on success."""
    failed_devices: tuple[DeviceFailure, ...]
    reads: int
    failures: int
    ticks_missed: int
    """Beats for which the thread came too late."""
    ticks_spared: int
    """Beats left out on purpose: the source failed, or its reads take long."""
    resets: int
    """New baselines of devices."""


class SamplerState:
    """The sampler at one moment; immutable."""

    def __init__(self, frames: Iterable[_Frame]) -> None:
        self._frames = {frame.result.key: frame for frame in frames}

    @property
    def results(self) -> tuple[SourceResult, ...]:
        return tuple(frame.result for frame in self._frames.values())

    @property
    def ticks_missed(self) -> int:
        return sum(result.ticks_missed for result in self.results)

    @property
    def resets(self) -> int:
        return sum(result.resets for result in self.results)

    def collector_results(self) -> tuple[CollectorResult, ...]:
        """In the form that exporters show."""
        return tuple(CollectorResult(result.key, result.success, result.duration_seconds) for result in self.results)

    def device(self, netns: int, name: str) -> DeviceTotals | None:
        """Totals of one device; None if no source has seen it."""
        for frame in self._frames.values():
            if frame.netns == netns and name in frame.rows:
                return frame.device(name)
        return None

    def of_source(self, key: str, name: str) -> DeviceTotals | None:
        """Totals of one device as one source sees them; None if it has not."""
        frame = self._frames.get(key)
        return frame.device(name) if frame is not None and name in frame.rows else None

    def result(self, key: str) -> SourceResult | None:
        """How one source is doing; None where there is no such source."""
        frame = self._frames.get(key)
        return frame.result if frame is not None else None

    def devices(self) -> tuple[tuple[int, str], ...]:
        """(namespace, name) of every device, also of those gone a short while ago."""
        return tuple((frame.netns, name) for frame in self._frames.values() for name in frame.rows)


@dataclass(frozen=True, slots=True)
class _Frame:
    """One source's part of a state: copies, from which a device is made when it is asked for."""

    netns: int
    result: SourceResult
    rows: dict[str, int]
    present: frozenset[str]
    fields: tuple[str, ...]
    totals: Values
    counts: Counts
    sums: Floats
    counted: Flags | None
    pinned: Flags | None

    def device(self, name: str) -> DeviceTotals:
        row = self.rows[name]
        values = dict(zip(self.fields, self.totals[row].tolist(), strict=True))
        counted = set(self.fields if self.counted is None else itertools.compress(self.fields, self.counted[row]))
        pinned = () if self.pinned is None else tuple(itertools.compress(self.fields, self.pinned[row]))
        return DeviceTotals(
            netns=self.netns,
            device=name,
            transmit_bytes=values.pop("tx_bytes"),
            receive_bytes=values.pop("rx_bytes"),
            counters=tuple((counter, value) for counter, value in values.items() if counter in counted),
            transmit_rate=self._histogram(row, 0),
            receive_rate=self._histogram(row, 1),
            present=name in self.present,
            bytes_counted=counted.issuperset(("tx_bytes", "rx_bytes")),
            pinned=pinned,
        )

    def _histogram(self, row: int, direction: int) -> Histogram:
        return Histogram(RATE_BOUNDS, tuple(self.counts[row, direction].tolist()), float(self.sums[row, direction]))


class _Entry:
    """One registered source, its schedule and what it gave so far."""

    def __init__(self, key: str, netns: int, source: CounterSource, period_ns: int, due_ns: int) -> None:
        self.key = key
        self.netns = netns
        self.source = source
        self.period_ns = period_ns
        self.due_ns = due_ns
        self.totals = Totals(())
        self.usual_ns = 0.0
        """Smoothed duration of a read."""
        self.consecutive_failures = 0
        self.rates = False
        self.reading = False
        self.removed = False
        self.refresh = False
        self.result = SourceResult(key, False, 0.0, "not read yet", (), 0, 0, 0, 0, 0)

    def fits(self, reading: CounterReading) -> bool:
        """Make room for a reading; False: it does not go with those before."""
        if not self.totals.fields:
            self.totals = totals_for(reading)
        return self.totals.widen(reading.fields)

    def schedule(self, started_ns: int, ended_ns: int) -> tuple[int, int]:
        """Set the next beat; returns how many beats were (missed, spared)."""
        missed = max(0, started_ns - self.due_ns) // self.period_ns
        beat_ns = self.due_ns + missed * self.period_ns
        pause_ns = 0
        if self.consecutive_failures:
            pause_ns = min(self.period_ns << min(self.consecutive_failures, 20), _LONGEST_PAUSE_NS)
        elif self.usual_ns * _THREAD_SHARE > self.period_ns:
            pause_ns = int(self.usual_ns * _THREAD_SHARE)
        steps = max(1, -(-pause_ns // self.period_ns))
        self.due_ns = beat_ns + steps * self.period_ns
        if self.due_ns <= ended_ns:  # one long read: the beats that it covered are gone
            late = (ended_ns - self.due_ns) // self.period_ns + 1
            self.due_ns += late * self.period_ns
            missed += late
        return missed, steps - 1

    def frame(self) -> _Frame:
        totals = self.totals
        return _Frame(
            netns=self.netns,
            result=self.result,
            rows=totals.rows,  # replaced, never changed
            present=frozenset(totals.names) if self.result.success else frozenset(),
            fields=totals.fields,
            totals=totals.totals.copy(),
            counts=totals.counts.copy(),
            sums=totals.sums.copy(),
            counted=None if totals.counted is None else totals.counted.copy(),
            pinned=None if totals.pinned is None else totals.pinned.copy(),
        )


class Sampler:
    """Reads counter sources in a thread of its own; every method may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def add(self, key: str, netns: int, source: CounterSource, period_seconds: float = DEFAULT_PERIOD_SECONDS) -> None:
        """Read `source` from now on; the sampler closes it when it is removed.

        `key` names it in results; `netns` is the namespace that its device names belong to.

        Raises:
            ValueError: the key is taken, or the period is not between 1 ms and 10 s.
        """
        if not MINIMUM_PERIOD_SECONDS <= period_seconds <= MAXIMUM_PERIOD_SECONDS:
            raise ValueError(f"sampling period {period_seconds} s: choose between 0.001 and 10 s")
        with self._lock:
            if key in self._entries:
                raise ValueError(f"a counter source named {key!r} is registered already")
            due_ns = self._clock.monotonic_ns()
            self._entries[key] = _Entry(key, netns, source, round(period_seconds * 1e9), due_ns)
        self._wake.set()

    def remove(self, key: str) -> None:
        """Stop reading a source, close it and forget its devices; unknown keys are ignored."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return
            entry.removed = True
            if entry.reading:
                return  # the thread that reads it closes it
        entry.source.close()

    def refresh(self, key: str) -> None:
        """Let a source learn its device names again at the next read; unknown keys are ignored."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                entry.refresh = True

    def start(self) -> None:
        """Start the thread; call once."""
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, if it runs, and close every source."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for key in list(self._entries):
            self.remove(key)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def tick(self, now_ns: int) -> int | None:
        """Read every source that is due; returns when the next one is, in monotonic nanoseconds, None without any."""
        with self._lock:
            due = [entry for entry in self._entries.values() if entry.due_ns <= now_ns]
        for entry in due:
            self._read(entry)
        with self._lock:
            return min((entry.due_ns for entry in self._entries.values()), default=None)

    def state(self) -> SamplerState:
        """Everything known now."""
        with self._lock:
            return SamplerState([entry.frame() for entry in self._entries.values()])

    def _read(self, entry: _Entry) -> None:
        with self._lock:
            if entry.removed:
                return
            entry.reading = True
            refresh, entry.refresh = entry.refresh, False
        reading: CounterReading | None = None
        error = ""
        started_ns = self._clock.monotonic_ns()
        try:
            if refresh or entry.consecutive_failures:
                entry.source.refresh()
            reading = entry.source.read()
        except (OSError, ValueError) as failure:
            error = str(failure) or type(failure).__name__
        ended_ns = self._clock.monotonic_ns()
        with self._lock:
            entry.reading = False
            if reading is not None and not entry.fits(reading):
                reading = None
                error = "the source counts other things than before"
            self._apply(entry, reading, error, started_ns, ended_ns)
            removed = entry.removed
        if removed:
            entry.source.close()

    def _apply(self, entry: _Entry, reading: CounterReading | None, error: str, started_ns: int, ended_ns: int) -> None:
        duration_ns = ended_ns - started_ns
        if reading is not None:
            entry.totals.add(reading, rates=entry.rates)
            entry.usual_ns += (duration_ns - entry.usual_ns) / 8
            entry.consecutive_failures = 0
        else:
            entry.consecutive_failures += 1
        missed, spared = entry.schedule(started_ns, ended_ns)
        entry.rates = reading is not None
        before = entry.result
        entry.result = SourceResult(
            key=entry.key,
            success=reading is not None,
            duration_seconds=duration_ns / 1e9,
            error=error,
            failed_devices=() if reading is None else reading.failed,
            reads=before.reads + 1,
            failures=before.failures + (reading is None),
            ticks_missed=before.ticks_missed + missed,
            ticks_spared=before.ticks_spared + spared,
            resets=entry.totals.resets,
        )

    def _run(self) -> None:
        _sharpen_timers()
        while not self._stopping:
            self._wake.clear()
            next_ns = self.tick(self._clock.monotonic_ns())
            if self._stopping:
                return
            timeout = None if next_ns is None else max(0.0, (next_ns - self._clock.monotonic_ns()) / 1e9)
            self._wake.wait(timeout)


def _sharpen_timers() -> None:
    """Let this thread wake within a microsecond of its time; the kernel's usual slack is 50 µs."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS), 0, 0, 0)
