"""Reads counters at a steady beat and keeps what a scrape every few seconds would lose.

One `Sampler` reads every registered `CounterSource` at that source's own period, turns readings into totals that
never fall, and sorts the rate over each interval into a histogram: a burst of 20 ms shows in it, while the totals
between two scrapes only show the average.

The rules:

* Totals never fall, and rates use the measured time between two reads, never the period: see agent/totals.py.
* A beat that was missed is counted, not made up for; the schedule does not drift.
* Where a source can do so, answers are only taken at the beat, and understood many at a time: that is most of the work,
  and most of that is the same for one answer and for fifty.  Whoever asks for the state gets all that was answered.
* Such sources are asked by a thread that needs no interpreter (probes/beats.py), whatever else computes; the thread
  here comes for the answers.  Whatever is not as usual, it looks at by itself.
* A source that fails shows in its own result, is tried again after a growing pause, and comes back by itself.  A
  source whose reads take long is read less often: it never gets more than a third of the time.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Final

from agent.sampler_state import Frame, SamplerState, SourceResult
from agent.shaped_totals import totals_for
from agent.totals import Totals
from probes import beats
from probes.beats import Answer, Asked, BeatThread
from probes.clock import Clock
from probes.netdev.counters import (
    CounterBlock,
    CounterReading,
    CounterSource,
    DeferringSource,
    DeviceFailure,
)

_log = logging.getLogger("railscope.sampling")

MINIMUM_PERIOD_SECONDS: Final = 0.001
MAXIMUM_PERIOD_SECONDS: Final = 10.0
DEFAULT_PERIOD_SECONDS: Final = 0.1

_OTHER_THINGS: Final = "the source counts other things than before"
_LONGEST_PAUSE_NS: Final = 30_000_000_000
_THREAD_SHARE: Final = 3
"""A source is read at most once in this many times its usual duration."""
_MOST_WAITING: Final = 64
"""Answers of one source that are not understood yet: a few hundred kilobytes."""
_LONGEST_WAIT_NS: Final = 1_000_000_000
_MOST_HEARD: Final = 256
"""Answers of another thread that are understood at once: each hearing has a price of its own."""
_SLOTS_PER_HEARING: Final = 3
"""Room for answers while the interpreter is busy with something else, in times of what is usually heard at once."""
_ASKED_PATIENCE_NS: Final = 10_000_000
_STATE_PATIENCE_SECONDS: Final = 0.01
"""A source may hang while somebody asks for the state, who then gets what was known before."""
_STOP_PATIENCE_SECONDS: Final = 1.0
"""Likewise where the agent ends, which a device must not keep from ending."""
_PR_SET_TIMERSLACK: Final = 29
_TIMER_SLACK_NS: Final = 1_000


class _Entry:
    """One registered source, its schedule and what it gave so far."""

    def __init__(self, key: str, netns: int, source: CounterSource, period_ns: int, due_ns: int) -> None:
        self.key = key
        self.netns = netns
        self.source = source
        self.deferring = source if isinstance(source, DeferringSource) else None
        self.period_ns = period_ns
        self.due_ns = due_ns
        self.use = threading.Lock()
        """Held by whoever uses the source."""
        self.waiting: list[Answer] = []
        """Not understood yet; guarded by `use`."""
        self.most_waiting = max(1, min(_MOST_WAITING, _LONGEST_WAIT_NS // period_ns))
        self.most_heard = max(1, min(_MOST_HEARD, _LONGEST_WAIT_NS // period_ns))
        self.asked: Asked | None = None
        """Where another thread asks: from then on `due_ns` is when its answers are heard; guarded by `use`."""
        self.next_try = 0
        """Reads after which to try it."""
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
    def may_be_asked(self) -> bool:
        """Whether another thread may ask from now on."""
        usual = self.success and not self.refresh and not self.removed
        return usual and self.deferring is not None and self.most_heard > 1 and self.reads >= self.next_try

    def succeed(self, failed_devices: tuple[DeviceFailure, ...]) -> None:
        self.success, self.error, self.failed_devices = True, "", failed_devices
        self.consecutive_failures = 0

    def fail(self, error: str, reads: int = 1) -> None:
        """These reads failed; the next one begins anew, as rates over a gap say nothing."""
        self.success, self.error, self.failed_devices = False, error, ()
        self.failures += reads
        self.consecutive_failures += 1
        self.rates = False

    def take(self, reading: CounterReading) -> str:
        """Take in a reading; returns why it does not go with those before, empty: it does."""
        if not self.totals.fields:
            self.totals = totals_for(reading)
        if not self.totals.widen(reading.fields):
            return _OTHER_THINGS
        self.totals.add(reading, rates=self.rates)
        self.rates = True
        self.succeed(reading.failed)
        return ""

    def take_answer(self) -> bool:
        """Ask a source whose answer may be understood later; False: it must be read, or `refusal` says why not."""
        self.refusal = ""
        if self.deferring is None or self.refresh or self.removed or not self.success:
            return False
        try:
            answer = self.deferring.take()
        except (OSError, ValueError) as failure:
            self.refusal = _words(failure)
            return False
        if answer is None:
            return False
        self.waiting.append(answer)
        self.schedule(answer.before_ns, answer.after_ns)
        return True

    def hear(self) -> bool:
        """Take over what another thread was answered; returns whether it goes on asking."""
        assert self.asked is not None
        heard = self.asked.hear()
        self.waiting += heard.answers
        if heard.answers:
            self.duration_ns = heard.answers[-1].after_ns - heard.answers[-1].before_ns
        self.reads += len(heard.answers)
        self.ticks_missed += heard.missed
        self.ticks_spared += heard.spared
        self.due_ns = heard.due_ns
        return not heard.ended

    def schedule(self, started_ns: int, ended_ns: int) -> None:
        """After a read: set the next beat, and count those that were missed or are spared."""
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
            pause_ns = min(period_ns << min(self.consecutive_failures, 20), _LONGEST_PAUSE_NS)
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


OnReading = Callable[[int, CounterReading | CounterBlock], None]
"""Takes a namespace and what was read of its devices; it holds up the sampler, and must be quick."""


class Sampler:
    """Reads counter sources in a thread of its own; every method may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self.on_reading: OnReading | None = None
        """Shown every reading as it is understood, with the namespace of its devices; None: nobody asks."""
        self._listed: tuple[_Entry, ...] = ()
        """The same for `tick`: replaced, never changed."""
        self._bell = threading.Lock()
        """Held but for the moment between being rung and being heard: cheaper to wait for than an event."""
        self._bell.acquire()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._beats: BeatThread | None = None
        """Started with the first source that it can ask for."""

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
            self._listed = tuple(self._entries.values())
        self._ring()

    def remove(self, key: str) -> None:
        """Stop reading a source, close it and forget its devices; unknown keys are ignored."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return
            entry.removed = True
            self._listed = tuple(self._entries.values())
        _close(entry)

    def refresh(self, key: str) -> None:
        """Let a source learn its device names again at the next read; unknown keys are ignored."""
        with self._lock:
            if (entry := self._entries.get(key)) is None:
                return
            entry.refresh = True
            if entry.asked is not None:
                entry.due_ns = self._clock.monotonic_ns()
        self._ring()

    def start(self) -> None:
        """Start the thread; call once."""
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, if it runs, and close every source; one that hangs is left to itself."""
        self._stopping = True
        self._ring()
        if self._thread is not None:
            self._thread.join(_STOP_PATIENCE_SECONDS)
            if self._thread.is_alive():
                hanging = sorted(key for key, entry in self._entries.items() if entry.use.locked())
                _log.warning("%s does not answer: the agent ends without it", ", ".join(hanging) or "a source")
            self._thread = None
        for key in list(self._entries):
            self.remove(key)
        if self._beats is not None and not self._beats.stop(_STOP_PATIENCE_SECONDS):
            _log.warning("a counter does not answer: the agent ends without it")

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def tick(self, now_ns: int) -> int | None:
        """Read every source that is due; returns when the next one is, in monotonic nanoseconds, None without any."""
        next_ns: int | None = None
        for entry in self._listed:
            due_ns = entry.due_ns
            if due_ns <= now_ns:
                self._read(entry)
                due_ns = entry.due_ns
            if (next_ns is None or due_ns < next_ns) and not entry.removed:
                next_ns = due_ns
        return next_ns

    def state(self) -> SamplerState:
        """Everything known now."""
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            if (entry.waiting or entry.asked) and entry.use.acquire(timeout=_STATE_PATIENCE_SECONDS):
                try:
                    if not entry.removed:
                        self._hear(entry, look=False)
                        self._understand(entry)
                finally:
                    entry.use.release()
                if entry.removed:
                    _close(entry)
        with self._lock:
            return SamplerState([entry.frame() for entry in self._entries.values()])

    def _read(self, entry: _Entry) -> None:
        with entry.use:
            if entry.asked is not None:
                self._hear(entry)
            elif not entry.removed:
                # Without another thread, the usual beat: an answer is taken, and nothing else happens.
                if not entry.take_answer():
                    self._read_now(entry)
                if len(entry.waiting) >= entry.most_waiting:
                    self._understand(entry)
                if entry.may_be_asked and self._thread is not None:
                    self._let_be_asked(entry)
        if entry.removed:
            _close(entry)

    def _let_be_asked(self, entry: _Entry) -> None:
        """Hand the asking over to the other thread, where there is a question; the caller holds `entry.use`."""
        entry.next_try = entry.reads + entry.most_waiting // 8
        try:
            question = entry.deferring.question() if entry.deferring is not None else None
            if question is None:
                return
            if self._beats is None:
                self._beats = beats.start()
                if self._beats is None:
                    return
            self._understand(entry)  # before what comes then
            slots = _SLOTS_PER_HEARING * entry.most_heard
            entry.asked = self._beats.ask(question, entry.period_ns, entry.due_ns, slots)
        except (OSError, ValueError) as failure:
            _log.debug("%s is not asked by another thread: %s", entry.key, failure)
        else:
            entry.due_ns += entry.most_heard * entry.period_ns

    def _hear(self, entry: _Entry, *, look: bool = True) -> None:
        """Take in what another thread was answered; the caller holds `entry.use`.

        `look`: and see whether it still asks the right question, which whoever only wants to know need not do.
        """
        if entry.asked is None or not (look or entry.asked.waits()):
            return
        heard_next_ns = entry.due_ns
        goes_on = entry.hear()
        self._understand(entry)
        entry.asked.let_go()
        usual = goes_on and entry.success and not entry.removed and not entry.refresh
        if usual and not look:
            entry.due_ns = heard_next_ns
        elif usual and _holds(entry):
            entry.due_ns += entry.most_heard * entry.period_ns
        else:
            _end(entry)
        if entry.refresh or entry.asked is None:
            entry.due_ns = min(entry.due_ns, self._clock.monotonic_ns() + entry.period_ns)
            self._ring()

    def _read_now(self, entry: _Entry) -> None:
        """Read what cannot be understood later, or failed lately; the caller holds `entry.use`."""
        self._understand(entry)  # what was answered so far is about the devices known so far
        reading: CounterReading | None = None
        error = entry.refusal
        started_ns = self._clock.monotonic_ns()
        if not error:
            try:
                if entry.refresh or entry.consecutive_failures:
                    entry.refresh = False
                    entry.source.refresh()
                reading = entry.source.read()
            except (OSError, ValueError) as failure:
                error = _words(failure)
        ended_ns = self._clock.monotonic_ns()
        with self._lock:
            if reading is not None:
                error = entry.take(reading)
                if self.on_reading is not None and not error:
                    self.on_reading(entry.netns, reading)
            if error:
                entry.fail(error)
            entry.schedule(started_ns, ended_ns)

    def _understand(self, entry: _Entry) -> None:
        """Take in what was answered so far; the caller holds `entry.use`."""
        answers, entry.waiting = entry.waiting, []
        if entry.deferring is None or not answers:
            return
        try:
            blocks = entry.deferring.understand(answers)
        except (OSError, ValueError) as failure:
            with self._lock:
                entry.fail(_words(failure), len(answers))
            return
        with self._lock:
            for block in blocks:
                if not entry.totals.widen(block.fields):
                    entry.fail(_OTHER_THINGS, len(block.times_ns))
                    return
                entry.totals.add_block(block, rates=entry.rates)
                if self.on_reading is not None:
                    self.on_reading(entry.netns, block)
                entry.rates = True

    def _run(self) -> None:
        _sharpen_timers()
        clock = self._clock
        while not self._stopping:
            next_ns = self.tick(clock.monotonic_ns())
            if next_ns is None:
                self._bell.acquire()
            elif (pause_ns := next_ns - clock.monotonic_ns()) > 0:
                self._bell.acquire(timeout=pause_ns / 1e9)

    def _ring(self) -> None:
        """Let the thread look at what there is to do."""
        with self._lock:
            if self._bell.locked():
                self._bell.release()


def _holds(entry: _Entry) -> bool:
    """Whether what another thread asks still is what the source would have asked."""
    assert entry.asked is not None
    assert entry.deferring is not None
    if not entry.asked.pause(_ASKED_PATIENCE_NS):
        entry.asked.resume()  # as soon as it is answered
        return True
    try:
        question = entry.deferring.question()
    except (OSError, ValueError):
        return False
    if question is not entry.asked.question:
        return False
    entry.asked.resume()
    return True


def _end(entry: _Entry) -> None:
    if entry.asked is not None:
        entry.asked.end(_ASKED_PATIENCE_NS)
        entry.asked = None


def _close(entry: _Entry) -> None:
    """Close the source of an entry that was removed, unless somebody uses it: they do it then."""
    if entry.use.acquire(blocking=False):
        try:
            if not entry.closed:
                entry.closed = True
                _end(entry)
                entry.source.close()
        finally:
            entry.use.release()


def _words(failure: Exception) -> str:
    return str(failure) or type(failure).__name__


def _sharpen_timers() -> None:
    """Let this thread wake within a microsecond of its time; the kernel's usual slack is 50 µs."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS), 0, 0, 0)
