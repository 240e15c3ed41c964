"""Inspects suspects: a process, its connections and its rails over the last one or two seconds.

Nothing here runs while no operation is suspected.  What is read is kept for a short while, so that two readings say
what moved between them.
"""

from __future__ import annotations

import logging
import platform
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from railscope.agent.facts.snapshot import RailFacts
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.stalls.evidence import ProcessFacts, RailSigns
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.clock import Clock
from railscope.probes.netdev.connection_state import ConnectionState, ProcessConnections
from railscope.probes.netdev.netlink import MalformedNetlink
from railscope.probes.printable import printable
from railscope.probes.processes.namespaces import NamespaceError, NetworkNamespace, run_inside
from railscope.probes.processes.state import (
    ProcessState,
    is_ending,
    process_state,
    thread_times,
    threads_waiting_for_network,
)
from railscope.probes.processes.tree import ProcessTrees

_log = logging.getLogger("railscope.stalls")

READ_PERIOD_NS: Final = 400_000_000
"""A process with hundreds of threads costs some milliseconds to look at."""
_THREAD_PAUSE_NS: Final = 2_000_000
"""For each of its threads: to read them takes half a percent of a core at most."""
MOST_FRESH: Final = 16
"""Suspects that are new, for each of which connections are read out of turn: a reading is of all suspects, and one user
may have thousands.  The others come with the next."""
_WINDOW_NS: Final = 1_500_000_000
_KEPT_NS: Final = 10_000_000_000
"""How long a namespace stays open after the last suspicion: an open socket keeps it alive."""
_LOSS_SEVERITIES: Final = frozenset({"warn", "page"})
_NO_LOSS: Final = frozenset({"carrier_changes"})

_REMEMBER_NS: Final = 500_000_000
_DESCENDANTS_NS: Final = 900_000_000
"""Once a second."""
MOST_LOOKS: Final = 64
"""In that time, for new descendants of one tenant's suspects: some 7 ms each at worst (probes/processes/tree.py).  No
host has as many GPUs."""
MOST_THREADS_READ: Final = 4096
"""Of one tenant's processes in `_REMEMBER_NS`, some 12 µs each: a host of eight ranks has fewer.  What is beyond it is
not known, and no sign that an operation is in flight."""
_UNKNOWN_PROCESS: Final = ProcessFacts("running", 0, 0.0, 0.0, 0, None)
"""Nothing speaks for or against a process that may not be looked at."""
Reading = TypeVar("Reading")
Port = tuple[str, str]
"""A device, and the number of its port if it is one for RDMA."""
RailsOf = Callable[[int], Iterable[tuple[RailFacts, int | None]]]
"""Rails that processes of a network namespace can use, each with when it last gained or lost its carrier."""


@dataclass(frozen=True, slots=True)
class _Latest:
    """What follows from the readings of a namespace: with thousands of connections it is not worked out twice."""

    first: Mapping[int, ConnectionState]
    """By cookie, each connection as it was when it was first read: some suspects came later than others."""
    of_process: Mapping[int, Sequence[ConnectionState]]
    """By pid, as they were read last."""
    carried: Mapping[str, tuple[int, int]]
    """By device: bytes that suspects sent and received since each connection was first read."""
    signs: dict[tuple[int, frozenset[str]], tuple[RailSigns, ...]] = field(default_factory=dict)
    """By pid and devices, as far as inspected."""


@dataclass(frozen=True, slots=True)
class _Look:
    """One process at one moment; sums since it was first looked at."""

    state: ProcessState
    written_bytes: int
    descendants_busy_ns: int


