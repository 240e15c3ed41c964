"""The schedule of the loop: ring reads, stall evaluation, updates, process scans.

A tick (relating bytes, judging what probes cost, reading drivers, queues and connections) takes most of the agent's
time.  A job that has run alike for ten seconds will as a rule do so for the next four, and where its threads keep every
core busy it loses the agent's time and more: then ticks rest.  Operations that stall are looked for without being told,
as often as ever, and so are byte counters.

What ends the rest: a communicator, process or link that comes or goes, a ring that fills much faster, a rank that is
suspected, a probe budget that is used up, bytes whose moments do not settle, and somebody who asks every two seconds.

Each waking costs as much as much of what it is for, so that what is due at about one moment is done at one waking.

No clock, no probes and no descriptors in here: moments come in, in ns of one monotonic clock, and go out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from railscope.agent.node.daemon.ring_pace import UNUSED_NS
from railscope.agent.node.stalls.watchdog import EVALUATION_NS, LONGEST_LOOK_PAUSE_NS, LOOK_SHARE, REST_NS

_TOGETHER_NS: Final = 25_000_000
"""What is due within this moment may be done at one waking."""
_SHIFT: Final = 1 / 4
"""Of the pause between two readings of the rings: by so much they may come earlier or later for that."""
_SCAN_SHARE: Final = 100
_SCAN_SHARE_UNHURRIED: Final = 500
"""A host with very many processes is scanned more rarely, so that scanning stays below 1 % of a core; below a fifth of
that where mappings are heard of anyhow, and nobody waits for what a scan would mend."""
BRISK_NS: Final = 1_000_000_000
CALM_NS: Final = 4_000_000_000
STEADY_NS: Final = 10_000_000_000
"""Nothing has changed for so long where all is calm."""
FOLLOWED_NS: Final = 4_500_000_000
"""Whoever asks so many times within this time follows what happens: not two Prometheus servers that scrape every five
seconds or more seldom, one right after the other."""
_ASKED: Final = 3


class Pace:
    """Not thread-safe, except `record_request`, which any thread may call."""

    def __init__(self, now_ns: int) -> None:
        self._disturbed_ns = self._followed_ns = now_ns
        self._asked_ns: deque[int] = deque(maxlen=_ASKED)
        self.why = "the agent has just started"
        """The last change, in words for the log."""

    def record_change(self, now_ns: int, what: str) -> None:
        """Record that something has changed."""
        self._disturbed_ns = now_ns
        self.why = what

    def record_request(self, now_ns: int) -> None:
        """Somebody was shown what is known."""
        self._asked_ns.append(now_ns)
        if len(self._asked_ns) == _ASKED and now_ns - self._asked_ns[0] <= FOLLOWED_NS:
            self._followed_ns = now_ns
            self.why = "a client scrapes repeatedly"

    def is_calm(self, now_ns: int) -> bool:
        """Whether nothing has changed for long enough, and no reader follows it."""
        return now_ns - max(self._disturbed_ns, self._followed_ns) >= STEADY_NS


@dataclass(frozen=True, slots=True)
class Plan:
    """When each thing is due, as it looks before the loop waits."""

    drain_ns: int
    look_ns: int
    tick_ns: int
    scan_ns: int

    @property
    def wake_ns(self) -> int:
        """When the first of them is due: a look is never before its rings are read."""
        return min(self.drain_ns, self.tick_ns, self.scan_ns)


class Schedule:
    """For the loop's thread only, but for `asked`.

    `used`: there is a communicator.  `resting`: ticks take their time.
    """

    def __init__(self, now_ns: int, *, scan_interval_ns: int, shown: bool = True) -> None:
        """Args:
        now_ns: when the agent comes.
        scan_interval_ns: least pause between two scans of all processes.
        shown: somebody waits for what is found out; else looks for stalls come once a second.
        """
        self.used = False
        self.resting = False
        self._streams = False
        self._shown = shown
        self._scan_interval_ns = scan_interval_ns
        self._least_look_ns = EVALUATION_NS if shown else REST_NS
        self._look_pause_ns = 0
        """What the last look for stalls took keeps the next one off for so long."""
        self._pace = Pace(now_ns)
        self._calm = False
        self._all_scanned = True
        self._looked_ns = self._ticked_ns = now_ns
        self._next_tick_ns = self._next_drain_ns = self._next_look_ns = self._next_scan_ns = 0

    @property
    def last_change(self) -> str:
        """The last change, in words for the log."""
        return self._pace.why

    def keep_pace(self) -> None:
        """From now on updates never pause: a stream receives what is recorded at once."""
        self._streams = True

    def set_scan_interval(self, interval_ns: int) -> None:
        """Scan at this interval from the next scan on."""
        self._scan_interval_ns = interval_ns

    def begin(self, now_ns: int) -> None:
        """The loop begins; processes have just been scanned."""
        self._next_tick_ns = self._next_drain_ns = self._next_look_ns = now_ns
        self._next_scan_ns = now_ns + (self._scan_interval_ns if self._all_scanned else 0)

    def plan(self, drained_ns: int) -> Plan:
        """What is due when.

        A tick and a look wait for each other, and a look that has time goes with the next tick.  Rings are read at
        about their time, and before each look, which is based on what they tell.  Ticks never come early: what is done
        once in a period relies on its length.

        Args:
            drained_ns: when the rings were read last.
        """
        tick_ns, look_ns = self._next_tick_ns, self._next_look_ns
        if abs(tick_ns - look_ns) <= _TOGETHER_NS:
            tick_ns = look_ns = max(tick_ns, look_ns)
        elif self._looked_ns + max(EVALUATION_NS, self._look_pause_ns) <= tick_ns < look_ns:
            look_ns = tick_ns
        drain_ns, others_ns = self._next_drain_ns, min(look_ns, tick_ns)
        if abs(drain_ns - others_ns) <= _SHIFT * (drain_ns - drained_ns):
            drain_ns = others_ns
        return Plan(min(drain_ns, look_ns), look_ns, tick_ns, self._next_scan_ns)

    def drained(self, now_ns: int, pause_ns: int) -> None:
        """The rings were read, and may be left alone for so long."""
        self._next_drain_ns = now_ns + pause_ns

    def stalls_evaluated(self, now_ns: int, spent_ns: int, pause_ns: int, unsettled: str | None) -> None:
        """Stalls were evaluated in `spent_ns` of CPU time, and need not be for `pause_ns`.

        `unsettled`: what changed, if anything.
        """
        self._looked_ns = now_ns
        self._look_pause_ns = min(LOOK_SHARE * spent_ns, LONGEST_LOOK_PAUSE_NS)
        wait_ns = max(self._least_look_ns, self._look_pause_ns, pause_ns)
        self._next_look_ns = now_ns + (wait_ns if self.used else UNUSED_NS)
        if unsettled is not None:
            self._pace.record_change(now_ns, unsettled)

    def tick_is_due(self, now_ns: int, plan: Plan) -> bool:
        """Whether a tick is due by this plan, or because the rest is over."""
        self._calm = self.used and not self._streams and self._pace.is_calm(now_ns)
        tick_ns = plan.tick_ns
        if self.resting and not self._calm:
            self.resting = False
            self._next_tick_ns = tick_ns = min(tick_ns, max(now_ns, self._ticked_ns + BRISK_NS))
        return now_ns >= tick_ns

    def tick_begins(self, now_ns: int) -> bool:
        """A tick begins, and whatever goes wrong in it, the next one comes in its time; whether it is a calm one."""
        self._ticked_ns = now_ns
        self._next_tick_ns = now_ns + (BRISK_NS if self.used else UNUSED_NS)
        return self._calm

    def tick_ended(self, now_ns: int, unsettled: str | None) -> None:
        """The tick that began at this moment has ended; `unsettled`: as for `looked`."""
        if unsettled is not None:
            self._pace.record_change(now_ns, unsettled)
        elif self._calm:
            self.resting = True
            self._next_tick_ns = now_ns + CALM_NS

    def scan_begins(self, now_ns: int) -> None:
        """All processes are scanned; whatever goes wrong in it, the next scan comes in its time."""
        self._next_scan_ns = now_ns + self._scan_interval_ns

    def first_scanned(self, *, complete: bool) -> None:
        """Processes were scanned before the loop began; `complete`: all of them."""
        self._all_scanned = complete

    def scanned(self, now_ns: int, spent_ns: int, *, mappings_heard: bool, complete: bool = True) -> None:
        """The scan that began at this moment took `spent_ns`; `mappings_heard`: the kernel reports new mappings.

        `complete`: it looked at all processes; else it goes on after as long a pause.
        """
        if not complete:
            self._next_scan_ns = now_ns + 2 * spent_ns
            return
        share = _SCAN_SHARE_UNHURRIED if mappings_heard and not self._shown else _SCAN_SHARE
        self._next_scan_ns = now_ns + max(self._scan_interval_ns, share * spent_ns)

    def set_in_use(self, now_ns: int, *, used: bool) -> None:
        """Whether there is a communicator, after all that was done."""
        if used == self.used:
            return
        self.used = used
        if used:  # from now on rings fill, and operations may stall
            self._next_tick_ns = now_ns
        self._next_drain_ns = self._next_look_ns = self._next_tick_ns  # seldom, and then all at once

    def evaluate_soon(self, now_ns: int) -> None:
        """A communicator or process has come or gone, which the last look for stalls did not foresee."""
        self.record_change(now_ns, "a communicator or process started or ended")
        soon_ns = max(now_ns + self._least_look_ns, self._looked_ns + self._look_pause_ns)
        self._next_look_ns = min(self._next_look_ns, soon_ns)

    def drain_now(self, now_ns: int, drained_ns: int) -> None:
        """A ring fills much faster than it did."""
        self._next_drain_ns = drained_ns  # long past: not to be put off to what is due soon
        self.record_change(now_ns, "a ring fills faster")

    def record_change(self, now_ns: int, what: str) -> None:
        """Record that something has changed."""
        self._pace.record_change(now_ns, what)

    def record_request(self, now_ns: int) -> None:
        """Somebody was shown what is known; from any thread."""
        self._pace.record_request(now_ns)
