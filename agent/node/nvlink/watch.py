"""Reads GPUs and NVLinks: one thread for NVML's session and one for each GPU, so that none blocks another.

A call into NVML may hang for as long as a GPU is ill, and no one can interrupt it.  So each GPU is read in a thread of
its own, and what it found is published as immutable facts that anyone may take at any time.  A GPU whose call does not
come back is said to hang, the others go on, and it goes on too when the call comes back.

Without the driver's library or its Python bindings nothing is shown and nothing is wrong: it is logged once, and
looked for again every minute, since a driver may be installed later.

What NVML tells by itself, XIDs among it, is taken by a thread of its own each second and kept until somebody takes it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from railscope.agent.facts.hardware import GpuFacts, NodeGpus, NvlinkFacts
from railscope.agent.facts.remarks import Remark
from railscope.agent.facts.snapshot import CollectorResult
from railscope.agent.node.nvlink.gpu import WINDOW_NS, Gpu, GpuHistories, without_states
from railscope.probes.clock import Clock
from railscope.probes.nvlink.gpu_events import GpuEvent, GpuEvents
from railscope.probes.nvlink.nvml import LIBRARY, NvmlError, NvmlMissing, NvmlSession

_log = logging.getLogger("railscope.nvlink")

DEFAULT_PERIOD_SECONDS: Final = 1.0
HANG_NS: Final = 5_000_000_000
"""A call that takes longer is said to hang; a usual one takes milliseconds."""
_SHARE: Final = 3
"""A GPU is read at most once in this many times the duration of a read."""
_LONGEST_PAUSE_NS: Final = 60_000_000_000
_CLOSE_NS: Final = 1_000_000_000
_EVENT_PERIOD_NS: Final = 1_000_000_000
_MOST_EVENTS: Final = 1024
"""That nobody took yet: a GPU that fails may tell of hundreds."""


class _Repeated:
    """Does one thing again and again in a thread of its own, and knows whether it hangs."""

    def __init__(self, name: str, clock: Clock, work: Callable[[], int]) -> None:
        """`work` returns how many nanoseconds to wait."""
        self._clock = clock
        self._work = work
        self._wake = threading.Event()
        self.stopping = False
        self.turns = 0
        """Those that came to their end."""
        self.since_ns: int | None = None
        """When the call under way began; None: none is."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask for the end; does not wait."""
        self.stopping = True
        self._wake.set()

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended within this time."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def hangs_for_ns(self) -> int:
        """How long the call under way has been lasting, 0 unless that is too long."""
        since_ns = self.since_ns
        lasting_ns = 0 if since_ns is None else self._clock.monotonic_ns() - since_ns
        return lasting_ns if lasting_ns > HANG_NS else 0

    def run_once(self) -> int:
        """Do the work of this thread once, and note since when; returns how many nanoseconds to wait."""
        self.since_ns = self._clock.monotonic_ns()
        try:
            return self._work()
        finally:
            self.since_ns = None
            self.turns += 1

    def _run(self) -> None:
        while not self.stopping:
            pause_ns = self.run_once()
            self._wake.wait(pause_ns / 1e9)


class _GpuThread:
    """Reads one GPU at its period, less often while that fails or takes long."""

    def __init__(self, gpu: Gpu, index: int, clock: Clock, period_ns: int, lost: Callable[[], None]) -> None:
        self.gpu = gpu
        self.index = index
        self.collector = f"nvlink gpu{index}"
        self._clock = clock
        self._period_ns = period_ns
        self._lost = lost
        self._failures = 0
        self._remark = Remark(_log, self.collector, "is read again")
        self._result = CollectorResult(self.collector, False, 0.0)
        self._facts: tuple[GpuFacts, tuple[NvlinkFacts, ...]] = (gpu.gpu, gpu.links)
        self.repeated = _Repeated(self.collector, clock, self._read)

    def _read(self) -> int:
        started_ns = self._clock.monotonic_ns()
        error = ""
        try:
            self.gpu.read()
        except NvmlError as refusal:
            error = str(refusal)
            if refusal.session_lost:
                self._lost()
        duration_ns = self._clock.monotonic_ns() - started_ns
        if self.repeated.stopping:
            return 0
        self._failures = self._failures + 1 if error else 0
        self._remark.say(error)
        self._facts = (self.gpu.gpu, self.gpu.links)
        self._result = CollectorResult(self.collector, not error, duration_ns / 1e9)
        if error:
            return min(self._period_ns << min(self._failures, 20), _LONGEST_PAUSE_NS)
        return max(self._period_ns - duration_ns, duration_ns * (_SHARE - 1))

    def facts(self) -> tuple[GpuFacts, tuple[NvlinkFacts, ...]]:
        """As published; while its call hangs, whether links are up is not known."""
        gpu, links = self._facts
        return gpu, without_states(links) if self.repeated.hangs_for_ns() else links

    def result(self) -> CollectorResult:
        """How its last reading went; while its call hangs, for how long it does."""
        hanging_ns = self.repeated.hangs_for_ns()
        return CollectorResult(self.collector, False, hanging_ns / 1e9) if hanging_ns else self._result

    def stop(self) -> None:
        """Ask for the end; does not wait."""
        self.gpu.retired = True
        self.repeated.stop()