class Inspector:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, clock: Clock, procfs: Path, rails_of: RailsOf) -> None:
        self._clock = clock
        self._procfs = procfs
        self._rails_of = rails_of
        self._states: dict[int, deque[_Look]] = {}
        self._trees = ProcessTrees(procfs)
        self._gap_ns = 0
        """See `bridge`."""
        self._outdated: set[int] = set()
        """Processes that are read again when they are asked about next, however recently they were."""
        self._looked_ns: dict[int, int] = {}
        """By process: when its descendants were looked for as it was suspected."""
        self._connections: dict[int, deque[tuple[int, tuple[ConnectionState, ...]]]] = {}
        """By network namespace: readings of all suspected processes in it."""
        self._looks: dict[Tenant, deque[int]] = {}
        """When descendants of suspects were looked for last, by tenant."""
        self._threads_read: dict[Tenant, tuple[int, int]] = {}
        """When each tenant's present period began, and how many threads of its processes were read in it."""
        self._suspects: defaultdict[int, set[int]] = defaultdict(set)
        """Pids by network namespace."""
        self._fresh: Counter[int] = Counter()
        """Readings in a row for suspects that were new, by namespace."""
        self._opened: dict[int, ProcessConnections] = {}
        self._counters: dict[int, deque[tuple[int, Mapping[Port, tuple[RailFacts, int | None]]]]] = {}
        self._latest: dict[int, _Latest] = {}
        """By network namespace: what follows from its readings, until there is another one."""
        self._runs: dict[int, tuple[int, dict[int, int]]] = {}
        """By process: when its threads were listed, and how often each had run."""
        self._active: dict[int, frozenset[int]] = {}
        """By process: threads that took part in collectives lately."""
        self._waiting: dict[int, tuple[int, tuple[str, ...]]] = {}
        """By process: when it was asked last, and what its threads waited in."""
        self._asked_ns: dict[int, int] = {}
        """When a namespace was last asked about."""
        self._hidden: dict[int, str] = {}
        """By namespace: why its connections cannot be seen."""

    def bridge(self, gap_ns: int) -> None:
        """From now on what was read before a pause of up to so long still tells of the last moments."""
        self._gap_ns = gap_ns

    def process(self, process: ObservedProcess) -> ProcessFacts:
        """What a process did over the last moments."""
        readings = self._states.get(process.identity.pid, deque())
        now_ns = self._clock.monotonic_ns()
        pause_ns = _pause_ns(readings[-1].state) if readings else 0
        longest_ns = _WINDOW_NS + self._gap_ns + max(0, pause_ns - READ_PERIOD_NS)
        _drop_if_old(readings, now_ns - longest_ns, lambda look: look.state.time_ns)
        outdated = process.identity.pid in self._outdated
        if outdated or not readings or now_ns - readings[-1].state.time_ns >= pause_ns:
            self._outdated.discard(process.identity.pid)
            try:
                readings.append(self._look_at(process))
            except OSError as error:
                _log.debug("process %d cannot be inspected: %s", process.identity.pid, error)
                return _UNKNOWN_PROCESS
            self._states[process.identity.pid] = readings
            _drop_old(readings, now_ns - _WINDOW_NS, lambda look: look.state.time_ns)
        moved_bytes = self._moved(process)
        begin, end = readings[0], readings[-1]
        first, last = begin.state, end.state
        window_ns = last.time_ns - first.time_ns
        return ProcessFacts(
            condition=last.condition,
            window_ns=window_ns,
            busy_ratio=max(0, last.busy_ns - first.busy_ns) / max(window_ns, 1),
            waited_ratio=max(0, last.waited_ns - first.waited_ns) / max(window_ns, 1),
            written_bytes=max(0, end.written_bytes - begin.written_bytes),
            moved_bytes=moved_bytes,
            freezer=printable(last.freezer),
            descendants_busy_ratio=max(0, end.descendants_busy_ns - begin.descendants_busy_ns) / max(window_ns, 1),
        )

    def outdate(self, process: ObservedProcess) -> None:
        """Something has happened to a process: what was read of it a moment ago is not what is asked for next."""
        pid = process.identity.pid
        self._outdated.add(pid)
        if process.namespace is not None:
            self._suspects[process.namespace.inode].discard(pid)

    def is_ending(self, process: ObservedProcess) -> bool:
        """Whether a process is about to end, whatever it does."""
        return is_ending(self._procfs, process.identity)

    def _look_at(self, process: ObservedProcess) -> _Look:
        state = process_state(self._procfs, process.identity, self._clock)
        look = state.time_ns - self._looked_ns.get(process.identity.pid, 0) >= _DESCENDANTS_NS
        if look and (look := self._take_look(process.tenant, state.time_ns)):
            self._looked_ns[process.identity.pid] = state.time_ns
        totals = self._trees.totals(process.identity.pid, look=look)
        written_bytes, busy_ns = (totals.written_bytes, totals.descendants_busy_ns) if totals else (0, 0)
        return _Look(state, written_bytes + self._sent_to_services(process), busy_ns)

    def _take_look(self, tenant: Tenant, now_ns: int) -> bool:
        """Whether a tenant may have one more look for descendants; if so, it counts as made."""
        looks = self._looks.setdefault(tenant, deque(maxlen=MOST_LOOKS))
        if len(looks) == MOST_LOOKS and now_ns - looks[0] < _DESCENDANTS_NS:
            return False
        looks.append(now_ns)
        return True

    def written_bytes(self, process: ObservedProcess, *, closely: bool) -> int | None:
        """What a process and its descendants wrote so far; None: this cannot be known.

        `closely`: look for new descendants, and ask the kernel for what they sent to services, of which else only is
        known what is asked for suspects.
        """
        if closely and process.namespace is not None:
            self._read(process.namespace, process.identity.pid)
        totals = self._trees.totals(process.identity.pid, look=closely)
        return totals.written_bytes + self._sent_to_services(process) if totals is not None else None

    def _sent_to_services(self, process: ObservedProcess) -> int:
        opened = self._opened.get(process.namespace.inode) if process.namespace is not None else None
        return opened.sent_to_services[process.identity.pid] if opened is not None else 0

    def waits_for_network(self, process: ObservedProcess) -> tuple[str, ...]:
        """System calls in which threads that took part in collectives wait for the network, without a time limit.

        A thread takes part if it ran while calls were made: between the readings that `remember_threads` kept.
        """
        pid, now_ns = process.identity.pid, self._clock.monotonic_ns()
        asked_ns, waiting = self._waiting.get(pid, (-READ_PERIOD_NS, ()))
        if now_ns - asked_ns >= READ_PERIOD_NS:
            active = self._active.get(pid, frozenset())
            if not self._may_read_threads(process.tenant, now_ns, len(active)):
                return waiting
            found = threads_waiting_for_network(self._procfs, pid, active, platform.machine())
            waiting = tuple(sorted(set(found.values())))
            self._waiting[pid] = now_ns, waiting
        return waiting

    def remember_threads(self, process: ObservedProcess) -> None:
        """Call it now and then while a process makes calls: the threads that run between two of these take part."""
        pid, now_ns = process.identity.pid, self._clock.monotonic_ns()
        before_ns, before = self._runs.get(pid, (-_REMEMBER_NS, {}))
        # A process may have many communicators, each of which asks.
        pause_ns = max(_REMEMBER_NS, len(before) * 2 * _THREAD_PAUSE_NS)
        if now_ns - before_ns < pause_ns or not self._may_read_threads(process.tenant, now_ns, 0):
            return
        now = {thread.tid: thread.runs for thread in thread_times(self._procfs, pid)}
        self._may_read_threads(process.tenant, now_ns, len(now))
        self._runs[pid] = now_ns, now
        ran = frozenset(tid for tid, runs in now.items() if tid in before and runs > before[tid])
        if before:
            self._active[pid] = ran

    def _may_read_threads(self, tenant: Tenant, now_ns: int, threads: int) -> bool:
        """Whether threads of one more process of a tenant may be read; if so, so many count as read."""
        begin_ns, read = self._threads_read.get(tenant, (now_ns, 0))
        if now_ns - begin_ns >= _REMEMBER_NS:
            begin_ns, read = now_ns, 0
        may = read < MOST_THREADS_READ
        self._threads_read[tenant] = begin_ns, read + threads if may else read
        return may

    def forget(self, pid: int) -> None:
        """A process has ended."""
        self._runs.pop(pid, None)
        self._active.pop(pid, None)
        self._states.pop(pid, None)
        self._outdated.discard(pid)
        self._waiting.pop(pid, None)
        self._trees.forget(pid)
        self._looked_ns.pop(pid, None)
        for pids in self._suspects.values():
            pids.discard(pid)

    def rails(self, process: ObservedProcess, devices: frozenset[str]) -> tuple[RailSigns, ...]:
        """The rails that a process uses; `devices` empty: those on which it has connections, or which have no TCP."""
        if process.namespace is None:
            return ()
        netns, pid = process.namespace.inode, process.identity.pid
        self._read(process.namespace, pid)
        latest = self._latest[netns]
        if (pid, devices) in latest.signs:
            return latest.signs[pid, devices]
        found = []
        ports = self._counters[netns][-1][1]
        for (device, _port), (facts, lost_ns) in ports.items():
            own = [state for state in latest.of_process.get(pid, ()) if state.device == device]
            # What NCCL hands over names the device: of one with two ports either may be meant.
            surely = bool(own) or (device in devices and sum(device == other for other, _ in ports) == 1)
            # An RDMA port that never carried anything may never have had a cable.
            perhaps = not devices and facts.port != "" and bool(facts.transmit_bytes)
            if device in devices or own if devices else surely or perhaps:
                found.append(self._signs(netns, facts, lost_ns, own, surely_used=surely))
        latest.signs[pid, devices] = tuple(found)
        return latest.signs[pid, devices]

    def why_hidden(self, process: ObservedProcess) -> str:
        """Why the connections of a process could not be seen when its rails were last asked for; empty: they could."""
        if process.namespace is None:
            return "its network namespace is unknown"
        return self._hidden.get(process.namespace.inode, "")

    @property
    def open(self) -> bool:
        """Whether a network namespace is held open."""
        return bool(self._asked_ns)

    def close_unused(self) -> None:
        """Close what was not inspected lately."""
        now_ns = self._clock.monotonic_ns()
        for tenant in [one for one, looks in self._looks.items() if now_ns - looks[-1] > _KEPT_NS]:
            del self._looks[tenant]
        for netns, asked_ns in list(self._asked_ns.items()):
            if now_ns - asked_ns > _KEPT_NS:
                self._close(netns)
        for pid in [pid for pid, states in self._states.items() if now_ns - states[-1].state.time_ns > _KEPT_NS]:
            del self._states[pid]

    def close(self) -> None:
        for netns in list(self._asked_ns):
            self._close(netns)

    def _close(self, netns: int) -> None:
        opened = self._opened.pop(netns, None)
        if opened is not None:
            opened.close()
        self._asked_ns.pop(netns, None)
        self._connections.pop(netns, None)
        self._counters.pop(netns, None)
        self._latest.pop(netns, None)
        self._suspects.pop(netns, None)
        self._fresh.pop(netns, None)
        self._hidden.pop(netns, None)

    def _read(self, namespace: NetworkNamespace, pid: int) -> None:
        """Read the connections of all suspects of a namespace, and its rails, unless that was done just now."""
        now_ns = self._asked_ns[namespace.inode] = self._clock.monotonic_ns()
        suspects = self._suspects[namespace.inode]
        fresh = pid not in suspects
        suspects.add(pid)
        readings = self._connections.setdefault(namespace.inode, deque())
        _drop_if_old(readings, now_ns - _WINDOW_NS - self._gap_ns, lambda reading: reading[0])
        in_turn = not readings or now_ns - readings[-1][0] >= READ_PERIOD_NS
        if not in_turn and (not fresh or self._fresh[namespace.inode] >= MOST_FRESH):
            return
        self._fresh[namespace.inode] = 0 if in_turn else self._fresh[namespace.inode] + 1
        rails = {(facts.device, facts.port): (facts, lost) for facts, lost in self._rails_of(namespace.inode)}
        counters = self._counters.setdefault(namespace.inode, deque())
        _drop_if_old(counters, now_ns - _WINDOW_NS - self._gap_ns, lambda reading: reading[0])
        readings.append((now_ns, self._ask(namespace, suspects)))
        counters.append((now_ns, rails))
        _drop_old(readings, now_ns - _WINDOW_NS, lambda reading: reading[0])
        _drop_old(counters, now_ns - _WINDOW_NS, lambda reading: reading[0])
        self._latest[namespace.inode] = _latest(readings)

    def _ask(self, namespace: NetworkNamespace, pids: set[int]) -> tuple[ConnectionState, ...]:
        try:
            opened = self._opened.get(namespace.inode)
            if opened is None:
                opened = run_inside(namespace, lambda: ProcessConnections(self._clock, self._procfs))
                self._opened[namespace.inode] = opened
            states = opened.read(pids, {child: pid for pid in pids for child in self._trees.descendants(pid)})
            self._hidden.pop(namespace.inode, None)
            return states
        except (OSError, NamespaceError, MalformedNetlink) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if self._hidden.get(namespace.inode) != reason:
                _log.warning("connections of network namespace %d cannot be read: %s", namespace.inode, reason)
            self._hidden[namespace.inode] = reason
            opened = self._opened.pop(namespace.inode, None)
            if opened is not None:
                opened.close()
            return ()

    def _moved(self, process: ObservedProcess) -> int | None:
        """Bytes that a process's connections moved between the first and the last reading; None: it has none."""
        if process.namespace is None:
            return None
        self._read(process.namespace, process.identity.pid)
        latest = self._latest[process.namespace.inode]
        last = latest.of_process.get(process.identity.pid)
        if not last:
            return None
        return sum(max(0, state.moved_bytes - latest.first[state.cookie].moved_bytes) for state in last)

    def _signs(
        self, netns: int, facts: RailFacts, lost_ns: int | None, own: list[ConnectionState], *, surely_used: bool
    ) -> RailSigns:
        readings, counters = self._connections[netns], self._counters[netns]
        window_ns = readings[-1][0] - readings[0][0]
        latest = self._latest[netns]
        pairs = [(latest.first[state.cookie], state) for state in own]
        sending = [
            (before, state)
            for before, state in pairs
            if state.bytes_sent > before.bytes_sent or state.unacknowledged_segments
        ]
        unanswered = [state for state in own if state.unanswered]
        dropped = [state for state in unanswered if state.only_small_arrive]
        trips = [state.round_trip_us for _, state in sending if state.round_trip_us]
        deviations = [state.round_trip_deviation_us for _, state in sending if state.round_trip_us]
        least = [state.minimum_round_trip_us for _, state in sending if 0 < state.minimum_round_trip_us < 1 << 31]
        old = counters[0][1].get((facts.device, facts.port))
        return RailSigns(
            rail=facts.rail,
            device=facts.device,
            netns=facts.netns,
            up=facts.up,
            window_ns=window_ns,
            carrier_lost_ns=lost_ns,
            speed_bytes_per_second=facts.speed_bytes_per_second,
            connections=len(own),
            unanswered=len(unanswered),
            only_small_arrive=len(dropped),
            segment_bytes=max((state.segment_bytes for state in dropped), default=0),
            peer_closed=sum(state.peer_closed for state in own),
            unanswered_ns=max((state.last_acknowledged_ms for state in unanswered), default=0) * 1_000_000,
            sent_bytes=sum(state.bytes_sent - before.bytes_sent for before, state in pairs),
            retransmitted_bytes=sum(state.retransmitted_bytes - before.retransmitted_bytes for before, state in pairs),
            moved_bytes=sum(state.moved_bytes - before.moved_bytes for before, state in pairs),
            busy_ratio=(
                sum(state.busy_us - before.busy_us for before, state in sending) * 1000 / len(sending) / window_ns
                if sending and window_ns
                else 0.0
            ),
            peer_limited_ratio=_peer_limited_ratio(sending),
            round_trip_ns=sum(trips) * 1000 // len(trips) if trips else None,
            round_trip_deviation_ns=sum(deviations) * 1000 // len(deviations) if deviations else None,
            least_round_trip_ns=min(least) * 1000 if least else None,
            backlog_bytes=facts.queue.backlog_bytes if facts.queue is not None else None,
            unacknowledged=sum(state.unacknowledged_segments > 0 for state in own),
            unread_bytes=sum(state.unread_bytes for state in own),
            unsent_bytes=sum(state.not_sent_bytes for state in own),
            losses=_losses(old[0] if old is not None else None, facts),
            port_bytes=_port_bytes(facts) - _port_bytes(old[0]) if old is not None else 0,
            foreign_ratio=_foreign_ratio(old[0], facts, latest.carried) if own and old else 0.0,
            surely_used=surely_used,
        )


