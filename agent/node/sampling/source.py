"""One counter source of a sampler: its schedule, its totals, and raw readings that are not parsed yet."""

from __future__ import annotations

import threading
from typing import Final

from railscope.agent.node.sampling.shaped_totals import totals_for
from railscope.agent.node.sampling.state import Frame, SourceResult
from railscope.agent.node.sampling.totals import Totals
from railscope.probes.native.beats import Answer, Asked
from railscope.probes.netdev.counters import CounterReading, CounterSource, DeferringSource, DeviceFailure

OTHER_THINGS: Final = "the source counts other things than before"
ASKED_PATIENCE_NS: Final = 10_000_000
"""The longest wait for a thread that asks."""
_LONGEST_PAUSE_NS: Final = 30_000_000_000
_THREAD_SHARE: Final = 3
"""A source is read at most once in this many times its usual duration."""
_MOST_WAITING: Final = 64
"""Answers of one source that are not understood yet: a few hundred kilobytes."""
_LONGEST_WAIT_NS: Final = 1_000_000_000
_MOST_HEARD: Final = 256
"""Answers of another thread that are understood at once: each hearing has a price of its own."""


class SampledSource:
    """One registered source, its schedule and what it gave so far."""

    def __init__(self, key: str, netns: int, source: CounterSource, period_ns: int, due_ns: int) -> None:
        self.key = key
        self.netns = netns
        self.source = source
        self.deferring = source if isinstance(source, DeferringSource) else None
        self.period_ns = period_ns
        self.due_ns = due_ns
        self.use = threading.Lock()
        """Held while the source is used."""
        self.waiting: list[Answer] = []
        """Not understood yet; guarded by `use`."""
        self.most_waiting = max(1, min(_MOST_WAITING, _LONGEST_WAIT_NS // period_ns))
        self.most_heard = max(1, min(_MOST_HEARD, _LONGEST_WAIT_NS // period_ns))
        self.asked: Asked | None = None
        """Where another thread asks: from then on `due_ns` is when its answers are heard; guarded by `use`."""
        self.look_ns = 0
        """By when it is seen, then, whether that thread is to go on."""
        self.next_try = 0
        """Reads after which to try it."""
        self.hanging = False
        """Whether another thread waits for an answer for long already."""
        self.totals = Totals(())
        self.usual_ns = 0.0
        """Smoothed duration of a read."""
        self.consecutive_failures = 0
        self.rates = False
        self.removed = False
        self.closed = False
        self.refresh = False
        self.success = False
        self.refusal = ""
        """Why no answer could be taken just now."""
        self.duration_ns = 0
        self.error = "not read yet"
        self.failed_devices: tuple[DeviceFailure, ...] = ()
        self.reads = self.failures = self.ticks_missed = self.ticks_spared = 0
        self.aligned = False
        """Whether beats are at multiples of the period."""
        self.wanted_ns = 0
        """When a reading out of turn was last requested."""
        self.begun_ns = 0
        """When the last read that has ended began."""

    @property
    def result(self) -> SourceResult:
        return SourceResult(
            key=self.key,
            success=self.success,
            duration_seconds=self.duration_ns / 1e9,
            error=self.error,
            failed_devices=self.failed_devices,
            reads=self.reads,
            failures=self.failures,
            ticks_missed=self.ticks_missed,
            ticks_spared=self.ticks_spared,
            resets=self.totals.resets,
        )

    @property
    def can_be_shared(self) -> bool:
        """Whether another thread may ask from now on."""
        usual = self.success and not self.refresh and not self.removed
        return usual and self.deferring is not None and self.most_heard > 1 and self.reads >= self.next_try

    @property
    def hearing_ns(self) -> int:
        """How long another thread's answers may wait to be read."""
        return self.most_heard * self.period_ns

    def succeed(self, failed_devices: tuple[DeviceFailure, ...]) -> None:
        self.success, self.error, self.failed_devices = True, "", failed_devices
        self.consecutive_failures = 0

    def fail(self, error: str, reads: int = 1) -> None:
        """These reads failed; the next one begins anew, as rates over a gap say nothing."""
        self.success, self.error, self.failed_devices = False, error, ()
        self.failures += reads
        self.consecutive_failures += 1
        self.rates = False

    def add_reading(self, reading: CounterReading) -> str:
        """Add a reading; returns why it does not fit those before, empty: it does."""
        if not self.totals.fields:
            self.totals = totals_for(reading)
        if not self.totals.add_columns(reading.fields):
            return OTHER_THINGS
        self.totals.add(reading, rates=self.rates)
        self.rates = True
        self.succeed(reading.failed)
        return ""

    def read_raw(self) -> bool:
        """Read a source's raw answer, to be parsed later; False: it must be read whole, or `refusal` says why not."""
        self.refusal = ""
        if self.deferring is None or self.refresh or self.removed or not self.success:
            return False
        try:
            answer = self.deferring.read_raw()
        except (OSError, ValueError) as failure:
            self.refusal = describe_failure(failure)
            return False
        if answer is None:
            return False
        self.waiting.append(answer)
        self.schedule(answer.before_ns, answer.after_ns)
        return True

    def read_answers(self) -> bool:
        """Read the answers that another thread received; returns whether that thread continues."""
        assert self.asked is not None
        heard = self.asked.read_answers()
        self.waiting += heard.answers
        if heard.answers:
            self.duration_ns = heard.answers[-1].after_ns - heard.answers[-1].before_ns
        self.reads += len(heard.answers)
        self.ticks_missed += heard.missed
        self.ticks_spared += heard.spared
        self.due_ns = heard.due_ns
        return not heard.ended

    def question_is_current(self) -> bool:
        """Whether what another thread asks, and is to ask no more for now, is what the source would have asked."""
        assert self.asked is not None
        assert self.deferring is not None
        try:
            return self.deferring.question() is self.asked.question
        except (OSError, ValueError):
            return False

    def end_asking(self) -> None:
        """Let another thread ask no more."""
        if self.asked is not None:
            self.asked.cancel(ASKED_PATIENCE_NS)
            self.asked = None

    def close(self) -> None:
        """Close the source, unless it is in use: its user closes it then."""
        if self.use.acquire(blocking=False):
            try:
                if not self.closed:
                    self.closed = True
                    self.end_asking()
                    self.source.close()
            finally:
                self.use.release()

    def schedule(self, started_ns: int, ended_ns: int) -> None:
        """After a read: set the next beat, and count those that were missed or are spared.

        After the first read, and one out of turn, beats are at multiples of the period, so that one waking serves the
        sources of all network namespaces: to wake costs more than to read.
        """
        self.begun_ns = started_ns
        self._set_next_beat(started_ns, ended_ns)
        if self.is_requested:  # since this read began
            self.due_ns, self.aligned = ended_ns, False

    def _set_next_beat(self, started_ns: int, ended_ns: int) -> None:
        if not self.aligned:
            self.aligned = True
            self.due_ns = (self.due_ns + self.period_ns // 2) // self.period_ns * self.period_ns
        self.reads += 1
        duration_ns = self.duration_ns = ended_ns - started_ns
        if not self.consecutive_failures:
            self.usual_ns += (duration_ns - self.usual_ns) / 8
        period_ns = self.period_ns
        next_ns = self.due_ns + period_ns
        if ended_ns < next_ns and self.usual_ns * _THREAD_SHARE <= period_ns and not self.consecutive_failures:
            self.due_ns = next_ns  # as a rule
            return
        missed = max(0, started_ns - self.due_ns) // period_ns
        beat_ns = self.due_ns + missed * period_ns
        pause_ns = 0
        if self.consecutive_failures:
            pause_ns = self._failure_pause_ns
        elif self.usual_ns * _THREAD_SHARE > period_ns:
            pause_ns = int(self.usual_ns * _THREAD_SHARE)
        steps = max(1, -(-pause_ns // period_ns))
        self.due_ns = beat_ns + steps * period_ns
        if self.due_ns <= ended_ns:  # one long read: the beats that it covered are gone
            late = (ended_ns - self.due_ns) // period_ns + 1
            self.due_ns += late * period_ns
            missed += late
        self.ticks_missed += missed
        self.ticks_spared += steps - 1

    def request_read(self, now_ns: int) -> bool:
        """Let a read that begins from now on come at once; False: it failed lately, and keeps its pause."""
        if self.consecutive_failures:
            return False
        self.wanted_ns = self.due_ns = now_ns
        self.aligned = False
        return True

    @property
    def is_requested(self) -> bool:
        """Whether no read has ended yet that began after the last request."""
        return self.wanted_ns > self.begun_ns

    def set_period(self, period_ns: int, now_ns: int) -> None:
        """Read it at this period from its next read on; a pause after failures is no longer than it would be then."""
        self.period_ns = period_ns
        self.aligned = False
        if self.consecutive_failures:
            self.due_ns = min(self.due_ns, now_ns + self._failure_pause_ns)

    @property
    def _failure_pause_ns(self) -> int:
        return min(self.period_ns << min(self.consecutive_failures, 20), _LONGEST_PAUSE_NS)

    def frame(self) -> Frame:
        totals = self.totals
        return Frame(
            netns=self.netns,
            result=self.result,
            rows=totals.rows,  # replaced, never changed
            present=frozenset(totals.names) if self.success else frozenset(),
            fields=totals.fields,
            totals=totals.totals.copy(),
            counts=totals.counts.copy(),
            sums=totals.sums.copy(),
            counted=None if totals.counted is None else totals.counted.copy(),
            pinned=None if totals.pinned is None else totals.pinned.copy(),
        )


def describe_failure(failure: Exception) -> str:
    """The message of a counter source's failure, or its class's name."""
    return str(failure) or type(failure).__name__