class _EventThread:
    """Takes what NVML tells of GPUs; registers again where a GPU was lost, less often while that fails."""

    def __init__(
        self,
        session: NvmlSession,
        gpus: range,
        clock: Clock,
        period_ns: int,
        told: Callable[[tuple[GpuEvent, ...]], None],
    ) -> None:
        self._session = session
        self._numbers = gpus
        self._clock = clock
        self._period_ns = period_ns
        self._told = told
        self._events: GpuEvents | None = None
        self._registered_ns = 0
        self._failures = 0
        self._remark = Remark(_log, "events of NVML", "are read again")
        self.repeated = _Repeated("nvlink events", clock, self._read)

    def _read(self) -> int:
        try:
            if self._events is None:
                self._registered_ns = self._clock.monotonic_ns()
                self._events = GpuEvents(self._session, self._numbers, self._clock)
            told = self._events.read()
        except NvmlError as error:
            self.give_back()
            self._failures += 1
            # Of a GPU that cannot tell nothing is missed: it is no failure.
            self._remark.say("" if error.absent else str(error))
            return min(self._period_ns << min(self._failures, 20), _LONGEST_PAUSE_NS)
        self._failures = 0
        self._remark.say("")
        if told:
            self._told(told)
        if not self._events.gpus:
            self.give_back()
            return _LONGEST_PAUSE_NS
        whole = len(self._events.gpus) == len(self._numbers)
        if not whole and self._clock.monotonic_ns() - self._registered_ns > _LONGEST_PAUSE_NS:
            self.give_back()  # one that was lost may be back
        return self._period_ns

    @property
    def gpus(self) -> tuple[int, ...]:
        events = self._events
        return events.gpus if events is not None else ()

    def give_back(self) -> None:
        """Let NVML forget the event set; only the thread itself may call this, or whoever saw its end."""
        if self._events is not None:
            self._events.close()
            self._events = None