def _latest(readings: Sequence[tuple[int, tuple[ConnectionState, ...]]]) -> _Latest:
    first: dict[int, ConnectionState] = {}
    for _, states in readings:
        for state in states:
            first.setdefault(state.cookie, state)
    of_process: dict[int, list[ConnectionState]] = defaultdict(list)
    carried: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for state in readings[-1][1]:
        of_process[state.pid].append(state)
        then, (sent, received) = first[state.cookie], carried[state.device]
        carried[state.device] = (
            sent + state.bytes_sent - then.bytes_sent,
            received + state.bytes_received - then.bytes_received,
        )
    return _Latest(first, dict(of_process), dict(carried))


def _port_bytes(facts: RailFacts) -> int:
    return (facts.transmit_bytes or 0) + (facts.receive_bytes or 0)


def _foreign_ratio(before: RailFacts, now: RailFacts, carried: Mapping[str, tuple[int, int]]) -> float:
    """Bytes of others in the direction that has more of them, in parts of what the busier direction carried.

    Of a direction by itself the ratio would say nothing: towards a sender there are acknowledgements alone.
    `carried`: by all suspects, by device.
    """
    sent, received_by_them = carried.get(now.device, (0, 0))
    transmitted = (now.transmit_bytes or 0) - (before.transmit_bytes or 0)
    received = (now.receive_bytes or 0) - (before.receive_bytes or 0)
    foreign = max(
        0,
        transmitted - sent,
        received - received_by_them,
    )
    return foreign / max(transmitted, received) if foreign else 0.0


