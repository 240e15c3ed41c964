"""Reads counters periodically and keeps the peaks that a scrape every few seconds would miss.

One `Sampler` reads every registered `CounterSource` at that source's own period, turns readings into totals that
never fall, and sorts the rate over each interval into a histogram: a burst of 20 ms shows in it, while the totals
between two scrapes only show the average.

The rules:

* Totals never fall, and rates use the measured time between two reads, never the period: see
  agent/node/sampling/totals.py.
* A beat that was missed is counted, not made up for; the schedule does not drift.
* Where a source can do so, answers are only taken at the beat, and understood many at a time: that is most of the work,
  and most of that is the same for one answer and for fifty.  Whoever asks for the state gets all that was answered.
* Such sources are asked by a thread that needs no interpreter (probes/native/beats.py), whatever else computes; the
  thread here comes for the answers.  Whatever is not as usual, it looks at by itself.
* A source that fails shows in its own result, is tried again after a growing pause, and comes back by itself.  A
  source whose reads take long is read less often: it never gets more than a third of the time.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Collection
from typing import Final

from railscope.agent.node.sampling.source import ASKED_PATIENCE_NS, OTHER_THINGS, SampledSource, describe_failure
from railscope.agent.node.sampling.state import SamplerState
from railscope.probes.clock import Clock
from railscope.probes.native import beats
from railscope.probes.native.beats import BeatThread
from railscope.probes.netdev.counters import CounterBlock, CounterReading, CounterSource

_log = logging.getLogger("railscope.sampling")

MINIMUM_PERIOD_SECONDS: Final = 0.001
MAXIMUM_PERIOD_SECONDS: Final = 10.0
DEFAULT_PERIOD_SECONDS: Final = 0.1

_HANGING_NS: Final = 1_000_000_000
"""A source that has not answered for so long is said not to."""
_READS_BETWEEN_TRIES: Final = 64
"""To find out that there is no question may cost as much as a read."""
_SLOTS_PER_HEARING: Final = 3
"""Room for answers while the interpreter is busy with something else, in times of what is usually heard at once."""
_HEARINGS_PUT_OFF: Final = 2
"""After a caller of `state` has read the answers, they are not read again for so long."""
_HEARINGS_PER_LOOK: Final = 3
"""But whether another thread is to go on asking is seen no later than this."""
_STATE_PATIENCE_SECONDS: Final = 0.01
"""A source may hang while `state` is called, which then returns the previous state."""
_READ_POLL_SECONDS: Final = 0.001
_STOP_PATIENCE_SECONDS: Final = 1.0
"""Likewise where the agent ends, which a device must not keep from ending."""
_PR_SET_TIMERSLACK: Final = 29
_TIMER_SLACK_NS: Final = 1_000


OnReading = Callable[[int, CounterReading | CounterBlock], None]
"""Takes a namespace and what was read of its devices; it holds up the sampler, and must be quick."""


class Sampler:
    """Reads counter sources in a thread of its own; every method may be called from any thread."""

    def __init__(self, clock: Clock, on_reading: OnReading | None = None) -> None:
        """`on_reading` is called with every reading once it is parsed."""
        self._clock = clock
        self._on_reading = on_reading
        self._lock = threading.Lock()
        self._entries: dict[str, SampledSource] = {}
        self._listed: tuple[SampledSource, ...] = ()
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
                raise ValueError(f"a counter source named {key!r} is already registered")
            due_ns = self._clock.monotonic_ns()
            self._entries[key] = SampledSource(key, netns, source, round(period_seconds * 1e9), due_ns)
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
        entry.close()

    def refresh(self, key: str) -> None:
        """Let a source learn its device names again at the next read; unknown keys are ignored."""
        with self._lock:
            if (entry := self._entries.get(key)) is None:
                return
            entry.refresh = True
            if entry.asked is not None:
                entry.due_ns = self._clock.monotonic_ns()
        self._ring()

    def set_period(self, key: str, period_seconds: float) -> None:
        """Read a source more or less often than so far, from its next read on; unknown keys are ignored.

        Raises:
            ValueError: the source's answers are understood many at a time, so that their number goes with the period.
        """
        with self._lock:
            if (entry := self._entries.get(key)) is None:
                return
            if entry.deferring is not None:
                raise ValueError(f"the period of {key} is set for good")
            entry.set_period(round(period_seconds * 1e9), self._clock.monotonic_ns())

    def read_soon(self, keys: Collection[str], patience_seconds: float = 0.0) -> None:
        """Read these sources now instead of when they are due, and wait for that, no longer than told.

        Unknown keys are ignored, and a source that failed keeps its pause.
        """
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            awaited = [self._entries[key] for key in keys if key in self._entries]
            awaited = [entry for entry in awaited if entry.request_read(now_ns)]
        self._ring()
        deadline_ns = now_ns + round(patience_seconds * 1e9)
        while self._clock.monotonic_ns() < deadline_ns and any(entry.is_requested for entry in awaited):
            self._clock.sleep(_READ_POLL_SECONDS)

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
                _log.warning(
                    "%s does not answer: the agent exits without waiting for it", ", ".join(hanging) or "a source"
                )
            self._thread = None
        for key in list(self._entries):
            self.remove(key)
        if self._beats is not None and not self._beats.stop(_STOP_PATIENCE_SECONDS):
            _log.warning("a counter does not answer: the agent exits without waiting for it")

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def read_due(self, now_ns: int) -> int | None:
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
                        self._read_answers(entry, look=False)
                        self._understand(entry)
                finally:
                    entry.use.release()
                if entry.removed:
                    entry.close()
        with self._lock:
            return SamplerState([entry.frame() for entry in self._entries.values()])

    def _read(self, entry: SampledSource) -> None:
        with entry.use:
            if entry.asked is not None:
                self._read_answers(entry)
            elif not entry.removed:
                # Without another thread, the usual beat: an answer is taken, and nothing else happens.
                if not entry.read_raw():
                    self._read_now(entry)
                if len(entry.waiting) >= entry.most_waiting:
                    self._understand(entry)
                if entry.can_be_shared and self._thread is not None:
                    self._share_question(entry)
        if entry.removed:
            entry.close()

    def _share_question(self, entry: SampledSource) -> None:
        """Hand the asking over to the other thread, where there is a question; the caller holds `entry.use`."""
        entry.next_try = entry.reads + _READS_BETWEEN_TRIES
        if self._beats is None:
            self._beats = beats.start_thread()
        if self._beats is None or self._beats.hangs(self._clock.monotonic_ns(), ASKED_PATIENCE_NS):
            return
        try:
            question = entry.deferring.question() if entry.deferring is not None else None
            if question is None:
                return
            self._understand(entry)  # before what comes then
            slots = _SLOTS_PER_HEARING * entry.most_heard
            entry.asked = self._beats.ask(question, entry.period_ns, entry.due_ns, slots)
            entry.look_ns = entry.due_ns + _HEARINGS_PER_LOOK * entry.hearing_ns
        except (OSError, ValueError) as failure:
            _log.debug("%s is not asked by another thread: %s", entry.key, failure)
        else:
            entry.due_ns += entry.hearing_ns
            if entry.refresh:
                entry.due_ns = self._clock.monotonic_ns()

    def _read_answers(self, entry: SampledSource, *, look: bool = True) -> None:
        """Read the answers that another thread received; the caller holds `entry.use`.

        `look`: and decide whether it continues, which a caller that only reads need not do.
        """
        if entry.asked is None or not (look or entry.asked.has_answers()):
            return
        hears_ns = entry.due_ns
        goes_on = entry.read_answers()
        if entry.waiting and entry.hanging:
            entry.hanging = False
            with self._lock:
                entry.succeed(())
        self._understand(entry)
        entry.asked.release()
        usual = goes_on and (entry.success or entry.hanging) and not entry.removed
        if usual and not look:
            # A source that hangs gives nothing to hear: the sampler's thread comes as before, and says so.
            put_off_ns = self._clock.monotonic_ns() + _HEARINGS_PUT_OFF * entry.hearing_ns
            entry.due_ns = hears_ns if entry.refresh else min(put_off_ns, entry.look_ns)
        elif usual and self._goes_on(entry):
            # Not from the next beat: where something hangs, that is long past.
            now_ns = self._clock.monotonic_ns()
            entry.look_ns = now_ns + _HEARINGS_PER_LOOK * entry.hearing_ns
            entry.due_ns = max(entry.due_ns, now_ns) + entry.hearing_ns
            if entry.refresh and not entry.hanging:
                entry.due_ns = now_ns
        else:
            entry.end_asking()
            entry.due_ns = min(entry.due_ns, self._clock.monotonic_ns() + entry.period_ns)
            self._ring()

    def _goes_on(self, entry: SampledSource) -> bool:
        """Whether the other thread is to go on asking."""
        assert entry.asked is not None
        assert self._beats is not None
        now_ns = self._clock.monotonic_ns()
        if not entry.asked.pause(ASKED_PATIENCE_NS):
            entry.asked.resume()  # as soon as it is answered
            if not entry.hanging and self._beats.hangs(now_ns, _HANGING_NS):
                entry.hanging = True
                with self._lock:
                    entry.fail(f"no answer for {_HANGING_NS / 1e9:.0f} s")
            return True
        behind = now_ns - entry.due_ns > _HANGING_NS and self._beats.hangs(now_ns, _HANGING_NS)
        # Where another source keeps the thread waiting, this one can be read here.
        if entry.refresh or behind or not entry.question_is_current():
            return False
        entry.asked.resume()
        return True

    def _wake_ended(self) -> None:
        """Let questions that ended be due at once, to see what is the matter."""
        for entry in self._listed:
            if entry.asked is not None and entry.use.acquire(blocking=False):
                try:
                    if entry.asked is not None and entry.asked.ended():
                        entry.due_ns = self._clock.monotonic_ns()
                finally:
                    entry.use.release()

    def _read_now(self, entry: SampledSource) -> None:
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
                error = describe_failure(failure)
        ended_ns = self._clock.monotonic_ns()
        with self._lock:
            if reading is not None:
                error = entry.add_reading(reading)
                if self._on_reading is not None and not error:
                    self._on_reading(entry.netns, reading)
            if error:
                entry.fail(error)
            entry.schedule(started_ns, ended_ns)

    def _understand(self, entry: SampledSource) -> None:
        """Parse the answers so far; the caller holds `entry.use`."""
        answers, entry.waiting = entry.waiting, []
        if entry.deferring is None or not answers:
            return
        try:
            blocks = entry.deferring.parse_raw(answers)
        except (OSError, ValueError) as failure:
            with self._lock:
                entry.fail(describe_failure(failure), len(answers))
            return
        with self._lock:
            for block in blocks:
                if not entry.totals.add_columns(block.fields):
                    entry.fail(OTHER_THINGS, len(block.times_ns))
                    return
                entry.totals.add_block(block, rates=entry.rates)
                if self._on_reading is not None:
                    self._on_reading(entry.netns, block)
                entry.rates = True

    def _run(self) -> None:
        _sharpen_timers()
        clock = self._clock
        while not self._stopping:
            next_ns = self.read_due(clock.monotonic_ns())
            if self._beats is not None:
                if next_ns is None or next_ns > clock.monotonic_ns():
                    self._beats.wait(next_ns)
                    self._wake_ended()
            elif next_ns is None:
                self._bell.acquire()
            elif (pause_ns := next_ns - clock.monotonic_ns()) > 0:
                self._bell.acquire(timeout=pause_ns / 1e9)

    def _ring(self) -> None:
        """Let the thread look at what there is to do."""
        with self._lock:
            if self._bell.locked():
                self._bell.release()
            if self._beats is not None:
                self._beats.wake()


def _sharpen_timers() -> None:
    """Let this thread wake within a microsecond of its time; the kernel's usual slack is 50 µs."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS), 0, 0, 0)