class NvlinkWatch:
    """GPUs and NVLinks of this host; `facts` and `collectors` are safe from any thread and never wait for NVML."""

    def __init__(
        self,
        clock: Clock,
        *,
        sysfs: Path,
        window_ns: int = WINDOW_NS,
        library: str = LIBRARY,
        period_seconds: float = DEFAULT_PERIOD_SECONDS,
    ) -> None:
        """`window_ns`: utilization of links is that of so long a time."""
        self._clock = clock
        self._sysfs = sysfs
        self._library = library
        self._period_ns = round(period_seconds * 1e9)
        self._histories = GpuHistories(window_ns)
        self._session: NvmlSession | None = None
        self._threads: tuple[_GpuThread, ...] = ()
        self._event_thread: _EventThread | None = None
        self._told: deque[GpuEvent] = deque(maxlen=_MOST_EVENTS)
        self._session_lost = False
        self._closed = False
        self._missing = ""
        self._failures = 0
        self._result: CollectorResult | None = None
        self._remark = Remark(_log, "NVML", "answers again")
        self._hanging: frozenset[int] = frozenset()
        self._keeper = _Repeated("nvlink", clock, self._keep)

    def start(self) -> None:
        """Start the threads; call once."""
        self._keeper.start()

    def close(self) -> None:
        """End the session.  A thread that hangs in NVML is left behind, and the session with it."""
        self._closed = True
        self._keeper.stop()
        if self._keeper.join(_CLOSE_NS / 1e9):
            self._end_session()

    @property
    def alive(self) -> bool:
        """Whether the thread that keeps the session runs."""
        return self._keeper.alive

    @property
    def why_no_nvml(self) -> str:
        """Why there is no NVML, on one line; empty: there is, or it was not looked for yet."""
        return self._missing

    def unread_sources(self) -> tuple[str, ...]:
        """Collectors that have no result yet, good or bad."""
        if not self._keeper.turns:
            return ("nvlink",)
        return tuple(thread.collector for thread in self._threads if not thread.repeated.turns)

    def facts(self) -> NodeGpus:
        """GPUs and their links, as each was last read."""
        facts = [thread.facts() for thread in self._threads]
        return NodeGpus(tuple(gpu for gpu, _ in facts), tuple(link for _, links in facts for link in links))

    @property
    def hears(self) -> tuple[int, ...]:
        """GPUs that tell of events at this moment."""
        return self._event_thread.gpus if self._event_thread is not None else ()

    def take_events(self) -> tuple[GpuEvent, ...]:
        """What NVML told since the last call; nothing is told twice."""
        told = []
        while self._told:
            told.append(self._told.popleft())
        return tuple(told)

    def collectors(self) -> tuple[CollectorResult, ...]:
        """`nvlink`, and `nvlink gpuN` for each GPU; none where there is no NVML."""
        threads = tuple(thread.result() for thread in self._threads)
        hanging_ns = self._keeper.hangs_for_ns()
        if hanging_ns:
            return CollectorResult("nvlink", False, hanging_ns / 1e9), *threads
        return (self._result, *threads) if self._result is not None else threads

    def _keep(self) -> int:
        """Open the session, or open it anew after it was lost; say which GPUs hang."""
        if self._session is not None and not self._session_lost:
            self._say_who_hangs()
            return self._period_ns
        started_ns = self._clock.monotonic_ns()
        self._end_session()
        try:
            session = NvmlSession.open(self._library)
        except NvmlMissing as missing:
            if not self._missing:
                _log.info("NVLinks and GPUs are not read: %s", missing)
            self._missing = str(missing)
            self._result = None
            return _LONGEST_PAUSE_NS
        except NvmlError as error:
            return self._refused(error, started_ns)
        try:
            count = session.gpu_count()
        except NvmlError as error:
            session.close()
            return self._refused(error, started_ns)
        if self._closed:
            session.close()
            return 0
        self._missing = ""
        self._failures = 0
        self._session_lost = False
        self._session = session
        self._threads = tuple(self._thread(index, session) for index in range(count))
        for thread in self._threads:
            thread.repeated.start()
        events = _EventThread(session, range(count), self._clock, _EVENT_PERIOD_NS, self._told.extend)
        self._event_thread = events
        events.repeated.start()
        self._result = CollectorResult("nvlink", True, (self._clock.monotonic_ns() - started_ns) / 1e9)
        self._remark.say("")
        return self._period_ns

    def _refused(self, error: NvmlError, started_ns: int) -> int:
        self._missing = ""
        self._failures += 1
        self._remark.say(str(error))
        self._result = CollectorResult("nvlink", False, (self._clock.monotonic_ns() - started_ns) / 1e9)
        return min(self._period_ns << min(self._failures, 20), _LONGEST_PAUSE_NS)

    def _thread(self, index: int, session: NvmlSession) -> _GpuThread:
        gpu = Gpu(index, session, self._clock, sysfs=self._sysfs, histories=self._histories)
        return _GpuThread(gpu, index, self._clock, self._period_ns, self._lose_session)

    def _lose_session(self) -> None:
        self._session_lost = True

    def _end_session(self) -> None:
        threads, self._threads = self._threads, ()
        session, self._session = self._session, None
        for thread in threads:
            thread.stop()
        repeated = [thread.repeated for thread in threads]
        events, self._event_thread = self._event_thread, None
        if events is not None:
            events.repeated.stop()
            repeated.append(events.repeated)
        last_ns = self._clock.monotonic_ns() + _CLOSE_NS
        ended = [one.join(max(0, last_ns - self._clock.monotonic_ns()) / 1e9) for one in repeated]
        if session is not None and all(ended):
            if events is not None:
                events.give_back()
            session.close()

    def _say_who_hangs(self) -> None:
        hanging = frozenset(thread.index for thread in self._threads if thread.repeated.hangs_for_ns())
        for index in sorted(hanging - self._hanging):
            _log.warning("nvlink gpu%d: NVML has not answered for %.0f s", index, HANG_NS / 1e9)
        for index in sorted(self._hanging - hanging):
            _log.info("nvlink gpu%d: NVML answers again", index)
        self._hanging = hanging