def _peer_limited_ratio(sending: Iterable[tuple[ConnectionState, ConnectionState]]) -> float:
    """How much of the time with data under way was waiting for peers that did not read."""
    busy_us = limited_us = 0
    for before, now in sending:
        busy_us += now.busy_us - before.busy_us
        limited_us += now.receive_window_limited_us - before.receive_window_limited_us
    return limited_us / busy_us if busy_us > 0 else 0.0


def _losses(before: RailFacts | None, now: RailFacts) -> tuple[tuple[str, int], ...]:
    """Error and loss counters that grew."""
    if before is None:
        return ()
    known = {name: value for name, _, value in before.counters}
    return tuple(
        (name, value - known.get(name, value))
        for name, severity, value in now.counters
        if severity in _LOSS_SEVERITIES and name not in _NO_LOSS and value > known.get(name, value)
    )


def _drop_old(readings: deque[Reading], before_ns: int, time_of: Callable[[Reading], int]) -> None:
    """Keep one reading that is older than the window, so that the window is always covered."""
    while len(readings) > 2 and time_of(readings[1]) <= before_ns:
        readings.popleft()


def _pause_ns(state: ProcessState) -> int:
    """How long what was read of a process stands, ns: a second where it has `MOST_THREADS`."""
    return max(READ_PERIOD_NS, len(state.threads) * _THREAD_PAUSE_NS)


def _drop_if_old(readings: deque[Reading], before_ns: int, time_of: Callable[[Reading], int]) -> None:
    """Restart after a pause: older readings say nothing about the last moments."""
    if readings and time_of(readings[-1]) < before_ns:
        readings.clear()
